"""Any sequence of residual blocks: attention, MLP, Mamba-2, mixture of experts or one linear map, each of its own size.

Each block builds transformers' own modules from a copy of the config that carries that block's sizes. Copied beside an
exported config.json, so it imports nothing but torch, transformers and its own configuration. For transformers 5.
"""

import copy
import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaPreTrainedModel,
    eager_attention_forward,
)
from transformers.models.nemotron.modeling_nemotron import (
    NemotronLayerNorm1P,
    NemotronMLP,
    NemotronRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHExperts,
    NemotronHMamba2Mixer,
    NemotronHMoE,
    NemotronHRMSNorm,
    NemotronHTopkRouter,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_nemo_ext_blocks import NemoExtBlocksConfig

# What transformers calls the cache in calls: "cache" from 5.24 on.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


try:
    from transformers.masking_utils import create_recurrent_attention_mask
except ImportError:  # transformers 5.12 and earlier

    def create_recurrent_attention_mask(
        config: NemoExtBlocksConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, **others: Any
    ) -> Tensor | None:
        """Mask of padding `[batch, seq]` for Mamba, None where there is none."""
        length = inputs_embeds.shape[1]
        if attention_mask is None or attention_mask.ndim != 2 or length == 1 or torch.all(attention_mask == 1):
            return None
        return attention_mask[:, -length:].contiguous()


def _copy(config: NemoExtBlocksConfig, **values: Any) -> NemoExtBlocksConfig:
    own = copy.copy(config)
    for name, value in values.items():
        setattr(own, name, value)
    return own


def build_norm(config: NemoExtBlocksConfig) -> nn.Module:
    """The norm of every block and of the end, over the last dimension of `[batch, seq, hidden]`."""
    size, eps = config.hidden_size, config.norm_eps
    if config.norm_type == "rms_norm":
        if config.norm_affine:
            return NemotronHRMSNorm(size, eps=eps)
        return nn.RMSNorm(size, eps=eps, elementwise_affine=False)
    if config.norm_type == "layer_norm_1p" and config.norm_affine:
        return NemotronLayerNorm1P(size, eps=eps)
    return nn.LayerNorm(size, eps=eps, elementwise_affine=config.norm_affine)


class Attention(LlamaAttention):
    """Llama's attention with an optional QK norm, a rotary embedding of its own head size, and a window."""

    def __init__(self, config: NemoExtBlocksConfig, layer_idx: int, block: dict[str, Any]) -> None:
        sizes = {name: block[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
        rope, window = config.rope_parameters, block.get("sliding_window")
        if rope is not None and window is not None and not config.rope_scaling_on_windowed:
            kept = ("rope_theta", "partial_rotary_factor")
            rope = {"rope_type": "default"} | {name: rope[name] for name in kept if name in rope}
        own = _copy(config, **sizes, rope_parameters=rope, attention_dropout=0.0)
        super().__init__(own, layer_idx)
        # From here on only the attention implementation is read, which may be set later on the model's config.
        self.config = config
        self.sliding_window = window
        self.rotary_emb = None if rope is None else NemotronRotaryEmbedding(own)
        self.q_norm = self.k_norm = nn.Identity()
        if config.qk_norm is not None:
            wide = config.qk_norm == "width"
            self.q_norm = NemotronHRMSNorm(own.head_dim * (own.num_attention_heads if wide else 1), config.norm_eps)
            self.k_norm = NemotronHRMSNorm(own.head_dim * (own.num_key_value_heads if wide else 1), config.norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Maps `[batch, seq, hidden]` to the same shape, and returns the attention weights if they were computed."""
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if self.config.qk_norm == "width":
            query, key = self.q_norm(query).view(heads), self.k_norm(key).view(heads)
        else:
            query, key = self.q_norm(query.view(heads)), self.k_norm(key.view(heads))
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.view(heads).transpose(1, 2)
        if self.rotary_emb is not None:
            query, key = apply_rotary_pos_emb(query, key, *self.rotary_emb(hidden_states, position_ids))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            position_ids=position_ids,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


class NoSharedExperts(nn.Module):
    """In the place of a mixture of experts' shared experts where it has none."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def build_mlp(config: NemoExtBlocksConfig, block: dict[str, Any]) -> nn.Module:
    bias = config.mlp_bias or block.get("bias", False)
    own = _copy(config, intermediate_size=block["intermediate_size"], mlp_bias=bias)
    return LlamaMLP(own) if config.gated_mlp else NemotronMLP(own)


def build_mamba(config: NemoExtBlocksConfig, layer_idx: int, block: dict[str, Any]) -> nn.Module:
    own = _copy(
        config,
        mamba_num_heads=block["num_heads"],
        mamba_head_dim=block["head_dim"],
        ssm_state_size=block["state_size"],
        n_groups=block["n_groups"],
        mamba_hidden_act="silu",
        conv_kernel=4,
        use_conv_bias=True,
        use_bias=False,
        layer_norm_epsilon=1e-5,
        chunk_size=128,
        # The mixer takes its lower limit of dt from here. Megatron sets none.
        time_step_min=0.0,
        # transformers 5.12 and earlier read these, too.
        time_step_max=0.1,
        time_step_limit=(0.0, float("inf")),
        use_mamba_kernels=True,
    )
    return NemotronHMamba2Mixer(own, layer_idx)


def build_moe(config: NemoExtBlocksConfig, block: dict[str, Any]) -> nn.Module:
    shared = block.get("shared_intermediate_size")
    own = _copy(
        config,
        n_routed_experts=block["n_routed_experts"],
        num_local_experts=block["n_routed_experts"],
        num_experts_per_tok=block["num_experts_per_tok"],
        moe_intermediate_size=block["intermediate_size"],
        # Never built at this size, but NemotronHMLP wants one.
        moe_shared_expert_intermediate_size=shared or 1,
        moe_latent_size=block.get("latent_size"),
        mlp_hidden_act=config.hidden_act,
        mlp_bias=False,
        n_group=1,
        topk_group=1,
    )
    moe = NemotronHMoE(own)
    if shared is None:
        moe.shared_experts = NoSharedExperts()
    # Its forward reads the implementation of the experts alone, which may be set later on the model's config.
    moe.experts.config = config
    return moe


class ResidualBlock(GradientCheckpointingLayer):
    """One residual block: x + mixer(norm(x)), or x + norm(mixer(x)).

    Attributes:
        kind: The block's kind, or "linear".
    """

    def __init__(self, config: NemoExtBlocksConfig, layer_idx: int) -> None:
        super().__init__()
        block = config.blocks[layer_idx]
        self.kind = config.kinds[layer_idx]
        self.norm_after = config.norm_placement == "output"
        self.norm = build_norm(config)
        self.mixer: nn.Module
        if self.kind == "attention":
            self.mixer = Attention(config, layer_idx, block)
        elif self.kind == "mamba":
            self.mixer = build_mamba(config, layer_idx, block)
        elif self.kind == "moe":
            self.mixer = build_moe(config, block)
        elif self.kind == "mlp":
            self.mixer = build_mlp(config, block)
        else:
            self.mixer = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Tensor:
        cache = kwargs.pop(CACHE, None)
        mixed = hidden_states if self.norm_after else self.norm(hidden_states)
        if self.kind == "attention":
            mixed, _ = self.mixer(mixed, attention_mask, position_ids, cache, **kwargs)
        elif self.kind == "mamba":
            mixed = self.mixer(mixed, cache, attention_mask, **kwargs)
        else:
            mixed = self.mixer(mixed)
        return hidden_states + (self.norm(mixed) if self.norm_after else mixed)


class NemoExtBlocksPreTrainedModel(LlamaPreTrainedModel):
    config: NemoExtBlocksConfig
    _no_split_modules: ClassVar = ["ResidualBlock"]
    _keep_in_fp32_modules_strict: ClassVar = ["e_score_correction_bias"]
    _can_record_outputs: ClassVar = {"hidden_states": ResidualBlock, "attentions": Attention}

    @property
    def _is_stateful(self) -> bool:
        """Whether generate() refuses speculative decoding, which must rewind: with Mamba, as NemotronH does."""
        return "mamba" in self.config.kinds

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Yes: transformers looks for its decorator in this file's text, but NemotronH's experts have it already."""
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, NemotronHMamba2Mixer):
            if hasattr(module, "init_nemotron_h_weights"):  # before transformers 5.13 it is drawn where it is built
                module.init_nemotron_h_weights()
        elif isinstance(module, NemotronHTopkRouter):
            initialization.normal_(module.weight, std=self.config.initializer_range)
            initialization.zeros_(module.e_score_correction_bias)
        elif isinstance(module, NemotronHExperts):
            initialization.normal_(module.up_proj, std=self.config.initializer_range)
            initialization.normal_(module.down_proj, std=self.config.initializer_range)
        elif isinstance(module, NemotronLayerNorm1P):
            initialization.zeros_(module.weight)

    @staticmethod
    def create_masks_for_generate(config: NemoExtBlocksConfig, **kwargs: Any) -> dict[Any, Tensor | None]:
        """The masks that the model's blocks take, by `config.masks`; `generate` calls it for static caches."""
        names = ("inputs_embeds", "attention_mask", CACHE, "position_ids")
        arguments = {name: kwargs.get(name) for name in names}
        masks: dict[Any, Tensor | None] = {}
        for mask in set(config.masks) - {None}:
            if mask == "mamba":
                masks[mask] = create_recurrent_attention_mask(config, **arguments)
            elif mask == "full":
                masks[mask] = create_causal_mask(config, **arguments)
            else:
                masks[mask] = create_sliding_window_causal_mask(_copy(config, sliding_window=mask), **arguments)
        return masks


class NemoExtBlocksModel(NemoExtBlocksPreTrainedModel):
    def __init__(self, config: NemoExtBlocksConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(ResidualBlock(config, index) for index in range(len(config.blocks)))
        self.norm = build_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[Any, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states `[batch, seq, hidden]` after the final norm; `cache` is the newer name of `past_key_values`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is None:
            cache = past_key_values
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + past)[None]
        masks = attention_mask
        if not isinstance(masks, dict):
            masks = self.create_masks_for_generate(
                self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **{CACHE: cache},
            )
        for layer, mask in zip(self.layers, self.config.masks, strict=True):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks.get(mask),
                position_ids=position_ids,
                use_cache=use_cache,
                **{CACHE: cache},
                **kwargs,
            )
        return BaseModelOutputWithPast(self.norm(hidden_states), cache)


class NemoExtBlocksForCausalLM(NemoExtBlocksPreTrainedModel, LlamaForCausalLM):
    """Llama's language model head, loss and generation over `NemoExtBlocksModel`."""

    def __init__(self, config: NemoExtBlocksConfig) -> None:
        # Not LlamaForCausalLM's constructor, which would build a Llama first.
        super(LlamaForCausalLM, self).__init__(config)
        self.model = NemoExtBlocksModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
