"""Submit: `nemo-ext submit recipe=domyn_small/cpt cluster=leonardo account=X`, a checked job for Slurm."""

import sys
from textwrap import fill

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import INTERRUPTED, mistakes_are_one_line

HELP = """\
nemo-ext submit: check a job on the login node, then submit it to Slurm. It continues by itself after time limits,
failed nodes and broken checkpoints (docs/clusters.md). The same command again continues the same run.

  nemo-ext submit recipe=domyn_small/cpt cluster=leonardo account=IscrX run_dir=$WORK/runs/cpt
  nemo-ext submit --dry-run recipe=olmo3/7b_pretrain cluster=leonardo cluster.qos=boost_qos_bprod
  nemo-ext submit --config-dir mine cluster=my_site recipe=nemotron3_nano/pretrain
  nemo-ext submit job=rl preset=rl_zero engine=nemo_rl slurm.nodes=16 model=... tasks.train.path=... cluster=leonardo
  nemo-ext submit --multirun recipe=olmo1/1b megatron.lr=1e-4,2e-4 run_dir=$WORK/sweep cluster=leonardo
  nemo-ext submit job=online preset=rpo_online model=... tasks.train.path=... serving.engine=vllm cluster=leonardo
  nemo-ext submit pipeline=domyn_small run_dir=$WORK/domyn start=... cpt.megatron.lr=1e-5 cluster=leonardo account=IscrX

{jobs}
  pipeline       name of a file in hydra_conf/pipeline: jobs that depend on each other (docs/pipelines.md);
                 STAGE.key=value changes one stage, JOB.key=value all stages of a job; finished stages are left out
  --multirun     submit a run for every combination of comma-separated values, all in one array
  cluster        name of a file in hydra_conf/cluster: leonardo, dgx_h100, testbed, generic; cluster.KEY=value changes a
                 setting, most often cluster.qos, cluster.partition or cluster.container.image
  account        account that is charged
  time           time limit of each start (default: the longest that the quality of service allows)
  slurm.margin   seconds before the time limit at which a run saves and is queued again (default: 600)
  slurm.max_restarts   number of starts after which a run is given up (default: 100)
  slurm.max_idle       the same, of starts in a row without a new checkpoint (default: 3)
  slurm.options  further options for sbatch: 'slurm.options=["--mail-type=END"]'
  slurm.rehearse step a rank of each kind of a training job here first, on fake tensors: true, false, or null: where
                 the GPUs' memory is known, and given up after a minute (default; docs/rehearsal.md)
  --dry-run      check the job and show the command, but submit nothing

All other words are settings of the job. The recipe's number of GPUs is kept, unless launcher.nodes=N and
launcher.nproc_per_node=N change it."""


def main() -> None:
    """Submits, or says in one line why not."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        from nemo_ext.slurm.jobs import JOBS

        jobs = f"train (default), {', '.join(JOBS[1:])}"
        print(HELP.replace("{jobs}", fill(jobs, 119, initial_indent="  job".ljust(17), subsequent_indent=" " * 17)))
        return
    if any(word.startswith("pipeline=") for word in words):
        from nemo_ext.pipeline.submit import submit
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
