"""Layer specs of block sequences in Megatron's HybridModel, for the `local` and `transformer_engine` back ends.

A plain Megatron-LM run uses `--spec nemo_ext.megatron.specs hybrid_stack_spec`. `hybrid_stack(...)` builds the same
spec for a pattern with per-block values. The four families differ only in `TransformerConfig` and in a few
`StackOptions` for which upstream has no switch.
"""

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, InferenceSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid import hybrid_layer_allocation
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from nemo_ext.architecture.blocks import LINEAR
from nemo_ext.architecture.pattern import DEPTH, parse
from nemo_ext.architecture.pattern import compile as compile_pattern
from nemo_ext.megatron.attention import BlockSelfAttention, Rotary, SDPACoreAttention
from nemo_ext.megatron.layers import (
    AttentionBlock,
    LinearReplacement,
    LocalMoELayer,
    MambaBlock,
    MLPBlock,
    MoEBlock,
    Overrides,
    block_config,
    with_output_norm,
)
from nemo_ext.megatron.norms import HeadsRMSNorm, LocalNorm


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """Options of the stack that Megatron's TransformerConfig does not have.

    Attributes:
        symbols: plain pattern that the model must have (`|` allowed); empty for any pattern.
        overrides: per-block config values, keyed by 1-based layer number.
        norm_affine: False for norms without weights (OLMo 1).
        norm_placement: `input` (pre-norm) or `output` (on each sub-layer's output before the residual add, OLMo 3).
        qk_norm_scope: whether QK norms (`qk_layernorm`) span each `head` or the full `width` (OLMo 3).
        rotary: rotary embeddings of single blocks, keyed by 1-based layer number; other blocks use the model's.
    """

    symbols: str = ""
    overrides: Overrides = field(default_factory=dict)
    norm_affine: bool = True
    norm_placement: str = "input"
    qk_norm_scope: str = "head"
    rotary: Mapping[int, Rotary] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, allowed in (("norm_placement", ("input", "output")), ("qk_norm_scope", ("head", "width"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}")


class LocalBackend(LocalSpecProvider):
    """Megatron's local back end, with norms and core attention that do not have upstream's limits."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> LayerNormBuilder:
        """Return the builder of all norms, `LocalNorm`; the arguments have no effect."""
        return LocalNorm

    def core_attention(self) -> type:
        """Return the core attention class, based on torch's SDPA: causal, sliding-window and packed."""
        return SDPACoreAttention


def backend(transformer_impl: str, *, setting: str = "transformer_impl") -> BackendSpecProvider:
    """Return the provider of a back end's linear, norm and attention classes; `setting` is the key in error messages.

    Raises:
        ValueError: the name is unknown, or Transformer Engine is not installed.
    """
    if transformer_impl == "local":
        return LocalBackend()
    if transformer_impl == "inference_optimized":
        return InferenceSpecProvider()
    if transformer_impl != "transformer_engine":
        raise ValueError(f"{setting}={transformer_impl}: expected local, transformer_engine or inference_optimized")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            f"{setting}=transformer_engine, but Transformer Engine is not installed here: set {setting}=local, or "
            "install it (`pip install transformer-engine[pytorch]` on a machine with CUDA)"
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # needs the package

    class EngineBackend(TESpecProvider):
        """Transformer Engine's back end, whose norms have the same checkpoint keys as the local back end's."""

        def layer_norm(self, *arguments: Any, **named: Any) -> LayerNormBuilder:
            return partial(_without_extra_state, super().layer_norm(*arguments, **named))

    return EngineBackend()


def _without_extra_state(builder: LayerNormBuilder, *arguments: Any, **named: Any) -> torch.nn.Module:
    """Build a norm without `_extra_state` in checkpoints, which holds FP8 state that norms do not have."""
    norm: Any = builder(*arguments, **named)
    kind = type(norm)
    names = ("get_extra_state", "set_extra_state")
    norm.__class__ = type(kind.__name__, (kind,), {name: getattr(torch.nn.Module, name) for name in names})
    return norm


def norm_builder(config: TransformerConfig, options: StackOptions) -> LayerNormBuilder:
    """Return the builder of the block norms and the final norm."""
    if not options.norm_affine:
        return partial(LocalNorm, affine=False)
    return backend(config.transformer_impl).layer_norm(rms_norm=config.normalization == "RMSNorm")


def stack_submodules(config: TransformerConfig, options: StackOptions) -> HybridStackSubmodules:
    """Return the sub-layers of every block kind for a config and options.

    Both back ends write the same checkpoint keys: where Transformer Engine fuses a norm into the following linear
    layer, the local back end's norm is saved under the fused name.
    """
    parts = backend(config.transformer_impl)
    norm = norm_builder(config, options)
    column, row = parts.column_parallel_linear(), parts.row_parallel_linear()
    block_norm: LayerNormBuilder = norm
    if options.norm_placement == "output":
        block_norm = IdentityOp
        row = with_output_norm(row, norm)
    elif parts.fuse_layernorm_and_linear() and options.norm_affine:
        block_norm = IdentityOp
        column = parts.column_parallel_layer_norm_linear() or column

    def saved_as(norm_name: str, linear_name: str) -> dict[str, str]:
        """Map a norm's key prefix to the one in Transformer Engine's fused layer, for checkpoints.

        The mapping is empty if the norm is not a separate module here.
        """
        return {f"{norm_name}.": f"{linear_name}.layer_norm_"} if block_norm is norm else {}

    q_norm = k_norm = None
    if config.qk_layernorm and options.qk_norm_scope == "width":
        q_norm = partial(HeadsRMSNorm, heads="num_attention_heads")
        k_norm = partial(HeadsRMSNorm, heads="num_query_groups")
    elif config.qk_layernorm:
        q_norm = k_norm = parts.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=True)

    # Upstream's class, without a call of ours per step, unless a block needs more.
    own = {"rotary": options.rotary} if options.rotary or q_norm is not k_norm else {}
    attention = TransformerLayerSubmodules(
        input_layernorm=block_norm,
        self_attention=ModuleSpec(
            module=BlockSelfAttention if own else SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal, **own},
            submodules=SelfAttentionSubmodules(
                linear_qkv=column,
                core_attention=parts.core_attention(),
                linear_proj=row,
                q_layernorm=q_norm,
                k_layernorm=k_norm,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=saved_as("input_layernorm", "self_attention.linear_qkv"),
    )
    mamba = MambaLayerSubmodules(
        norm=block_norm,
        mixer=ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row)),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=saved_as("norm", "mixer.in_proj"),
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=block_norm,
        mlp=partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=saved_as("pre_mlp_layernorm", "mlp.linear_fc1"),
    )
    experts: Any = get_moe_module_spec_for_backend(
        parts, num_experts=config.num_moe_experts or 1, moe_grouped_gemm=config.moe_grouped_gemm
    )
    if config.transformer_impl == "local":
        experts = partial(LocalMoELayer, **experts.keywords)
    moe = TransformerLayerSubmodules(
        pre_mlp_layernorm=norm if options.norm_placement == "input" else IdentityOp,
        mlp=experts,
        mlp_bda=get_bias_dropout_add,
    )

    def block(module: type, submodules: object, linear: object) -> ModuleSpec:
        params = {"overrides": options.overrides, "linear_submodules": linear}
        return ModuleSpec(module=module, params=params, submodules=submodules)

    add, linear = get_bias_dropout_add, LinearReplacement
    linear_mamba = MambaLayerSubmodules(norm=norm, mixer=linear, mamba_bda=add)
    linear_layer = TransformerLayerSubmodules(input_layernorm=norm, self_attention=linear, self_attn_bda=add)
    linear_ffn = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=linear, mlp_bda=add)
    return HybridStackSubmodules(
        mamba_layer=block(MambaBlock, mamba, linear_mamba),
        attention_layer=block(AttentionBlock, attention, linear_layer),
        mlp_layer=block(MLPBlock, mlp, linear_ffn),
        moe_layer=block(MoEBlock, moe, linear_ffn),
    )


class BlockStack(HybridStack):
    """Megatron's HybridStack, with the sub-layers and final norm of the model's back end, chosen at construction.

    Upstream hard-codes Transformer Engine for the final norm. Here the spec has only `options`; the sub-layers are
    chosen from the config that Megatron passes in, so one `--spec` object works for every model and back end.

    Megatron-Core up to 0.19 passes layer symbols (`layer_type_list`), and each block copies the model's config. Later
    versions pass a config per block (`layer_config_list`), in which this class sets the block's values, because
    upstream uses that config to build the block and to enter its FP8 context.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        options: StackOptions,
        layer_type_list: list[str] | None = None,
        layer_config_list: Sequence[TransformerConfig] | None = None,
        pp_layer_offset: int = 0,
        post_layer_norm: bool = True,
        submodules: HybridStackSubmodules | None = None,  # only for HybridModel, which reads `mtp_block_spec` from it
        **kwargs: Any,
    ) -> None:
        symbols, configs = layer_type_list, layer_config_list
        if (symbols is None) == (configs is None):
            raise ValueError(
                f"expected one of layer_type_list and layer_config_list, got {'neither' if symbols is None else 'both'}"
            )
        if symbols is None:
            symbols = hybrid_layer_allocation.get_layer_type_list_from_layer_config_list(configs)
        elif "layer_config_list" in inspect.signature(super().__init__).parameters:
            configs = hybrid_layer_allocation.validate_segment_layers("".join(symbols), config)
        check_pattern(options, symbols, pp_layer_offset, last=kwargs.get("post_process", True))
        layers: dict[str, Any] = {"layer_type_list": symbols}
        if configs is not None:
            values = options.overrides
            numbered = enumerate(configs, start=pp_layer_offset + 1)
            layers = {"layer_config_list": [block_config(block, values.get(number, {})) for number, block in numbered]}
            linear = {number: {LINEAR: True} for number, of_block in values.items() if of_block.get(LINEAR)}
            options = replace(options, overrides=linear)
        self._configs_to_build: Sequence[TransformerConfig] | None = configs
        super().__init__(
            config,
            stack_submodules(config, options),
            **layers,
            pp_layer_offset=pp_layer_offset,
            post_layer_norm=False,
            **kwargs,
        )
        self._configs_to_build = None
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = norm_builder(config, options)(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    @property
    def layer_config_list(self) -> list[TransformerConfig]:
        """Configs of the current layers, which upstream's forward pass iterates over together with the layers.

        They are not stored, because block-wise jobs replace and remove layers after the stack is built.
        """
        building = self._configs_to_build
        return [layer.config for layer in self.layers] if building is None else list(building)

    @layer_config_list.setter
    def layer_config_list(self, configs: Sequence[TransformerConfig]) -> None:
        self._configs_to_build = configs


_SAME_PATTERN = "pass the same pattern to hybrid_stack() and to --hybrid-layer-pattern"


def check_pattern(options: StackOptions, layer_type_list: list[str], offset: int, *, last: bool = False) -> None:
    """Check that a pipeline stage's blocks fit the options.

    Args:
        options: options of the stack.
        layer_type_list: symbols of the stage's blocks.
        offset: number of blocks before the stage.
        last: True for the last stage, which must end where the options' pattern ends.

    Raises:
        ValueError: a block differs from the options' pattern, blocks are missing at the end, or a kind of block is not
            supported.
    """
    unsupported = set(layer_type_list) - set("M*-E")
    if unsupported:
        raise ValueError(f"blocks {sorted(unsupported)} of the pattern have no layer spec: use only M, *, - and E")
    if options.norm_placement == "output" and "E" in layer_type_list:
        raise ValueError("norm_placement=output is not supported for MoE blocks (E): set model.norm_placement=input")
    expected = options.symbols.replace("|", "")
    if not expected:
        return
    for index, symbol in enumerate(layer_type_list, start=offset):
        if index >= len(expected) or expected[index] != symbol:
            there = repr(expected[index]) if index < len(expected) else "the end of the pattern"
            raise ValueError(
                f"hybrid_layer_pattern has {symbol!r} at block {index + 1}, but the layer spec was made for {there} "
                f"at this position ({options.symbols}): {_SAME_PATTERN}"
            )
    blocks = offset + len(layer_type_list)
    if last and blocks < len(expected):
        raise ValueError(
            f"hybrid_layer_pattern has {blocks} blocks, but the layer spec was made for {len(expected)} "
            f"({options.symbols}): {_SAME_PATTERN}"
        )


class BlockPredictionLayer(MultiTokenPredictionLayer):
    """One depth of multi-token prediction, built from the sub-layers and norms of the model's back end.

    Megatron numbers the blocks of a depth from 1 again, so each depth has its own `options`, separate from the model's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        *args: Any,
        options: StackOptions,
        hybrid_submodules: HybridStackSubmodules,
        **kwargs: Any,
    ) -> None:
        check_pattern(options, list(kwargs.get("mtp_layer_pattern") or ""), 0)
        norm, linear = norm_builder(config, options), backend(config.transformer_impl).column_parallel_linear()
        parts = MultiTokenPredictionLayerSubmodules(enorm=norm, hnorm=norm, eh_proj=linear, layer_norm=norm)
        super().__init__(config, parts, *args, hybrid_submodules=stack_submodules(config, options), **kwargs)


def _with_prediction(options: StackOptions) -> HybridStackSubmodules:
    """Return the submodules from which HybridModel builds multi-token prediction, with `options` for each depth."""
    layer = ModuleSpec(
        module=BlockPredictionLayer,
        params={"options": options},
        submodules=MultiTokenPredictionLayerSubmodules(enorm=None, hnorm=None, eh_proj=None, layer_norm=None),
    )
    block = MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    return HybridStackSubmodules(mtp_block_spec=ModuleSpec(module=MultiTokenPredictionBlock, submodules=block))


def hybrid_stack(pattern: str = "", *, mtp_rotary: Mapping[int, Rotary] | None = None, **options: Any) -> ModuleSpec:
    """Build the stack spec of a pattern, for `HybridModel(hybrid_stack_spec=...)` or a `--spec` module.

    Args:
        pattern: block notation, such as `(*{kv=4}-)x40`; empty if every block has the config's sizes.
        mtp_rotary: rotary embeddings of single blocks in a depth of multi-token prediction, keyed by 1-based number.
        options: `norm_affine`, `norm_placement`, `qk_norm_scope` and `rotary`, as in `StackOptions`.

    Raises:
        PatternError: the pattern does not parse.
        ValueError: the norm placement or QK norm scope is unknown.
        TypeError: an option is unknown.
    """
    depth = {**options, "rotary": mtp_rotary or {}}
    if pattern:
        compiled = compile_pattern(parse(pattern))
        symbols = compiled.hybrid_layer_pattern.partition(DEPTH)[0]
        options = {"symbols": symbols, "overrides": compiled.overrides, **options}
        depth = {"overrides": compiled.mtp_overrides, **depth}
    return ModuleSpec(
        module=BlockStack,
        params={"options": StackOptions(**options)},
        submodules=_with_prediction(StackOptions(**depth)),
    )


hybrid_stack_spec = hybrid_stack()
"""Spec for `--spec nemo_ext.megatron.specs hybrid_stack_spec`: pre-norm blocks with sizes from Megatron's arguments."""
