"""Latencies of blocks in a serving engine, brought by the user as a JSON file in place of the roofline. No torch.

    {"engine": "vLLM 0.32, H100", "batch": 32, "prompt": 2048, "context": 4096, "precision": "fp8",
     "cache_precision": "fp8", "latencies": [{"block": "*{kv=8}", "prefill_seconds": 0.031, "decode_seconds": 0.0004},
                   {"block": "outside", "prefill_seconds": 0.004, "decode_seconds": 0.0009}, ...]}

Seconds are those of the whole batch: of its prompts, and of one token of each sequence at full context. Values that a
block does not name are the parent's; `outside` is everything but the blocks. A block is measured as the difference of
two models, one of which has it more often.
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
    """Seconds of one block.

    Attributes:
        block: notation of the block, or `outside`.
        prefill_seconds: for the prompts of the whole batch.
        decode_seconds: for one token of each of its sequences at full context.
    """

    block: str
    prefill_seconds: Seconds
    decode_seconds: Seconds


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Table:
    """The file's content: what was measured, in the shape of `puzzle.serving`."""

    engine: str
    batch: PositiveInt
    prompt: PositiveInt
    context: PositiveInt
    precision: Precision
    cache_precision: Precision
    latencies: list[Latency]


def blocks_to_measure(found: Iterable[Iterable[Variant]]) -> list[Block]:
    """Every block that a search may choose, once."""
    return list(dict.fromkeys(variant.block for each in found for variant in each if variant.block is not None))


def read_table(file: Path, architecture: Architecture, wanted: Iterable[Block], serving: Serving) -> dict[str, Latency]:
    """Latencies by the notation of a block with all of its values, and of `outside`.

    Args:
        file: the JSON file.
        architecture: the parent's.
        wanted: the blocks that must be in it (`blocks_to_measure`).
        serving: shape that they must have been measured in.

    Raises:
        ValueError: no such file, whose form is then written beside its place; another shape; a block that is not a
            block, that is there twice, or that is missing.
    """
    names = [*map(str, wanted), OUTSIDE]
    if not file.is_file():
        empty = file.with_name(f"{file.stem}_to_fill_in.json")
        rows: list[dict[str, Any]] = [
            {"block": name, "prefill_seconds": None, "decode_seconds": None} for name in names
        ]
        shape = {key: asdict(serving)[key] for key in SHAPE}
        if not empty.exists():  # somebody may be filling it in
            empty.parent.mkdir(parents=True, exist_ok=True)
            write_text(empty, json.dumps({"engine": "", **shape, "latencies": rows}, indent=1) + "\n")
        raise ValueError(f"puzzle.measure.table={file}: no such file; {empty} has its form and the blocks to measure")
    try:
        given: Mapping[str, Any] = json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"puzzle.measure.table={file}: not JSON ({error})") from None
    table = checked(Table, given, str(file), strict=True)
    measured, now = ({key: getattr(of, key) for key in SHAPE} for of in (table, serving))
    check_same(measured, now, f"{file} was measured in another shape than puzzle.serving", "make them agree")
    there: dict[str, Latency] = {}
    for each in table.latencies:
        name = each.block if each.block == OUTSIDE else _full(each.block, architecture, file)
        if name in there:
            raise ValueError(f"{file}: {each.block} is there twice: leave one")
        there[name] = each
    if missing := [name for name in names if name not in there]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{file}: no latencies of {', '.join(missing[:3])}{more}: measure them, or narrow puzzle.variants"
        )
    return there


def _full(notation: str, architecture: Architecture, file: Path) -> str:
    """Notation with the values that the parent's blocks have."""
    try:
        (block,) = parse(notation).blocks
        return str(architecture.resolved(block, layer=1))
    except ValueError as error:
        raise ValueError(f"{file}: {notation!r} is not a block: {error}") from None
