"""Choice of what to train on from all shards: deduplication, length, each task's share of thinking, the budget."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.chat.reasoning import ANY_TASK, Mode, moves_to_share
from nemo_ext.data.packs.packed_files import PackingSettings
from nemo_ext.data.sft.filters.near_duplicates import Sketches, first_of_each
from nemo_ext.data.sft.sampling import copies, epochs
from nemo_ext.data.sft.settings import SftSettings
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
    """All shards together; arrays and names that are not listed here are those of `Shard`, joined.

    Attributes:
        shards: shards in order.
        reports: number of a source -> counts of its records.
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

    def left_out(self, chosen: ReadReport) -> ConversationReport:
        """Counts of what was left out by a choice and when the records were read, over all sources."""
        whole = ConversationReport()
        for report in (chosen, *self.reports.values()):
            whole.add(report)
        return whole


@dataclass(frozen=True)
class Chosen:
    """Rows to train on.

    Attributes:
        train: numbers of the rows for training, repeated for later passes.
        valid: numbers of the rows for validation.
        passes: number of passes over each source.
        left: samples left out here by reason (texts, if longer than a pack), with places and what they repeat.
        left_out: the same and all that was left out when the records were read.
        changed: change -> number of samples brought to another mode.
        shares: task -> target share of samples with thinking on, and the numbers of those on and off, in training and
            validation.
    """

    train: Numbers
    valid: Numbers
    passes: list[float]
    left: ReadReport
    left_out: ConversationReport
    changed: Counter[str]
    shares: dict[str, tuple[float, int, int]]


def table_of(shards: Sequence[Shard], packing: PackingSettings) -> Table:
    """Join the shards into one table; texts that packing cuts have the lengths that they are cut to."""
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
    """Choose the rows to train on: without duplicates, in the shares of thinking, split, and sampled to the budget.

    Raises:
        ValueError: too many records are bad, an id comes twice under `duplicate_ids=error`, a task of
            `thinking_shares` does not exist, nothing is left, or the budget cannot be reached.
    """
    for number, report in table.reports.items():
        report.check_bad_share(f"source {settings.sources[number].name}", settings.max_bad_share)
    left, changed = ReadReport(), Counter[str]()
    keep = _distinct(table, settings, left)
    packing = settings.packing
    fits = (table.lengths <= packing.capacity) | (packing.longer != "drop")
    rows, shares = _balanced(table, settings, keep[table.samples], fits, left, changed)
    if too_long := int((rows & ~fits).sum()):
        left.skip("text longer than a pack", count=too_long)
    rows &= fits
    # Split by the sample's own id: more data or another order move no sample to the other side.
    keys = np.array([digest(settings.seed, "split", int(each)) for each in table.ids], dtype=np.uint64)
    held_out = keys < np.uint64(int(settings.validation_share * 2**64))
    valid, train = np.flatnonzero(rows & held_out[table.samples]), np.flatnonzero(rows & ~held_out[table.samples])
    tokens = np.bincount(table.samples[train], weights=table.lengths[train], minlength=len(table.ids)).astype(np.int64)
    of_source = [(tokens > 0) & (table.sources == number) for number in range(len(settings.sources))]
    passes = epochs([int(tokens[mine].sum()) for mine in of_source], settings.sampling)
    times = np.zeros(len(table.ids), dtype=np.int64)
    for mine, over in zip(of_source, passes, strict=True):
        members = np.flatnonzero(mine)
        again = np.array([digest(settings.seed, "again", int(each)) for each in table.ids[members]], dtype=np.uint64)
        times[members] = copies(over, again, tokens[members])
    train = np.repeat(train, times[table.samples[train]])
    left_out = table.left_out(left)
    if not len(train):
        raise ValueError(f"no sample is left to train on; left out: {left_out.summary(examples=1)}")
    return Chosen(train, valid, passes, left, left_out, changed, shares)


def _skip(
    reason: str,
    count: int,
    pairs: Iterable[tuple[int, int]],
    table: Table,
    settings: SftSettings,
    left: ReadReport,
) -> None:
    """Count samples that repeat others; the first few pairs of them are kept as places."""
    ends = np.cumsum([len(shard.ids) for shard in table.shards])

    def place(sample: int) -> str:
        number = int(np.searchsorted(ends, sample, side="right"))
        shard = table.shards[number]
        record = int(shard.numbers[sample - ends[number]])  # a negative index, from the shard's end
        return settings.sources[shard.piece.source].files.place(shard.piece.part, record)

    if count:
        left.skip(reason, count=count)
        left.examples[reason] = [f"{place(one)} is {place(of)}" for one, of in islice(pairs, EXAMPLES_PER_REASON)]


def _distinct(table: Table, settings: SftSettings, left: ReadReport) -> Flags:
    """Mask of the samples that are the first of their id and near no earlier one, [samples]."""
    first = first_of_each(table.ids)
    again = first != np.arange(len(first))
    other = again & (table.contents != table.contents[first])
    if again.any() and settings.duplicate_ids == "error":
        raise ValueError(
            f"{int(again.sum()):,} samples have the id of an earlier one of their source: give each its own "
            "(id_key), or set duplicate_ids=drop"
        )
    for reason, found in (("duplicate id", again & ~other), ("duplicate id of another sample", other)):
        pairs = ((int(each), int(first[each])) for each in np.flatnonzero(found))
        _skip(reason, int(found.sum()), pairs, table, settings, left)
    if other.any():
        notice(
            f"warning: {int(other.sum()):,} samples have the id of an earlier one of their source but say something "
            "else, and are left out: give each its own (id_key)"
        )
    keep = ~again
    if settings.near_duplicates is not None:
        order = np.flatnonzero(keep)
        sketches = Sketches.joined([shard.sketches for shard in table.shards if shard.sketches is not None])
        found = settings.near_duplicates.duplicate_of(Sketches(sketches.bands[order], sketches.slots[order]))
        pairs = ((int(order[each]), int(order[found[each]])) for each in np.flatnonzero(found >= 0))
        _skip("near duplicate", int((found >= 0).sum()), pairs, table, settings, left)
        keep[order[found >= 0]] = False
    return keep


def _balanced(
    table: Table, settings: SftSettings, keep: Flags, fits: Flags, left: ReadReport, changed: Counter[str]
) -> tuple[Flags, dict[str, tuple[float, int, int]]]:
    """Mask of the rows kept so that tasks have their shares of thinking, [rows], and the shares reached."""
    rows = keep & (table.kinds != KINDS.index("stripped"))
    if not settings.thinking_shares:
        return rows, {}
    _check_tasks(table, settings)
    task_of = np.zeros(len(table.ids), dtype=np.int64)
    task_of[table.samples] = table.tasks
    there = {kind: _samples_with(table, rows & fits, kind) for kind in _UNITS}
    moved = {kind: np.zeros(len(table.ids), dtype=bool) for kind in _UNITS}
    targets = {name: settings.thinking_share(name) for name in table.task_names}
    for task, name in enumerate(table.task_names):
        if (share := targets[name]) is None:
            continue
        own = {kind: members[task_of[members] == task] for kind, members in there.items()}
        if share > 0 and len(own["off"]) and not len(own["on"]) + len(own["fixed"]):
            notice(f"thinking_shares.{name}: no sample of this task that is left has reasoning: it stays as it is")
        counts = moves_to_share(len(own["on"]), len(own["fixed"]), len(own["off"]), share)
        for kind, count in zip(_UNITS, counts, strict=True):
            # The two samples of a pair have one id but are drawn separately.
            draws = [digest(settings.seed, "thinking share", int(each), kind) for each in table.ids[own[kind]]]
            moved[kind][own[kind][np.argsort(np.array(draws, dtype=np.uint64))[:count]]] = True
        if counts[0]:
            changed[f"{name or 'no task'}: stripped for its share"] += counts[0]
        if sum(counts[1:]):
            left.skip("thinking share", count=sum(counts[1:]))
    for kind, samples in moved.items():
        rows &= ~(samples[table.samples] & (table.kinds == KINDS.index(kind)))
    rows |= keep & moved["on"][table.samples] & (table.kinds == KINDS.index("stripped"))
    shares = {}
    for task, name in enumerate(table.task_names):
        if (target := targets[name]) is not None:
            own = rows & fits & (table.tasks == task)
            on, fixed, off, stripped = (
                len(_samples_with(table, own, kind)) for kind in ("on", "fixed", "off", "stripped")
            )
            shares[name] = target, on + fixed, off + stripped
    return rows, shares


def _check_tasks(table: Table, settings: SftSettings) -> None:
    for name in settings.thinking_shares:
        if name != ANY_TASK and name not in table.task_names:
            said = f"thinking_shares.{name}: no sample is of this task: {nearest(name, filter(None, table.task_names))}"
            if settings.preset is None:
                raise ValueError(said)
            notice(said)  # the tasks of a preset need not be in the user's data


def _samples_with(table: Table, rows: Flags, kind: str) -> Numbers:
    """Samples that have one of these rows of that kind, ascending."""
    found: Numbers = np.unique(table.samples[rows & (table.kinds == KINDS.index(kind))])
    return found


def _trained_within(shard: Shard, capacity: int) -> Numbers:
    """Number of tokens in the loss among the first `capacity` of each text, [rows]."""
    trained, lengths = shard.trained.copy(), shard.file.lengths
    starts = np.cumsum(lengths) - lengths
    for row in np.flatnonzero(lengths > capacity).tolist():
        mask = np.fromfile(shard.file.loss, dtype=np.uint8, count=capacity, offset=int(starts[row]))
        trained[row] = int(mask[1:].sum())
    return trained
