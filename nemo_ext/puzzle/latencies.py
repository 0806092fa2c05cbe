"""Block latencies in a serving engine, from the user's JSON file instead of the roofline. Does not import torch.

    {"engine": "vLLM 0.32, H100", "batch": 32, "prompt": 2048, "context": 4096, "precision": "fp8",
     "cache_precision": "fp8", "latencies": [{"block": "*{kv=8}", "prefill_seconds": 0.031, "decode_seconds": 0.0004},
                   {"block": "outside", "prefill_seconds": 0.004, "decode_seconds": 0.0009}, ...]}

Seconds are for the whole batch: for its prompts, and for one token of each sequence at full context. Values that a
block does not set are the parent's; `outside` is everything except the blocks. To measure a block, take the difference
between two models that contain it a different number of times.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import parse
from nemo_ext.job.files import write_text
from nemo_ext.job.made_of import check_same
from nemo_ext.job.settings import STRICT, checked
from nemo_ext.puzzle.cost import OUTSIDE, Precision, Serving
from nemo_ext.puzzle.variants import Variant

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SHAPE = ("batch", "prompt", "context", "precision", "cache_precision")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Latency:
    """Latency of one block.

    Attributes:
        block: the block's notation, or `outside`.
        prefill_seconds: seconds for the prompts of the whole batch.
        decode_seconds: seconds for one token of each sequence at full context.
    """

    block: str
    prefill_seconds: Seconds
    decode_seconds: Seconds


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Table:
    """Content of the file: latencies, and the serving scenario in which they were measured (as in `puzzle.serving`)."""

    engine: str
    batch: PositiveInt
    prompt: PositiveInt
    context: PositiveInt
    precision: Precision
    cache_precision: Precision
    latencies: list[Latency]


def blocks_to_measure(by_block: Iterable[Iterable[Variant]]) -> list[Block]:
    """List the distinct blocks that a search may choose; `by_block` holds the variants of each block."""
    return list(dict.fromkeys(variant.block for each in by_block for variant in each if variant.block is not None))


def read_table(
    file: Path, architecture: Architecture, required: Iterable[Block], serving: Serving
) -> dict[str, Latency]:
    """Read the latencies as a mapping from full block notation, or `outside`, to latency.

    Args:
        required: blocks that the file must contain (`blocks_to_measure`).
        serving: serving scenario in which the latencies must have been measured.

    Raises:
        ValueError: the file does not exist (a template is then written next to it), is for another serving scenario, or
            has an invalid, repeated or missing block.
    """
    names = [*map(str, required), OUTSIDE]
    if not file.is_file():
        template = file.with_name(f"{file.stem}_to_fill_in.json")
        rows: list[dict[str, Any]] = [
            {"block": name, "prefill_seconds": None, "decode_seconds": None} for name in names
        ]
        shape = {key: asdict(serving)[key] for key in SHAPE}
        if not template.exists():  # the user may be filling it in
            template.parent.mkdir(parents=True, exist_ok=True)
            write_text(template, json.dumps({"engine": "", **shape, "latencies": rows}, indent=1) + "\n")
        raise ValueError(
            f"puzzle.measure.table={file}: no such file; fill in {template}, which lists the blocks to measure, and "
            "rename it"
        )
    try:
        content: Mapping[str, Any] = json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"puzzle.measure.table={file} is not valid JSON ({error}); correct it") from None
    table = checked(Table, content, str(file), strict=True)
    measured, now = ({key: getattr(source, key) for key in SHAPE} for source in (table, serving))
    check_same(measured, now, f"{file} was measured in a scenario that differs from puzzle.serving", "make them agree")
    latencies: dict[str, Latency] = {}
    for latency in table.latencies:
        name = latency.block if latency.block == OUTSIDE else _full(latency.block, architecture, file)
        if name in latencies:
            raise ValueError(f"{file} lists the block {latency.block} twice: remove one entry")
        latencies[name] = latency
    if missing := [name for name in names if name not in latencies]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{file} has no latencies of {', '.join(missing[:3])}{more}: add them, or narrow puzzle.variants"
        )
    return latencies


def _full(notation: str, architecture: Architecture, file: Path) -> str:
    """Return a block's notation with the parent's values filled in."""
    try:
        (block,) = parse(notation).blocks
        return str(architecture.resolved(block, layer=1))
    except ValueError as error:
        raise ValueError(f"{file}: {notation!r} is not a valid block ({error})") from None
