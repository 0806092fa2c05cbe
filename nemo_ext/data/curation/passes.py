"""Passes over the documents: each applies consecutive stages, up to a barrier that needs all documents to decide.

The input is cut into units, independently of shards and workers. A pass over a unit writes its documents, the
barrier's features and the counts; the counts come last and mark the unit as done. So the output is the same byte for
byte, whichever process does a unit and however often work is interrupted.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from datatrove.data import Document

from nemo_ext.data.curation.documents import SUFFIX, Writer, documents, line_of, read_lines
from nemo_ext.data.curation.funnel import Amount, Counts
from nemo_ext.data.curation.settings import Curate, Plan, read_plan
from nemo_ext.data.curation.stage import Barrier, Features, Judge, Stage, Values, shown
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.data.text.documents import UNLIMITED, Part, ReadReport, Unit, cut
from nemo_ext.data.text.tokenizers import Tokenizer, load_tokenizer, named_tokenizer
from nemo_ext.data.text.user_files import value_at
from nemo_ext.job.files import complete_file, publish, unfinished, write_text
from nemo_ext.job.made_of import noted
from nemo_ext.job.progress import notice
from nemo_ext.job.seeds import uniform
from nemo_ext.job.settings import checked, prefixed_errors
from nemo_ext.job.units import Units

READ = "read"
DOCUMENTS = "documents"
"""Folder for the kept documents in the output."""
SAMPLE = 0.01
"""Share of the dropped documents that `keep_dropped=sample` writes."""
DECIDED = "decided"
"""File in a pass's folder that marks its barrier's decision as complete."""
VALUES, ENDS, VERDICTS = ".values", ".ends.npy", ".verdicts"
"""Suffixes of a unit's files: all documents' feature values, the end of each document's values, and the verdicts."""
_UNITS = "units.json"
_NOT_IN_NAMES = re.compile("[^A-Za-z0-9_-]")
_LONGEST = 100
"""Maximum number of characters in a folder name."""
MOST_FOLDERS = 200
"""Maximum number of folders below `documents` per unit; each has an open file."""
_ZEROS = 1 << 20


@dataclass(frozen=True)
class Pass:
    """Consecutive stages that are applied to all documents.

    Attributes:
        number: number of the pass, from 0.
        begin: name of the barrier whose verdicts are applied first; None in the first pass.
        names: names of the stages that judge one document at a time.
        end: name of the barrier whose features are recorded last; None in the last pass.
    """

    number: int
    begin: str | None
    names: tuple[str, ...]
    end: str | None


def passes_of(stages: Mapping[str, Stage]) -> list[Pass]:
    """Divide stages into passes at their barriers."""
    passes, begin, names = list[Pass](), None, list[str]()
    for name, stage in stages.items():
        if isinstance(stage, Barrier):
            passes.append(Pass(len(passes), begin, tuple(names), name))
            begin, names = name, []
        else:
            names.append(name)
    return [*passes, Pass(len(passes), begin, tuple(names), None)]


def units_of(plan: Plan, *, store: bool = True) -> list[Unit]:
    """Return the units of the input; the first process lists them in a file that the other processes read.

    Args:
        store: whether to write the list.

    Raises:
        ValueError: the input is empty.
    """
    file = plan.settings.own / _UNITS
    if (stored := noted(file)) is not None:
        return [Unit(each["number"], each["stream"], tuple(Part(**part) for part in each["parts"])) for each in stored]
    notice("listing the input")
    units = list(cut(plan.streams, max_documents=UNLIMITED, max_size=plan.curate.unit))
    if not units:
        raise ValueError("input or data.streams has no documents: check that the files are not empty")
    if store:
        write_text(file, json.dumps([asdict(unit) for unit in units]))
    return units


@dataclass(frozen=True)
class Work:
    """A pass in a form that is cheap to send to workers: the composed config as JSON, and the pass number."""

    config: str
    number: int

    @property
    def plan(self) -> Plan:
        """Settings, stages and sources of the config."""
        return _plan(self.config)

    @property
    def current(self) -> Pass:
        """The pass that this work belongs to."""
        return passes_of(self.plan.stages)[self.number]

    @property
    def units(self) -> Units:
        """Files that the pass writes per unit; the counts file marks the unit as done."""
        return Units(self.plan.settings.own / str(self.number))

    def counts(self, unit: int) -> Counts:
        """Return the counts of a finished unit of the input."""
        return checked(Counts, json.loads(self.units.file(unit).read_text()))

    def features(self, unit: int) -> Features:
        """Return the features that the barrier recorded for a finished unit of the input."""
        path = self.units.file(unit, VALUES)
        try:
            ends = np.load(self.units.file(unit, ENDS), mmap_mode="r")
            features = Features(path, int(ends[-1]), len(ends) - 1)
            complete = path.stat().st_size == 8 * features.number
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{path} is damaged ({error}): remove {self.plan.settings.own} and run again") from error
        if not complete:
            raise ValueError(f"{path} is damaged: remove {self.plan.settings.own} and run again")
        return features


@lru_cache(maxsize=1)
def _plan(config: str) -> Plan:
    return read_plan(json.loads(config))


@lru_cache(maxsize=32)
def judge_of(config: str, name: str) -> Judge:
    """Return the function that judges documents in the stage `name` of a config, built once per process."""
    return _plan(config).stages[name].start()


def tokenizer_of(curate: Curate) -> Tokenizer | None:
    """Return the tokenizer for counting tokens; None if they are not counted. Raises ValueError if unreadable."""
    config = curate.tokenizer
    if config is None:
        return None
    return load_tokenizer(named_tokenizer(config) if isinstance(config, str) else config, "curate.tokenizer")


@lru_cache(maxsize=1)
def _counter(config: str) -> Callable[[str], int]:
    tokenizer = tokenizer_of(_plan(config).curate)
    return lambda text: 0 if tokenizer is None else len(tokenizer.encode([text])[0])


def check_read(work: Work, units: Sequence[Unit]) -> None:
    """Check after the first pass that the input is unchanged and that few of its records were malformed.

    Raises:
        ValueError: too many records of a stream were malformed, or the input changed while it was read.
    """
    if work.number:
        return
    work.plan.settings.check_same(work.plan.made_of())
    for stream, source in work.plan.streams.items():
        report = ReadReport()
        for unit in units:
            if unit.stream == stream:
                report.add(work.counts(unit.number).read)
        with prefixed_errors(f"stream {stream!r}"):
            source.finish(report)


def decide(work: Work, units: Sequence[Unit]) -> None:
    """Write the verdicts of the barrier at the end of a pass, if there is one, once all units of the pass are done.

    Raises:
        ValueError: a file is damaged.
    """
    plan, current = work.plan, work.current
    if current.end is None or (work.units.folder / DECIDED).exists():
        return
    barrier = plan.stages[current.end]
    assert isinstance(barrier, Barrier)
    features = [work.features(unit.number) for unit in units]
    files = [work.units.file(unit.number, VERDICTS) for unit in units]
    for file, unit_features in zip(files, features, strict=True):
        size = unit_features.number if barrier.verdict_of_values else unit_features.documents
        with open(unfinished(file), "wb") as out:  # not sparse: on a full disk, writing to a map kills the process
            for start in range(0, size, _ZEROS):
                out.write(bytes(min(_ZEROS, size - start)))

    def mark(unit: int, places: Any, values: Any) -> None:
        if unfinished(files[unit]).stat().st_size:
            verdicts = np.memmap(unfinished(files[unit]), dtype=np.uint8, mode="r+")
            verdicts[places] = values
            verdicts.flush()

    barrier.decide(features, mark, plan.curate.memory)
    for file in files:
        publish(unfinished(file), file)
    write_text(work.units.folder / DECIDED, "")


def run_unit(work: Work, unit: Unit) -> None:
    """Run a pass over one unit of the input: write the documents it keeps, the barrier's features, and last the counts.

    Raises:
        ValueError: the input cannot be read, or a file of the previous pass is truncated or damaged.
    """
    current = work.current
    end = work.plan.stages[current.end] if current.end is not None else None
    with ExitStack() as stack:
        flow = Flow(work, unit, stack)
        documents = flow.enter()
        for name in current.names:
            documents = flow.judged(name, judge_of(work.config, name), documents)
        for _ in flow.stored(end.features, documents) if isinstance(end, Barrier) else flow.written(documents):
            pass
    write_text(work.units.file(unit.number), json.dumps(asdict(flow.counts)))


class Flow:
    """Documents of one unit of the input on their way through a pass, counted at each step.

    Each step is a generator; dropped documents are written according to `curate.keep_dropped`.

    Attributes:
        counts: counts so far.
    """

    def __init__(self, work: Work, unit: Unit, stack: ExitStack) -> None:
        self._work, self._unit, self._stack = work, unit, stack
        self._plan, self._out = work.plan, Writer(stack)
        self._size = _Size(_counter(work.config))
        self.counts = Counts()
        work.units.folder.mkdir(parents=True, exist_ok=True)

    def enter(self) -> Iterator[Document]:
        """Yield the input's documents in the first pass, and in later passes the documents that the verdicts keep."""
        if (begin := self._work.current.begin) is not None:
            yield from self._judged(begin, _with_verdicts(self._work, self._unit))
            return
        through = self.counts.stage(READ)
        source = self._plan.streams[self._unit.stream]
        for document in documents(source, self._unit.parts, self._unit.stream, self.counts.read):
            through.came.add(amount := self._size.measure(document))
            through.kept.add(amount)
            yield document

    def judged(self, name: str, judge: Judge, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents that the stage `name` keeps; count the others by reason."""
        return self._judged(name, ((document, judge) for document in documents))

    def _judged(self, name: str, documents: Iterable[tuple[Document, Judge]]) -> Iterator[Document]:
        through, keep = self.counts.stage(name), self._plan.curate.keep_dropped
        dropped = self._plan.settings.folder / "dropped" / name / f"{self._unit.number:06d}{SUFFIX}"
        for document, judge in documents:
            before = self._size.measure(document)
            through.came.add(before)
            drop = judge(document)
            if drop is None and not document.text.strip():
                drop = Drop("nothing-left")
            if drop is None:
                after = self._size.measure(document)
                through.kept.add(after)
                through.changed += after is not before
                yield document
                continue
            through.drop(drop.reason, before, document.id, drop.detail)
            if keep == "all" or (keep == "sample" and uniform(0, "dropped", document.id) < SAMPLE):
                self._out.write(dropped, line_of(document, dropped=drop.reason, why=drop.detail))
        through.finish()

    def stored(self, features: Callable[[Document], Values], documents: Iterable[Document]) -> Iterator[Document]:
        """Write documents and their features for the barrier at the end of the pass, and yield the documents."""
        record = self._stack.enter_context(_feature_files(self._work, self._unit))
        for document in documents:
            record(features(document))
            self._out.write(self._work.units.file(self._unit.number, SUFFIX), line_of(document))
            yield document

    def written(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Write documents to the output, and yield them.

        Raises:
            ValueError: `curate.divide` requires too many folders, or names that are too long.
        """
        written = self.counts.written
        for document in documents:
            place = _place(self._plan, self._unit, document)
            written.setdefault(place, Amount()).add(self._size.measure(document))
            if len(written) > MOST_FOLDERS:
                raise ValueError(
                    f"curate.divide requires more than {MOST_FOLDERS} folders for one unit of the input: choose "
                    "keys with fewer values, or lower curate.unit"
                )
            path = self._plan.settings.folder / DOCUMENTS / place / f"{self._unit.number:06d}{SUFFIX}"
            self._out.write(path, line_of(document))
            yield document


class _Size:
    """Measures the size of the current document, and remeasures it only if the text has changed."""

    def __init__(self, tokens: Callable[[str], int]) -> None:
        self._tokens = tokens
        self._text: str | None = None
        self._amount = Amount()

    def measure(self, document: Document) -> Amount:
        if document.text != self._text:
            self._text = document.text
            data = self._text.encode(errors="replace")
            self._amount = Amount(1, len(data), self._tokens(self._text))
        return self._amount


def _with_verdicts(work: Work, unit: Unit) -> Iterator[tuple[Document, Judge]]:
    """Yield the previous pass's documents, each with a function that applies the barrier's verdicts to it."""
    before = Work(work.config, work.number - 1)
    barrier = work.plan.stages[work.current.begin or ""]
    assert isinstance(barrier, Barrier)
    path, advice = before.units.file(unit.number, SUFFIX), f"remove {work.plan.settings.own} and run again"
    try:
        ends = np.load(before.units.file(unit.number, ENDS))
        verdicts = np.fromfile(before.units.file(unit.number, VERDICTS), dtype=np.uint8)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{path}: the list of documents to keep is missing or damaged ({error}): {advice}") from error
    expected = len(ends) - 1
    if len(verdicts) != (ends[-1] if barrier.verdict_of_values else expected):
        raise ValueError(f"{before.units.file(unit.number, VERDICTS)} is damaged: {advice}")
    number = 0
    for document in read_lines(path) if expected else ():
        if number == expected:
            raise ValueError(f"{path} has more documents than the {expected:,} that were counted: {advice}")
        start, end = ends[number], ends[number + 1]
        mine = verdicts[start:end] if barrier.verdict_of_values else verdicts[number : number + 1]
        yield document, partial(barrier.apply, verdicts=mine)
        number += 1
    if number < expected:
        raise ValueError(f"{path} has {number:,} documents, but {expected:,} were counted: {advice}")


@contextmanager
def _feature_files(work: Work, unit: Unit) -> Iterator[Callable[[Any], None]]:
    """Yield a function that appends the features of a unit's next document to the unit's files.

    The files get their final names when the context exits.
    """
    ends = [0]
    with complete_file(work.units.file(unit.number, VALUES)) as file:

        def record(values: Any) -> None:
            file.write(values.tobytes())
            ends.append(ends[-1] + len(values))

        yield record
    with complete_file(work.units.file(unit.number, ENDS)) as file:
        np.save(file, np.array(ends, dtype=np.int64))


def _place(plan: Plan, unit: Unit, document: Document) -> str:
    """Return the folder of a document, relative to `documents` in the output."""
    values = [str(value_at(document.metadata, key)) for key in plan.curate.divide]
    for key, value in zip(plan.curate.divide, values, strict=True):
        if len(value) > _LONGEST:
            raise ValueError(
                f"curate.divide: document {document.id} has {key}={shown(value)!r}..., which is too long for a folder "
                "name; choose keys with short values"
            )
    names = [_NOT_IN_NAMES.sub("_", value) or "_" for value in values]
    return "/".join([unit.stream, *names])
