"""Block classes that a `HybridStack` builds: Megatron's own layers, each with its block's own sizes.

`HybridStack` passes every layer a config and the layer's global 1-based number. Each class here copies the config, sets
the values that the pattern notation gives the block (`*{kv=4}`, `-{ffn=5376}`), and calls Megatron's constructor. In
Megatron-Core versions with a config per layer, that config already has the values (`specs.BlockStack`), and these
classes only choose between Megatron's sub-layer and a linear map.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from torch import Tensor

from nemo_ext.architecture.blocks import LINEAR

Overrides = Mapping[int, Mapping[str, object]]
"""Mapping from 1-based global layer numbers to TransformerConfig fields (and `linear`), from `pattern.compile`."""


def block_config(config: TransformerConfig, values: Mapping[str, object]) -> TransformerConfig:
    """Return one block's config: `config` itself if the block has no values, or a shallow copy with `values` set.

    Raises:
        ValueError: a name in `values` is not a field of the config.
    """
    fields = {name: value for name, value in values.items() if name != LINEAR}
    if not fields:
        return config
    changed = copy.copy(config)
    for name, value in fields.items():
        if not hasattr(changed, name):
            raise ValueError(
                f"{name}={value!r} of a block is not a field of {type(config).__name__}: remove it from the block's "
                "overrides"
            )
        setattr(changed, name, value)
    return changed


class _Block(MegatronModule):
    """Base class of the blocks: builds Megatron's layer with the config and submodules that suit the block's values."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int = 1,
        *args: Any,
        overrides: Overrides,
        linear_submodules: Any,
        **kwargs: Any,
    ) -> None:
        values = overrides.get(layer_number, {})
        chosen = linear_submodules if values.get(LINEAR) else submodules
        super().__init__(block_config(config, values), chosen, layer_number, *args, **kwargs)


class MambaBlock(_Block, MambaLayer):
    """Mamba-2 block (`M`) with its own heads, head size, state and groups, or one linear map (`M{linear}`)."""


class AttentionBlock(_Block, TransformerLayer):
    """Attention block (`*`) with its own heads, KV heads, head size and window, or one linear map."""


class MLPBlock(_Block, MLPLayer):
    """Dense FFN block (`-`): an MLP with its own width, or a single linear layer."""


class MoEBlock(_Block, MoETransformerLayer):
    """Mixture-of-experts block (`E`) with its own experts, top-k and widths, or one linear map."""


class ReplicatedLinear(torch.nn.Module):
    """Linear map without bias, with its whole weight on every tensor-parallel rank (Transformer Engine's `duplicated`).

    Under sequence parallelism, each rank maps its slice of the sequence, and Megatron sums the weight's gradient over
    the group because it is marked `sequence_parallel`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any] | None,
        bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("latent experts with model.backend=local require megatron.disable_bias_linear=true")
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            assert init_method is not None
            init_method(self.weight)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Map `[..., input]` to `[..., output]`; mask, rotary and cache arguments are ignored."""
        return self._forward_impl(hidden_states, self.weight, None), None

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the product; named as in Megatron's linear layers, so that `float8_modules` can replace it too."""
        return torch.nn.functional.linear(input, weight, bias)


class LinearReplacement(ReplicatedLinear):
    """Linear map `hidden x hidden` in place of a mixer or FFN (Puzzle's linear-replaced blocks).

    It can replace any mixer, self-attention or MLP that Megatron builds, and like these returns `(output, None)`.
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        hidden = config.hidden_size
        super().__init__(hidden, hidden, config=config, init_method=config.output_layer_init_method)


class LocalMoELayer(MoELayer):
    """Megatron's MoE layer, whose latent projections (LatentMoE) do not require Transformer Engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with patch.multiple(moe_layer, HAVE_TE=True, TELinear=ReplicatedLinear):
            super().__init__(*args, **kwargs)


def with_output_norm(linear: type[RowParallelLinear], norm: LayerNormBuilder) -> type[RowParallelLinear]:
    """Return a row-parallel linear class that normalises its output before the residual add, as in OLMo 2 and 3.

    The norm is the submodule `output_norm`, so a checkpoint holds `linear_proj.output_norm.weight`. The linear layer
    must have no bias, because Megatron would add it only after the layer, and thus after the norm.
    """

    class RowParallelLinearWithOutputNorm(linear):
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, bias: bool, **kwargs: Any):
            if bias:
                raise ValueError("model.norm_placement=output requires megatron.disable_bias_linear=true")
            super().__init__(input_size, output_size, config=config, bias=bias, **kwargs)
            self.output_norm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(x)
            return self.output_norm(output), bias

    return RowParallelLinearWithOutputNorm
