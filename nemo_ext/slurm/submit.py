"""`nemo-ext submit`: checks a job before it is queued, then calls sbatch with the site's options."""

import os
import shlex
import signal
import subprocess
import sys
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
from nemo_ext.slurm.status import job_of, queued, queued_job
from nemo_ext.slurm.sweep import MULTIRUN, points

SCRIPTS = Path(__file__).parent / "scripts"
"""Folder of batch scripts: links to `slurm/` in a checkout, files in an installed package."""

ROUNDS = "rounds"
"""Folder below a record with those of all but the last of several arrays."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job ready for submission.

    Attributes:
        settings: settings of site and queue.
        words: arguments of the batch script: those about site and queue, and the job's own.
        configs: composed configs of the job; several for a sweep.
        base: folder of the job's output.
        shards: number of array tasks that divide one run; 1 without an array.
        rounds: number of such arrays, each after the one before.
        shards_before: number of array tasks of those before the last.
        notes: findings on choices made for the user.
        after: ids of jobs that must have succeeded.
        beside: ids of jobs that must have started: servers that it asks.
        coming: paths that those jobs write.
        model_to_come: config.json of the model that those jobs make and this one starts from; None if unknown.
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
        """Folders whose `slurm` holds the record of starts, one per task."""
        if self.shards > 1:
            return [shard_record(self.base, number) for number in range(self.shards)]
        return [record_of(self.settings.job, config, self.settings) for config in self.configs]

    @property
    def every_round(self) -> "list[Submission]":
        """A submission for each round; the last has the record of the whole."""
        own = [word for word in self.words if not word.startswith("slurm.folder=")]
        earlier = []
        for number in range(1, self.rounds):
            base = self.base / ROUNDS / str(number)
            words = (*own, f"slurm.folder={hydra_value(str(base))}")
            earlier.append(replace(self, base=base, words=words, rounds=1, shards=self.shards_before))
        return [*earlier, replace(self, rounds=1)]

    @property
    def cores(self) -> int | None:
        """CPU cores that the job takes of each of its nodes; None if unknown."""
        _, gpus = nodes_and_gpus(self.settings.job, self.config, self.settings)
        ranks = gpus if find(self.settings.job).ranks == "slurm" else 1
        each = _cores(self.settings, gpus, ranks)
        return each and each * ranks

    def command(self) -> list[str]:
        """The whole sbatch command."""
        settings, job = self.settings, self.settings.job
        cluster = settings.cluster
        nodes, gpus = nodes_and_gpus(job, self.config, settings)
        ranks = gpus if find(job).ranks == "slurm" else 1
        limit = settings.time or (cluster.limit.time if cluster.limit else None)
        tasks = len(self.records)
        # Slurm reads a % in the path as a pattern such as %j.
        output = str(self.base.resolve() / attempts.FOLDER).replace("%", "%%")
        waits = [f"{how}:{':'.join(jobs)}" for how, jobs in (("afterok", self.after), ("after", self.beside)) if jobs]
        given = {
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
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        script, words = script_of(job), list(self.words)
        if script.name == "task.sbatch":
            words.insert(0, job)
        return ["sbatch", "--parsable", *options, *settings.slurm.options, str(script), *words]


def _cores(settings: Settings, gpus: int, ranks: int) -> int | None:
    """CPU cores per task: the task's share of a node by its GPUs, or all cores if it takes no GPU; None if unknown."""
    node = settings.cluster.node
    if node is None:
        return None
    return max(1, node.cpus * (gpus or node.gpus) // node.gpus // ranks)


OPERATION = "operation=cluster"
"""What training on several nodes is given, unless it names an operation."""


def script_of(job: str) -> Path:
    """Path of a job's batch script.

    Raises:
        ValueError: if the job has none.
    """
    return SCRIPTS / f"{submitted(job).script}.sbatch"


def planned(words: Sequence[str], *, coming: Sequence[Path] = ()) -> Submission:
    """The submission that the command's words describe.

    A recipe keeps its total number of GPUs on nodes of another size, unless the words set the launcher.

    Args:
        words: arguments of the command.
        coming: paths that earlier jobs write.

    Raises:
        ValueError: if the settings or the config are invalid, or a sweep's runs differ in nodes or GPUs.
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
            notes.append(Finding("note", f"{OPERATION}, as it takes several nodes; operation=none leaves that out"))
    taken = {nodes_and_gpus(job, config, settings) for config in configs}
    if len(taken) > 1:
        raise ValueError(f"{MULTIRUN}: the runs take different numbers of nodes or GPUs: submit them by themselves")
    base = record_of(job, configs[0], settings)
    if several:
        base = base.parent
        notes.append(Finding("note", f"{len(runs)} runs: {', '.join(run[-1].partition('=')[2] for run in runs)}"))
    if (rounds := rounds_of(job, configs[0], settings)) > 1:
        last = "" if tasks_of(job, configs[0], settings) > 1 else ", the last one task"
        arrays = f"{rounds} arrays of {settings.slurm.shards} tasks, each after the one before{last}"
        notes.append(Finding("note", arrays))
    if dropped := sorted(name for name in os.environ if name.startswith("SBATCH_")):
        options = "account=, time=, cluster.partition=, cluster.qos= and slurm.options= set what they would"
        notes.append(Finding("note", f"without this shell's {', '.join(dropped)}: {options}"))
    # The script takes the launcher's values from the allocation.
    own = [word for word in theirs if not ranks or not word.startswith("launcher.")]
    both = dict.fromkeys([*([MULTIRUN] if several else []), *ours, *own])  # a --config-dir is in both
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
    """Launcher overrides that keep the recipe's number of GPUs on nodes of another size, and a note about them."""
    node, launcher = settings.cluster.node, config["launcher"]
    world = int(launcher["nodes"]) * int(launcher["nproc_per_node"])
    if node is None or any(word.startswith("launcher.") for word in words):
        return [], []
    if launcher["nproc_per_node"] == node.gpus or world % node.gpus:
        return [], []
    nodes = world // node.gpus
    note = Finding("note", f"{world} GPUs are {nodes} nodes of {node.gpus} on {settings.cluster.name}")
    return [f"launcher.nodes={nodes}", f"launcher.nproc_per_node={node.gpus}"], [note]


def checked(submission: Submission, *, kept: Path | None = None) -> list[Finding]:
    """Findings of our own checks, of Megatron's if it is installed, of bash, of `sbatch --test-only`, of a rehearsal.

    Args:
        submission: the job.
        kept: folder of rehearsals; None for the record's own.
    """
    settings, coming = submission.settings, submission.coming
    found = list(submission.notes)
    for config in submission.configs:
        ours = findings(config, settings, coming=coming, model_to_come=submission.model_to_come)
        found += [one for one in ours if one not in found]
    wanted = is_wanted(settings)  # and if so, a rehearsal has the last word on memory, after what takes seconds
    guesses = [one for one in found if wanted and one.text.startswith(MEMORY)]
    found = _checked_here(submission, [one for one in found if one not in guesses])
    if not wanted or errors(found):
        return [*found, *guesses]
    place = submission.base / attempts.FOLDER / REHEARSALS if kept is None else kept
    return with_rehearsals([*found, *guesses], submission.configs, settings, place, coming)


def _checked_here(submission: Submission, found: list[Finding]) -> list[Finding]:
    """The findings, and if there is no error among them those of Megatron, bash and Slurm."""
    settings, coming = submission.settings, submission.coming
    if not errors(found) and find_spec("megatron") and find_spec("torch"):
        every = [
            each for config in submission.configs for each in (*started(settings.job, config), (settings.job, config))
        ]
        for config in [config for job, config in every if find(job).ranks == "slurm"]:
            found += [one for one in by_megatron(config, coming) if one not in found]
    script = script_of(settings.job)
    syntax = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    if syntax.returncode:
        found.append(Finding("error", f"bash -n {script}: {syntax.stderr.strip()}"))
    found += unknown_to_slurm(settings)
    if not errors(found):
        records = [record for each in submission.every_round for record in each.records]
        queue = queued() if any(map(job_of, records)) else {}
        for record in records:
            if job := queued_job(record, queue):
                found.append(Finding("error", f"{record}: job {job} of it is {queue[job]}"))
    if not errors(found):
        asked = [*submission.command()[:1], "--test-only", *submission.command()[2:]]
        tested = call(asked)
        lines = [line for line in tested.stderr.splitlines() if line.strip()] or [f"exit code {tested.returncode}"]
        found.append(Finding("error", lines[0]) if tested.returncode else Finding("note", lines[-1]))
    return found


def submit(words: Sequence[str], *, dry_run: bool) -> int:
    """Check, report and submit; returns the exit code.

    Args:
        words: arguments of the command, without --dry-run.
        dry_run: if True, submit nothing.

    Raises:
        ValueError: for mistakes that the user can correct.
    """
    console = Console(highlight=False, soft_wrap=True)
    submission = planned(words)
    own = split(submission.words)[1]
    ends = [attempts.finished(record) for record in submission.records]
    (end, *others), serves = ends, find(submission.settings.job).server
    if end is not None and not others and not serves and not attempts.other_words(end, own):
        mark = submission.base / attempts.FOLDER / attempts.FINISHED
        console.print(f"{submission.base}: finished before; remove {mark} to have it done again", markup=False)
        return 0
    tell(console, found := checked(submission))
    for line in by_hand(submission):
        console.print(line, markup=False)
    if errors(found):
        console.print("not submitted: mend the errors first")
        return 2
    if dry_run:
        console.print("not submitted: --dry-run")
        return 0
    job = hand_over(submission)
    array = len(submission.records) > 1
    output = submission.base / attempts.FOLDER / (f"{job}_*.out" if array else f"{job}.out")
    console.print(f"job {job}; output: {output}; `nemo-ext status {submission.base}`", markup=False)
    return 0


def tell(console: Console, found: Sequence[Finding]) -> None:
    """Print findings."""
    for one in found:
        style = {"error": "red", "warning": "yellow", "note": ""}[one.kind]
        console.print(f"{one.kind}: {one.text}", style=style, markup=False)


def variable(stage: str) -> str:
    """The shell's variable with the id of a stage's job."""
    return "$" + stage.replace("-", "_")


def by_hand(submission: Submission, stage: str | None = None) -> Iterator[str]:
    """Lines of a shell that submit the job, in as many arrays as there are rounds.

    Args:
        submission: the job.
        stage: name whose `variable` holds the id of the last for other lines; None if there are none.
    """
    rounds, before = submission.every_round, ""
    for number, each in enumerate(rounds, start=1):
        command = (replace(each, after=(before,)) if before else each).command()
        # Variables among the ids of other jobs are the shell's.
        words = [f'"{word}"' if word.startswith("--dependency=") else shlex.quote(word) for word in command]
        folder = shlex.quote(str(each.base.resolve() / attempts.FOLDER))
        line = f"mkdir -p {folder} && {' '.join(words)}"
        last = number == len(rounds)
        before = variable(stage or "job") if last else f"{variable(stage or 'job')}_{number}"
        yield line if last and stage is None else f"{before[1:]}=$({line})"


def hand_over(submission: Submission) -> str:
    """Submit to Slurm, in as many arrays as there are rounds, and return the id of the last.

    Raises:
        ValueError: if Slurm refuses one; those before it are cancelled.
    """
    jobs: list[str] = []
    for each in submission.every_round:
        try:
            jobs.append(_hand_over(replace(each, after=(jobs[-1],)) if jobs else each))
        except ValueError as error:
            if jobs:
                call(["scancel", *reversed(jobs)])
                raise ValueError(f"{error} (jobs {', '.join(jobs)} before it were cancelled)") from error
            raise
    return jobs[-1]


def _hand_over(submission: Submission) -> str:
    """Submit one job and return its id, which is also written beside the record of starts."""
    (submission.base / attempts.FOLDER).mkdir(parents=True, exist_ok=True)
    # Ctrl-C waits until the queued job is recorded.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        done = call(submission.command())
        if done.returncode:
            raise ValueError(done.stderr.strip() or f"sbatch ended with {done.returncode}")
        job = done.stdout.strip().partition(";")[0]
        records = submission.records
        for number, record in enumerate(records):
            write_text(record / attempts.FOLDER / JOB, f"{job}\n" if len(records) == 1 else f"{job}_{number}\n")
            write_text(record / attempts.FOLDER / SUBMITTED, shlex.join(submission.command()) + "\n")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return job


def by_megatron(config: Mapping[str, Any], coming: Sequence[Path]) -> list[Finding]:
    """Errors that the installed Megatron's parser and our own checks raise on a training config.

    Args:
        config: config of the job.
        coming: paths that earlier jobs write.
    """
    from nemo_ext.megatron.check import check_launcher
    from nemo_ext.megatron.run import Run

    try:
        check_launcher(config)
        if coming:  # of data that does not exist yet only the settings can be checked
            check_settings(config)
            flags = {**config["megatron"], "mock_data": True}
            config = {**config, "data": None, "phases": without_data(config.get("phases") or {}), "megatron": flags}
            config = _without_teacher_to_come(config, coming)
        Run.of(config).check()
    except ValueError as error:
        return [Finding("error", str(error))]
    return []


def _without_teacher_to_come(config: Mapping[str, Any], coming: Sequence[Path]) -> Mapping[str, Any]:
    """The config without a teacher, or a teacher's files, that an earlier job writes and that is not there yet."""
    teacher, saved = (config.get("distillation") or {}).get("teacher"), config["megatron"].get("logits_load_dir")
    absent = [place for place in (teacher, saved) if place and not Path(str(place)).exists()]
    absent = [place for place in absent if will_exist(Path(str(place)), coming)]
    if teacher in absent:
        config = {**config, "distillation": None}
    if saved in absent:
        config = {**config, "megatron": {**config["megatron"], "logits_load_dir": None}}
    return config
