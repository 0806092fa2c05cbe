"""Child that consists of the chosen variants: its description, and its checkpoint, assembled from parent and blocks."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import Architecture
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.parameters import Piece, rows
from nemo_ext.checkpoint.torch_dist import TorchDistReader
from nemo_ext.checkpoint.writing import Slot, Work
from nemo_ext.puzzle.stages.library import Library
from nemo_ext.puzzle.variants import KEEP, Variant


def child(parent: Description, choice: Sequence[Variant]) -> Description:
    """Return the description of a child, which has the parent's depths of multi-token prediction.

    Args:
        choice: one variant for each of the parent's blocks, in order.

    Raises:
        ValueError: the choice is not one variant per block, or the child has no block.
    """
    if [variant.number for variant in choice] != list(range(len(parent.blocks))):
        raise ValueError(
            f"a child needs one variant for each of the {len(parent.blocks)} blocks, in order, but the choice has "
            f"variants of blocks {[variant.number + 1 for variant in choice]}"
        )
    blocks = tuple(_shortened(parent.architecture, v.block) for v in choice if v.block is not None)
    if not blocks:
        raise ValueError("the child has no block, as every chosen variant is a no-op: loosen a limit of puzzle.search")
    pattern = parent.architecture.pattern
    architecture = parent.architecture.with_pattern(replace(pattern, blocks=blocks, cuts=()))
    routed = any(block.kind == "E" and not block.is_linear for block in (*blocks, *pattern.mtp))
    return replace(
        parent,
        architecture=architecture,
        router=parent.router if routed else None,
        hf_layers=None,
        hf_layer_count=None,
    )


def _shortened(architecture: Architecture, block: Block) -> Block:
    """Return the block without the values that it would get from the model's architecture anyway."""
    values = dict(block.values)
    for name, _ in block.values:
        # If the model sets windows by layer number, a block that changes its number keeps its window.
        if name == "window" and architecture.window_attn_skip_freq is not None:
            continue
        without = Block(block.kind, tuple((key, value) for key, value in values.items() if key != name))
        if architecture.resolved(without, layer=1) == block:
            values = dict(without.values)
    return Block(block.kind, tuple(values.items()))


def realise(reader: TorchDistReader, parent: Description, choice: Sequence[Variant], library: Library) -> list[Work]:
    """Return work items that write a child's checkpoint: kept blocks and MTP from the parent, others from the library.

    Args:
        choice: one variant for each block.
        library: library of initial or trained weights.
    """
    kept = [variant for variant in choice if variant.block is not None]
    work = []
    for row in rows(child(parent, choice), stacked_experts=True):
        for piece in row.pieces:
            number = row.block if row.block is not None and row.block < len(kept) else None  # others are of MTP
            variant = None if number is None else kept[number]
            work.append(_work(reader, library, variant, piece, number))
    return work


def _work(reader: TorchDistReader, library: Library, variant: Variant | None, piece: Piece, number: int | None) -> Work:
    name = piece.key if number is None else piece.key.removeprefix(f"decoder.layers.{number}.")
    if variant is None or variant.name == KEEP:
        source = name if variant is None else f"decoder.layers.{variant.number}.{name}"
        return Work((Slot(piece, reader.tensors[source].dtype),), lambda: [reader.read(source)], (source,))
    dtype = reader.tensors["embedding.word_embeddings.weight"].dtype
    return Work((Slot(piece, dtype),), lambda: [library.read(variant)[name]], (str(library.file(variant)),))
