"""Submission of jobs to Slurm: checks before a job is queued, and sbatch with the site's options."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_ext.data.training import check_settings
from nemo_ext.job.config import check_choice, compose, hydra_value, without_data
from nemo_ext.job.files import write_text
from nemo_ext.job.findings import Finding, errors
from nemo_ext.job.job import will_exist
from nemo_ext.job.registry import job as find
from nemo_ext.megatron.preflight import MEMORY
from nemo_ext.slurm import attempts
from nemo_ext.slurm.cluster import call
from nemo_ext.slurm.ends import JOB, SUBMITTED
from nemo_ext.slurm.jobs import nodes_and_gpus, record_of, rounds_of, shard_record, submitted, tasks_of
from nemo_ext.slurm.preflight import findings, started, unknown_to_slurm
from nemo_ext.slurm.rehearse import REHEARSALS, is_wanted, with_rehearsals
from nemo_ext.slurm.settings import Settings, settings_of, split
from nemo_ext.slurm.status import PATIENCE, job_of, queued, queued_job
from nemo_ext.slurm.sweep import MULTIRUN, points

SCRIPTS = Path(__file__).parent / "scripts"
"""Folder of the batch scripts, which are links to `slurm/` in a checkout and files in an installed package."""

POLL = 10.0
"""Seconds between checks of whether a job is still in the queue."""
ROUNDS = "rounds"
"""Subfolder of a record folder for the records of all arrays but the last."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Job that is ready for submission.

    Attributes:
        settings: site and queue settings.
        words: arguments of the batch script, which include site, queue and job settings.
        configs: composed configs of the job; several for a sweep.
        base: record folder of the job, or the parent of the record folders of a sweep.
        shards: number of array tasks that divide a run; 1 without an array.
        rounds: number of consecutive arrays.
        shards_before: number of tasks of each array but the last.
        notes: findings about choices made for the user.
        after: ids of jobs that must succeed first.
        beside: job ids of the servers that the job uses, which must start first.
        coming: paths that earlier jobs will write.
        model_to_come: config.json of the model that earlier jobs will write and the job starts from; None if unknown.
    """

    settings: Settings
    words: tuple[str, ...]
    configs: tuple[Mapping[str, Any], ...]
    base: Path
    shards: int = 1
    rounds: int = 1
    shards_before: int = 1
    notes: tuple[Finding, ...] = ()
    after: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    coming: tuple[Path, ...] = ()
    model_to_come: Mapping[str, Any] | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """Config of the job, or of a sweep's first run."""
        return self.configs[0]

    @property
    def records(self) -> list[Path]:
        """Record folder of each task, in which its starts are recorded."""
        if self.shards > 1:
            return [shard_record(self.base, number) for number in range(self.shards)]
        return [record_of(self.settings.job, config, self.settings) for config in self.configs]

    @property
    def every_round(self) -> "list[Submission]":
        """Return a submission for each of the job's rounds; the last one has the record folder of the whole job."""
        common = [word for word in self.words if not word.startswith("slurm.folder=")]
        earlier = []
        for number in range(1, self.rounds):
            base = self.base / ROUNDS / str(number)
            words = (*common, f"slurm.folder={hydra_value(str(base))}")
            earlier.append(replace(self, base=base, words=words, rounds=1, shards=self.shards_before))
        return [*earlier, replace(self, rounds=1)]

    @property
    def cores(self) -> int | None:
        """CPU cores that the job uses on each of its nodes; None if unknown."""
        _, gpus = nodes_and_gpus(self.settings.job, self.config, self.settings)
        ranks = gpus if find(self.settings.job).ranks == "slurm" else 1
        per_rank = _cores(self.settings, gpus, ranks)
        return per_rank and per_rank * ranks

    def command(self) -> list[str]:
        """Build the complete sbatch command."""
        settings, job = self.settings, self.settings.job
        cluster = settings.cluster
        nodes, gpus = nodes_and_gpus(job, self.config, settings)
        ranks = gpus if find(job).ranks == "slurm" else 1
        limit = settings.time or (cluster.limit.time if cluster.limit else None)
        tasks = len(self.records)
        # Slurm interprets % in the path as the start of a pattern such as %j.
        output = str(self.base.resolve() / attempts.FOLDER).replace("%", "%%")
        waits = [f"{how}:{':'.join(jobs)}" for how, jobs in (("afterok", self.after), ("after", self.beside)) if jobs]
        values = {
            "job-name": job if self.base.name == job else f"{job}-{self.base.name.removeprefix(f'{job}-')}",
            "account": settings.account,
            "partition": cluster.partition,
            "qos": cluster.qos,
            "nodes": nodes,
            "ntasks-per-node": ranks,
            "gpus-per-node": gpus or None,
            "cpus-per-task": _cores(settings, gpus, ranks),
            "time": limit,
            "signal": f"B:USR2@{settings.slurm.margin}",
            "array": None if tasks == 1 else f"0-{tasks - 1}",
            "dependency": ",".join(waits) if waits else None,
            "kill-on-invalid-dep": "yes" if waits else None,
            "output": f"{output}/{'%j' if tasks == 1 else '%A_%a'}.out",
            "export": f"ALL,NEMO_EXT_PYTHON={sys.executable}",
        }
        options = [f"--{name}={value}" for name, value in values.items() if value is not None]
        script, words = script_of(job), list(self.words)
        if script.name == "task.sbatch":
            words.insert(0, job)
        return ["sbatch", "--parsable", *options, *settings.slurm.options, str(script), *words]


def _cores(settings: Settings, gpus: int, ranks: int) -> int | None:
    """CPU cores per task, in proportion to its GPUs; None if the site's hardware is unknown.

    Args:
        gpus: number of GPUs that the job uses on each node; with 0, it gets all cores.
        ranks: number of tasks per node.
    """
    node = settings.cluster.node
    if node is None:
        return None
    return max(1, node.cpus * (gpus or node.gpus) // node.gpus // ranks)


OPERATION = "operation=cluster"
"""Argument added for training on several nodes, unless the user sets `operation`."""


def script_of(job: str) -> Path:
    """Path of a job's batch script; raises ValueError if the job has none."""
    return SCRIPTS / f"{submitted(job).script}.sbatch"


def planned(words: Sequence[str], *, coming: Sequence[Path] = ()) -> Submission:
    """Build the submission that a command line describes.

    If the site's nodes have a different number of GPUs than the recipe assumes, its total number of GPUs is kept,
    unless the arguments include launcher settings.

    Args:
        words: arguments of the command.
        coming: paths that earlier jobs will write.

    Raises:
        ValueError: the settings or the config are invalid, or a sweep's runs differ in their number of nodes or GPUs.
    """
    ours, theirs = split([word for word in words if word != MULTIRUN])
    settings = settings_of(ours)
    job = settings.job
    ranks = submitted(job).ranks == "slurm"
    check_choice("recipe", theirs, job)
    several = MULTIRUN in words
    runs = [split(point)[1] for point in points(job, theirs)] if several else [theirs]
    configs = [compose(job, run) for run in runs]
    notes: list[Finding] = []
    if ranks:
        layouts = [_nodes_of_the_site(run, config, settings) for run, config in zip(runs, configs, strict=True)]
        configs = [
            compose(job, [*run, *given]) if given else config
            for run, config, (given, _) in zip(runs, configs, layouts, strict=True)
        ]
        notes = list(dict.fromkeys(note for _, found in layouts for note in found))
        if int(configs[0]["launcher"]["nodes"]) > 1 and not any(word.startswith("operation=") for word in theirs):
            theirs = [OPERATION, *theirs]
            configs = [compose(job, [OPERATION, *run, *given]) for run, (given, _) in zip(runs, layouts, strict=True)]
            notes.append(Finding("note", f"{OPERATION}, as the job uses several nodes; operation=none turns it off"))
    taken = {nodes_and_gpus(job, config, settings) for config in configs}
    if len(taken) > 1:
        raise ValueError(f"{MULTIRUN}: the runs use different numbers of nodes or GPUs; submit them separately")
    base = record_of(job, configs[0], settings)
    if several:
        base = base.parent
        notes.append(Finding("note", f"{len(runs)} runs: {', '.join(run[-1].partition('=')[2] for run in runs)}"))
    if (rounds := rounds_of(job, configs[0], settings)) > 1:
        last = "" if tasks_of(job, configs[0], settings) > 1 else ", the last with one task"
        arrays = f"{rounds} arrays of {settings.slurm.shards} tasks, one after the other{last}"
        notes.append(Finding("note", arrays))
    if dropped := sorted(name for name in os.environ if name.startswith("SBATCH_")):
        options = "set account=, time=, cluster.partition=, cluster.qos= and slurm.options= instead"
        notes.append(Finding("note", f"ignoring this shell's {', '.join(dropped)}: {options}"))
    # The script derives the launcher's values from the allocation.
    job_words = [word for word in theirs if not ranks or not word.startswith("launcher.")]
    both = dict.fromkeys([*([MULTIRUN] if several else []), *ours, *job_words])  # a --config-dir is in both
    return Submission(
        settings=settings,
        words=tuple(word for word in both if not word.startswith("job=")),
        configs=tuple(configs),
        base=base,
        shards=tasks_of(job, configs[0], settings),
        rounds=rounds,
        shards_before=settings.slurm.shards,
        notes=tuple(notes),
        coming=tuple(coming),
    )


def _nodes_of_the_site(
    words: Sequence[str], config: Mapping[str, Any], settings: Settings
) -> tuple[list[str], list[Finding]]:
    """Launcher overrides that keep the recipe's total number of GPUs on the site's nodes, and a note about them.

    Both lists are empty if the recipe fits the nodes as it is, or if `words` contain launcher settings.
    """
    node, launcher = settings.cluster.node, config["launcher"]
    world = int(launcher["nodes"]) * int(launcher["nproc_per_node"])
    if node is None or any(word.startswith("launcher.") for word in words):
        return [], []
    if launcher["nproc_per_node"] == node.gpus or world % node.gpus:
        return [], []
    nodes = world // node.gpus
    note = Finding("note", f"{world} GPUs: {nodes} nodes with {node.gpus} GPUs each on {settings.cluster.name}")
    return [f"launcher.nodes={nodes}", f"launcher.nproc_per_node={node.gpus}"], [note]


def checked(submission: Submission, *, kept: Path | None = None) -> list[Finding]:
    """Collect all findings on a job before it is submitted.

    They come from our own checks, Megatron (if installed), bash (syntax of the batch script), `sbatch --test-only`, and
    a rehearsal. Results of the rehearsal are in the folder `kept`; by default, in the record folder.
    """
    settings, coming = submission.settings, submission.coming
    collected = list(submission.notes)
    for config in submission.configs:
        ours = findings(config, settings, coming=coming, model_to_come=submission.model_to_come)
        collected += [finding for finding in ours if finding not in collected]
    wanted = is_wanted(settings)  # if so, a rehearsal replaces the estimates of memory, after the fast checks
    guesses = [finding for finding in collected if wanted and finding.text.startswith(MEMORY)]
    collected = _checked_here(submission, [finding for finding in collected if finding not in guesses])
    if not wanted or errors(collected):
        return [*collected, *guesses]
    place = submission.base / attempts.FOLDER / REHEARSALS if kept is None else kept
    return with_rehearsals([*collected, *guesses], submission.configs, settings, place, coming)


def _checked_here(submission: Submission, collected: list[Finding]) -> list[Finding]:
    """Add the findings of Megatron, bash and Slurm on this machine to `collected`, the earlier ones, and return all.

    Bash checks the syntax of the batch script. Megatron and `sbatch --test-only` are skipped after earlier errors.
    """
    settings, coming = submission.settings, submission.coming
    if not errors(collected) and find_spec("megatron") and find_spec("torch"):
        every = [
            pair for config in submission.configs for pair in (*started(settings.job, config), (settings.job, config))
        ]
        for config in [config for job, config in every if find(job).ranks == "slurm"]:
            collected += [finding for finding in by_megatron(config, coming) if finding not in collected]
    script = script_of(settings.job)
    syntax = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    if syntax.returncode:
        collected.append(Finding("error", f"{script} has a syntax error (bash -n): {syntax.stderr.strip()}"))
    collected += unknown_to_slurm(settings)
    if not errors(collected):
        records = [record for round_ in submission.every_round for record in round_.records]
        queue = queued() if any(map(job_of, records)) else {}
        for record in records:
            if job := queued_job(record, queue):
                collected.append(
                    Finding(
                        "error",
                        f"{record}: its job {job} is {queue[job]}; wait for it, or cancel it with `nemo-ext cancel`",
                    )
                )
    if not errors(collected):
        tested = call([*submission.command()[:1], "--test-only", *submission.command()[2:]])
        lines = [line for line in tested.stderr.splitlines() if line.strip()] or [f"exit code {tested.returncode}"]
        collected.append(
            Finding("error", f"Slurm rejects the job: {lines[0]}") if tested.returncode else Finding("note", lines[-1])
        )
    return collected


def submit(words: Sequence[str], *, dry_run: bool) -> int:
    """Check a job, print the findings, submit it, and return the exit code.

    Args:
        words: arguments of the command, without --dry-run.
        dry_run: whether to check and print only.

    Raises:
        ValueError: the arguments or the config are invalid.
    """
    console = Console(highlight=False, soft_wrap=True)
    submission = planned(words)
    job_words = split(submission.words)[1]
    ends = [attempts.finished(record) for record in submission.records]
    (end, *others), serves = ends, find(submission.settings.job).server
    if end is not None and not others and not serves and not attempts.other_words(end, job_words):
        mark = submission.base / attempts.FOLDER / attempts.FINISHED
        console.print(f"{submission.base}: finished before; remove {mark} to run it again", markup=False)
        return 0
    tell(console, found := checked(submission))
    for line in by_hand(submission):
        console.print(line, markup=False)
    if errors(found):
        console.print("not submitted: fix the errors first")
        return 2
    if dry_run:
        console.print("not submitted: --dry-run")
        return 0
    job = hand_over(submission)
    array = len(submission.records) > 1
    output = submission.base / attempts.FOLDER / (f"{job}_*.out" if array else f"{job}.out")
    console.print(f"job {job}; output: {output}; `nemo-ext status {submission.base}`", markup=False)
    return 0


def complete(words: Sequence[str]) -> None:
    """Submit a job, unless it is in the queue, and wait until it has left the queue.

    Args:
        words: arguments of `nemo-ext submit`.

    Raises:
        ValueError: the arguments or the config are invalid, or Slurm rejects the job.
    """
    records = planned(words).records

    def is_queued(patience: float = 0.0) -> bool:
        queue = queued(patience)
        return any(queued_job(record, queue) for record in records)

    if not is_queued() and submit(words, dry_run=False):
        raise ValueError("the job was not submitted: fix the errors printed above")
    while is_queued(PATIENCE):
        time.sleep(POLL)


def tell(console: Console, found: Sequence[Finding]) -> None:
    """Print findings for the user, with the kind of each shown in colour."""
    for finding in found:
        style = {"error": "red", "warning": "yellow", "note": ""}[finding.kind]
        console.print(f"{finding.kind}: {finding.text}", style=style, markup=False)


def variable(stage: str) -> str:
    """Name of the shell variable that holds a stage's job id, with its $."""
    return "$" + stage.replace("-", "_")


def by_hand(submission: Submission, stage: str | None = None) -> Iterator[str]:
    """Yield the shell lines with which a user can submit the job by hand, one for each round.

    If later lines need the job id of the pipeline stage `stage`, the last line stores it in the shell variable
    `variable(stage)`.
    """
    rounds, before = submission.every_round, ""
    for number, round_ in enumerate(rounds, start=1):
        command = (replace(round_, after=(before,)) if before else round_).command()
        # Job ids of dependencies may be shell variables, which must not be quoted.
        words = [f'"{word}"' if word.startswith("--dependency=") else shlex.quote(word) for word in command]
        folder = shlex.quote(str(round_.base.resolve() / attempts.FOLDER))
        line = f"mkdir -p {folder} && {' '.join(words)}"
        last = number == len(rounds)
        before = variable(stage or "job") if last else f"{variable(stage or 'job')}_{number}"
        yield line if last and stage is None else f"{before[1:]}=$({line})"


def hand_over(submission: Submission) -> str:
    """Submit a job to Slurm, with one sbatch call per round, and return the id of the last.

    Raises:
        ValueError: Slurm rejects a round; earlier ones are cancelled.
    """
    jobs: list[str] = []
    for round_ in submission.every_round:
        try:
            jobs.append(_hand_over(replace(round_, after=(jobs[-1],)) if jobs else round_))
        except ValueError as error:
            if jobs:
                call(["scancel", *reversed(jobs)])
                raise ValueError(
                    f"{error} (the jobs submitted before it, {', '.join(jobs)}, were cancelled)"
                ) from error
            raise
    return jobs[-1]


def _hand_over(submission: Submission) -> str:
    """Submit one job with sbatch and return its id, which is also written next to the record of starts."""
    (submission.base / attempts.FOLDER).mkdir(parents=True, exist_ok=True)
    # Defer Ctrl-C until the queued job is recorded.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        done = call(submission.command())
        if done.returncode:
            reason = done.stderr.strip() or f"exit code {done.returncode}"
            raise ValueError(
                f"Slurm rejects the job ({reason}): correct the settings under cluster and slurm, or submit again later"
            )
        job = done.stdout.strip().partition(";")[0]
        records = submission.records
        for number, record in enumerate(records):
            write_text(record / attempts.FOLDER / JOB, f"{job}\n" if len(records) == 1 else f"{job}_{number}\n")
            write_text(record / attempts.FOLDER / SUBMITTED, shlex.join(submission.command()) + "\n")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return job


def by_megatron(config: Mapping[str, Any], coming: Sequence[Path]) -> list[Finding]:
    """Collect the errors that Megatron's parser and our own checks raise for a training config.

    Args:
        config: the job's config.
        coming: paths that earlier jobs will write.
    """
    from nemo_ext.megatron.check import check_launcher
    from nemo_ext.megatron.run import Run

    try:
        check_launcher(config)
        if coming:  # only the settings of data that do not exist yet can be checked
            check_settings(config)
            flags = {**config["megatron"], "mock_data": True}
            config = {**config, "data": None, "phases": without_data(config.get("phases") or {}), "megatron": flags}
            config = _without_teacher_to_come(config, coming)
        Run.from_config(config).check()
    except ValueError as error:
        return [Finding("error", str(error))]
    return []


def _without_teacher_to_come(config: Mapping[str, Any], coming: Sequence[Path]) -> Mapping[str, Any]:
    """Copy a config without the teacher, or the teacher's saved logits, if an earlier job has yet to write them."""
    teacher, saved = (config.get("distillation") or {}).get("teacher"), config["megatron"].get("logits_load_dir")
    absent = [place for place in (teacher, saved) if place and not Path(str(place)).exists()]
    absent = [place for place in absent if will_exist(Path(str(place)), coming)]
    if teacher in absent:
        config = {**config, "distillation": None}
    if saved in absent:
        config = {**config, "megatron": {**config["megatron"], "logits_load_dir": None}}
    return config
