"""Block library: weights of the variants of all blocks, one file per variant.

    FOLDER/block_003/ffn256.safetensors     tensors, named as in Megatron's checkpoint after `decoder.layers.N.`

Existing files are reused. `keep` and `no_op` need no file.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import conv1d, silu

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.pattern import parse
from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent
from nemo_ext.checkpoint.description import Description
from nemo_ext.puzzle.stages.initialise import Importance, initial_weights
from nemo_ext.puzzle.variants import KEEP, NO_OP, Variant

BLOCK = "block"


@dataclass(frozen=True)
class Library:
    """Folder with the weights of variants.

    Attributes:
        initial: whether it has initial weights, which do not depend on the number of experts per token, so that
            variants with different numbers share a file.
    """

    folder: Path
    initial: bool = False

    def file(self, variant: Variant) -> Path:
        """Return the path of a variant's weights; block numbers in names are 1-based.

        Earlier versions wrote initial weights for each number of experts per token; such a file is used if it exists.
        """
        folder = self.folder / f"block_{variant.number + 1:03d}"
        own = folder / f"{variant.name}.safetensors"
        shared = folder / f"{variant.weights}.safetensors" if self.initial else own
        return own if own.is_file() and not shared.is_file() else shared

    def _weights_of(self, block: Block | None) -> tuple[str, dict[str, int]] | None:
        """Return a block's kind and the values on which its weights in the library depend.

        Values that are none are omitted, as files of earlier versions do not mention values introduced later.
        """
        if block is None:
            return None
        return block.kind, {
            name: value for name, value in block.values if value and not (self.initial and name == "topk")
        }

    def has(self, variant: Variant) -> bool:
        """Return whether a variant's weights are in the library or not needed."""
        return variant.name in (KEEP, NO_OP) or self.file(variant).is_file()

    def write(self, variant: Variant, tensors: dict[str, Tensor], **notes: str) -> None:
        """Write a variant's weights, with `notes` as metadata, by atomic rename."""
        file = self.file(variant)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}")
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            unfinished,
            metadata={**notes, BLOCK: str(variant.block), "format": "pt"},
        )
        unfinished.replace(file)

    def read(self, variant: Variant) -> dict[str, Tensor]:
        """Read the weights of a variant.

        Raises:
            ValueError: they are not in the library, or belong to another block.
        """
        made_of = self.notes(variant).get(BLOCK)
        if made_of is None or self._weights_of(parse(made_of).blocks[0]) != self._weights_of(variant.block):
            raise ValueError(
                f"{self.file(variant)} holds weights of {made_of}, not of {variant.block}: remove it, or use "
                "another folder"
            )
        return load_file(self.file(variant))

    def notes(self, variant: Variant) -> dict[str, str]:
        """Read the metadata of a variant's weights; raises ValueError if they are not in the library."""
        if not self.file(variant).is_file():
            raise ValueError(f"{self.file(variant)} is missing from the library: run the stage `library` first")
        with safe_open(self.file(variant), framework="pt") as opened:
            metadata: dict[str, str] = opened.metadata()
        return metadata

    def layer(self, parent: Parent, variant: Variant) -> torch.nn.Module | None:
        """Build a variant's layer with its weights; return None for a no-op."""
        if variant.block is None:
            return None
        if variant.name == KEEP:
            return parent.layers[variant.number]
        return parent.layer(variant.number, variant.block, self.read(variant))


def build(
    parent: Parent,
    description: Description,
    by_block: Sequence[Sequence[Variant]],
    library: Library,
    *,
    calibration: Sequence[Tensor],
    advance: Callable[[int], None] = lambda count: None,
) -> int:
    """Build the missing variants, and return their number.

    Args:
        by_block: variants of each block, from `variants`.
        calibration: this rank's tokens `[batch, seq]` for measuring importance; empty to use the norms of weights.
        advance: called after every block with its number of variants.
    """
    missing = data_parallel.agreed(
        lambda: [(v.number, v.name) for each in by_block for v in each if not library.has(v)]
    )
    measured = importance(parent, description, calibration) if missing and calibration else {}

    turns = cycle(range(data_parallel.count()))
    for number, block_variants in enumerate(by_block):
        new = [variant for variant in block_variants if (variant.number, variant.name) in missing]
        if new:
            mine = next(turns) == data_parallel.number()
            tensors = {name: t.cpu() for name, t in parent.tensors(number, wanted=mine).items()}
            for variant in new if mine else ():
                if library.has(variant):  # written for another number of experts per token
                    continue
                assert variant.block is not None
                block = description.blocks[number]
                weights = initial_weights(block, variant.block, tensors, description.architecture, measured.get(number))
                library.write(variant, weights)
        advance(len(block_variants))
    data_parallel.wait()
    return len(missing)


def importance(parent: Parent, description: Description, calibration: Sequence[Tensor]) -> dict[int, Importance]:
    """Measure the importance of channels, experts, heads and states of every block on calibration data.

    MLP channels: mean of |activation| x norm of the channel's output column (Puzzle, section 3.2). Heads of attention
    and Mamba-2: root mean square of the head's output x norm of its columns. Entries of a Mamba-2 state: product of the
    root mean squares of B and C. Experts: total router weight.

    Returns:
        Mapping from 0-based block numbers to importance; linear blocks are omitted.
    """
    sums: dict[tuple[int, str], Tensor] = {}
    with ExitStack() as hooks, torch.no_grad():
        for number, name, module, measure in _measured_modules(parent, description):

            def add(module: Any, args: Any, output: Any, key: Any = (number, name), measure: Any = measure) -> None:
                value = measure(args, output)
                sums[key] = sums.get(key, torch.zeros_like(value)) + value

            hooks.callback(module.register_forward_hook(add).remove)
        for tokens in calibration:
            parent.hidden(tokens)
    result: dict[int, Importance] = {}
    for (number, name), local_sum in sums.items():
        total = data_parallel.summed(local_sum).cpu()
        block = description.blocks[number]
        layer: Any = parent.layers[number]
        if name == "channels":
            with parent.gathered(number):
                total = total * _columns(layer.mlp.linear_fc2)
        elif name == "heads":
            output = layer.mixer.out_proj if block.kind == "M" else layer.self_attention.linear_proj
            with parent.gathered(number):
                total = (total.sqrt() * _columns(output)).reshape(block.size("heads"), -1).sum(1)
        elif name == "state":
            total = total.sqrt().reshape(2, block.size("groups"), -1).prod(0)
        result[number] = replace(result.get(number, Importance()), **{name: total})
    return result


def _measured_modules(parent: Parent, description: Description) -> Iterator[tuple[int, str, Any, Any]]:
    """Yield what to measure: the block's number, the field of `Importance`, the module, and a function.

    The function computes the importance, summed over tokens, from the module's arguments and output in a forward pass.
    """

    def squares(args: Any, output: Any) -> Tensor:
        return args[0].float().square().flatten(0, -2).sum(0)

    for number, block in enumerate(description.blocks):
        layer: Any = parent.layers[number]
        if block.is_linear:
            continue
        if block.kind == "-":
            module = layer.mlp.linear_fc2
            yield number, "channels", module, lambda args, output: args[0].float().abs().flatten(0, -2).sum(0)
        elif block.kind == "*":
            yield number, "heads", layer.self_attention.linear_proj, squares
        elif block.kind == "M":
            yield number, "heads", layer.mixer.out_proj, squares
            yield number, "state", layer.mixer.in_proj, partial(_states, layer.mixer, block)
        elif block.kind == "E":
            # The router's first output is the weight of every expert for every token, `[tokens, experts]`.
            yield number, "experts", layer.mlp.router, lambda args, output: output[0].float().flatten(0, -2).sum(0)


def _states(mixer: Any, block: Block, args: Any, output: Any) -> Tensor:
    """Return the sum over tokens of the squares of a Mamba-2 block's B and C, `[2 x groups x state]`.

    Args:
        block: the block with all values filled in.
        output: its output, whose first element is `[seq, batch, z | x | B | C | dt]`, before the convolution.
    """
    inner = block.size("heads") * block.size("head_dim")
    part = slice(inner, inner + 2 * block.size("groups") * block.size("state"))
    weight, bias = mixer.cp.get_conv1d_weight()[part], mixer.cp.get_conv1d_bias()[part]
    values = output[0][..., inner + part.start : inner + part.stop].permute(1, 2, 0)
    width = weight.shape[-1] - 1
    return (
        silu(conv1d(values, weight, bias, padding=width, groups=len(weight))[..., : -width or None])
        .float()
        .square()
        .sum((0, 2))
    )


@torch.no_grad()
def _columns(linear: Any) -> Tensor:
    weight: Tensor = linear.weight
    return weight.float().norm(dim=0).cpu()
