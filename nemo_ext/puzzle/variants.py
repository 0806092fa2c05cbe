"""Variants of each of a parent's blocks (Puzzle, arXiv:2411.19146; Llama-Nemotron paper, section 2.1).

A variant is a block in pattern notation, or a no-op. Variants do not depend on neighbouring blocks, so a library grows
with the number of blocks, not with the number of combinations of attention and FFN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import Architecture
from nemo_ext.job.settings import STRICT

KEEP, NO_OP, LINEAR = "keep", "no_op", "linear"
Shares = tuple[Annotated[float, Field(gt=0, lt=1)], ...]


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Choices:
    """Sizes of variants, as fractions of the parent's; those that round to the parent's size are omitted.

    Attributes:
        heads: fractions of the attention heads, rounded up to a multiple of the KV heads.
        kv: fractions of the KV heads.
        windows: sliding windows in tokens.
        ffn: fractions of the FFN width (the paper's 87, 75, 50, 25, 10 %).
        ffn_multiple: multiple to which widths are rounded up (256 in Puzzle, which suits tensor cores and FP8).
        experts: fractions of a MoE block's experts.
        top_k: smaller numbers of experts per token.
        expert_ffn: fractions of an expert's width.
        latent: fractions of a MoE block's latent width, rounded up like FFN widths.
        mamba_heads: fractions of a Mamba-2 block's heads.
        mamba_state: fractions of a Mamba-2 block's state.
        combine: kinds of blocks (`*`, `E`, `M`) with variants that are smaller in several sizes, in all combinations.
        linear: True to include variants that replace a block with a single linear map.
        no_op: True to include variants that remove a block.
    """

    heads: Shares = ()
    kv: Shares = (0.5, 0.25, 0.125)
    windows: tuple[PositiveInt, ...] = ()
    ffn: Shares = (0.87, 0.75, 0.5, 0.25, 0.1)
    ffn_multiple: PositiveInt = 256
    experts: Shares = (0.75, 0.5, 0.25)
    top_k: tuple[PositiveInt, ...] = ()
    expert_ffn: Shares = (0.75, 0.5)
    latent: Shares = ()
    mamba_heads: Shares = (0.75, 0.5, 0.25)
    mamba_state: Shares = ()
    combine: tuple[Literal["*", "E", "M"], ...] = ()
    linear: bool = True
    no_op: bool = True


@dataclass(frozen=True)
class Variant:
    """One alternative for a block.

    Attributes:
        number: 0-based number of the block in the parent.
        name: short name, unique within the block, such as `keep`, `kv2`, `ffn512_topk4`, `linear`, `no_op`.
        block: the block with all values filled in; None for a no-op.
    """

    number: int
    name: str
    block: Block | None

    @property
    def weights(self) -> str:
        """Name of the initial weights, which do not depend on the number of experts per token."""
        return "_".join(size for size in self.name.split("_") if not size.startswith("topk")) or "topk"


def variants(parent: Architecture, choices: Choices | None = None) -> list[list[Variant]]:
    """List the variants of each of the parent's blocks, the unchanged block first; `choices` defaults to `Choices()`.

    A block that is already a linear map can only be kept or removed.
    """
    chosen = choices or Choices()
    return [_variants_of(number, block, chosen) for number, block in enumerate(parent.sizes)]


def _variants_of(number: int, block: Block, choices: Choices) -> list[Variant]:
    blocks = {KEEP: block}
    if not block.is_linear:
        blocks |= {
            name: Block(block.kind, tuple({**dict(block.values), **values}.items()))
            for name, values in _smaller(block, choices).items()
        }
    variants_of_block = [Variant(number, name, each) for name, each in blocks.items()]
    if choices.linear and not block.is_linear:
        variants_of_block.append(Variant(number, LINEAR, Block.from_values(block.kind, linear=True)))
    if choices.no_op:
        variants_of_block.append(Variant(number, NO_OP, None))
    return variants_of_block


def _smaller(block: Block, choices: Choices) -> dict[str, dict[str, int]]:
    """Return the smaller variants of a block: a mapping from their names to the values in which they differ from it."""
    sizes = _sizes(block, choices)
    found = {}
    for count in range(1, len(sizes) + 1 if block.kind in choices.combine else 2):
        for names in combinations(sizes, count):
            for numbers in product(*(sizes[name] for name in names)):
                values = dict(zip(names, numbers, strict=True))
                if block.kind == "E" and values.get("experts", block.size("experts")) < values.get(
                    "topk", block.size("topk")
                ):
                    continue
                found["_".join(f"{name}{number}" for name, number in values.items())] = values
    return found


def _sizes(block: Block, choices: Choices) -> dict[str, Sequence[int]]:
    """Return the smaller sizes to try, keyed by the name of the value."""
    if block.kind == "*":
        heads, kv, window = (block.size(name) for name in ("heads", "kv", "window"))
        return {
            "heads": _parts(heads, choices.heads, kv),
            "kv": [n for n in _parts(kv, choices.kv) if kv % n == 0],
            "window": [w for w in choices.windows if not window or w < window],
        }
    if block.kind == "-":
        return {"ffn": _parts(block.size("ffn"), choices.ffn, choices.ffn_multiple)}
    if block.kind == "M":
        heads, groups, state = (block.size(name) for name in ("heads", "groups", "state"))
        return {"heads": _parts(heads, choices.mamba_heads, groups), "state": _parts(state, choices.mamba_state)}
    if block.kind == "E":
        experts, top_k, ffn, latent = (block.size(name) for name in ("experts", "topk", "ffn", "latent"))
        return {
            "experts": _parts(experts, choices.experts),
            "topk": [n for n in choices.top_k if n < top_k],
            "ffn": _parts(ffn, choices.expert_ffn, choices.ffn_multiple),
            "latent": _parts(latent, choices.latent, choices.ffn_multiple),
        }
    return {}


def _parts(size: int, shares: Sequence[float], multiple: int = 1) -> list[int]:
    """Return fractions of a size, rounded up to a multiple; distinct, below the size, and in descending order."""
    parts = {-(-round(size * share, 6) // multiple) * multiple for share in shares}
    return sorted((int(part) for part in parts if 0 < part < size), reverse=True)
