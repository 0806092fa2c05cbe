"""The job `convert`: runs the conversion that a config describes, or lists every tensor in a dry run."""

import atexit
import gc
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from nemo_ext.checkpoint.hf import Plan, Settings, check_effect, convert, is_made, plan
from nemo_ext.checkpoint.output import check_room, check_target, folder_to_make
from nemo_ext.checkpoint.writing import HUGGING_FACE, cut_into_parts
from nemo_ext.job.config import hydra_value
from nemo_ext.job.garbage import without_collection
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import checked

PLAIN_WIDTH = 200
"""Width of the tensor listing in characters if stdout is not a terminal."""


def run(config: Mapping[str, Any]) -> None:
    """Run the conversion that a config describes, or only list its tensors if `dry_run` is true.

    Raises:
        ValueError: a setting is invalid, or `nemo_ext.checkpoint.hf` rejects the conversion.
    """
    for key in ("from", "to"):
        if not isinstance(config[key], str) or not config[key]:
            raise ValueError(f"{key}={config[key]!r}: expected the path of a folder")
    for key in ("files_from", "architecture", "tokenizer", "old_tokenizer", "template"):
        if config[key] == "":
            raise ValueError(f"{key}='': expected a name or null")
    names = [field.name for field in fields(Settings)]
    settings = checked(Settings, {name: config[name] for name in names}, strict=True)
    if not isinstance(config["dry_run"], bool):
        raise ValueError(f"dry_run={config['dry_run']!r}: expected true or false")
    if config["model"]["pattern"] and HydraConfig.initialized():
        # A complete model has keys that do not affect a checkpoint; keys typed on the command line must affect it.
        typed = [word.lstrip("+").partition("=")[0] for word in HydraConfig.get().overrides.task]
        keys = {name.removeprefix("megatron."): None for name in typed if name.startswith("megatron.")}
        check_effect(config, "megatron", keys)
    atexit.register(gc.freeze)  # otherwise Python traverses all of torch's objects at exit, which takes 0.4 s
    with without_collection():  # a plan imports torch, whose modules live until the end
        conversion = plan(Path(config["from"]), folder_to_make(Path(config["to"])), settings, config)
    if config["dry_run"]:
        _list(conversion)
        check_target(conversion.to)
        if not is_made(conversion, settings):
            check_room(conversion.to, conversion.bytes)
    notice(_summary(conversion, settings))
    for remark in conversion.remarks:
        notice(f"note: {remark}")
    if config["dry_run"]:
        return
    convert(conversion, settings)
    notice(f"done: {conversion.to}" + (f"\n{_next(conversion)}" if conversion.to_format != HUGGING_FACE else ""))


def _summary(plan: Plan, settings: Settings) -> str:
    names = plan.format.architecture
    kinds = f"{names} -> Megatron" if plan.to_format != HUGGING_FACE else f"-> {names}"
    parts = len(cut_into_parts(plan.work, settings.shard_gigabytes))
    count = sum(len(work.slots) for work in plan.work)
    return f"{plan.reader.path} {kinds}: {count} tensors, {plan.bytes / 1e9:,.3f} GB in {parts} files to {plan.to}"


def _next(plan: Plan) -> str:
    (model,) = (file.stem for file in (plan.to / "model").glob("*.yaml"))
    words = ["--config-dir", str(plan.to), f"model={model}"]
    words.append(f"megatron.pretrained_checkpoint={hydra_value(str(plan.to))}")
    return f"next: nemo-ext train {shlex.join(words)} ..."


def _list(plan: Plan) -> None:
    """Print a table of every tensor with its sources, target, shape and type."""
    from rich.console import Console
    from rich.table import Table

    table = Table("from", "to", "shape", "type", box=None, pad_edge=False)
    for row in _rows(plan):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, markup=False).print(table)


def _rows(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    for work in plan.work:
        for number, slot in enumerate(work.slots):
            source = " + ".join(work.sources) if number == 0 else '"'
            yield source, slot.label, "x".join(map(str, slot.piece.shape)), slot.dtype
