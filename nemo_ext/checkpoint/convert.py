"""The convert job: a composed config's conversion, with a dry run that lists every tensor."""

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
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import checked

PLAIN_WIDTH = 200
"""Width of the listing in columns where it does not go to a terminal."""


def run(config: Mapping[str, Any]) -> None:
    """Run the conversion that a config describes, or with `dry_run` only list it.

    Raises:
        ValueError: see `nemo_ext.checkpoint.hf`.
    """
    for key in ("from", "to"):
        if not isinstance(config[key], str) or not config[key]:
            raise ValueError(f"{key}={config[key]}: expected a folder")
    for key in ("files_from", "architecture", "tokenizer", "old_tokenizer", "template"):
        if config[key] == "":
            raise ValueError(f"{key}='': give a name, or null")
    names = [field.name for field in fields(Settings)]
    settings = checked(Settings, {name: config[name] for name in names}, strict=True)
    if not isinstance(config["dry_run"], bool):
        raise ValueError(f"dry_run={config['dry_run']}: expected true or false")
    if config["model"]["pattern"] and HydraConfig.initialized():
        # A whole model has keys that do not affect a checkpoint; a key that the user typed must.
        typed = [word.lstrip("+").partition("=")[0] for word in HydraConfig.get().overrides.task]
        keys = {name.removeprefix("megatron."): None for name in typed if name.startswith("megatron.")}
        check_effect(config, "megatron", keys)
    made = plan(Path(config["from"]), folder_to_make(Path(config["to"])), settings, config)
    if config["dry_run"]:
        _list(made)
        check_target(made.to)
        if not is_made(made, settings):
            check_room(made.to, made.bytes)
    notice(_summary(made, settings))
    for remark in made.remarks:
        notice(f"note: {remark}")
    if config["dry_run"]:
        return
    convert(made, settings)
    notice(f"done: {made.to}" + (f"\n{_next(made)}" if made.to_format != HUGGING_FACE else ""))


def _summary(made: Plan, settings: Settings) -> str:
    names = made.format.architecture
    kinds = f"{names} -> Megatron" if made.to_format != HUGGING_FACE else f"-> {names}"
    parts = len(cut_into_parts(made.work, settings.shard_gigabytes))
    count = sum(len(work.slots) for work in made.work)
    return f"{made.reader.path} {kinds}: {count} tensors, {made.bytes / 1e9:,.3f} GB in {parts} files to {made.to}"


def _next(made: Plan) -> str:
    (model,) = (file.stem for file in (made.to / "model").glob("*.yaml"))
    words = ["--config-dir", str(made.to), f"model={model}"]
    words.append(f"megatron.pretrained_checkpoint={hydra_value(str(made.to))}")
    return f"next: nemo-ext train {shlex.join(words)} ..."


def _list(made: Plan) -> None:
    """Print every tensor: sources, target, shape and type."""
    from rich.console import Console
    from rich.table import Table

    table = Table("from", "to", "shape", "type", box=None, pad_edge=False)
    for row in _rows(made):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, markup=False).print(table)


def _rows(made: Plan) -> Iterator[tuple[str, str, str, str]]:
    for work in made.work:
        for number, slot in enumerate(work.slots):
            source = " + ".join(work.sources) if number == 0 else '"'
            yield source, slot.label, "x".join(map(str, slot.piece.shape)), slot.dtype
