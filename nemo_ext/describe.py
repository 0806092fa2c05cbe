"""The `nemo-ext describe` command: prints a model's costs as tables or JSON, and draws it. Does not import torch."""

import difflib
import os
import sys
from collections import UserDict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.job.job import Grammar, Job
from nemo_ext.job.settings import Place, checked_whole
from nemo_ext.megatron.commands import TRAINING

if TYPE_CHECKING:
    from nemo_ext.architecture.precision_plan import Plan

SEQ_LENGTH = 8192
"""Sequence length in tokens if neither the user nor the model sets one."""

FORMATS = ("table", "json")
PLAIN_WIDTH = 120
"""Width of the tables, in columns, if stdout is not a terminal."""


def report(config: dict[str, Any]) -> None:
    """Run the describe job, and print a note for every `megatron.*` override that does not affect the figures."""
    from hydra.core.hydra_config import HydraConfig

    describe(config)
    overridden = [word.lstrip("+").partition("=")[0] for word in HydraConfig.get().overrides.task]
    keys = [key.removeprefix("megatron.") for key in overridden if key.startswith("megatron.")]
    read = keys_read(config)
    for key in sorted(set(keys) - read):
        near = difflib.get_close_matches(key, read, n=1)
        hint = f"; did you mean megatron.{near[0]}?" if near else ""
        print(f"note: megatron.{key} has no effect on these figures{hint}", file=sys.stderr)


def describe(config: Mapping[str, Any]) -> None:
    """Print the costs of the config's model as tables or JSON, and draw it if `draw` names a file.

    Raises:
        ValueError: the output format is unknown, the picture cannot be written, or the model or parallelism is invalid.
    """
    from nemo_ext.architecture.describe import to_json

    if config["format"] not in FORMATS:
        raise ValueError(f"format={config['format']!r}: expected one of {', '.join(FORMATS)}")
    figures = model_figures(config)
    picture = None if config["draw"] is None else _draw(config, figures)
    if config["format"] == "table":
        _print_tables(figures, picture)
        return
    print(to_json(figures))
    if picture is not None:
        print(f"drawn: {picture}", file=sys.stderr)


def model_figures(config: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the figures of `architecture.describe` for a config, including those per GPU if the model is distributed.

    Adds `recipe` (None if there is none), `prediction` (of the throughput, if `gpu` is set), `pipeline_cuts` (1-based
    numbers of the blocks after which a cut follows) and `pipeline_cuts_from`: `model.pattern`, `balance` if computed as
    in `nemo-ext train`, or None without cuts.

    Args:
        config: resolved config of the describe job, as plain containers.

    Raises:
        ValueError: sizes are missing or inconsistent.
    """
    from nemo_ext.architecture.describe import describe as cost_figures
    from nemo_ext.architecture.layout import Layout, NotEstimated
    from nemo_ext.architecture.model import Architecture
    from nemo_ext.megatron.arguments import pattern_with_cuts

    length = sequence_length(config)
    pattern = str(config["model"]["pattern"])
    config = {**config, "megatron": {**config["megatron"], "seq_length": length}}
    config["model"] = {**config["model"], "pattern": pattern_with_cuts(config)}
    gpus = _gpus(config["launcher"])
    layout = Layout.from_config(config, world_size=gpus)
    architecture = Architecture.from_config(config)
    cuts = list(architecture.pattern.cuts)
    spread = config["recipe"] is not None or gpus is not None or layout.world_size > 1 or bool(cuts)
    try:
        figures = cost_figures(architecture, layout=layout if spread else None, plan=_plan(config))
    except NotEstimated as error:
        print(f"note: figures per GPU are omitted: {error}", file=sys.stderr)
        figures = cost_figures(architecture, layout=None, plan=_plan(config))
    if config["gpu"] is not None:
        figures["prediction"] = _prediction(config)
    return figures | {
        "recipe": config["recipe"],
        "pipeline_cuts": cuts,
        "pipeline_cuts_from": ("model.pattern" if "|" in pattern else "balance") if cuts else None,
    }


def keys_read(config: Mapping[str, Any]) -> set[str]:
    """Return the names of all Megatron flags that affect the printed figures, whether or not the config sets them."""
    from nemo_ext.architecture.layout import Layout
    from nemo_ext.architecture.model import Architecture

    flags = _Flags(config["megatron"])
    config = {**config, "megatron": flags}
    sequence_length(config)
    Architecture.from_config(config)
    Layout.from_config(config, world_size=_gpus(config["launcher"]))
    return flags.read


class _Flags(UserDict[str, Any]):
    """Mapping of flags that records which keys are read."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self.read: set[str] = set()
        super().__init__(flags)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def sequence_length(config: Mapping[str, Any]) -> int:
    """Return the sequence length: `seq_length`, else the model's training or maximum length, else `SEQ_LENGTH`.

    Raises:
        ValueError: the value is not a positive integer.
    """
    megatron = config["megatron"]
    for name, value in (
        ("seq_length", config["seq_length"]),
        ("megatron.seq_length", megatron.get("seq_length")),
        ("megatron.max_position_embeddings", megatron.get("max_position_embeddings")),
    ):
        if value is not None:
            return checked_whole(name, value, least=1)
    return SEQ_LENGTH


def _gpus(launcher: Mapping[str, Any]) -> int | None:
    """Return the number of GPUs that the launcher section sets; None if it sets neither nodes nor ranks per node."""
    given = {name: launcher[name] for name in ("nodes", "nproc_per_node") if launcher[name] is not None}
    return prod(checked_whole(f"launcher.{name}", count, least=1) for name, count in given.items()) if given else None


def _prediction(config: Mapping[str, Any]) -> dict[str, Any]:
    from nemo_ext.rehearsal.search import gpu_of, predict

    needed = [config["launcher"][name] for name in ("nodes", "nproc_per_node")]
    if None in (*needed, config["megatron"].get("global_batch_size")):
        raise ValueError(
            f"gpu={config['gpu']}: a prediction requires launcher.nodes, launcher.nproc_per_node and "
            "megatron.global_batch_size; set them, or recipe=NAME"
        )
    return predict(config, *gpu_of(str(config["gpu"]), None, key="gpu"))


def _plan(config: Mapping[str, Any]) -> "Plan | None":
    from nemo_ext.architecture.precision_plan import Plan

    given = config.get("precision_plan")
    return None if given is None else Plan.from_config(given)


def _draw(config: Mapping[str, Any], figures: Mapping[str, Any]) -> Path:
    from nemo_ext.architecture.draw import draw_blocks
    from nemo_ext.architecture.model import Architecture

    architecture = Architecture.from_config(config).with_pattern(figures["pattern"])
    try:
        length = figures["seq_length"]
        return draw_blocks(architecture, Path(config["draw"]), seq_length=length, plan=_plan(config))
    except OSError as error:
        raise ValueError(
            f"draw={config['draw']} cannot be written ({error.strerror or error}): name another file"
        ) from error


def _print_tables(figures: Mapping[str, Any], picture: Path | None) -> None:
    from rich.console import Console

    from nemo_ext.architecture.describe import render_table

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    console = Console(width=wide, highlight=False)
    console.print(render_table(dict(figures)))
    if figures["pipeline_cuts"]:
        why = {"model.pattern": "as in model.pattern", "balance": "computed to balance the stages' FLOPs"}
        after = ", ".join(map(str, figures["pipeline_cuts"]))
        console.print(f"cut after blocks {after} ({why[figures['pipeline_cuts_from']]})", soft_wrap=True)
    if "prediction" in figures:
        from nemo_ext.rehearsal.search import prediction_text

        console.print(prediction_text(figures["prediction"]), soft_wrap=True)
    hint = "draw=model.svg draws the blocks (or .png, .pdf); format=json prints every figure"
    console.print(hint if picture is None else f"drawn: {picture}", style="dim", soft_wrap=True)


DESCRIBE = Job(
    name="describe",
    group="train",
    help="show parameters, FLOPs and memory of a model, as a table, JSON or picture",
    run=report,
    grammar=Grammar(settings={**TRAINING, "draw": Place, "gpu": Place}),
)
