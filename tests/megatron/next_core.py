"""A stand-in for Megatron-Core after Megatron-LM #6313, where it differs for a layer spec.

`HybridModel` passes the stack a config for each layer instead of its symbol, and `HybridStack` builds each layer by the
exact class of its config. The rest is the Megatron-Core that is installed.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core.models.hybrid import hybrid_layer_allocation, hybrid_model
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.spec_utils import build_module

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
    """A config for each layer, all with the values of the model's."""
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
        self.layer_config_list = layer_config_list
        self.layers = torch.nn.ModuleList()
        attention = {"is_mtp_layer": is_mtp_layer, "add_layer_offset": False, "pp_layer_offset": pp_layer_offset}
        others = {
            MambaLayerConfig: {"pp_layer_offset": pp_layer_offset},
            AttentionLayerConfig: attention,
            MLPLayerConfig: {"add_layer_offset": False},
            MoELayerConfig: {"add_layer_offset": False, "is_mtp_layer": is_mtp_layer},
        }
        for number, (symbol, own) in enumerate(
            zip(symbols_of(layer_config_list), layer_config_list, strict=True), start=pp_layer_offset + 1
        ):
            spec, given = getattr(submodules, SLOTS[symbol]), others[type(own)]
            layer = build_module(spec, config=own, layer_number=number, pg_collection=pg_collection, name=name, **given)
            self.layers.append(layer)
        self.num_layers_per_pipeline_rank = len(self.layers)
        assert not (post_process and post_layer_norm), "upstream builds Transformer Engine's norm here"

    @property
    def layer_type_list(self) -> list[str]:
        """Symbols of the layers, for code that reads them."""
        return symbols_of(self.layer_config_list)


@contextmanager
def applied() -> Iterator[None]:
    """Let `HybridModel` and our stack meet as they do in the next Megatron-Core."""
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
