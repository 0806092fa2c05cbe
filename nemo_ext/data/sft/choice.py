"""Selection of the rows to train on, over all shards: deduplication, length, shares of thinking, token budget."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.chat.reasoning import ANY_TASK, Mode, moves_to_share
from nemo_ext.data.blends.division import fill
from nemo_ext.data.packs.packed_files import PackingSettings
from nemo_ext.data.sft.filters.near_duplicates import Sketches, first_of_each
from nemo_ext.data.sft.settings import Sampling, SftSettings
from nemo_ext.data.sft.shards import KINDS, Shard
from nemo_ext.data.sft.sources import ConversationReport
from nemo_ext.data.text.documents import EXAMPLES_PER_REASON, ReadReport
from nemo_ext.job.progress import notice
from nemo_ext.job.seeds import digest
from nemo_ext.job.settings import nearest

_UNITS: tuple[Mode, ...] = ("on", "fixed", "off")

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """All shards joined; fields that are not listed here are documented in `Shard`.

    Attributes:
        shards: shards in order.
        reports: mapping from the number of a source to the counts of its records.
        sources: [samples] number of the source.
        lengths: [rows] number of tokens.
    """

    shards: Sequence[Shard]
    reports: dict[int, ConversationReport]
    sources: Numbers
    ids: npt.NDArray[np.uint64]
    contents: npt.NDArray[np.uint64]
    samples: Numbers
    lengths: Numbers
    trained: Numbers
    modes: Numbers
    kinds: Numbers
    tasks: Numbers
    languages: Numbers
    task_names: list[str]
    language_names: list[str]


@dataclass(frozen=True)
class Chosen:
    """Rows to train on.

    Attributes:
        train: indices of the rows for training, repeated for later passes.
        valid: indices of the rows for validation.
        passes: number of passes over each source, in order.
        skipped: counts of samples skipped by this selection (rows, if longer than a pack), with the first few as
            examples.
        all_skipped: `skipped` plus all records skipped while reading.
        changed: number of samples whose thinking mode was changed, keyed by kind of change.
        shares: mapping from each task to its target share of samples with thinking on, and its numbers of samples with
            thinking on and off, in training and validation together.
    """

    train: Numbers
    valid: Numbers
    passes: list[float]
    skipped: ReadReport
    all_skipped: ConversationReport
    changed: Counter[str]
    shares: dict[str, tuple[float, int, int]]


def table_of(shards: Sequence[Shard], packing: PackingSettings) -> Table:
    """Join the shards into one table; rows that packing will truncate get their truncated lengths."""
    before = np.cumsum([0, *(len(shard.ids) for shard in shards)])
    tasks = sorted({name for shard in shards for name in shard.task_names})
    languages = sorted({name for shard in shards for name in shard.language_names})
    reports: dict[int, ConversationReport] = {}
    for shard in shards:
        reports.setdefault(shard.piece.source, ConversationReport()).add(shard.report)

    def joined(values: Callable[[Shard], npt.ArrayLike], kind: type = np.int64) -> npt.NDArray[Any]:
        return np.concatenate([np.empty(0, dtype=kind), *(np.asarray(values(shard)) for shard in shards)]).astype(kind)

    def numbers_in(known: list[str], names: list[str]) -> Numbers:
        return np.array([known.index(name) for name in names], dtype=np.int64)

    cut = packing.capacity if packing.longer == "truncate" else None
    return Table(
        shards=shards,
        reports=reports,
        sources=joined(lambda shard: np.full(len(shard.ids), shard.piece.source)),
        ids=joined(lambda shard: shard.ids, np.uint64),
        contents=joined(lambda shard: shard.contents, np.uint64),
        samples=joined(lambda shard: shard.samples + before[shard.piece.number]),
        lengths=joined(lambda shard: shard.file.lengths if cut is None else np.minimum(shard.file.lengths, cut)),
        trained=joined(lambda shard: shard.trained if cut is None else _trained_within(shard, cut)),
        modes=joined(lambda shard: shard.modes),
        kinds=joined(lambda shard: shard.kinds),
        tasks=joined(lambda shard: numbers_in(tasks, shard.task_names)[shard.tasks]),
        languages=joined(lambda shard: numbers_in(languages, shard.language_names)[shard.languages]),
        task_names=tasks,
        language_names=languages,
    )


def choose(table: Table, settings: SftSettings) -> Chosen:
    """Select the rows to train on: deduplicate, apply the shares of thinking, split, and sample to the token budget.

    Raises:
        ValueError: too many records are invalid, an id is repeated under `duplicate_ids=error`, a task in
            `thinking_shares` does not exist, no sample is left, or the budget cannot be reached.
    """
    for number, report in table.reports.items():
        report.check_bad_share(f"source {settings.sources[number].name}", settings.max_bad_share)
    skipped, changed = ReadReport(), Counter[str]()
    keep = _distinct(table, settings, skipped)
    packing = settings.packing
    fits = (table.lengths <= packing.capacity) | (packing.longer != "drop")
    rows, shares = _balanced(table, settings, keep[table.samples], fits, skipped, changed)
    if too_long := int((rows & ~fits).sum()):
        skipped.skip("text longer than a pack", count=too_long)
    rows &= fits
    # The split depends on a sample's id alone, so new data or another order never move a sample between splits.
    keys = np.array([digest(settings.seed, "split", int(identity)) for identity in table.ids], dtype=np.uint64)
    held_out = keys < np.uint64(int(settings.validation_share * 2**64))
    valid, train = np.flatnonzero(rows & held_out[table.samples]), np.flatnonzero(rows & ~held_out[table.samples])
    tokens = np.bincount(table.samples[train], weights=table.lengths[train], minlength=len(table.ids)).astype(np.int64)
    by_source = [np.flatnonzero((tokens > 0) & (table.sources == number)) for number in range(len(settings.sources))]
    passes = epochs([int(tokens[members].sum()) for members in by_source], settings.sampling)
    times = np.zeros(len(table.ids), dtype=np.int64)
    for members, source_passes in zip(by_source, passes, strict=True):
        draws = [digest(settings.seed, "again", int(identity)) for identity in table.ids[members]]
        times[members] = copies(source_passes, np.array(draws, dtype=np.uint64), tokens[members])
    train = np.repeat(train, times[table.samples[train]])
    all_skipped = ConversationReport()
    for counts in (skipped, *table.reports.values()):
        all_skipped.add(counts)
    if not len(train):
        why = all_skipped.summary(examples=1)
        raise ValueError(f"no sample is left to train on (skipped: {why}); relax the filters, or add data")
    return Chosen(train, valid, passes, skipped, all_skipped, changed, shares)


def _skip(
    reason: str,
    count: int,
    pairs: Iterable[tuple[int, int]],
    table: Table,
    settings: SftSettings,
    skipped: ReadReport,
) -> None:
    """Count `count` samples that repeat others in `skipped`, under `reason`.

    The examples are the places of the first few `pairs` of sample indices (repeat, original).
    """
    ends = np.cumsum([len(shard.ids) for shard in table.shards])

    def place(sample: int) -> str:
        number = int(np.searchsorted(ends, sample, side="right"))
        shard = table.shards[number]
        record = int(shard.numbers[sample - ends[number]])  # a negative index, from the shard's end
        return settings.sources[shard.piece.source].files.place(shard.piece.part, record)

    if count:
        skipped.skip(reason, count=count)
        examples = islice(pairs, EXAMPLES_PER_REASON)
        skipped.examples[reason] = [f"{place(repeat)} repeats {place(original)}" for repeat, original in examples]


def _distinct(table: Table, settings: SftSettings, skipped: ReadReport) -> Flags:
    """Return the mask of samples that repeat no earlier id and have no earlier near duplicate, [samples]."""
    first = first_of_each(table.ids)
    repeats = first != np.arange(len(first))
    differ = repeats & (table.contents != table.contents[first])
    if repeats.any() and settings.duplicate_ids == "error":
        raise ValueError(
            f"{int(repeats.sum()):,} samples repeat the id of an earlier sample of their source: set id_key to a key "
            "with unique ids, or set duplicate_ids=drop"
        )
    for reason, mask in (("duplicate id", repeats & ~differ), ("duplicate id of another sample", differ)):
        pairs = ((int(sample), int(first[sample])) for sample in np.flatnonzero(mask))
        _skip(reason, int(mask.sum()), pairs, table, settings, skipped)
    if differ.any():
        notice(
            f"warning: {int(differ.sum()):,} samples are skipped because they repeat the id of an earlier sample of "
            "their source with other content: set id_key to a key with unique ids"
        )
    keep = ~repeats
    if settings.near_duplicates is not None:
        order = np.flatnonzero(keep)
        sketches = Sketches.joined([shard.sketches for shard in table.shards if shard.sketches is not None])
        originals = settings.near_duplicates.duplicate_of(Sketches(sketches.bands[order], sketches.slots[order]))
        near = np.flatnonzero(originals >= 0)
        pairs = ((int(order[place]), int(order[originals[place]])) for place in near)
        _skip("near duplicate", len(near), pairs, table, settings, skipped)
        keep[order[near]] = False
    return keep


def _balanced(
    table: Table, settings: SftSettings, keep: Flags, fits: Flags, skipped: ReadReport, changed: Counter[str]
) -> tuple[Flags, dict[str, tuple[float, int, int]]]:
    """Choose the rows that give each task its share of thinking; return their mask, [rows], and `Chosen.shares`.

    Args:
        keep: [rows] mask of the rows to choose from.
        fits: [rows] mask of the rows that fit into a pack, if necessary truncated; only these count for the shares.
    """
    rows = keep & (table.kinds != KINDS.index("stripped"))
    if not settings.thinking_shares:
        return rows, {}
    _check_tasks(table, settings)
    task_of = np.zeros(len(table.ids), dtype=np.int64)
    task_of[table.samples] = table.tasks
    available = {kind: _samples_with(table, rows & fits, kind) for kind in _UNITS}
    moved = {kind: np.zeros(len(table.ids), dtype=bool) for kind in _UNITS}
    targets = {name: settings.thinking_share(name) for name in table.task_names}
    for task, name in enumerate(table.task_names):
        if (share := targets[name]) is None:
            continue
        of_task = {kind: samples[task_of[samples] == task] for kind, samples in available.items()}
        if share > 0 and len(of_task["off"]) and not len(of_task["on"]) + len(of_task["fixed"]):
            notice(f"thinking_shares.{name}: the task is unchanged, as none of its remaining samples has reasoning")
        counts = moves_to_share(len(of_task["on"]), len(of_task["fixed"]), len(of_task["off"]), share)
        for kind, count in zip(_UNITS, counts, strict=True):
            # The kind is part of the draw, since the two samples of a pair have the same id.
            draws = [digest(settings.seed, "thinking share", int(key), kind) for key in table.ids[of_task[kind]]]
            moved[kind][of_task[kind][np.argsort(np.array(draws, dtype=np.uint64))[:count]]] = True
        if counts[0]:
            changed[f"{name or 'no task'}: stripped for its share"] += counts[0]
        if sum(counts[1:]):
            skipped.skip("thinking share", count=sum(counts[1:]))
    for kind, samples in moved.items():
        rows &= ~(samples[table.samples] & (table.kinds == KINDS.index(kind)))
    rows |= keep & moved["on"][table.samples] & (table.kinds == KINDS.index("stripped"))
    shares = {}
    for task, name in enumerate(table.task_names):
        if (target := targets[name]) is not None:
            task_rows = rows & fits & (table.tasks == task)
            on, fixed, off, stripped = (
                len(_samples_with(table, task_rows, kind)) for kind in ("on", "fixed", "off", "stripped")
            )
            shares[name] = target, on + fixed, off + stripped
    return rows, shares


def _check_tasks(table: Table, settings: SftSettings) -> None:
    for name in settings.thinking_shares:
        if name != ANY_TASK and name not in table.task_names:
            known = nearest(name, filter(None, table.task_names))
            message = f"thinking_shares.{name} is not the task of any sample; {known}"
            if settings.preset is None:
                raise ValueError(message)
            notice(message)  # the tasks of a preset need not be in the user's data


def _samples_with(table: Table, rows: Flags, kind: str) -> Numbers:
    """Return the indices, ascending, of the samples that have a row of this kind in the mask `rows`."""
    found: Numbers = np.unique(table.samples[rows & (table.kinds == KINDS.index(kind))])
    return found


def _trained_within(shard: Shard, capacity: int) -> Numbers:
    """Return the number of tokens that count in the loss among the first `capacity` tokens of each row, [rows]."""
    trained, lengths = shard.trained.copy(), shard.file.lengths
    starts = np.cumsum(lengths) - lengths
    for row in np.flatnonzero(lengths > capacity).tolist():
        mask = np.fromfile(shard.file.loss, dtype=np.uint8, count=capacity, offset=int(starts[row]))
        trained[row] = int(mask[1:].sum())
    return trained


def epochs(tokens: Sequence[int], sampling: Sampling) -> list[float]:
    """Return the number of passes over each source, given the sources' numbers of training tokens.

    A source's share of the budget is proportional to its tokens to the power `alpha`; the part that it cannot use
    within `max_epochs` goes to the other sources.

    Raises:
        ValueError: the budget exceeds what all sources provide within `max_epochs`.
    """
    if sampling.tokens is None and sampling.passes is None:
        return [1.0 if size else 0.0 for size in tokens]
    budget = Fraction(sampling.tokens if sampling.tokens is not None else (sampling.passes or 0) * sum(tokens))
    most = sampling.max_epochs * sum(tokens)
    if sampling.tokens is not None and sampling.tokens > most:
        raise ValueError(
            f"sampling.tokens={sampling.tokens:,.0f} must be at most {most:,.0f}, as the sources have {sum(tokens):,} "
            f"tokens and sampling.max_epochs={sampling.max_epochs:g}: lower tokens, raise max_epochs, or add data"
        )
    present = [number for number, size in enumerate(tokens) if size]
    weights = [Fraction(float(tokens[number]) ** sampling.alpha) for number in present]
    limits = [Fraction(sampling.max_epochs) * tokens[number] for number in present]
    passes = [0.0] * len(tokens)
    for number, used in zip(present, fill(budget, weights, limits), strict=True):
        passes[number] = float(used / tokens[number])
    return passes


def copies(passes: float, keys: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of copies of each sample, [samples]; a partial pass takes the samples with the smallest keys.

    Args:
        passes: number of passes over all samples.
        keys: [samples] random but fixed keys, so that more passes never remove a sample.
        tokens: [samples] number of tokens.
    """
    counts = np.full(len(keys), int(passes), dtype=np.int64)
    partial = (passes - int(passes)) * tokens.sum()
    order = np.argsort(keys, kind="stable")
    # The partial pass ends at the nearest sample.
    middles = np.cumsum(tokens[order]) - tokens[order] / 2
    counts[order[: int(np.searchsorted(middles, partial, side="left"))]] += 1
    return counts
