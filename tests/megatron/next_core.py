"""A simulation of Megatron-Core after Megatron-LM #6313, as far as it differs for a layer spec.

`HybridModel` passes the stack a config for each layer instead of its symbol, and `HybridStack` builds each layer by the
exact class of its config and runs layers and configs together. The rest is the Megatron-Core that is installed.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.hybrid import hybrid_layer_allocation, hybrid_model
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor

from nemo_ext.megatron.specs import BlockStack


class MambaLayerConfig(TransformerConfig):
    """Config of a block `M`."""


class AttentionLayerConfig(TransformerConfig):
    """Config of a block `*`."""


class MLPLayerConfig(TransformerConfig):
    """Config of a block `-`."""


class MoELayerConfig(TransformerConfig):
    """Config of a block `E`."""


CONFIGS: dict[str, type[TransformerConfig]] = {
    "M": MambaLayerConfig,
    "*": AttentionLayerConfig,
    "-": MLPLayerConfig,
    "E": MoELayerConfig,
}
SLOTS = {"M": "mamba_layer", "*": "attention_layer", "-": "mlp_layer", "E": "moe_layer"}


def symbols_of(configs: Sequence[TransformerConfig]) -> list[str]:
    """Symbols of the layers with these configs."""
    symbols = {kind: symbol for symbol, kind in CONFIGS.items()}
    return [symbols[type(config)] for config in configs]


def configs_of(symbols: str, config: TransformerConfig) -> list[TransformerConfig]:
    """A config for each layer, all with the model's values."""
    configs = []
    for symbol in symbols:
        own = copy.copy(config)
        own.__class__ = CONFIGS[symbol]
        configs.append(own)
    return configs


class NextStack(HybridStack):
    """HybridStack with the constructor of the next Megatron-Core."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        pre_process: bool = True,
        layer_type_list: list[str] | None = None,
        pp_layer_offset: int = 0,
        post_layer_norm: bool = True,
        post_process: bool = True,
        dtype: torch.dtype | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        layer_config_list: Sequence[TransformerConfig] | None = None,
        hash_moe_layer_threshold: int | None = None,
    ) -> None:
        if (layer_type_list is None) == (layer_config_list is None):
            raise ValueError("Exactly one of layer_type_list or layer_config_list must be provided")
        if layer_type_list is not None:
            warnings.warn("layer_type_list is deprecated", DeprecationWarning, stacklevel=2)
            layer_config_list = configs_of("".join(layer_type_list), config)
        assert layer_config_list is not None
        MegatronModule.__init__(self, config)
        self.pre_process, self.post_process, self.post_layer_norm = pre_process, post_process, post_layer_norm
        self.is_mtp_layer, self.pg_collection, self.input_tensor = is_mtp_layer, pg_collection, None
        self.pp_group, self.tp_group = pg_collection.pp, pg_collection.tp
        self.layer_config_list = list(layer_config_list)
        self.layers = torch.nn.ModuleList()
        attention = {"is_mtp_layer": is_mtp_layer, "add_layer_offset": False, "pp_layer_offset": pp_layer_offset}
        others = {
            MambaLayerConfig: {"pp_layer_offset": pp_layer_offset},
            AttentionLayerConfig: attention,
            MLPLayerConfig: {"add_layer_offset": False},
            MoELayerConfig: {"add_layer_offset": False, "is_mtp_layer": is_mtp_layer},
        }
        for number, own in enumerate(self.layer_config_list, start=pp_layer_offset + 1):
            spec, given = getattr(submodules, SLOTS[symbols_of([own])[0]]), others[type(own)]
            with get_fp8_context(own, number - 1, is_init=True) if own.fp8 else nullcontext():
                self.layers.append(
                    build_module(spec, config=own, layer_number=number, pg_collection=pg_collection, name=name, **given)
                )
        self.num_layers_per_pipeline_rank = len(self.layers)
        assert not (post_process and post_layer_norm), "upstream builds Transformer Engine's norm here"

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        inference_context: Any = None,
        rotary_pos_emb: torch.Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the layers in order, each in the FP8 context of its config."""
        hidden = hidden_states if self.pre_process else self.input_tensor
        common = {"attention_mask": attention_mask, "inference_context": inference_context}
        common["packed_seq_params"] = packed_seq_params
        for config, layer in zip(self.layer_config_list, self.layers, strict=True):
            more = {"rotary_pos_emb": rotary_pos_emb, "sequence_len_offset": None, "padding_mask": padding_mask}
            with get_fp8_context(config, layer.layer_number - 1) if self.config.fp8 else nullcontext():
                output = layer(hidden_states=hidden, **common, **(more if isinstance(layer, TransformerLayer) else {}))
            hidden = output[0] if isinstance(output, tuple) else output
        if self.post_process and self.post_layer_norm:
            hidden = self.final_norm(hidden)
        return make_viewless_tensor(inp=hidden, requires_grad=hidden.requires_grad, keep_graph=True)

    @property
    def layer_type_list(self) -> list[str]:
        """Symbols of the layers, for code that reads them."""
        return symbols_of(self.layer_config_list)


@contextmanager
def applied() -> Iterator[None]:
    """Connect `HybridModel` and our stack as in the next Megatron-Core."""
    validate = hybrid_layer_allocation.validate_segment_layers

    def validate_next(segment: str, config: TransformerConfig | None = None) -> list[Any]:
        symbols = validate(segment)  # without a config: a call of the HybridModel that is installed
        return symbols if config is None else configs_of("".join(symbols), config)

    def build_next(spec: Any, config: TransformerConfig, *, layer_type_list: list[str], **others: Any) -> Any:
        configs = configs_of("".join(layer_type_list), config)
        return build_module(spec, config, layer_config_list=configs, hash_moe_layer_threshold=None, **others)

    assert "layer_config_list" not in inspect.signature(HybridStack).parameters, "installed now: test that one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_model, "build_module", build_next)
        patch.setattr(hybrid_layer_allocation, "validate_segment_layers", validate_next)
        patch.setattr(hybrid_layer_allocation, "get_layer_type_list_from_layer_config_list", symbols_of, raising=False)
        bases, BlockStack.__bases__ = BlockStack.__bases__, (NextStack,)
        try:
            yield
        finally:
            BlockStack.__bases__ = bases
