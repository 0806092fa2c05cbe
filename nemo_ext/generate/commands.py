"""`nemo-ext generate`."""

from nemo_ext.job.job import Grammar, Job, reads
from nemo_ext.job.settings import Place
from nemo_ext.serving.commands import REPLICAS, STARTS_FROM, engines, served_inputs, size

GENERATE = Job(
    name="generate",
    group="serve and evaluate",
    help="send rows to an endpoint, keep the answers; any number of workers, resumable",
    run="nemo_ext.generate.job:run",
    engines=engines,
    resumable=True,
    check=reads("nemo_ext.generate.job:check"),
    inputs=served_inputs,
    model=STARTS_FROM,
    script="task",
    size=size,
    size_keys=("serving.nodes", "serving.gpus"),
    array=REPLICAS,
    serving="replicas",
    grammar=Grammar(
        settings=("nemo_ext.generate.job:Given", {"served": Place}),
        aliases={"model": "served"},
        open=("generate.extra", "serving.vllm"),
        texts=("generate.template", "generate.system"),
        dry_run="generate.dry_run",
    ),
)
