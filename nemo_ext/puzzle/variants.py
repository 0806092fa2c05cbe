"""Variants of each of a parent's blocks (Puzzle, arXiv:2411.19146; Llama-Nemotron paper, section 2.1).

A variant is a block in pattern notation, or a no-op. Variants do not depend on neighbouring blocks, so a library grows
with the number of blocks, not with the number of combinations of attention and FFN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

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
        kv: fractions of the KV heads.
        windows: sliding windows in tokens.
        ffn: fractions of the FFN width (the paper's 87, 75, 50, 25, 10 %).
        ffn_multiple: multiple to which widths are rounded up (256 in Puzzle, which suits tensor cores and FP8).
        experts: fractions of a MoE block's experts.
        top_k: smaller numbers of experts per token.
        expert_ffn: fractions of an expert's width.
        latent: fractions of a MoE block's latent width, rounded up like FFN widths.
        mamba_heads: fractions of a Mamba-2 block's heads.
        linear: True to include variants that replace a block with a single linear map.
        no_op: True to include variants that remove a block.
    """

    kv: Shares = (0.5, 0.25, 0.125)
    windows: tuple[PositiveInt, ...] = ()
    ffn: Shares = (0.87, 0.75, 0.5, 0.25, 0.1)
    ffn_multiple: PositiveInt = 256
    experts: Shares = (0.75, 0.5, 0.25)
    top_k: tuple[PositiveInt, ...] = ()
    expert_ffn: Shares = (0.75, 0.5)
    latent: Shares = ()
    mamba_heads: Shares = (0.75, 0.5, 0.25)
    linear: bool = True
    no_op: bool = True


@dataclass(frozen=True)
class Variant:
    """One alternative for a block.

    Attributes:
        number: 0-based number of the block in the parent.
        name: short name, unique within the block, such as `keep`, `kv2`, `ffn512`, `linear`, `no_op`.
        block: the block with all values filled in; None for a no-op.
    """

    number: int
    name: str
    block: Block | None


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
    if block.kind == "*":
        kv, window = block.size("kv"), block.size("window")
        found = {f"kv{n}": {"kv": n} for n in _parts(kv, choices.kv) if kv % n == 0}
        return found | {f"window{w}": {"window": w} for w in choices.windows if not window or w < window}
    if block.kind == "-":
        return {f"ffn{n}": {"ffn": n} for n in _parts(block.size("ffn"), choices.ffn, choices.ffn_multiple)}
    if block.kind == "M":
        heads, groups = block.size("heads"), block.size("groups")
        return {f"heads{n}": {"heads": n} for n in _parts(heads, choices.mamba_heads, groups)}
    if block.kind == "E":
        experts, top_k, ffn, latent = (block.size(name) for name in ("experts", "topk", "ffn", "latent"))
        fewer = {f"experts{n}": {"experts": n} for n in _parts(experts, choices.experts) if n >= top_k}
        sparser = {f"topk{n}": {"topk": n} for n in choices.top_k if n < top_k}
        narrower = {f"ffn{n}": {"ffn": n} for n in _parts(ffn, choices.expert_ffn, choices.ffn_multiple)}
        low = {f"latent{n}": {"latent": n} for n in _parts(latent, choices.latent, choices.ffn_multiple)}
        return fewer | sparser | narrower | low
    return {}


def _parts(size: int, shares: Sequence[float], multiple: int = 1) -> list[int]:
    """Return fractions of a size, rounded up to a multiple; distinct, below the size, and in descending order."""
    parts = {-(-round(size * share, 6) // multiple) * multiple for share in shares}
    return sorted((int(part) for part in parts if 0 < part < size), reverse=True)
