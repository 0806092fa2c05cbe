"""One layer of a parent in Megatron's static inference, with its generation cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nemo_ext.blockwise.parent import Parent


class Inference:
    """Static inference with a model whose stack is reduced to one layer or the final norm (see `open_inference`).

    Args:
        decoder: the reduced stack.
        rotary: the model's rotary embedding for `length` tokens; None if it has none.
        length: cache capacity in tokens per sequence.
    """

    def __init__(self, decoder: Any, rotary: Tensor | None, *, batch: int, length: int) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        self.decoder, self.rotary = decoder, rotary
        self.context = StaticInferenceContext(batch, length)

    def __call__(self, hidden: Tensor, *, start: int) -> Tensor:
        """Run hidden states `[seq, batch, hidden]` through the stack, and return its output, of the same shape.

        `start` is their 0-based position in the sequences; the cache holds the tokens before it.
        """
        self.at(start)
        return self.decoder(hidden, None, inference_context=self.context, rotary_pos_emb=self.rotary)

    def at(self, start: int) -> None:
        """Set the number of tokens in the cache."""
        self.context.sequence_len_offset = start
        self.context.decode_mode = start > 0

    @property
    def cache(self) -> list[Tensor]:
        """Allocated cache tensors: keys and values, or convolution and scan states."""
        return [tensor for pair in self.context.key_value_memory_dict.values() for tensor in pair]

    def fill(self) -> None:
        """Fill the cache with random numbers, as uninitialised values may be slow to compute with."""
        for tensor in self.cache:
            tensor.normal_()


@contextmanager
def open_inference(parent: Parent, layer: torch.nn.Module | None, *, batch: int, length: int) -> Iterator[Inference]:
    """Put the parent into static inference with only one layer and no final norm, until the context ends.

    Args:
        layer: the layer to run; None to run only the final norm.
        length: cache capacity in tokens per sequence.
    """
    from megatron.core.inference.utils import InferenceMode

    decoder = parent.model.decoder
    whole, norm = decoder.layers, decoder.post_layer_norm
    decoder.layers = torch.nn.ModuleList([] if layer is None else [layer])
    decoder.post_layer_norm = norm and layer is None
    try:
        with torch.no_grad(), InferenceMode.active(), _decodes_batches(layer):
            yield Inference(decoder, _rotary(parent.model, length), batch=batch, length=length)
    finally:
        decoder.layers, decoder.post_layer_norm = whole, norm


def _rotary(model: Any, length: int) -> Tensor | None:
    """Rotary embedding that HybridModel computes once and passes to all blocks; None if it uses none."""
    if model.position_embedding_type not in ("rope", "yarn"):
        return None
    embedding = model.rotary_pos_emb(length)
    return embedding[0] if isinstance(embedding, tuple) else embedding


@contextmanager
def _decodes_batches(layer: Any) -> Iterator[None]:
    """Make static decoding of a Mamba-2 layer correct for more than one sequence.

    Megatron-Core passes `[1, batch, width]` to a function that expects `[batch, 1, width]`: without this, the sequences
    of a batch are treated as tokens of one sequence (core/ssm/mamba_mixer.py: `_decode`, in 0.20 `_static_decode`).
    """
    mixer = getattr(layer, "mixer", None)
    name = "ssm_decode" if hasattr(mixer, "ssm_decode") else "_ssm_decode"  # since 0.20; until 0.19
    step = getattr(mixer, name, None)
    if step is None:
        yield
        return

    def batch_first(projected: Tensor, conv_state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if projected.shape[0] == conv_state.shape[0]:
            return step(projected, conv_state, *args, **kwargs)
        return step(projected.transpose(0, 1), conv_state, *args, **kwargs).transpose(0, 1)

    setattr(mixer, name, batch_first)
    try:
        yield
    finally:
        delattr(mixer, name)
