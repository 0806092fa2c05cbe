"""The `nemo-ext generate` command: sends rows to an endpoint and stores the answers."""

from nemo_ext.job.job import Grammar, reads
from nemo_ext.serving.commands import asking

GENERATE = asking(
    extra="generate",
    name="generate",
    group="serve and evaluate",
    help="send rows to an endpoint and store the answers; any number of workers, resumable",
    run="nemo_ext.generate.job:run",
    check=reads("nemo_ext.generate.job:check"),
    grammar=Grammar(
        settings="nemo_ext.generate.settings:Settings", aliases={"model": "served"}, dry_run="generate.dry_run"
    ),
)
