"""Submit: `nemo-ext submit recipe=domyn_small/cpt cluster=leonardo account=X`, a checked job for Slurm."""

import sys
from textwrap import fill

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import INTERRUPTED, mistakes_are_one_line

HELP = """\
nemo-ext submit: checks a job on the login node, then hands it to Slurm. It goes on by itself after time limits, failed
nodes and broken checkpoints (docs/clusters.md). The same command again goes on with the same run.

  nemo-ext submit recipe=domyn_small/cpt cluster=leonardo account=IscrX run_dir=$WORK/runs/cpt
  nemo-ext submit --dry-run recipe=olmo3/7b_pretrain cluster=leonardo cluster.qos=boost_qos_bprod
  nemo-ext submit --config-dir mine cluster=my_site recipe=nemotron3_nano/pretrain
  nemo-ext submit job=rl preset=rl_zero engine=nemo_rl slurm.nodes=16 model=... tasks.train.path=... cluster=leonardo
  nemo-ext submit --multirun recipe=olmo1/1b megatron.lr=1e-4,2e-4 run_dir=$WORK/sweep cluster=leonardo
  nemo-ext submit pipeline=domyn_small run_dir=$WORK/domyn start=... cpt.megatron.lr=1e-5 cluster=leonardo account=IscrX

{jobs}
  pipeline       a file of hydra_conf/pipeline: jobs that follow each other (docs/pipelines.md); STAGE.key=value and
                 JOB.key=value go to a stage, or to all of a job; finished stages are left out
  --multirun     every combination of comma-separated values is a run, all of them one array
  cluster        a file of hydra_conf/cluster: leonardo, dgx_h100, testbed, generic; cluster.KEY=value changes a fact,
                 cluster.qos, cluster.partition and cluster.container.image above all
  account        that is charged
  time           of each start; the longest that the quality of service allows if not given
  slurm.margin   seconds before the limit in which a run saves and is queued again (600)
  slurm.max_restarts, slurm.max_idle   starts in all (100), and without a new checkpoint (3), after which it is given up
  slurm.options  further options of sbatch: 'slurm.options=["--mail-type=END"]'
  --dry-run      checks and shows the command, submits nothing

All other words are the job's own. A recipe's number of GPUs is kept; launcher.nodes=N and
launcher.nproc_per_node=N say others."""


def main() -> None:
    """Submits, or says in one line why not."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        from nemo_ext.slurm.jobs import JOBS

        jobs = f"of nemo-ext: train (if not given), {', '.join(JOBS[1:])}"
        print(HELP.replace("{jobs}", fill(jobs, 119, initial_indent="  job".ljust(17), subsequent_indent=" " * 17)))
        return
    if any(word.startswith("pipeline=") for word in words):
        from nemo_ext.slurm.pipeline import submit
    else:
        from nemo_ext.slurm.submit import submit

    try:
        with mistakes_are_one_line():
            sys.exit(submit([word for word in words if word != "--dry-run"], dry_run="--dry-run" in words))
    except KeyboardInterrupt:
        print("interrupted: what is queued stays so (nemo-ext status); the same command goes on", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
