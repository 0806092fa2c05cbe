"""Passes over the documents: runs of stages, each ended by a barrier that needs all documents before the next begins.

The input is cut into units, which depend on it alone. A pass over a unit is a file of documents, the barrier's features
of them, and its counts, written last, which mark it as done. So who does which unit, and how often work is cut off,
does not change a byte.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from datatrove.data import Document

from nemo_ext.data.curation.documents import SUFFIX, documents, line_of, read_lines, writer
from nemo_ext.data.curation.funnel import Amount, Counts
from nemo_ext.data.curation.settings import Curate, Plan, read_plan
from nemo_ext.data.curation.stage import Barrier, Features, Judge, Stage, shown
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.data.text.documents import UNLIMITED, Part, ReadReport, Unit, cut
from nemo_ext.data.text.tokenizers import Tokenizer, load_tokenizer, named_tokenizer
from nemo_ext.data.text.user_files import value_at
from nemo_ext.job.files import complete_file, publish, unfinished, write_text
from nemo_ext.job.made_of import noted
from nemo_ext.job.progress import notice
from nemo_ext.job.seeds import uniform
from nemo_ext.job.units import Units

READ = "read"
DOCUMENTS = "documents"
"""Folder of the output."""
SAMPLE = 0.01
"""Share of the dropped documents that `keep_dropped=sample` keeps."""
DECIDED = "decided"
"""File in a pass's folder that says that its barrier has decided."""
VALUES, ENDS, VERDICTS = ".values", ".ends.npy", ".verdicts"
"""Endings of a unit's files: the barrier's values of its documents, where those of each end, and the decisions."""
_UNITS = "units.json"
_NOT_IN_NAMES = re.compile("[^A-Za-z0-9_-]")
_LONGEST = 100
"""Characters of a folder's name."""
_ZEROS = 1 << 20


@dataclass(frozen=True)
class Pass:
    """A run of stages over all documents.

    Attributes:
        number: number of the pass, from 0.
        begin: name of the barrier whose decisions are applied first; None in the first pass.
        names: names of the stages that judge one document at a time.
        end: name of the barrier that notes features; None in the last pass.
    """

    number: int
    begin: str | None
    names: tuple[str, ...]
    end: str | None


def passes_of(stages: Mapping[str, Stage]) -> list[Pass]:
    """Passes that stages take."""
    found, begin, names = list[Pass](), None, list[str]()
    for name, stage in stages.items():
        if isinstance(stage, Barrier):
            found.append(Pass(len(found), begin, tuple(names), name))
            begin, names = name, []
        else:
            names.append(name)
    return [*found, Pass(len(found), begin, tuple(names), None)]


def units_of(plan: Plan) -> list[Unit]:
    """The units of the input, cut by the first process that comes.

    Raises:
        ValueError: the input is empty.
    """
    file = plan.settings.own / _UNITS
    if (found := noted(file)) is not None:
        return [Unit(each["number"], each["stream"], tuple(Part(**part) for part in each["parts"])) for each in found]
    notice("looking through the input")
    units = list(cut(plan.streams, max_documents=UNLIMITED, max_size=plan.curate.unit))
    if not units:
        raise ValueError("the input is empty: there is no document in it")
    write_text(file, json.dumps([asdict(unit) for unit in units]))
    return units


@dataclass(frozen=True)
class Work:
    """A pass, in a form that is cheap to send to a worker: the composed config as JSON, and the pass's number."""

    config: str
    number: int

    @property
    def plan(self) -> Plan:
        """Settings, stages and sources."""
        return _plan(self.config)

    @property
    def units(self) -> Units:
        """Files that the pass makes of the units; their counts mark them as done."""
        return Units(self.plan.settings.own / str(self.number))

    def counts(self, unit: int) -> Counts:
        """Counts of a unit that is done."""
        return Counts.from_json(json.loads(self.units.file(unit).read_text()))

    def features(self, unit: int) -> Features:
        """What the barrier noted of a unit that is done."""
        path = self.units.file(unit, VALUES)
        try:
            ends = np.load(self.units.file(unit, ENDS), mmap_mode="r")
            found = Features(path, int(ends[-1]), len(ends) - 1)
            sound = path.stat().st_size == 8 * found.number
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{path} is damaged ({error}): remove {self.plan.settings.own} and run again") from error
        if not sound:
            raise ValueError(f"{path} is damaged: remove {self.plan.settings.own} and run again")
        return found


@lru_cache(maxsize=1)
def _plan(config: str) -> Plan:
    return read_plan(json.loads(config))


@lru_cache(maxsize=1)
def _judges(config: str, names: tuple[str, ...]) -> list[tuple[str, Judge]]:
    stages = _plan(config).stages
    return [(name, stages[name].start()) for name in names]


def tokenizer_of(curate: Curate) -> Tokenizer | None:
    """The tokenizer that counts tokens; raises ValueError if it cannot be read."""
    given = curate.tokenizer
    return None if given is None else load_tokenizer(named_tokenizer(given) if isinstance(given, str) else given)


@lru_cache(maxsize=1)
def _counter(config: str) -> Callable[[str], int]:
    tokenizer = tokenizer_of(_plan(config).curate)
    return lambda text: 0 if tokenizer is None else len(tokenizer.encode([text])[0])


def decide(work: Work, units: Sequence[Unit]) -> None:
    """Let a pass's barrier decide, when all units are done.

    Raises:
        ValueError: a file is damaged, or too many records of a stream were malformed.
    """
    this = passes_of(work.plan.stages)[work.number]
    if work.number == 0:
        check_read(work, units)
    if this.end is None or (work.units.folder / DECIDED).exists():
        return
    barrier = work.plan.stages[this.end]
    assert isinstance(barrier, Barrier)
    features = [work.features(unit.number) for unit in units]
    files = [work.units.file(unit.number, VERDICTS) for unit in units]
    for file, each in zip(files, features, strict=True):
        size = each.number if barrier.verdict_of_values else each.documents
        with open(unfinished(file), "wb") as out:  # written, not truncated: a full disk ends a process at a map
            for start in range(0, size, _ZEROS):
                out.write(bytes(min(_ZEROS, size - start)))

    def mark(unit: int, places: Any, values: Any) -> None:
        if unfinished(files[unit]).stat().st_size:
            verdicts = np.memmap(unfinished(files[unit]), dtype=np.uint8, mode="r+")
            verdicts[places] = values
            verdicts.flush()

    barrier.decide(features, mark, work.plan.curate.memory)
    for file in files:
        publish(unfinished(file), file)
    write_text(work.units.folder / DECIDED, "")


def check_read(work: Work, units: Sequence[Unit]) -> None:
    """Raises ValueError if too many of a stream's records were malformed."""
    for stream, source in work.plan.streams.items():
        report = ReadReport()
        for unit in units:
            if unit.stream == stream:
                report.add(work.counts(unit.number).read)
        try:
            source.finish(report)
        except ValueError as error:
            raise ValueError(f"stream {stream!r}: {error}") from error


def run_unit(work: Work, unit: Unit) -> None:
    """Do a pass over one unit.

    Raises:
        ValueError: the input cannot be read, or a file of the pass before is short or damaged.
    """
    plan, this = work.plan, passes_of(work.plan.stages)[work.number]
    judges, size = _judges(work.config, this.names), _Size(_counter(work.config))
    work.units.folder.mkdir(parents=True, exist_ok=True)
    counts = Counts()
    end = plan.stages[this.end] if this.end is not None else None
    note = end.noting() if isinstance(end, Barrier) else None
    dropped = plan.settings.folder / "dropped"
    with writer() as out, _noted(work, unit) as noted:

        def drops(name: str, drop: Drop | None, document: Document, before: Amount) -> bool:
            """Count what a stage did to a document; True if it is dropped."""
            through = counts.of(name)
            through.came.add(before)
            if drop is None:
                after = size.of(document)
                through.kept.add(after)
                through.changed += after is not before
                return False
            through.drop(drop.reason, before, document.id, drop.detail)
            keep = plan.curate.keep_dropped
            if keep == "all" or (keep == "sample" and uniform(0, "dropped", document.id) < SAMPLE):
                path = dropped / name / f"{unit.number:06d}{SUFFIX}"
                out.write(path, line_of(document, dropped=drop.reason, why=drop.detail))
            return True

        for document, decided in _documents(work, unit, counts.read):
            before = size.of(document)
            if this.begin is None:
                counts.of(READ).came.add(before)
                counts.of(READ).kept.add(before)
            elif drops(this.begin, decided(document), document, before):
                continue
            for name, judge in judges:
                before = size.of(document)
                drop = judge(document)
                if drop is None and not document.text.strip():
                    drop = Drop("nothing-left")
                if drops(name, drop, document, before):
                    break
            else:
                if note is not None:
                    noted(note(document))
                    out.write(work.units.file(unit.number, SUFFIX), line_of(document))
                    continue
                place = _place(plan, unit, document)
                counts.written.setdefault(place, Amount()).add(size.of(document))
                out.write(plan.settings.folder / DOCUMENTS / place / f"{unit.number:06d}{SUFFIX}", line_of(document))
    for through in counts.stages.values():
        through.finish()
    write_text(work.units.file(unit.number), json.dumps(counts.as_json()))


class _Size:
    """Size of the last document, taken again when its text is another."""

    def __init__(self, tokens: Callable[[str], int]) -> None:
        self._tokens = tokens
        self._text: str | None = None
        self._amount = Amount()

    def of(self, document: Document) -> Amount:
        if document.text != self._text:
            self._text = document.text
            data = self._text.encode(errors="replace")
            self._amount = Amount(1, len(data), self._tokens(self._text))
        return self._amount


def _documents(
    work: Work, unit: Unit, report: ReadReport
) -> Iterator[tuple[Document, Callable[[Document], Drop | None]]]:
    """Documents of a unit before a pass, each with what the barrier before decided on it."""
    if work.number == 0:
        for document in documents(work.plan.streams[unit.stream], unit.parts, unit.stream, report):
            yield document, lambda document: None
        return
    before = Work(work.config, work.number - 1)
    begin = passes_of(work.plan.stages)[work.number].begin
    barrier = work.plan.stages[begin or ""]
    assert isinstance(barrier, Barrier)
    path, damaged = before.units.file(unit.number, SUFFIX), f"remove {work.plan.settings.own} and run again"
    try:
        ends = np.load(before.units.file(unit.number, ENDS))
        verdicts = np.fromfile(before.units.file(unit.number, VERDICTS), dtype=np.uint8)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{path}: what was decided on it is not there ({error}): {damaged}") from error
    expected = len(ends) - 1
    if len(verdicts) != (ends[-1] if barrier.verdict_of_values else expected):
        raise ValueError(f"{before.units.file(unit.number, VERDICTS)} is damaged: {damaged}")
    number = 0
    for document in read_lines(path) if expected else ():
        if number == expected:
            raise ValueError(f"{path}: more than the {expected:,} documents that were counted: {damaged}")
        start, end = ends[number], ends[number + 1]
        mine = verdicts[start:end] if barrier.verdict_of_values else verdicts[number : number + 1]
        yield document, partial(barrier.apply, verdicts=mine)
        number += 1
    if number < expected:
        raise ValueError(f"{path}: {number:,} documents, but {expected:,} were counted: {damaged}")


@contextmanager
def _noted(work: Work, unit: Unit) -> Iterator[Callable[[Any], None]]:
    """A function that notes the features of a document, into files that get their names at the end."""
    ends = [0]
    with complete_file(work.units.file(unit.number, VALUES)) as file:

        def note(values: Any) -> None:
            file.write(values.tobytes())
            ends.append(ends[-1] + len(values))

        yield note
    with complete_file(work.units.file(unit.number, ENDS)) as file:
        np.save(file, np.array(ends, dtype=np.int64))


def _place(plan: Plan, unit: Unit, document: Document) -> str:
    """Folder of the output that a document belongs in."""
    values = [str(value_at(document.metadata, key)) for key in plan.curate.divide]
    for key, value in zip(plan.curate.divide, values, strict=True):
        if len(value) > _LONGEST:
            raise ValueError(
                f"curate.divide: {key} of {document.id} is too long for a folder's name: {shown(value)}..."
            )
    names = [_NOT_IN_NAMES.sub("_", value) or "_" for value in values]
    return "/".join([unit.stream, *names])
