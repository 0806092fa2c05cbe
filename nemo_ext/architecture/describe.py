"""Cost figures of a model, as a dictionary (for JSON and code) and as tables to print."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nemo_ext.architecture import cost, pattern, pipeline
from nemo_ext.architecture.blocks import FLAGS, NAMES, VALUES, Block
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan, misfits, weight_bytes, weights
from nemo_ext.architecture.widths import layers

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

# The figures nest strings, numbers, lists and dictionaries, as JSON does.
Description = dict[str, Any]


def describe(
    architecture: Architecture, *, seq_length: int | None = None, layout: Layout | None = None, plan: Plan | None = None
) -> Description:
    """Compute every cost figure of a model.

    Args:
        architecture: The model.
        seq_length: Sequence length for FLOPs, caches and activations; the model's own by default.
        layout: Parallel layout, which adds `layout`, `stages` and `gpus`.
        plan: Precision plan, which adds `precision`: the matrices' bytes in each precision, and the bytes saved.

    Returns:
        Dictionary with total_params, active_params (per token, without the input embedding),
        active_params_with_embedding, forward_flops_per_token, train_flops_per_token (exact) and
        train_flops_per_token_6n (6 per active parameter), weight_bytes and training_bytes (each keyed by precision),
        kv_bytes_per_token and kv_cache_bytes (bf16, the latter for one full sequence), state_bytes_per_sequence,
        kinds (keyed by symbol), blocks (a list with each block's 1-based layer, kind, name, values, resolved sizes,
        params and forward_flops_per_token), and the fields that identify the model. FLOPs are integers.
    """
    length = architecture.sequence_length(seq_length)
    blocks = [_block(architecture, layer, length) for layer in layers(architecture)]
    forward = cost.forward_flops_per_token(architecture, seq_length=length)
    figures: Description = {
        "name": architecture.name,
        "family": architecture.family,
        "pattern": pattern.format(architecture.pattern),
        "hidden_size": architecture.hidden_size,
        "vocab_size": architecture.vocab_size,
        "seq_length": length,
        "total_params": cost.total_params(architecture),
        "active_params": cost.active_params(architecture),
        "active_params_with_embedding": cost.active_params(architecture, with_embedding=True),
        "embedding_params": cost.embedding_parameters(architecture).total,
        "head_params": cost.head_parameters(architecture).total,
        "mtp_params": cost.mtp_parameters(architecture).total,
        "forward_flops_per_token": round(forward),
        "train_flops_per_token": round(cost.train_flops_per_token(architecture, seq_length=length)),
        "train_flops_per_token_6n": cost.six_n(architecture),
        "head_forward_flops_per_token": round(cost.head_forward_flops_per_token(architecture)),
        "weight_bytes": {name: cost.weight_bytes(architecture, name) for name in ("fp32", "bf16", "fp8")},
        "training_bytes": {name: cost.training_state_bytes(architecture, precision=name) for name in ("fp32", "bf16")},
        "kv_bytes_per_token": cost.kv_bytes_per_token(architecture),
        "kv_cache_bytes": cost.kv_cache_bytes(architecture, length),
        "state_bytes_per_sequence": cost.state_bytes_per_sequence(architecture),
        "kinds": _kinds(blocks),
        "blocks": blocks,
    }
    if layout is not None:
        figures |= _spread(architecture, layout, length)
    if plan is not None:
        figures["precision"] = _precision(plan, architecture)
    return figures


def _precision(plan: Plan, architecture: Architecture) -> Description:
    stored = weight_bytes(plan, architecture)
    in_bf16 = 2 * sum(weight.parameters for weight in weights(architecture))
    if architecture.pattern.mtp:  # always in BF16
        sets = 1 if architecture.mtp_repeated else architecture.pattern.depths
        blocks = sum(weight.parameters for weight in weights(architecture.depth) if weight.block is not None)
        prediction = 2 * sets * (2 * architecture.hidden_size**2 + blocks)
        stored, in_bf16 = {**stored, "bf16": stored.get("bf16", 0) + prediction}, in_bf16 + prediction
    return {
        "plan": {"default": plan.default, "recipe": plan.recipe, "rules": [rule.text for rule in plan.rules]},
        "bytes": stored,
        "bytes_in_bf16": in_bf16,
        "saved_bytes": in_bf16 - sum(stored.values()),
        "kv_bytes_per_token": cost.kv_bytes_per_token(architecture, precision=plan.kv_cache),
        "does_not_fit": misfits(plan, architecture),
    }


def _block(architecture: Architecture, layer: int, length: int) -> Description:
    block, sizes = architecture.pattern.blocks[layer - 1], architecture.sizes[layer - 1]
    counted = cost.block_parameters(architecture, layer)
    return {
        "layer": layer,
        "kind": block.kind,
        "name": block.name,
        "values": dict(block.values),
        "sizes": dict(sizes.values),
        "params": counted.total,
        "active_params": counted.active,
        "forward_flops_per_token": round(cost.block_forward_flops_per_token(architecture, layer, seq_length=length)),
    }


def _kinds(blocks: Iterable[Mapping[str, Any]]) -> Description:
    kinds: dict[str, Counter[str]] = {}
    for block in blocks:
        sums = kinds.setdefault(block["kind"], Counter())
        sums.update(count=1, **{key: block[key] for key in ("params", "forward_flops_per_token")})
    return {kind: {"name": NAMES[kind], **sums} for kind, sums in kinds.items()}


def _spread(architecture: Architecture, layout: Layout, length: int) -> Description:
    stages = cost.per_stage(architecture, layout, seq_length=length)
    gpus = cost.per_gpu(architecture, layout, seq_length=length)
    idle = pipeline.idle_share([stage.forward_flops_per_token for stage in stages], layout)
    return {
        "layout": {**asdict(layout), "world_size": layout.world_size, "idle_share": idle},
        "stages": [
            {
                "stage": stage.stage,
                "rank": stage.rank,
                "layers": list(stage.layers),
                "params": stage.parameters.total,
                "forward_flops_per_token": round(stage.forward_flops_per_token),
            }
            for stage in stages
        ],
        "gpus": [
            {
                **asdict(gpu),
                "forward_flops_per_token": round(gpu.forward_flops_per_token),
                "total_bytes": gpu.total_bytes,
            }
            for gpu in gpus
        ],
    }


def to_json(description: Description) -> str:
    """Write the figures as JSON."""
    return json.dumps(description, indent=2)


def render_table(description: Description) -> "Group":
    """Render the figures as rich tables: the model, its blocks, and its stages and GPUs if there is a layout.

    Equal blocks share a row. Print the result with `rich.print`.
    """
    from rich.console import Group
    from rich.text import Text

    tables = [_summary(description), _block_table(description)]
    if "gpus" in description:
        tables += [_stage_table(description), _gpu_table(description)]
    parts: list[Any] = [Text(description["pattern"], style="cyan", overflow="fold")]
    for table in tables:
        parts += [Text(), table]
    return Group(*parts)


def _table(title: str, *columns: str, left: int = 1) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


def _summary(figures: Description) -> "Table":
    length = figures["seq_length"]
    table = _table(f"{figures['name']}: {len(figures['blocks'])} blocks", "", "", left=2)
    table.show_header = False
    weights, training = figures["weight_bytes"], figures["training_bytes"]
    rows = {
        "parameters": number(figures["total_params"]),
        "active per token": f"{number(figures['active_params'])} "
        f"({number(figures['active_params_with_embedding'])} with the input embedding)",
        "FLOPs per token": f"{flop(figures['forward_flops_per_token'])} forward, "
        f"{flop(figures['train_flops_per_token'])} training, at {length:,} tokens; "
        f"{flop(figures['train_flops_per_token_6n'])} training by 6N, which excludes attention scores",
        "weights": ", ".join(f"{size(count)} {name}" for name, count in weights.items()),
        "training state": ", ".join(f"{size(count)} {name}" for name, count in training.items())
        + " (weights, gradients, Adam, on one GPU)",
    }
    if figures["kv_bytes_per_token"]:
        token, sequence = size(figures["kv_bytes_per_token"]), size(figures["kv_cache_bytes"])
        rows["KV cache (bf16)"] = f"{token} per token, {sequence} per sequence"
    if figures["state_bytes_per_sequence"]:
        rows["Mamba state"] = f"{size(figures['state_bytes_per_sequence'])} per sequence"
    if precision := figures.get("precision"):
        stored = {name: count for name, count in precision["bytes"].items() if count}
        share = precision["saved_bytes"] / precision["bytes_in_bf16"]
        rows["precision plan"] = (
            f"{', '.join(f'{size(count)} {name}' for name, count in stored.items())}: {share:.0%} less than in bf16"
        )
        if unsupported := precision["does_not_fit"]:
            rows["does not fit"] = unsupported[0] + (
                f", and {len(unsupported) - 1} more" if len(unsupported) > 1 else ""
            )
    for label, text in rows.items():
        table.add_row(label, text)
    return table


def _block_table(figures: Description) -> "Table":
    """Build a table with one row for each group of equal blocks, in order of first appearance."""
    groups: dict[Block, list[Mapping[str, Any]]] = {}
    for block in figures["blocks"]:
        groups.setdefault(Block.from_values(block["kind"], **block["values"]), []).append(block)
    whole = figures["forward_flops_per_token"]
    table = _table("blocks", "block", "what", "layers", "count", "params each", "params", "FLOPs", left=3)
    for written, members in groups.items():
        params, flops = members[0]["params"], sum(block["forward_flops_per_token"] for block in members)
        table.add_row(
            str(written),
            _sizes(members[0]),
            ranges([block["layer"] for block in members]),
            str(len(members)),
            number(params),
            number(params * len(members)),
            f"{flops / whole:.1%}",
        )
    embedding, head = figures["embedding_params"], figures["head_params"]
    table.add_row("", "embedding", "", "1", number(embedding), number(embedding), "0.0%")
    table.caption = "layers a-b/2: every second layer from a to b"
    table.caption_justify = "left"
    share = figures["head_forward_flops_per_token"] / whole
    table.add_row("", "norm and output layer", "", "1", number(head), number(head), f"{share:.1%}")
    if mtp := figures["mtp_params"]:
        table.add_row("", "multi-token prediction", "", "", "", number(mtp), "")
    return table


def _sizes(block: Mapping[str, Any]) -> str:
    """Write a block's name and resolved sizes, omitting sizes of zero and flags that are off."""
    if block["sizes"].get("linear"):
        return f"{block['name']} as a linear"
    values = [(name, block["sizes"].get(name)) for name in VALUES[block["kind"]]]
    sizes = [name if name in FLAGS else f"{name} {value}" for name, value in values if value]
    return ", ".join([block["name"], *sizes])


def _stage_table(figures: Description) -> "Table":
    stages = figures["stages"]
    mean = sum(stage["forward_flops_per_token"] for stage in stages) / len(stages)
    table = _table("pipeline stages", "stage", "rank", "layers", "params", "FLOPs per token", "of the mean")
    for stage in stages:
        flops = stage["forward_flops_per_token"]
        table.add_row(
            str(stage["stage"]),
            str(stage["rank"]),
            ranges(stage["layers"]),
            number(stage["params"]),
            flop(flops),
            f"{flops / mean:.2f}" if mean else "-",
        )
    return table


def _gpu_table(figures: Description) -> "Table":
    layout = figures["layout"]
    names = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP", "data": "DP"}
    title = " ".join(f"{short}{layout[f'{name}_parallel']}" for name, short in names.items())
    idle = f", idle for {layout['idle_share']:.1%} of a step" if layout["idle_share"] else ""
    table = _table(
        f"one GPU of each pipeline rank ({title}, {layout['world_size']} GPUs{idle}, activations estimated)",
        *("rank", "params", "weights", "gradients", "optimizer", "activations", "together"),
    )
    for gpu in figures["gpus"]:
        parts = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "total_bytes")
        table.add_row(str(gpu["rank"]), number(gpu["parameters"]), *(size(gpu[part]) for part in parts))
    return table


def number(value: float) -> str:
    """Write a count with a decimal unit, such as `31.58 B`."""
    return _scaled(value, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3), ("", 1))).rstrip()


def flop(value: float) -> str:
    """Write a number of floating-point operations with a unit, such as `20.76 GFLOP`."""
    return _scaled(
        value, (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("KFLOP", 1e3), ("FLOP", 1))
    )


def size(value: float) -> str:
    """Write a number of bytes with a binary unit, such as `1.5 GiB`."""
    return _scaled(value, (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)))


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    unit, factor = next((pair for pair in units if value >= pair[1]), units[-1])
    return f"{value / factor:.4g} {unit}"


def ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers as ranges, `/2` marking every second number: `1-4, 7-15/2, 20`."""
    words: list[str] = []
    rest = list(numbers)
    while rest:
        best = rest[:1]
        for step in (1, 2):
            run = rest[:1]
            while len(run) < len(rest) and rest[len(run)] == run[-1] + step:
                run.append(rest[len(run)])
            if len(run) >= (2 if step == 1 else 3) and len(run) > len(best):
                best = run
        if len(best) == 1:
            words.append(str(best[0]))
        else:
            words.append(f"{best[0]}-{best[-1]}" + ("" if best[1] == best[0] + 1 else f"/{best[1] - best[0]}"))
        rest = rest[len(best) :]
    return ", ".join(words)
