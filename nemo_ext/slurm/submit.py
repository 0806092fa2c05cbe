"""`nemo-ext submit`: a training job checked before the queue, then sbatch with what the site needs."""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

import nemo_ext
from nemo_ext.config import check_recipe, compose
from nemo_ext.run_directory import write_text
from nemo_ext.slurm import attempts
from nemo_ext.slurm.preflight import Finding, findings
from nemo_ext.slurm.settings import Settings, settings_of, split
from nemo_ext.slurm.status import JOB, job_of, queued

SCRIPTS = Path(nemo_ext.__file__).parents[1] / "slurm"
JOBS = ("train",)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What is to be submitted.

    Attributes:
        settings: of site and queue.
        words: of the batch script: about site and queue, and the job's own.
        config: of the job, composed.
        notes: what was decided for the user.
    """

    settings: Settings
    words: tuple[str, ...]
    config: Mapping[str, Any]
    notes: tuple[Finding, ...] = ()

    @property
    def run_dir(self) -> Path:
        """Of the job."""
        return Path(str(self.config["run_dir"]))

    def command(self) -> list[str]:
        """The whole sbatch command."""
        settings, launcher = self.settings, self.config["launcher"]
        cluster = settings.cluster
        ranks = launcher["nproc_per_node"]
        limit = settings.time or (cluster.limit.time if cluster.limit else None)
        given = {
            "job-name": f"{settings.job}-{self.run_dir.name}",
            "account": settings.account,
            "partition": cluster.partition,
            "qos": cluster.qos,
            "nodes": launcher["nodes"],
            "ntasks-per-node": ranks,
            "gpus-per-node": ranks,
            "cpus-per-task": None if cluster.node is None else max(1, cluster.node.cpus // cluster.node.gpus),
            "time": limit,
            "signal": f"B:USR2@{settings.slurm.margin}",
            "output": self.run_dir.resolve() / attempts.FOLDER / "%j.out",
            "export": f"ALL,NEMO_EXT_PYTHON={sys.executable}",
        }
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return ["sbatch", "--parsable", *options, *settings.slurm.options, str(script_of(settings.job)), *self.words]


def script_of(job: str) -> Path:
    """The batch script of a job.

    Raises:
        ValueError: there is none.
    """
    if job not in JOBS:
        raise ValueError(f"job={job}: there are scripts for {', '.join(JOBS)} so far; others run on one machine")
    script = SCRIPTS / f"{job}.sbatch"
    if not script.is_file():
        raise ValueError(f"{script} is not there: submit from a checkout of nemo_ext (pip install -e)")
    return script


def planned(words: Sequence[str]) -> Submission:
    """A submission from the words of the command.

    A recipe's number of GPUs is kept where the site's nodes have other numbers of them, unless the words say one.

    Raises:
        ValueError: as `settings_of` and composing.
    """
    ours, theirs = split(words)
    settings = settings_of(ours)
    script_of(settings.job)
    check_recipe(theirs)
    config = compose("train", theirs)
    notes: list[Finding] = []
    node, launcher = settings.cluster.node, config["launcher"]
    world = int(launcher["nodes"]) * int(launcher["nproc_per_node"])
    said = any(word.startswith("launcher.") for word in theirs)
    if node is not None and not said and launcher["nproc_per_node"] != node.gpus and world % node.gpus == 0:
        nodes = world // node.gpus
        theirs += [f"launcher.nodes={nodes}", f"launcher.nproc_per_node={node.gpus}"]
        config = compose("train", theirs)
        notes.append(Finding("note", f"{world} GPUs are {nodes} nodes of {node.gpus} on {settings.cluster.name}"))
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: name a directory")
    # The allocation says these to the script.
    own = [word for word in theirs if not word.startswith("launcher.")]
    both = dict.fromkeys([*ours, *own])  # a --config-dir is in both
    return Submission(settings=settings, words=tuple(both), config=config, notes=tuple(notes))


def checked(submission: Submission) -> list[Finding]:
    """All that is found: by us, by Megatron's own checks where it is installed, by bash and by Slurm."""
    found = [*submission.notes, *findings(submission.config, submission.settings)]
    if not _errors(found) and find_spec("megatron") and find_spec("torch"):
        found += _by_megatron(submission.config)
    script = script_of(submission.settings.job)
    syntax = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    if syntax.returncode:
        found.append(Finding("error", f"bash -n {script}: {syntax.stderr.strip()}"))
    if not _errors(found) and (job := job_of(submission.run_dir)) and job in (queue := queued()):
        found.append(Finding("error", f"run_dir={submission.run_dir}: job {job} of it is {queue[job]}"))
    if not _errors(found):
        asked = [*submission.command()[:1], "--test-only", *submission.command()[2:]]
        tested = _call(asked)
        lines = [line for line in tested.stderr.splitlines() if line.strip()] or [f"exit code {tested.returncode}"]
        found.append(Finding("error", lines[0]) if tested.returncode else Finding("note", lines[-1]))
    return found


def submit(words: Sequence[str], *, dry_run: bool) -> int:
    """Check, tell and submit; the exit code.

    Args:
        words: of the command, without --dry-run.
        dry_run: submit nothing.

    Raises:
        ValueError: what the user can mend.
    """
    console = Console(highlight=False, soft_wrap=True)
    submission = planned(words)
    found = checked(submission)
    for one in found:
        style = {"error": "red", "warning": "yellow", "note": ""}[one.kind]
        console.print(f"{one.kind}: {one.text}", style=style, markup=False)
    console.print(shlex.join(submission.command()), markup=False)
    if _errors(found):
        console.print("not submitted: mend the errors first")
        return 2
    if dry_run:
        console.print("not submitted: --dry-run")
        return 0
    folder = submission.run_dir / attempts.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    done = _call(submission.command())
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"sbatch ended with {done.returncode}")
    job = done.stdout.strip().partition(";")[0]
    write_text(folder / JOB, f"{job}\n")
    write_text(folder / "submit.txt", shlex.join(submission.command()) + "\n")
    console.print(f"job {job}; output: {folder / f'{job}.out'}; ranks: {submission.run_dir / 'train.log'}")
    return 0


def _by_megatron(config: Mapping[str, Any]) -> list[Finding]:
    """What the installed Megatron's parser and our layouts refuse."""
    from copy import deepcopy

    from nemo_ext.launch import checked_runs

    try:
        checked_runs(deepcopy(dict(config)))
    except ValueError as error:
        return [Finding("error", str(error))]
    return []


def _errors(found: Sequence[Finding]) -> bool:
    return any(one.kind == "error" for one in found)


def _call(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ValueError(f"{words[0]} is not on PATH: submit from a login node of the cluster") from None
