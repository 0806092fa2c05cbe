"""Block-by-block access to a parent model: recording block inputs, replacing blocks, partial forward passes.

All passes use Megatron's layers and HybridModel's forward method; only the list of layers changes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.pattern import Pattern, parse
from nemo_ext.architecture.pattern import format as format_pattern
from nemo_ext.megatron.session import put_tensors, take_tensors

Replaced = Mapping[int, torch.nn.Module | None]
"""Mapping from 0-based block numbers to the layers that replace these blocks; None skips the block."""


class Parent:
    """Parent model without pipeline stages, replicated on every rank or with sharded blocks (`blockwise.sharded`).

    If the blocks are sharded, all methods that run or read a block are collective.

    Args:
        model: Megatron's HybridModel.
        model_config: the `BlockModelConfig` that it was built from.

    Attributes:
        share: function that shards a layer in the same way as the model's; None if blocks are replicated.
        shared: one context manager per block that gathers its weights; empty if blocks are replicated.
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self.model = model.eval()
        self.model_config = model_config
        self.layers: list[torch.nn.Module] = list(model.decoder.layers)
        self.share: Callable[[torch.nn.Module], Any] | None = None
        self.shared: list[Any] = []

    def gathered(self, number: int) -> AbstractContextManager[object]:
        """Return a context in which the weights of a block (0-based number) are gathered."""
        return self.shared[number] if self.shared else nullcontext()

    @property
    def device(self) -> torch.device:
        """Device of the model; tokens passed to the methods must be on it."""
        return next(iter(self.model.parameters())).device

    def tensors(self, number: int, *, wanted: bool = True) -> dict[str, Tensor]:
        """Copy a block's weights, keyed by their names in Megatron's checkpoint after `decoder.layers.N.`.

        Args:
            number: 0-based number of the block.
            wanted: False on a rank that only takes part in gathering the block; it gets an empty dictionary.
        """
        prefix = f"decoder.layers.{number}."
        with self.gathered(number):
            if not wanted:
                return {}
            return {name.removeprefix(prefix): t for name, t in take_tensors(self.layers[number], prefix).items()}

    def layer(self, number: int, block: Block, tensors: Mapping[str, Tensor]) -> torch.nn.Module:
        """Build Megatron's layer for a block that replaces block `number`, with given weights.

        Args:
            number: 0-based number of the replaced block, which determines settings that depend on the position.
            block: the replacement with all of its values.
            tensors: weights, keyed by their names after `decoder.layers.N.`.
        """
        layer = self.fresh(number, block)
        prefix = f"decoder.layers.{number}."
        put_tensors(layer, {prefix + name: tensor for name, tensor in tensors.items()}, prefix)
        return layer

    def fresh(self, number: int, block: Block) -> torch.nn.Module:
        """Build the layer that `layer` builds for this number and block, but with newly initialised weights."""
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.spec_utils import build_module

        blocks = list(parse(self.model_config.pattern).blocks)
        blocks[number] = block
        model_config = replace(self.model_config, pattern=format_pattern(Pattern(tuple(blocks))))
        stack = build_module(
            model_config.stack_spec(),
            model_config.transformer,
            layer_type_list=[block.kind],
            pp_layer_offset=number,
            post_layer_norm=False,
            pre_process=True,
            post_process=False,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        (layer,) = stack.layers
        module: torch.nn.Module = layer.to(self.device).eval()
        return module

    @contextmanager
    def recorded(self, numbers: Collection[int] | None = None) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Record the inputs and outputs of blocks in all forward passes in the context.

        Args:
            numbers: 0-based numbers of the blocks; None for all. Recorded tensors stay in memory.

        Yields:
            List to which an (input, output) pair, each `[seq, batch, hidden]`, is appended whenever a block is run.
        """
        record: list[tuple[Tensor, Tensor]] = []

        def note(layer: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            record.append((kwargs["hidden_states"], output[0] if isinstance(output, tuple) else output))

        layers = [layer for number, layer in enumerate(self.layers) if numbers is None or number in numbers]
        hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
        try:
            yield record
        finally:
            for hook in hooks:
                hook.remove()

    def hidden(self, tokens: Tensor, replaced: Replaced | None = None) -> Tensor:
        """Compute the hidden states `[seq, batch, hidden]` before the output layer from tokens `[batch, seq]`.

        `replaced` maps 0-based block numbers to layers to run instead; None skips the block.
        """
        with self._layers(0, replaced or {}):
            return self._run(tokens)

    def run_to(self, last: int, tokens: Tensor, first: int = 0, hidden: Tensor | None = None) -> None:
        """Run tokens `[batch, seq]` through the blocks up to number `last`, so that `recorded` records their inputs.

        If `hidden` `[seq, batch, hidden]`, the input of block `first`, is given, the pass starts at that block.
        """
        with self._layers(first, {}, last):
            self._run(tokens if hidden is None else None, hidden)

    def hidden_from(self, first: int, hidden: Tensor, replaced: Replaced | None = None) -> Tensor:
        """Compute the hidden states before the output layer from the input of block `first`.

        Both are `[seq, batch, hidden]`; see `Parent.hidden` for `replaced`.
        """
        with self._layers(first, replaced or {}):
            return self._run(None, hidden)

    def each_hidden_from(self, first: int, hidden: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the results of `hidden_from` for several inputs of block `first`, gathering each sharded block once."""
        if self.shared:
            states = [*hidden]
            for number in range(first, len(self.layers)):
                with self.gathered(number):
                    for place, each in enumerate(states):  # one at a time, to avoid holding all of them twice
                        states[place] = self.block_output(number, each, self.layers[number])
            first, hidden = len(self.layers), states
        for each in hidden:
            yield self.hidden_from(first, each)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Compute logits `[batch, seq, vocabulary]` from the hidden states before the output layer."""
        model = self.model
        tied = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        return model.output_layer(hidden, weight=tied)[0].transpose(0, 1)

    def logits(self, tokens: Tensor, replaced: Replaced | None = None) -> Tensor:
        """Compute logits `[batch, seq, vocabulary]` from tokens `[batch, seq]`; see `Parent.hidden` for `replaced`."""
        return self.logits_of(self.hidden(tokens, replaced))

    def block_output(self, number: int, hidden: Tensor, layer: torch.nn.Module | None) -> Tensor:
        """Run `layer` on `hidden`, the `[seq, batch, hidden]` input of block `number`; None returns `hidden`.

        The layer runs in a stack of one layer, without the final norm, because the stack provides RoPE and masks.
        """
        if layer is None:
            return hidden
        decoder = self.model.decoder
        saved = decoder.post_layer_norm
        with self._layers(number, {number: layer}, last=number):
            decoder.post_layer_norm = False
            try:
                return self._run(None, hidden)
            finally:
                decoder.post_layer_norm = saved

    def _run(self, tokens: Tensor | None, hidden: Tensor | None = None) -> Tensor:
        """Run HybridModel's forward pass without its output layer; return hidden states `[seq, batch, hidden]`.

        The input is tokens `[batch, seq]`, or if they are None, `hidden` as the first layer's input.
        """
        from nemo_ext.megatron.transformer_engine import explained

        if tokens is None:
            assert hidden is not None
            # Only the shape of these tokens is used: the embedding is bypassed.
            tokens = torch.zeros(hidden.shape[1], hidden.shape[0], dtype=torch.long, device=hidden.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        head, self.model.post_process = self.model.post_process, False
        try:
            with explained():
                return self.model(tokens, positions, None, decoder_input=hidden)
        finally:
            self.model.post_process = head

    @contextmanager
    def _layers(self, first: int, replaced: Replaced, last: int | None = None) -> Iterator[None]:
        """Restrict the decoder in the context to the blocks from `first` to `last`; None for the final block.

        `replaced` maps 0-based block numbers to layers that take the blocks' place; None skips the block.
        """
        end = len(self.layers) if last is None else last + 1
        chosen = [replaced.get(n, self.layers[n]) for n in range(first, end)]
        decoder = self.model.decoder
        whole = decoder.layers
        decoder.layers = torch.nn.ModuleList(layer for layer in chosen if layer is not None)
        try:
            yield
        finally:
            decoder.layers = whole
