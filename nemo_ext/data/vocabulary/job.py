"""The `nemo-ext train_tokenizer` job: draws a sample of text, trains a tokenizer on it, and writes a report."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.chat.template import Template
from nemo_ext.data.text.tokenizers import read_tokenizer
from nemo_ext.data.vocabulary import report
from nemo_ext.data.vocabulary.sample import Sample, draw, texts
from nemo_ext.data.vocabulary.settings import BYTES, Settings, Weighted, read_settings
from nemo_ext.data.vocabulary.training import longest, special_tokens, train, untrained, unused, write
from nemo_ext.job.files import only_run_in, write_text
from nemo_ext.job.made_of import check_same, note, noted
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import REPORT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RESULTS = "report.json"
_LONGEST = 25


def check(config: Mapping[str, Any]) -> tuple[Settings, list[Weighted]]:
    """Validate a composed config and return its settings and streams, without looking at the streams' files.

    Raises:
        ValueError: a setting is invalid.
    """
    settings, streams = read_settings(config)
    special_tokens(settings)
    untrained(settings)
    return settings, streams


def run(config: Mapping[str, Any]) -> None:
    """Train the tokenizer of a composed config and report on it, skipping parts that are complete.

    Raises:
        ValueError: a setting or a file is invalid, or the folder has a tokenizer made with different settings.
    """
    settings, streams = check(config)
    for stream in streams:
        stream.source.check()
    others = {_name(path, settings): _load(path) for path in settings.compare}
    folder = settings.folder
    with only_run_in(folder, "output"):
        record, made_of = settings.record, _made_of(settings, streams)
        reported = {"compare": list(settings.compare), "held_out": settings.held_out}
        before = noted(record) or {}
        trained = (folder / "tokenizer.json").exists()
        if trained and not before:
            raise ValueError(
                f"output={folder} has a tokenizer that `nemo-ext train_tokenizer` did not write: choose another folder"
            )
        recorded = before.get("made_of", {}) if trained else None
        check_same(recorded, made_of, f"output={folder} already has a tokenizer", "choose another folder")
        if trained and before.get("reported") == reported:
            notice(f"{folder} is already complete: see {(folder / REPORT).with_suffix('.html')}")
            return
        note(record, {"made_of": made_of})
        samples = [_draw(stream, settings) for stream in streams]
        if not trained:
            write(_train(settings, samples), settings)
        page = _report(settings, samples, others)
        note(record, {"made_of": made_of, "reported": reported})
    notice(f"tokenizer in {folder}; report: {page}")


def _draw(stream: Weighted, settings: Settings) -> Sample:
    notice(f"reading {stream.name}")
    size = round(settings.sample * stream.share)
    sample = draw(stream, train=size, held_out=settings.held_out, seed=settings.seed)
    if sample.train_bytes < size:
        notice(
            f"{stream.name} has only {sample.train_bytes:,} of the {size:,} bytes that its weight requires: add text, "
            "or its share of the sample will be smaller"
        )
    return sample


def _train(settings: Settings, samples: list[Sample]) -> "Tokenizer":
    size = sum(sample.train_bytes for sample in samples)
    if not size:
        raise ValueError("none of the streams has text to train on: add text, or correct input or data.streams")
    notice(f"training on {size / 1e6:,.1f} MB; Ctrl-C stops at once, without saving")
    tokenizer = train(settings, texts(samples))
    if (tokens := tokenizer.get_vocab_size()) < settings.vocab:
        notice(f"vocab={settings.vocab}, but the sample yields only {tokens} tokens: provide more text, or lower vocab")
    return tokenizer


def _report(settings: Settings, samples: list[Sample], others: Mapping[str, "Tokenizer"]) -> Path:
    """Write the report, with `others`, tokenizers to compare with, keyed by name; return the path of its HTML page."""
    notice("measuring the tokenizers")
    folder = settings.folder
    tokenizer, special = _load(str(folder)), special_tokens(settings)
    counts = report.measure({report.OURS: tokenizer, **others}, samples)
    size = tokenizer.get_vocab_size()
    about = {
        "preset": settings.preset or "none",
        "tokens": f"{size:,}: {BYTES} bytes, {size - BYTES - len(special):,} merges, {len(special)} special",
        "ends a document": f"`{settings.end}`, id {tokenizer.token_to_id(settings.end)}",
        "trained on": f"{sum(sample.train_bytes for sample in samples):,} bytes",
    }
    never_used = unused(tokenizer, texts(samples))
    write_text(folder / RESULTS, json.dumps({"tokens": size, **counts, "unused": len(never_used)}, indent=1) + "\n")
    longest_tokens = f"Longest: {report.shown(longest(tokenizer, _LONGEST))}"
    unused_tokens = f"{len(never_used):,} tokens do not occur in the sample: {report.shown(never_used[:40])}"
    page = report.page(about, counts, samples).section("Tokens", longest_tokens, unused_tokens)
    return page.write(folder / REPORT, page=True)


def _load(path: str) -> "Tokenizer":
    """Load a tokenizer, and set it to encode the names of special tokens in a text as ordinary text."""
    tokenizer, _ = read_tokenizer(_folder(path) / "tokenizer.json")
    tokenizer.encode_special_tokens = True
    return tokenizer


def _name(path: str, settings: Settings) -> str:
    """Return the name of a tokenizer in the report: its folder's name if that is unique, otherwise its path."""
    names = [_folder(other).name for other in settings.compare]
    return _folder(path).name if names.count(_folder(path).name) == 1 else path


def _folder(path: str) -> Path:
    place = Path(path).expanduser().absolute()
    return place.parent if place.name == "tokenizer.json" else place


def _made_of(settings: Settings, streams: list[Weighted]) -> dict[str, Any]:
    """Return the settings and input files that determine the tokenizer."""
    excluded = ("output", "preset", "compare", "held_out", "template")
    values = {key: value for key, value in dataclasses.asdict(settings).items() if key not in excluded}
    template = Template.load(settings.template).source if settings.template else None
    sources = {stream.name: {"share": stream.share, **stream.source.identity()} for stream in streams}
    return values | {"template": template, "streams": sources}
