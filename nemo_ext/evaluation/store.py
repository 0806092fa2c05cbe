"""The store of a model's evaluations: answers and scores in lines that are only ever appended.

    answers-WORKER.jsonl    `Sample`, one line each
    scores-WORKER.jsonl     `Score` of a sample; the last one of a sample and a digest counts
    prompts-WORKER.jsonl    {hash, prompt}: what was asked, once for each text

A sample's key is (benchmark, problem, prompt, mode, sample). Lines of several workers never contradict each other: the
first answer to a key counts. A last line that a kill cut short is left out.
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
"""Files of a run directory: the tables, the hashes of the requests that count in them by benchmark, the store."""
BITS = "bits_per_byte"
"""Name of the metric of benchmarks that are measured by likelihoods of texts."""


class Key(NamedTuple):
    """Name of a sample."""

    benchmark: str
    problem: str
    prompt: str
    mode: str
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer to a problem, or the log-likelihoods of its choices.

    Attributes:
        key: its name.
        asked: hash of the request, seed aside; an answer to another request is not this one's.
        seed: seed of the request.
        answer: text after the reasoning; "" where there is none.
        reasoning: text of the reasoning; None where there is none.
        tool_calls: calls as OpenAI's `tool_calls`.
        turns: later messages of a conversation with tools.
        finish_reason: why it ended; `length` if it was cut off.
        prompt_tokens, completion_tokens, reasoning_tokens: numbers of tokens; None where not counted.
        seconds: seconds that it took.
        logprobs: natural log-likelihoods of the choices, or of the text, in nats; empty for answers.
        sizes: UTF-8 bytes of the same.
        greedy: whether they are what the model would say by itself; empty where nobody asks.
        problem: why there is no answer; "" if there is one.
    """

    key: Key
    asked: str
    seed: int | None = None
    answer: str = ""
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    turns: Sequence[Mapping[str, Any]] = ()
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
    """What a sample is worth.

    Attributes:
        key: the sample's.
        asked: the sample's.
        digest: hash of the verifier and its settings: other ones are other scores.
        reference: hash of the reference.
        score: from 0 to 1, or bits per byte; None where it cannot be told, as when a judge is down.
        why: why it is not 1; "" if it is.
        found: the answer as it was compared, for majorities; None if none was found.
        more: further numbers, such as {acc_norm: 1.0, bits_per_byte: 0.9}.
    """

    key: Key
    asked: str
    digest: str
    score: float | None
    reference: str = ""
    why: str = ""
    found: str | None = None
    more: Mapping[str, float] = field(default_factory=dict)


def digest_of(*parts: Any) -> str:
    """Short hash of JSON values."""
    try:
        text = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS, default=str)
    except TypeError:  # whole numbers of more than 64 bits, half characters
        text = json.dumps(parts, sort_keys=True, default=str).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    return str(value) if isinstance(value, int) and value.bit_length() > 63 else value


class Store:
    """Answers and scores of one model in a folder.

    Args:
        folder: the folder; made when first written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._worker = f"{time.time_ns():020}-{uuid.uuid4().hex[:8]}"  # files are read in the order of their beginnings
        self._files: dict[str, IO[bytes]] = {}
        self._prompts: set[str] | None = None

    def answers(self) -> Iterator[Sample]:
        """All answers, of each key and request the first; failures (`Sample.problem`) only where there is no answer."""
        failed: dict[tuple[Key, str], Sample] = {}
        seen: set[tuple[Key, str]] = set()
        for line in self._lines("answers"):
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
        """Newest score by key, request and digest."""
        found = {}
        for line in self._lines("scores"):
            line["key"] = Key._make(line["key"])
            score = Score(**line)
            found[score.key, score.asked, score.digest] = score
        return found

    def prompts(self) -> dict[str, Any]:
        """What was asked, by hash."""
        return {line["hash"]: line["prompt"] for line in self._lines("prompts")}

    def add(self, sample: Sample) -> None:
        """Append an answer."""
        self._append("answers", sample)

    def add_scores(self, scores: Iterable[Score]) -> None:
        """Append scores."""
        for score in scores:
            self._append("scores", score)

    def add_prompt(self, asked: str, prompt: Any) -> None:
        """Keep what was asked, unless it is there."""
        if self._prompts is None:
            self._prompts = set(self.prompts())
        if asked not in self._prompts:
            self._prompts.add(asked)
            self._append("prompts", {"hash": asked, "prompt": prompt})

    def close(self) -> None:
        """Close the files."""
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
        except TypeError:  # whole numbers of more than 64 bits become texts, half characters a mark
            held = line if isinstance(line, Mapping) else {name: getattr(line, name) for name in line.__slots__}
            text = orjson.dumps(_plain(held))
        file.write(text + b"\n")
        file.flush()

    def _lines(self, kind: str) -> Iterator[dict[str, Any]]:
        """Lines of a kind, of the oldest file first."""
        for path in sorted(self.folder.glob(f"{kind}-*.jsonl")):
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break  # cut short by a kill
                    try:
                        yield orjson.loads(line)
                    except orjson.JSONDecodeError:
                        raise ValueError(f"{path}:{number}: no line of an evaluation: remove the line") from None
