"""Job `nemo-ext train_tokenizer`: text -> sample -> tokenizer -> report."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer
from nemo_ext.data.vocabulary import report
from nemo_ext.data.vocabulary.sample import draw, texts
from nemo_ext.data.vocabulary.settings import BYTES, Settings, Weighted, read_settings
from nemo_ext.data.vocabulary.training import longest, special_tokens, train, untrained, unused, write
from nemo_ext.job.files import only_run_in, write_text
from nemo_ext.job.made_of import differing, note, told
from nemo_ext.job.progress import notice
from nemo_ext.job.report import write_page
from nemo_ext.job.run_directory import OWN, REPORT

RESULTS = "report.json"
_LONGEST = 25


def run(config: Mapping[str, Any]) -> None:
    """Train the tokenizer that the composed config describes, and report on it.

    Raises:
        ValueError: a setting or a file is at fault, or the folder has a tokenizer of other settings.
    """
    settings, streams = read_settings(config)
    special = special_tokens(settings)
    untrained(settings)
    others = {_name(path, settings): HuggingFaceTokenizer(path, eod=None) for path in settings.compare}
    folder = settings.folder
    with only_run_in(folder, "output"):
        record, made_of = folder / OWN / "settings.json", _made_of(settings, streams)
        if (folder / "tokenizer.json").exists():
            before = json.loads(record.read_text()) if record.exists() else None
            if before == made_of and (folder / REPORT).exists():
                notice(f"{folder}: is there already: {folder / REPORT}")
                return
            if before is None or (changed := differing(before, made_of)):
                why = told(changed) if before is not None else "nobody knows of what"
                raise ValueError(f"output={folder}: has a tokenizer already ({why}): choose another folder")
        note(record, made_of)
        _make(settings, streams, special, others)


def _make(
    settings: Settings, streams: list[Weighted], special: list[str], others: dict[str, HuggingFaceTokenizer]
) -> None:
    folder, samples = settings.folder, []
    for stream in streams:
        notice(f"reading {stream.name}")
        wanted = round(settings.sample * stream.share)
        samples.append(draw(stream, train=wanted, held_out=settings.held_out, seed=settings.seed))
        if (got := samples[-1].train_bytes) < 0.9 * wanted:
            notice(f"{stream.name}: has {got:,} of the {wanted:,} bytes that its weight asks for: all of it is taken")
    size = sum(sample.train_bytes for sample in samples)
    if not size:
        raise ValueError("none of the streams has text to train on")
    notice(f"training on {size / 1e6:,.1f} MB")
    tokenizer = train(settings, texts(samples))
    write(tokenizer, settings)
    tokenizer.encode_special_tokens = True  # text that spells one is text
    made = tokenizer.get_vocab_size()
    if made < settings.vocab:
        notice(f"vocab={settings.vocab}: the sample has pairs for {made} tokens alone; give it more text")
    notice("measuring")
    tokenizers = {report.OURS: tokenizer} | {name: each.rust for name, each in others.items()}
    counts = report.measured(tokenizers, samples)
    about = [
        ("preset", settings.preset or "none"),
        ("tokens", f"{made:,}: {BYTES} bytes, {made - BYTES - len(special):,} merges, {len(special)} special"),
        ("ends a document", f"`{settings.end}`, id {tokenizer.token_to_id(settings.end)}"),
        ("trained on", f"{size:,} bytes"),
    ]
    left = unused(tokenizer, texts(samples))
    longest_tokens = longest(tokenizer, _LONGEST)
    if counts["stream"]:
        report.picture(counts["stream"], folder / report.PICTURE)
    as_json = {
        kind: {label: {name: dataclasses.asdict(each) for name, each in row.items()} for label, row in by.items()}
        for kind, by in counts.items()
    }
    write_text(folder / RESULTS, json.dumps({"tokens": made, **as_json, "unused": len(left)}, indent=1) + "\n")
    write_text(folder / REPORT, report.markdown(about, counts, samples, longest=longest_tokens, unused=left))
    page = write_page(folder / REPORT)
    notice(f"{folder}: {made:,} tokens: {page}")


def _name(path: str, settings: Settings) -> str:
    """A tokenizer's name in the report: its folder's, or the path where two have the same."""
    names = [_folder(each).name for each in settings.compare]
    return _folder(path).name if names.count(_folder(path).name) == 1 else path


def _folder(path: str) -> Path:
    place = Path(path).expanduser().absolute()
    return place.parent if place.name == "tokenizer.json" else place


def _made_of(settings: Settings, streams: list[Weighted]) -> dict[str, Any]:
    asked = {
        key: value for key, value in dataclasses.asdict(settings).items() if key not in ("output", "compare", "preset")
    }
    sources = {
        each.name: {
            "share": each.share,
            **each.source.describe(),
            "files": each.source.fingerprint(each.source.inputs()),
        }
        for each in streams
    }
    found: dict[str, Any] = json.loads(json.dumps(asked | {"streams": sources}, default=str))
    return found
