"""Job `nemo-ext train_tokenizer`: text -> sample -> tokenizer -> report."""

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
    """Settings and streams of a composed config, whose files need not be there yet.

    Raises:
        ValueError: a setting is wrong.
    """
    settings, streams = read_settings(config)
    special_tokens(settings)
    untrained(settings)
    return settings, streams


def run(config: Mapping[str, Any]) -> None:
    """Train the tokenizer that the composed config describes, unless it is there, and report on it.

    Raises:
        ValueError: a setting or a file is at fault, or the folder has a tokenizer of other settings.
    """
    settings, streams = check(config)
    for stream in streams:
        stream.source.check()
    others = {_name(path, settings): _compared(path) for path in settings.compare}
    folder = settings.folder
    with only_run_in(folder, "output"):
        record, made_of = settings.record, _made_of(settings, streams)
        reported = {"compare": list(settings.compare), "held_out": settings.held_out}
        before = noted(record) or {}
        there = (folder / "tokenizer.json").exists()
        if there and not before:
            raise ValueError(f"output={folder}: has a tokenizer that was not made here: choose another folder")
        begun = before.get("made_of", {}) if there else None
        check_same(begun, made_of, f"output={folder}: has a tokenizer already", "choose another folder")
        if there and before.get("reported") == reported:
            notice(f"{folder}: is there already: {(folder / REPORT).with_suffix('.html')}")
            return
        note(record, {"made_of": made_of})
        samples = [_drawn(stream, settings) for stream in streams]
        if not there:
            write(_trained(settings, samples), settings)
        page = _report(settings, samples, others)
        note(record, {"made_of": made_of, "reported": reported})
    notice(f"{folder}: {page}")


def _drawn(stream: Weighted, settings: Settings) -> Sample:
    notice(f"reading {stream.name}")
    wanted = round(settings.sample * stream.share)
    sample = draw(stream, train=wanted, held_out=settings.held_out, seed=settings.seed)
    if sample.train_bytes < wanted:
        notice(f"{stream.name}: {sample.train_bytes:,} of the {wanted:,} bytes that its weight asks for: that is all")
    return sample


def _trained(settings: Settings, samples: list[Sample]) -> "Tokenizer":
    size = sum(sample.train_bytes for sample in samples)
    if not size:
        raise ValueError("none of the streams has text to train on")
    notice(f"training on {size / 1e6:,.1f} MB; Ctrl-C ends it at once")
    tokenizer = train(settings, texts(samples))
    if (made := tokenizer.get_vocab_size()) < settings.vocab:
        notice(f"vocab={settings.vocab}: the sample has pairs for {made} tokens alone; give it more text")
    return tokenizer


def _report(settings: Settings, samples: list[Sample], others: Mapping[str, "Tokenizer"]) -> Path:
    """Writes the report; returns its page."""
    notice("measuring")
    folder = settings.folder
    tokenizer, special = _compared(str(folder)), special_tokens(settings)
    counts = report.measured({report.OURS: tokenizer, **others}, samples)
    made = tokenizer.get_vocab_size()
    about = {
        "preset": settings.preset or "none",
        "tokens": f"{made:,}: {BYTES} bytes, {made - BYTES - len(special):,} merges, {len(special)} special",
        "ends a document": f"`{settings.end}`, id {tokenizer.token_to_id(settings.end)}",
        "trained on": f"{sum(sample.train_bytes for sample in samples):,} bytes",
    }
    left = unused(tokenizer, texts(samples))
    write_text(folder / RESULTS, json.dumps({"tokens": made, **counts, "unused": len(left)}, indent=1) + "\n")
    tokens = f"Longest: {report.shown(longest(tokenizer, _LONGEST))}"
    never = f"In the sample {len(left):,} tokens do not occur: {report.shown(left[:40])}"
    page = report.page(about, counts, samples).section("Tokens", tokens, never)
    return page.write(folder / REPORT, page=True)


def _compared(path: str) -> "Tokenizer":
    """A tokenizer to which text that spells a special token is text."""
    tokenizer, _ = read_tokenizer(_folder(path) / "tokenizer.json")
    tokenizer.encode_special_tokens = True
    return tokenizer


def _name(path: str, settings: Settings) -> str:
    """A tokenizer's name in the report: its folder's, or the path where two have the same."""
    names = [_folder(each).name for each in settings.compare]
    return _folder(path).name if names.count(_folder(path).name) == 1 else path


def _folder(path: str) -> Path:
    place = Path(path).expanduser().absolute()
    return place.parent if place.name == "tokenizer.json" else place


def _made_of(settings: Settings, streams: list[Weighted]) -> dict[str, Any]:
    """What the tokenizer depends on."""
    left = ("output", "preset", "compare", "held_out", "template")
    asked = {key: value for key, value in dataclasses.asdict(settings).items() if key not in left}
    template = Template.load(settings.template).source if settings.template else None
    sources = {
        each.name: {
            "share": each.share,
            **each.source.describe(),
            "files": each.source.fingerprint(each.source.inputs()),
        }
        for each in streams
    }
    found: dict[str, Any] = json.loads(json.dumps(asked | {"template": template, "streams": sources}, default=str))
    return found
