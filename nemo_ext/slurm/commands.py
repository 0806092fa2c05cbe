"""The commands `nemo-ext submit`, `status`, `logs` and `cancel`: submit jobs to Slurm, watch and cancel them."""

import argparse
import os
import sys
from pathlib import Path
from textwrap import fill

from nemo_ext.job.config import INTERRUPTED, mistakes_are_one_line
from nemo_ext.job.job import Command, Grammar, invoke
from nemo_ext.job.registry import jobs

HELP = """\
nemo-ext submit: check a job on the login node, then submit it to Slurm. It resumes automatically after time limits,
node failures and corrupt checkpoints (docs/clusters.md). Running the same command again resumes the same run.

  nemo-ext submit recipe=domyn_small/cpt cluster=leonardo account=IscrX run_dir=$WORK/runs/cpt
  nemo-ext submit --dry-run recipe=olmo3/7b_pretrain cluster=leonardo cluster.qos=boost_qos_bprod
  nemo-ext submit --config-dir mine cluster=my_site recipe=nemotron3_nano/pretrain
  nemo-ext submit job=rl preset=rl_zero engine=nemo_rl slurm.nodes=16 model=... tasks.train.path=... cluster=leonardo
  nemo-ext submit --multirun recipe=olmo1/1b megatron.lr=1e-4,2e-4 run_dir=$WORK/sweep cluster=leonardo
  nemo-ext submit job=online preset=rpo_online model=... tasks.train.path=... serving.engine=vllm cluster=leonardo
  nemo-ext submit pipeline=domyn_small run_dir=$WORK/domyn start=... cpt.megatron.lr=1e-5 cluster=leonardo account=IscrX

{jobs}
  pipeline       name of a file in hydra_conf/pipeline: jobs that depend on each other (docs/pipelines.md);
                 STAGE.key=value changes one stage, JOB.key=value all stages of a job; finished stages are skipped
  --multirun     submit one run per combination of comma-separated values, all in one array
  cluster        name of a file in hydra_conf/cluster: leonardo, dgx_h100, testbed, generic; cluster.KEY=value changes a
                 setting, most often cluster.qos, cluster.partition or cluster.container.image
  account        account to charge
  time           time limit of each start (default: the maximum of the quality of service)
  slurm.margin   seconds before the time limit at which a run saves and is requeued (default: 600)
  slurm.max_restarts   number of starts after which a run is not requeued any more (default: 100)
  slurm.max_idle       number of consecutive starts without a new checkpoint after which it is not (default: 3)
  slurm.options  further options for sbatch: 'slurm.options=["--mail-type=END"]'
  slurm.rehearse first run a step of one rank of each kind of a training job here, on fake tensors: true, false, or
                 null (default): if the GPUs' memory is known, for a minute at most (docs/rehearsal.md)
  --dry-run      check the job and show the command, but submit nothing

All other arguments are settings of the job. The recipe's total number of GPUs is kept, unless launcher.nodes=N and
launcher.nproc_per_node=N change it."""


DEFAULT = "train"
"""Name of the job that `nemo-ext submit` submits if `job=` is not given."""


def _submit(words: list[str]) -> None:
    """Submit a job or a pipeline, printing errors as one line."""
    if {"-h", "--help"} & set(words):
        names = [job.name for job in jobs() if job.script and job.name != DEFAULT]
        text = f"{DEFAULT} (default), {', '.join(names)}"
        print(HELP.replace("{jobs}", fill(text, 119, initial_indent="  job".ljust(17), subsequent_indent=" " * 17)))
        return
    room = "pipeline" if any(word.startswith("pipeline=") for word in words) else "slurm"
    others = [word for word in words if word != "--dry-run"]
    try:
        with mistakes_are_one_line():
            sys.exit(invoke(f"nemo_ext.{room}.submit:submit", others, dry_run="--dry-run" in words))
    except KeyboardInterrupt:
        print("interrupted: queued jobs stay queued (nemo-ext status); the same command resumes", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _status(words: list[str]) -> None:
    """Print a table of runs with their states."""
    parser = argparse.ArgumentParser(
        prog="nemo-ext status", description="Show the runs on Slurm: state, step, time left, loss."
    )
    parser.add_argument(
        "run_dirs",
        nargs="*",
        type=Path,
        default=[Path("runs")],
        metavar="RUN_DIR",
        help="run directories, or folders that contain run directories (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    arguments = parser.parse_args(words)
    from nemo_ext.slurm.status import show

    with mistakes_are_one_line():
        show(arguments.run_dirs, as_json=arguments.json)


def _logs(words: list[str]) -> None:
    """Print the end of a run's log, or follow it until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="nemo-ext logs", description="Show the log of a run's ranks, or its job's output."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the log as it grows")
    parser.add_argument(
        "-n", "--lines", type=int, default=50, help="number of lines to show first (default: %(default)s)"
    )
    arguments = parser.parse_args(words)
    from nemo_ext.slurm.status import follow, log_of

    with mistakes_are_one_line():
        if arguments.follow:
            try:
                follow(arguments.run_dir, arguments.lines)
            except KeyboardInterrupt:
                sys.exit(INTERRUPTED)
        path = log_of(arguments.run_dir)
    print(path, file=sys.stderr, flush=True)
    os.execvp("tail", ["tail", f"--lines={arguments.lines}", str(path)])


def _cancel(words: list[str]) -> None:
    """Cancel jobs, and print how to resume."""
    description = "Cancel the job of a run, or all jobs of a pipeline or sweep. Ranks save first."
    parser = argparse.ArgumentParser(prog="nemo-ext cancel", description=description)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    arguments = parser.parse_args(words)
    from nemo_ext.slurm.status import cancel

    with mistakes_are_one_line():
        cancelled = cancel(arguments.run_dir)
    print(f"cancelled: {', '.join(cancelled)}; the same `nemo-ext submit` command resumes from the last checkpoint")


SUBMIT = Command(
    name="submit",
    group="cluster",
    help="check a job and submit it to Slurm, where it resumes automatically after stops",
    main=_submit,
    config="slurm",
    grammar=Grammar(settings={"slurm": "nemo_ext.slurm.settings:Keeping", "cluster": "nemo_ext.slurm.cluster:Cluster"}),
)
STATUS = Command(
    name="status", group="cluster", help="show the runs on Slurm: state, step, time left, loss, restarts", main=_status
)
LOGS = Command(name="logs", group="cluster", help="show the log of a run on Slurm; -f follows it", main=_logs)
CANCEL = Command(name="cancel", group="cluster", help="cancel a run's job on Slurm; its ranks save first", main=_cancel)
