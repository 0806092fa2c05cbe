"""The command `nemo-ext serve`, which serves a model behind an OpenAI-compatible endpoint.

Other commands that use a served model share some of its definitions.
"""

import glob
import os
from collections.abc import Iterator
from typing import Any

from nemo_ext.job.findings import Finding
from nemo_ext.job.job import Array, Config, Grammar, Input, Job, Model, inputs
from nemo_ext.job.settings import Place, strings

SERVED = {
    **dict.fromkeys(("run_dir", "served", "files_from", "endpoint"), Place),
    "serving": "nemo_ext.serving.settings:ServingSettings",
}
"""Types of the config keys that describe a served model."""
REPLICAS = Array(
    key="serving.replica",
    words=("serving.replica={number}",),
    tasks=lambda config, shards: int(config["serving"]["replicas"]),
    shards=False,
)
"""Array job that runs each replica of a served model as a task."""
STARTS_FROM = Model(key="model")


def engines(config: Config) -> tuple[str, ...]:
    """Return the engines that this process requires to serve the config's model: `torch`, or none.

    With vLLM, which runs in its own process, or with an existing endpoint, none are required.
    """
    here = config.get("endpoint") is None and config["served"] and config["serving"]["engine"] == "transformers"
    return ("torch",) if here else ()


def extras(config: Config) -> tuple[str, ...]:
    """Return the nemo_ext extras that the server needs; none if this process does not serve the config's model."""
    return ("serve",) if engines(config) else ()


def size(config: Config, settings: Any) -> tuple[int, int]:
    """Return the number of nodes per replica and the number of GPUs per node, 0 if no GPU is needed."""
    serving = config["serving"]
    cpu = serving["device"] == "cpu" or not config["served"] or bool(config.get("endpoint"))
    return int(serving["nodes"]), 0 if cpu else int(serving["gpus"])


def size_of_one(config: Config, settings: Any) -> tuple[int, int]:
    """Return the number of nodes (one) and the number of GPUs for a job that serves one model after another."""
    return 1, 0 if config["serving"]["device"] == "cpu" else int(config["serving"]["gpus"])


def served_inputs(config: Config) -> list[Input]:
    """Return the inputs to check: the served model, and those entries of the config's `input` that match no file."""
    absent = [word for word in strings(config.get("input")) if not glob.glob(os.path.expanduser(word))]
    return inputs(
        ("model", None if config.get("endpoint") else config["served"], "`nemo-ext convert` writes one"),
        *(("input", word, "set it to an existing file") for word in absent),
        model=("model",),
    )


def asking(*, extra: str = "endpoint", **attributes: Any) -> Job:
    """Define a job that sends requests to a served model or an endpoint, with one array task per replica.

    Args:
        extra: nemo_ext extra that the job requires.
        attributes: other attributes of the job.
    """
    return Job(
        engines=engines,
        extras=lambda config: (extra, *extras(config)),
        resumable=True,
        inputs=served_inputs,
        model=STARTS_FROM,
        script="task",
        size=size,
        size_keys=("serving.nodes", "serving.gpus"),
        array=REPLICAS,
        serving="replicas",
        **attributes,
    )


def on_one_node(config: Config, settings: Any, **others: object) -> Iterator[Finding]:
    """Yield errors if a job that serves one model after another is given several replicas or nodes.

    `others` are arguments that all checks of jobs receive; they are unused here.
    """
    for key in ("replicas", "nodes"):
        if (number := config["serving"][key]) != 1:
            yield Finding(
                "error",
                f"serving.{key}={number}: job={settings.job} serves its models one at a time on its own node; set "
                f"serving.{key}=1 (with serving.engine=vllm, serving.gpus gives a model more GPUs)",
            )


def _check(config: Config, coming: object) -> None:
    from nemo_ext.serving.model import checked_settings
    from nemo_ext.serving.settings import LOOPBACK

    if config["serving"]["host"] in LOOPBACK:
        config = {**config, "serving": {**config["serving"], "host": "NODE"}}  # as in the Slurm task
    checked_settings(config)


SERVE = Job(
    name="serve",
    group="serve and evaluate",
    help="serve a model behind an OpenAI-compatible endpoint, on this machine or with vLLM",
    run="nemo_ext.serving.job:run",
    engines=engines,
    extras=extras,
    check=_check,
    inputs=served_inputs,
    model=STARTS_FROM,
    script="task",
    size=size,
    size_keys=("serving.nodes", "serving.gpus"),
    array=REPLICAS,
    own_folder=True,
    serving="replicas",
    server=True,
    grammar=Grammar(settings=SERVED, aliases={"model": "served"}),
)
