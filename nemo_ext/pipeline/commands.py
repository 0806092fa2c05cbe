"""The `nemo-ext pipeline` command: runs a pipeline's jobs in order on this machine, with one report."""

import sys

from nemo_ext.job.config import INTERRUPTED, mistakes_are_one_line
from nemo_ext.job.job import Command, Grammar
from nemo_ext.job.settings import Place, Words

HELP = """\
nemo-ext pipeline: run a pipeline's stages one after the other on this machine (docs/pipelines.md). The same command
resumes: finished stages are not run again, an unfinished one resumes. `nemo-ext submit` queues the same pipeline on
Slurm.

  nemo-ext pipeline pipeline=quickstart run_dir=runs/chain
  nemo-ext pipeline pipeline=domyn_small scale=laptop run_dir=runs/domyn
  nemo-ext pipeline pipeline=domyn_small scale=laptop run_dir=runs/domyn to=sft cpt.train.tokens=2e6 --dry-run

  pipeline          name of a file in hydra_conf/pipeline, or with --config-dir DIR of DIR/pipeline/NAME.yaml
  scale             laptop: the pipeline's twin in hydra_conf/pipeline/laptop, with tiny models and generated data
  run_dir           folder of the pipeline (default: runs/PIPELINE): a folder and a log per stage, and report.md
  data_root         folder of the data (default: data, or as in the twin)
  from, to          first and last stage to run; the stages before and after are assumed to be finished
  skip              stages to skip, assumed to be finished elsewhere: skip=[tokenize]
  evaluate          arguments of `nemo-ext evaluate` for a stage evaluate_STAGE after each stage that trains a model:
                    evaluate='suite=quick evaluate.limit=10' (default: none, or as in the twin)
  STAGE.key=value   changes one stage; JOB.key=value all stages of a job; other arguments are keys of the pipeline
  --report          write report.md and report.html of the stages run so far, here or by `submit`, and start nothing
  --dry-run         check the configs of all stages and show their commands, but start nothing

Ctrl-C interrupts the job of the running stage, which saves first. A stage's output is in RUN_DIR/STAGE.log."""


def _main(words: list[str]) -> None:
    """Run `nemo-ext pipeline` with its arguments, and exit."""
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return
    from nemo_ext.pipeline.run import report, run

    try:
        with mistakes_are_one_line():
            if "--report" in words:
                sys.exit(report([word for word in words if word != "--report"]))
            sys.exit(run([word for word in words if word != "--dry-run"], dry_run="--dry-run" in words))
    except KeyboardInterrupt:
        print("interrupted: the same command resumes", file=sys.stderr)
        sys.exit(INTERRUPTED)


PIPELINE = Command(
    name="pipeline",
    group="train",
    help="run the jobs of a pipeline in order on this machine, with one report; resumable",
    main=_main,
    grammar=Grammar(settings={"run_dir": Place, "data_root": Place, "evaluate": Words}, loose=True),
)
