"""Append-only store of a model's answers and scores.

    answers-WORKER.jsonl    one `Sample` per line
    scores-WORKER.jsonl     one `Score` per line; for each answer that counts and each digest, the last score counts
    prompts-WORKER.jsonl    {hash, prompt} of each distinct request

A sample's key is (benchmark, problem, prompt, mode, sample). If several workers answer the same request for the same
key, the first answer counts. A last line left incomplete by a killed worker is ignored.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

RESULTS, ASKED, STORE = "results.json", "asked.json", "store"
"""Names in a run directory: the results, the hashes of their requests for each benchmark, and the store's folder."""
BITS = "bits_per_byte"
"""Name of the metric for bits per byte."""


class Key(NamedTuple):
    """Identity of a sample: names of benchmark, problem, prompt and mode, and the sample's number."""

    benchmark: str
    problem: str
    prompt: str
    mode: str
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer to a problem, or the log-likelihoods of its choices.

    Attributes:
        key: identity of the sample.
        asked: hash of the request without its seed; samples of outdated requests are ignored.
        seed: seed of the request.
        answer: text after the reasoning; "" if there is none.
        reasoning: reasoning trace; None if the endpoint does not return it separately.
        tool_calls: tool calls in OpenAI's format.
        turns: messages of a conversation with tools, after the initial ones.
        calls, failed_calls: numbers of its tool calls and of the failed ones; None if the environment does not count.
        finish_reason: finish reason; `length` for a truncated answer.
        prompt_tokens, completion_tokens, reasoning_tokens: numbers of tokens; None if not counted.
        seconds: duration of the request in seconds.
        logprobs: log-likelihood of each choice, or of the text, in nats; empty for answers.
        sizes: number of UTF-8 bytes of each choice, or of the text.
        greedy: whether each choice, or the text, is the greedy continuation; empty for answers.
        problem: why there is no answer; "" if there is one.
    """

    key: Key
    asked: str
    seed: int | None = None
    answer: str = ""
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    turns: Sequence[Mapping[str, Any]] = ()
    calls: float | None = None
    failed_calls: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    seconds: float | None = None
    logprobs: Sequence[float] = ()
    sizes: Sequence[int] = ()
    greedy: Sequence[bool] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of a sample by one verifier.

    Attributes:
        key: key of the sample.
        asked: hash of the sample's request.
        digest: hash of the verifier and its settings; a sample has one score per digest.
        reference: hash of the reference.
        score: from 0 to 1, or bits per byte; None if it could not be computed, for example because a judge is down.
        why: why the score is not 1; "" if it is.
        found: extracted answer that was compared, used in majority votes; None if none was found.
        more: further metrics, such as {acc_norm: 1.0, bits_per_byte: 0.9}; pairs as in `Verdict.more`.
    """

    key: Key
    asked: str
    digest: str
    score: float | None
    reference: str = ""
    why: str = ""
    found: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def digest_of(*parts: Any) -> str:
    """Return a hash of JSON values, as 16 hexadecimal digits."""
    try:
        text = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS, default=str)
    except TypeError:  # integers over 64 bits, lone surrogates
        text = json.dumps(parts, sort_keys=True, default=str).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Make a value writable by orjson: replace lone surrogates, and turn integers that exceed 64 bits into strings."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, int) and value.bit_length() > 63 else value


class Store:
    """Answers and scores of one model in a folder.

    Args:
        folder: the folder; it is created at the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._worker = f"{time.time_ns():020}-{uuid.uuid4().hex[:8]}"  # files are read in the order of their creation
        self._files: dict[str, IO[bytes]] = {}
        self._prompts: set[str] | None = None

    def answers(self) -> Iterator[Sample]:
        """Yield the first answer for each key and request; a failure (`Sample.problem`) only if there is no answer."""
        failed: dict[tuple[Key, str], Sample] = {}
        seen: set[tuple[Key, str]] = set()
        for _, line in self._lines("answers"):
            line["key"] = Key._make(line["key"])
            sample = Sample(**line)
            name = sample.key, sample.asked
            if name in seen:
                continue
            if sample.problem:
                failed[name] = sample
                continue
            seen.add(name)
            yield sample
        yield from (sample for name, sample in failed.items() if name not in seen)

    def scores(self) -> dict[tuple[Key, str, str], Score]:
        """Return the latest score by key, request hash and verifier digest, for answers that count (see `answers`).

        Workers that answer the same request also score their own answers. A missing score, as when a judge is down,
        does not replace one for the same reference.
        """
        scores: dict[tuple[Key, str, str], Score] = {}
        superseded = self._superseded()
        for worker, line in self._lines("scores"):
            line["key"] = Key._make(line["key"])
            score = Score(**line)
            name = score.key, score.asked, score.digest
            if (worker, score.key, score.asked) in superseded:
                continue
            known = scores.get(name)
            same = known is not None and known.score is not None and known.reference == score.reference
            if score.score is not None or not same:
                scores[name] = score
        return scores

    def _superseded(self) -> set[tuple[str, Key, str]]:
        """Return worker, key and request hash of each answer that does not count, as another worker's came first."""
        if len(list(self.folder.glob("answers-*.jsonl"))) < 2:
            return set()
        first: dict[tuple[Key, str], str] = {}
        superseded = set()
        for worker, line in self._lines("answers"):
            name = Key._make(line["key"]), line["asked"]
            if not line.get("problem") and first.setdefault(name, worker) != worker:
                superseded.add((worker, *name))
        return superseded

    def prompts(self) -> dict[str, Any]:
        """Return the stored requests, as a mapping from hash to request."""
        return {line["hash"]: line["prompt"] for _, line in self._lines("prompts")}

    def add(self, sample: Sample) -> None:
        """Append an answer to the store."""
        self._append("answers", sample)

    def add_scores(self, scores: Iterable[Score]) -> None:
        """Append scores to the store."""
        for score in scores:
            self._append("scores", score)

    def add_prompt(self, asked: str, prompt: Any) -> None:
        """Append a request under its hash `asked`, unless the store has it."""
        if self._prompts is None:
            self._prompts = set(self.prompts())
        if asked not in self._prompts:
            self._prompts.add(asked)
            self._append("prompts", {"hash": asked, "prompt": prompt})

    def close(self) -> None:
        """Close the store's files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, kind: str, line: Sample | Score | Mapping[str, Any]) -> None:
        if kind not in self._files:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files[kind] = open(self.folder / f"{kind}-{self._worker}.jsonl", "ab")  # noqa: SIM115
        file = self._files[kind]
        try:
            text = orjson.dumps(line, default=tuple)
        except TypeError:
            fields = line if isinstance(line, Mapping) else {name: getattr(line, name) for name in line.__slots__}
            text = orjson.dumps(_plain(fields))
        file.write(text + b"\n")
        file.flush()

    def _lines(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield worker and content of the lines of all files of one kind, from the oldest file to the newest."""
        for path in sorted(self.folder.glob(f"{kind}-*.jsonl")):
            worker = path.stem.removeprefix(f"{kind}-")
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break  # truncated by a kill
                    try:
                        yield worker, orjson.loads(line)
                    except orjson.JSONDecodeError:
                        raise ValueError(f"{path}:{number}: the line is not valid JSON; remove it") from None
