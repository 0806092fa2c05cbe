"""Conversations to packs: shards made by workers, then one pass that decides over all samples, packs and reports.

OUTPUT/shards/             tokenised texts; kept, so that other sampling or packing starts from them
OUTPUT/train.*, valid.*    packs (`nemo_ext.data.packed_files`)
OUTPUT/report.md           what there is, what was left out and why
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.data.packed_files import PackedManifest, write_packed
from nemo_ext.data.seeds import digest
from nemo_ext.data.sft.filters.near_duplicates import Sketches, first_of_each
from nemo_ext.data.sft.reasoning import ModePlan, ModeShares
from nemo_ext.data.sft.report import write_report
from nemo_ext.data.sft.sampling import copies, epochs
from nemo_ext.data.sft.settings import SftSettings, read_settings
from nemo_ext.data.sft.shards import (
    Piece,
    Shard,
    Work,
    config_text,
    encoder_of,
    is_finished,
    make_shard,
    observe,
    open_shard,
)
from nemo_ext.data.workers import in_workers, usable_cores
from nemo_ext.progress import notice, progress_of
from nemo_ext.run_directory import only_run_in, write_text

PART_RECORDS = 5000
PART_BYTES = 32_000_000
LATER = ("preset", "output", "sampling", "packing", "validation_share", "workers", "duplicate_ids")
"""Keys that change nothing in the shards."""


@dataclass(frozen=True)
class Table:
    """All shards together. A row is a text, a sample the conversation that it is of.

    Attributes:
        shards: in order.
        sources: [samples] number of the source.
        ids: [samples] digests of source and id.
        samples: [rows] sample of a row.
        lengths: [rows] tokens.
        trained: [rows] tokens that the loss is taken of.
        modes: [rows] index into `shards.MODES`.
        tasks: [rows] index into `task_names`, `languages` likewise.
        task_names: of all shards.
        language_names: likewise.
    """

    shards: Sequence[Shard]
    sources: npt.NDArray[np.int64]
    ids: npt.NDArray[np.uint64]
    samples: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int64]
    tasks: npt.NDArray[np.int64]
    languages: npt.NDArray[np.int64]
    task_names: list[str]
    language_names: list[str]


@dataclass(frozen=True)
class Chosen:
    """What is trained on.

    Attributes:
        train: numbers of rows, those of later passes again.
        valid: numbers of rows.
        passes: over each source.
        dropped: reason -> samples left out in this pass over all of them.
    """

    train: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]
    passes: list[float]
    dropped: dict[str, int]


def run(config: Mapping[str, Any]) -> Path:
    """Make packs and a report of the composed config; returns the report's path.

    Raises:
        ValueError: anything in the config, a source that cannot be read, or nothing left to train on.
        RuntimeError: a worker died.
    """
    settings = read_settings(config)
    with only_run_in(settings.output, "output"):
        return _run(config, settings)


def _run(config: Mapping[str, Any], settings: SftSettings) -> Path:
    text = config_text({**config, "output": str(settings.output)})
    encoder_of(text)  # a template or tokenizer that cannot be used is known before anything is read
    settings.screen.check()
    inputs = [source.check() for source in settings.sources]
    pieces = _pieces(settings)
    work = Work(text, _shard_folder(config, settings, [path for each in inputs for _, path in each]))
    workers = settings.workers or usable_cores()
    if settings.thinking_shares:
        work = replace(work, plan=_mode_plan(work, pieces, workers))
    with (
        progress_of("conversations", sum(piece.part.size for piece in pieces)) as advance,
        closing(in_workers(partial(make_shard, work), pieces, workers=workers, skip=partial(_is_there, work))) as done,
    ):
        for piece, _ in done:
            advance(piece.part.size)
    table = _table([open_shard(work, piece.index) for piece in pieces])
    chosen = choose(table, settings)
    packed = _pack(work, table, chosen, settings)
    report = write_report(settings, table, chosen, packed)
    for name, manifest in packed.items():
        notice(f"{name}: {manifest.contents()}")
    return report


def _pieces(settings: SftSettings) -> list[Piece]:
    parts = [
        (number, part)
        for number, source in enumerate(settings.sources)
        for part in source.parts(max_documents=PART_RECORDS, max_size=PART_BYTES)
    ]
    return [Piece(index, number, part) for index, (number, part) in enumerate(parts)]


def _shard_folder(config: Mapping[str, Any], settings: SftSettings, inputs: Sequence[Path]) -> Path:
    """The folder of shards of these inputs and settings; shards of others are removed."""
    decides = {key: value for key, value in config.items() if key not in LATER}
    files = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in inputs]
    made_of = hashlib.sha256(json.dumps([decides, files], sort_keys=True).encode()).hexdigest()
    folder = settings.output / "shards"
    note = folder / "made_of.json"
    if folder.is_dir() and (not note.is_file() or json.loads(note.read_text()) != made_of):
        notice(f"{folder}: made from other conversations or settings: starting over")
        shutil.rmtree(folder)
    write_text(note, json.dumps(made_of))
    return folder


def _is_there(work: Work, piece: Piece) -> bool:
    return is_finished(work.folder, piece.index)


def _mode_plan(work: Work, pieces: Sequence[Piece], workers: int) -> ModePlan:
    """Which samples change so that tasks have their shares of thinking: a first pass over all conversations."""
    settings = work.settings
    shares = ModeShares(settings.thinking_shares, seed=settings.seed)
    with (
        progress_of("thinking shares", sum(piece.part.size for piece in pieces)) as advance,
        closing(in_workers(partial(observe, work), pieces, workers=workers)) as done,
    ):
        for piece, observed in done:
            assert observed is not None
            shares.add(observed)
            advance(piece.part.size)
    plan = shares.plan()
    for task in plan.unreachable:
        notice(f"thinking_shares.{task}: no sample of this task has reasoning, so it is left as it is")
    return plan


def _table(shards: Sequence[Shard]) -> Table:
    before = np.cumsum([0, *(len(shard.ids) for shard in shards)])
    tasks = sorted({name for shard in shards for name in shard.report["task_names"]})
    languages = sorted({name for shard in shards for name in shard.report["language_names"]})

    def joined(parts: Sequence[npt.NDArray[Any]], kind: type = np.int64) -> npt.NDArray[Any]:
        return np.concatenate([np.empty(0, dtype=kind), *parts]).astype(kind)

    def numbered(kind: str, names: list[str]) -> npt.NDArray[np.int64]:
        places = {name: number for number, name in enumerate(names)}
        own = [np.array([places[name] for name in shard.report[f"{kind}_names"]], dtype=np.int64) for shard in shards]
        rows = {"task": [s.tasks for s in shards], "language": [s.languages for s in shards]}[kind]
        return joined([of[row] for of, row in zip(own, rows, strict=True)])

    return Table(
        shards=shards,
        sources=joined([np.full(len(shard.ids), shard.report["source"]) for shard in shards]),
        ids=joined([shard.ids for shard in shards], np.uint64),
        samples=joined([shard.samples + first for shard, first in zip(shards, before[:-1], strict=True)]),
        lengths=joined([shard.file.lengths for shard in shards]),
        trained=joined([shard.trained for shard in shards]),
        modes=joined([shard.modes for shard in shards]),
        tasks=numbered("task", tasks),
        languages=numbered("language", languages),
        task_names=tasks,
        language_names=languages,
    )


def choose(table: Table, settings: SftSettings) -> Chosen:
    """Which rows are trained on: without duplicates, split, and sampled to the budget.

    Raises:
        ValueError: an id twice under `duplicate_ids=error`, nothing left, or a budget that cannot be reached.
    """
    dropped: dict[str, int] = {}
    keep = first_of_each(table.ids)
    if not keep.all():
        dropped["duplicate id"] = int((~keep).sum())
        if settings.duplicate_ids == "error":
            raise ValueError(
                f"{dropped['duplicate id']:,} samples have the id of an earlier one of their source: give each its own "
                "(id_key), or set duplicate_ids=drop"
            )
    if settings.near_duplicates is not None:
        order = np.flatnonzero(keep)
        sketches = Sketches.joined([shard.sketches for shard in table.shards if shard.sketches is not None])
        found = settings.near_duplicates.duplicate_of(Sketches(sketches.bands[order], sketches.slots[order]))
        if count := int((found >= 0).sum()):
            dropped["near duplicate"] = count
        keep[order[found >= 0]] = False
    # Both by the sample's own id: more data or another order move nobody to the other side.
    keys = np.array([digest(settings.seed, "split", int(each)) for each in table.ids], dtype=np.uint64)
    valid = keep & (keys < np.uint64(int(settings.validation_share * 2**64)))
    train = keep & ~valid
    tokens = np.bincount(table.samples, weights=table.lengths, minlength=len(table.ids)).astype(np.int64)
    of_source = [train & (table.sources == number) for number in range(len(settings.sources))]
    passes = epochs([int(tokens[mine].sum()) for mine in of_source], settings.sampling)
    times = np.zeros(len(table.ids), dtype=np.int64)
    for mine, over in zip(of_source, passes, strict=True):
        members = np.flatnonzero(mine)
        again = np.array([digest(settings.seed, "again", int(each)) for each in table.ids[members]], dtype=np.uint64)
        times[members] = copies(over, again, tokens[members])
    rows = np.repeat(np.arange(len(table.samples)), times[table.samples])
    if not len(rows):
        raise ValueError("no sample is left to train on; the counts of what was left out: " + _summary(table, dropped))
    return Chosen(rows, np.flatnonzero(valid[table.samples]), passes, dropped)


def _summary(table: Table, dropped: Mapping[str, int]) -> str:
    counts = dict(dropped)
    for shard in table.shards:
        for reason, count in shard.report["skipped"].items():
            counts[reason] = counts.get(reason, 0) + count
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items())) or "none"


def _pack(work: Work, table: Table, chosen: Chosen, settings: SftSettings) -> dict[str, PackedManifest]:
    if not len(chosen.valid):
        for old in settings.output.glob("valid.*"):
            old.unlink()
    tokenizer = encoder_of(work.config).tokenizer
    files = [shard.file for shard in table.shards]
    return {
        name: write_packed(
            settings.output / name,
            files,
            settings.packing,
            vocab_size=tokenizer.vocab_size,
            tokenizer_identity=tokenizer.identity,
            rows=rows,
        )
        for name, rows in (("train", chosen.train), ("valid", chosen.valid))
        if len(rows)
    }
