"""report.html: tables, accuracy versus tokens, and all samples, in one self-contained file.

Answers are embedded in compressed blocks, which the browser unpacks when they are viewed. All external content is
base64-encoded data that is shown as text; the page's Content-Security-Policy allows no other scripts and no requests.
"""

import base64
import gzip
import hashlib
import html
import zlib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from nemo_ext.evaluation.report import NONE, facts, figure, measured, name_of, number, share, tables
from nemo_ext.evaluation.store import Key, Sample, Score, Store
from nemo_ext.job.files import complete_file
from nemo_ext.rl.verdict import Metric

PAGE = "report.html"
VERDICTS = ("right", "partly right", "wrong", "measured", "unscored", "failed")
SAMPLES, BYTES = 400_000, 1 << 30
"""Maximum number of samples and of bytes of answers in a page; beyond either, a subset of samples is chosen by hash."""
TEXT = 100_000
"""Maximum number of characters per string in the page; longer strings are shortened in the middle."""
_BLOCK_SAMPLES, _BLOCK_BYTES = 500, 1 << 22


def write(
    results: Mapping[str, Any], store: Store, run_dir: Path, *, asked: Mapping[tuple[str, ...], str] | None = None
) -> Path:
    """Write report.html into a run directory.

    Args:
        results: content of results.json.
        asked: mapping from (benchmark, problem, prompt, mode) to the current request's hash; other samples are left
            out. If None, all stored samples of the benchmarks in `results` are shown.

    Returns:
        Path of report.html.
    """
    before, after = _template(str(results["model"]))
    index = _Index(results)
    with complete_file(run_dir / PAGE) as file:
        file.write(before.encode())
        block: list[dict[str, Any]] = []
        prompts: dict[str, Any] = {}
        shown, size = store.prompts(), 0
        for sample, score in _samples(results, store, asked, index):
            if len(block) == _BLOCK_SAMPLES or size > _BLOCK_BYTES:
                file.write(_data({"prompts": prompts, "samples": block}, 'class="block"'))
                index.blocks.append(len(block))
                block, prompts, size = [], {}, 0
            line = _line(sample, score)
            block.append(line)
            size += sum(len(line[key] or "") for key in ("answer", "reasoning"))
            size += sum(len(str(turn)) for turn in line["turns"])
            if sample.asked not in prompts:
                prompts[sample.asked] = _cut(shown.get(sample.asked))
                size += len(str(prompts[sample.asked]))
            index.add(sample, score)
        if block:
            file.write(_data({"prompts": prompts, "samples": block}, 'class="block"'))
            index.blocks.append(len(block))
        file.write(_data(_summary(results), 'id="summary"'))
        file.write(_data(index.columns(), 'id="index"'))
        file.write(after.encode())
    return run_dir / PAGE


class _Index:
    """Columns of the page's list of samples, for display and filters; names are stored as indices into lists."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        self.entries = results.get("benchmarks", {})
        self.names: dict[str, dict[str, int]] = {name: {} for name in ("benchmark", "problem", "prompt", "mode")}
        for name in self.entries:
            self.names["benchmark"].setdefault(name, len(self.names["benchmark"]))
        self.numbers: dict[str, list[Any]] = {
            name: [] for name in (*self.names, "sample", "verdict", "score", "tokens", "truncated")
        }
        self.blocks: list[int] = []
        self.omitted = 0

    def add(self, sample: Sample, score: Score | None) -> None:
        """Append a sample to the list; `score` is None if it has no score."""
        for name, known in self.names.items():
            value = getattr(sample.key, name)
            self.numbers[name].append(known.setdefault(value, len(known)))
        self.numbers["sample"].append(sample.key.sample)
        self.numbers["verdict"].append(VERDICTS.index(verdict(sample, score, self.entries[sample.key.benchmark])))
        self.numbers["score"].append(None if score is None or score.score is None else round(score.score, 4))
        self.numbers["tokens"].append(sample.completion_tokens)
        self.numbers["truncated"].append(int(sample.finish_reason == "length"))

    def columns(self) -> dict[str, Any]:
        """Return the list of samples as columns, in the page's format."""
        names = {name: list(known) for name, known in self.names.items()}
        note = ""
        if self.omitted:
            shown = len(self.numbers["sample"])
            note = f"{shown:,} of {shown + self.omitted:,} samples are in this page, chosen by hash; store/ has all."
        return {**self.numbers, "names": names, "verdicts": VERDICTS, "blocks": self.blocks, "note": note}


def verdict(sample: Sample, score: Score | None, entry: Mapping[str, Any]) -> str:
    """Return the verdict on a sample, one of `VERDICTS`; on benchmarks where lower is better, a score of 0 is right.

    `entry` is the benchmark's entry in results.json.
    """
    if sample.problem:
        return "failed"
    if score is None or score.score is None:
        return "unscored"
    if measured(entry["metric"]):
        return "measured"
    value = score.score if entry.get("higher_is_better", True) else 1 - score.score
    return "right" if value >= 1 else "wrong" if value <= 0 else "partly right"


def _samples(
    results: Mapping[str, Any], store: Store, asked: Mapping[tuple[str, ...], str] | None, index: _Index
) -> Iterator[tuple[Sample, Score | None]]:
    entries = results.get("benchmarks", {})
    verifiers = {name: entry["verifier"] for name, entry in entries.items()}
    scores = {name: score for name, score in store.scores().items() if verifiers.get(name[0].benchmark) == name[2]}
    size = sum(path.stat().st_size for path in store.folder.glob("answers-*.jsonl"))
    part = min(1.0, BYTES / max(size, 1), SAMPLES / max(len(scores), 1))
    for sample in store.answers():
        if sample.key.benchmark not in entries:
            continue
        if asked is not None and asked.get(tuple(sample.key[:4])) != sample.asked:
            continue
        if part < 1 and _place(sample.key) >= part:
            index.omitted += 1
            continue
        yield sample, scores.get((sample.key, sample.asked, verifiers[sample.key.benchmark]))


def _place(key: Key) -> float:
    """Return a pseudo-random number in [0, 1) derived from the key, to select samples if not all fit on the page."""
    return zlib.crc32(orjson.dumps([*key])) / (1 << 32)


def _shown(value: Metric) -> float | str:
    return round(value, 4) if isinstance(value, int | float) else "/".join(f"{part:g}" for part in value)


def _line(sample: Sample, score: Score | None) -> dict[str, Any]:
    known: dict[str, float | int | str | None] = {
        "score": None if score is None or score.score is None else round(score.score, 4),
        "compared as": None if score is None else score.found,
        **({} if score is None else {name: _shown(value) for name, value in score.more.items()}),
        "ended by": sample.finish_reason,
        "prompt tokens": sample.prompt_tokens,
        "answer tokens": sample.completion_tokens,
        "reasoning tokens": sample.reasoning_tokens,
        "seconds": None if sample.seconds is None else round(sample.seconds, 2),
        "seed": sample.seed,
    }
    return {
        "asked": sample.asked,
        "answer": _cut(sample.answer),
        "reasoning": _cut(sample.reasoning),
        "tool_calls": _cut(sample.tool_calls),
        "turns": _cut(sample.turns),
        "why": _cut(sample.problem or ("no score yet" if score is None else score.why)),
        "facts": [[name, str(value)] for name, value in known.items() if value is not None],
        "choices": [[f"{nats:.4f}", size] for nats, size in zip(sample.logprobs, sample.sizes, strict=False)],
    }


def _cut(value: Any) -> Any:
    """Shorten the long strings of a JSON value in the middle."""
    if isinstance(value, str) and len(value) > TEXT:
        middle = f"\n… {len(value) - TEXT:,} characters are omitted here; store/ has them …\n"
        return value[: TEXT // 2] + middle + value[-(TEXT // 2) :]
    if isinstance(value, Mapping):
        return {key: _cut(each) for key, each in value.items()}
    return [_cut(each) for each in value] if isinstance(value, list | tuple) else value


def _summary(results: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": str(results["model"]),
        "facts": facts(results),
        "tables": [
            {
                "title": table.title,
                "note": table.note,
                "heading": table.heading,
                "rows": [[[cell.text, cell.value] for cell in row] for row in table.rows],
            }
            for table in tables(results)
        ],
        "points": list(_points(results)),
    }


def _points(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the points of the plot: mean tokens per answer (x), accuracy in percent (y), and its interval."""
    for name, entry in results.get("benchmarks", {}).items():
        if measured(entry["metric"]):
            continue
        modes = entry.get("modes") or {"": entry}
        for mode, values in modes.items():
            if values["accuracy"] is None or values.get("tokens") is None:
                continue
            several = len(modes) > 1
            shown = figure(values["accuracy"], values["interval"]).text
            cut = share(values.get("truncated")).text
            yield {
                "benchmark": name,
                "mode": mode,
                "name": f"{name_of(name, entry)}, {mode}" if several else name_of(name, entry),
                "text": f"{shown}, {number(values['tokens']).text} tokens"
                + (f", {cut} truncated" if cut != NONE else ""),
                "x": values["tokens"],
                "y": 100 * values["accuracy"],
                "interval": None if values["interval"] is None else [100 * end for end in values["interval"]],
            }


def _data(value: Any, attribute: str) -> bytes:
    """Return a script element that holds a value as gzip-compressed JSON in base64; `attribute` identifies it."""
    packed = gzip.compress(orjson.dumps(value), compresslevel=5, mtime=0)
    return b'<script type="application/octet-stream" %b>%b</script>\n' % (attribute.encode(), base64.b64encode(packed))


def _template(title: str) -> tuple[str, str]:
    """Return the page's HTML before and after its data; its security policy allows only its own script and style."""
    page = files("nemo_ext.evaluation").joinpath("page.html").read_text(encoding="utf-8")
    hashes = {}
    for tag in ("style", "script"):
        content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[tag] = f"{tag}-src 'sha256-{digest}'"
    policy = f"default-src 'none'; {hashes['style']}; {hashes['script']}; base-uri 'none'; form-action 'none'; "
    policy += "require-trusted-types-for 'script'; trusted-types 'none'"
    before, _, after = page.partition("<!--data-->")
    return before.replace("POLICY", policy, 1).replace("TITLE", html.escape(title), 1), after
