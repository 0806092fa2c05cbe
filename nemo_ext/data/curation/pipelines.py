"""The stages of a curation as datatrove's pipelines, run by its local, Slurm and Ray executors.

A pass is a pipeline with one task per unit, and a barrier is a job between two passes: datatrove's MinHash, or a single
task. Each block leaves its counts in datatrove's stats, from which the last job builds the funnel.
"""

import inspect
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig
from datatrove.utils.stats import MetricStats
from datatrove.utils.text import TextNormConfig

from nemo_ext.data.curation.funnel import Amount, Counts, Reason
from nemo_ext.data.curation.passes import (
    ENDS,
    READ,
    VERDICTS,
    Flow,
    Work,
    check_read,
    decide,
    judge_of,
    passes_of,
    units_of,
)
from nemo_ext.data.curation.results import RESULTS, finish, remove
from nemo_ext.data.curation.settings import Plan
from nemo_ext.data.curation.stage import Barrier
from nemo_ext.data.curation.stages.duplicates import NearDuplicates
from nemo_ext.data.curation.stages.rules import Characters
from nemo_ext.data.text.documents import Unit
from nemo_ext.job.files import write_text
from nemo_ext.job.job import JobFailed
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import check_keys
from nemo_ext.job.workers import usable_cores

_EXECUTORS = {"local": LocalPipelineExecutor, "slurm": SlurmPipelineExecutor, "ray": RayPipelineExecutor}
_NOT_OPTIONS = ("pipeline", "tasks", "logging_dir", "depends", "depends_job_id", "workers", "skip_completed")
_LOGS = "datatrove"
"""Folder in the output with a folder per job: datatrove's completions, logs and stats."""
_MEASURES = {"": "documents", "bytes_": "bytes", "tokens_": "tokens"}
"""Prefixes of the labels in datatrove's stats, and the attributes of `Amount` that they hold."""
_MINHASH = ("signatures", "links", "removed")
"""Folders of datatrove's MinHash in a pass's folder."""
_UNITS_PER_TASK = 1000
"""Maximum number of units whose signatures one task compares, per band."""


class Block(PipelineStep):
    """Base class of datatrove pipeline blocks that belong to a pass; `name` is the stage's name."""

    type = "nemo_ext"

    def __init__(self, work: Work, name: str) -> None:
        self.name, self.work = name, work
        super().__init__()

    @contextmanager
    def flow(self, rank: int) -> Iterator[Flow]:
        """Yield the `Flow` of the unit with number `rank`; at the end, add its counts to datatrove's stats."""
        with ExitStack() as stack:
            yield (flow := Flow(self.work, units_of(self.work.plan)[rank], stack))
        for label, value in _labels(flow.counts):
            if value:
                self.stat_update(label, value=value, unit="task")


class Read(Block):
    """Reads the documents that enter a pass: the input, or the documents that the barrier `name` keeps."""

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        with self.flow(rank) as flow:
            yield from flow.enter()


class Filter(Block):
    """Runs a stage that judges one document at a time."""

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        judge = judge_of(self.work.config, self.name)

        def timed(document: Document) -> Any:
            with self.track_time():
                return judge(document)

        with self.flow(rank) as flow:
            yield from flow.judged(self.name, timed, data)


class Store(Block):
    """Writes documents, and their features for the barrier `name` unless datatrove computes signatures."""

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        barrier = self.work.plan.stages[self.name]
        assert isinstance(barrier, Barrier)
        with self.flow(rank) as flow:
            none = np.empty(0, dtype=np.uint64)
            yield from flow.stored((lambda document: none) if by_datatrove(barrier) else barrier.features, data)


class Write(Block):
    """Writes the documents that the last stage keeps to the output."""

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        with self.flow(rank) as flow:
            yield from flow.written(data)


class Decide(Block):
    """Single task after a pass: decides on duplicates, or takes the decision from datatrove's clusters.

    Args:
        name: name of the barrier at the end of the pass.
        removed: datatrove's folder with the numbers of the documents to remove; None to decide here.
    """

    def __init__(self, work: Work, name: str, removed: Path | None = None) -> None:
        super().__init__(work, name)
        self.removed = removed

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        work, units = self.work, units_of(self.work.plan)
        _collect(work, units)
        check_read(work, units)
        with self.track_time("task"):
            if self.removed is None:
                decide(work, units)
            else:
                _take(work, units, self.removed)
        _remove_before(work, units)


def _take(work: Work, units: Sequence[Unit], removed: Path) -> None:
    """Convert the duplicates that datatrove found, listed by unit in the folder `removed`, to verdicts."""
    for unit in units:
        verdicts = np.zeros(len(np.load(work.units.file(unit.number, ENDS))) - 1, dtype=np.uint8)
        if (numbers := removed / f"{unit.number:06d}.remove").exists():
            verdicts[np.fromfile(numbers, dtype="<u4")] = 1
        verdicts.tofile(work.units.file(unit.number, VERDICTS))


class Finish(Block):
    """Single task after the last pass: reconciles the counts, and writes the funnel, the report and the data file."""

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        units = units_of(self.work.plan)
        _collect(self.work, units)
        check_read(self.work, units)
        _remove_before(self.work, units)
        finish(self.work.plan, self.work, units)


def by_datatrove(barrier: object) -> TypeGuard[NearDuplicates]:
    """Return whether datatrove's MinHash makes the decision: the barrier finds near duplicates, without a threshold."""
    return isinstance(barrier, NearDuplicates) and barrier.threshold is None


def executors(plan: Plan, config: str, units: Sequence[Unit]) -> list[PipelineExecutor]:
    """Build datatrove's executors, in the order in which they must run; each of the `units` is a task of every pass."""
    settings = plan.settings
    kind, workers = _EXECUTORS[settings.datatrove.executor], settings.workers
    if workers is None:
        workers = usable_cores() if kind is LocalPipelineExecutor else -1
    built = list[PipelineExecutor]()
    for name, tasks, pipeline in _jobs(plan, config, len(units)):
        folder = settings.folder.absolute() / _LOGS / f"{len(built) + 1:02d}_{name}"
        options = {"job_name": f"curate_{name}"} if kind is SlurmPipelineExecutor else {}
        options |= settings.datatrove.options
        built.append(kind(pipeline, tasks=tasks, workers=workers, logging_dir=str(folder), **options))
    return built


def _jobs(plan: Plan, config: str, units: int) -> Iterator[tuple[str, int, list[PipelineStep]]]:
    """Yield name, number of tasks and pipeline of each job."""
    for current in passes_of(plan.stages):
        work = Work(config, current.number)
        pipeline: list[PipelineStep] = [Read(work, current.begin or READ)]
        pipeline += [Filter(work, name) for name in current.names]
        name = f"pass_{current.number}"
        if current.end is None:
            yield name, units, [*pipeline, Write(work, "documents")]
            yield "report", 1, [Finish(work, "report")]
            return
        barrier, pipeline = plan.stages[current.end], [*pipeline, Store(work, current.end)]
        if not by_datatrove(barrier):
            yield name, units, pipeline
            yield f"decide_{current.end}", 1, [Decide(work, current.end)]
            continue
        signatures, links, removed = (work.units.folder / each for each in _MINHASH)
        minhash = MinhashConfig(
            n_grams=barrier.ngram,
            num_buckets=barrier.bands,
            hashes_per_bucket=barrier.rows,
            seed=barrier.seed,
            norm_config=TextNormConfig(norm_numbers=False, norm_unicode_diacritics=False),  # as in our own stage
            hash_config=HashConfig(hash_fc="sha1"),  # xxhash is not a dependency
        )
        signature = MinhashDedupSignature(str(signatures), config=minhash, language=Characters())
        yield name, units, [*pipeline, signature]
        tasks = barrier.bands * -(-units // _UNITS_PER_TASK)
        yield f"compare_{current.end}", tasks, [MinhashDedupBuckets(str(signatures), str(links), config=minhash)]
        cluster = MinhashDedupCluster(str(links), str(removed), config=minhash)
        yield f"decide_{current.end}", 1, [cluster, Decide(work, current.end, removed)]


def check(plan: Plan) -> None:
    """Check that the executor and its options can be used.

    Raises:
        ValueError: an option is unknown or missing, or Ray or Slurm is not installed.
    """
    executor, options = plan.settings.datatrove.executor, plan.settings.datatrove.options
    parameters = list(inspect.signature(_EXECUTORS[executor]).parameters.values())
    known = [each.name for each in parameters if each.name not in _NOT_OPTIONS]
    required = [each.name for each in parameters if each.name in known and each.default is each.empty]
    check_keys(options, known, required=required, where="datatrove.options")
    if executor == "ray" and find_spec("ray") is None:
        raise ValueError("datatrove.executor=ray: Ray is not installed: pip install 'ray[default]'")
    if executor == "slurm" and not plan.settings.dry_run and shutil.which("sbatch") is None:
        raise ValueError("datatrove.executor=slurm: sbatch is not installed here: run it on a login node")


def run(plan: Plan, config: str, units: Sequence[Unit]) -> None:
    """Run the jobs, or queue them on Slurm; datatrove skips completed tasks.

    Raises:
        JobFailed: tasks failed.
    """
    built = executors(plan, config, units)
    if plan.settings.datatrove.executor == "slurm":
        for before, executor in pairwise(built):
            executor.depends = before
        built[-1].run()
        notice(f"{len(built)} jobs are queued; the last one writes {plan.settings.folder / RESULTS}")
        return
    for executor in built:
        executor.run()
        if failed := executor.get_incomplete_ranks():
            raise JobFailed(
                f"{len(failed)} of {executor.world_size} tasks failed: see {executor.logging_dir.path}/logs; the same "
                "command runs them again"
            )


def shown(executor: PipelineExecutor) -> str:
    """Format a job's name, its number of tasks and its pipeline's blocks as text."""
    blocks = [f"  {type(step).__name__} {step.name}" for step in executor.pipeline]
    return "\n".join([f"{Path(executor.logging_dir.path).name}: {executor.world_size} tasks", *blocks])


def _labels(counts: Counts) -> Iterator[tuple[str, int]]:
    """Yield the counts of one block as labels and values for datatrove's stats; a missing label is 0."""
    amounts = {f"written_{place}": amount for place, amount in counts.written.items()}
    for through in counts.stages.values():
        amounts |= {"total": through.came, "forwarded": through.kept}
        amounts |= {f"dropped_{name}": reason.amount for name, reason in through.dropped.items()}
        yield "changed", through.changed
    for label, amount in amounts.items():
        yield from ((prefix + label, getattr(amount, attribute)) for prefix, attribute in _MEASURES.items())
    yield "records", counts.read.records
    yield from ((f"skipped_{reason}", number) for reason, number in counts.read.skipped.items())


def _counts(blocks: Sequence[Mapping[str, Any]]) -> Counts:
    """Return the counts in the stats of one task."""
    counts = Counts()
    for block in blocks:
        kind, _, name = block["name"].partition(": ")
        if kind != Block.type:
            continue
        totals = {label: int(MetricStats.from_dict(value).total) for label, value in block["stats"].items()}

        def amount(label: str, totals: Mapping[str, int] = totals) -> Amount:
            return Amount(*(totals.get(prefix + label, 0) for prefix in _MEASURES))

        counts.read.records += totals.get("records", 0)
        for label, number in totals.items():
            place, reason = label.removeprefix("written_"), label.removeprefix("dropped_")
            if place != label:
                counts.written[place] = amount(label)
            elif reason != label:
                counts.stage(name).dropped[reason] = Reason(amount(label))
            elif label.startswith("skipped_"):
                counts.read.skip(label.removeprefix("skipped_"), count=number)
        if "total" in totals:
            through = counts.stage(name)
            through.came, through.kept = amount("total"), amount("forwarded")
            through.changed = totals.get("changed", 0)
    return counts


def _remove_before(work: Work, units: Sequence[Unit]) -> None:
    """Remove the files of the previous pass, which are no longer needed."""
    if work.number:
        before = Work(work.config, work.number - 1)
        remove(before, units)
        for name in _MINHASH:
            shutil.rmtree(before.units.folder / name, ignore_errors=True)


def _collect(work: Work, units: Sequence[Unit]) -> None:
    """Write the counts of a pass's units, from the stats of its tasks."""
    (logs,) = (work.plan.settings.folder / _LOGS).glob(f"[0-9][0-9]_pass_{work.number}")
    for unit in units:
        stats = json.loads((logs / "stats" / f"{unit.number:05d}.json").read_text())
        write_text(work.units.file(unit.number), json.dumps(asdict(_counts(stats))))
