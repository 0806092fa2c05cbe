"""`nemo-ext pipeline`."""

import sys

from nemo_ext.job.config import INTERRUPTED, mistakes_are_one_line
from nemo_ext.job.job import Command, Grammar
from nemo_ext.job.settings import Place, Words

HELP = """\
nemo-ext pipeline: run a pipeline's stages one after the other on this machine (docs/pipelines.md). The same command
goes on: finished stages are left alone, an unfinished one resumes. `nemo-ext submit` queues the same pipeline on Slurm.

  nemo-ext pipeline pipeline=quickstart run_dir=runs/chain
  nemo-ext pipeline pipeline=domyn_small scale=laptop run_dir=runs/domyn
  nemo-ext pipeline pipeline=domyn_small scale=laptop run_dir=runs/domyn to=sft cpt.train.tokens=2e6 --dry-run

  pipeline          name of a file in hydra_conf/pipeline, or of your own DIR/pipeline/NAME.yaml with --config-dir DIR
  scale             laptop: the pipeline's twin in hydra_conf/pipeline/laptop, with tiny models and generated data
  run_dir           folder of the pipeline (default: runs/PIPELINE): a folder and a log for every stage, and report.md
  data_root         where data are kept (default: data, or what the twin says)
  from, to          the first stage and the last one; those outside are taken to be done
  skip              stages that are done elsewhere: skip=[tokenize]
  evaluate          words of `nemo-ext evaluate` for a stage evaluate_STAGE after each stage that makes a model:
                    evaluate='suite=quick evaluate.limit=10' (default: none, or what the twin says)
  STAGE.key=value   changes one stage; JOB.key=value all stages of a job; other words are the pipeline's own keys
  --report          write report.md and report.html of what has been run, here or by `submit`, and start nothing
  --dry-run         check the configs of all stages and show their commands, but start nothing

Ctrl-C ends the running stage as Ctrl-C would its job: it saves first. A stage's output is in RUN_DIR/STAGE.log."""


def _main(words: list[str]) -> None:
    """Run the stages, or say in one line why not."""
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
        print("interrupted: the same command goes on", file=sys.stderr)
        sys.exit(INTERRUPTED)


PIPELINE = Command(
    name="pipeline",
    group="train",
    help="run jobs that follow each other on this machine, a table of them, one report; resumable",
    main=_main,
    grammar=Grammar(settings={"run_dir": Place, "data_root": Place, "evaluate": Words}, loose=True),
)
