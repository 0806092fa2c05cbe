"""DeciLM ("nemotron-nas"): Llama whose layers differ in KV heads, window and FFN width, or lack a part.

Each layer builds Llama's own attention and MLP from a copy of the config that carries that layer's sizes. Copied beside
an exported config.json, so it imports nothing but torch, transformers and its own configuration. For transformers 5.
"""

import copy
import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_decilm import DeciLMConfig

# What transformers calls the cache in calls: "cache" from 5.24 on.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


class LinearMixer(nn.Module):
    """One linear map in the place of attention; returns no attention weights, and keeps no cache.

    Not called attention: transformers would take this file for one that implements attention without its interface.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear_attn = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return self.linear_attn(hidden_states), None


class LinearMLP(nn.Module):
    """One linear map in the place of the MLP."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear_mlp = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.linear_mlp(hidden_states)


class DeciLMDecoderLayer(GradientCheckpointingLayer):
    """Llama's layer with the parts and sizes of its `block_configs` entry.

    Attributes:
        window: How many tokens a token sees, itself included; `None` is all.
    """

    def __init__(self, config: DeciLMConfig, layer_idx: int, cache_idx: int) -> None:
        super().__init__()
        attention, ffn = config.block_configs[layer_idx].attention, config.block_configs[layer_idx].ffn
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        own = copy.copy(config)
        self.window = attention.get("window_length")
        self.self_attn = self.mlp = None
        if config.windows[layer_idx] is not None:
            own.num_key_value_heads = config.num_attention_heads // attention.n_heads_in_group
            self.self_attn = LlamaAttention(own, cache_idx)
            # Its forward reads the attention implementation alone, which may be set later on the model's config.
            self.self_attn.config = config
        elif not attention.get("no_op"):
            self.self_attn = LinearMixer(hidden_size)
        if self.self_attn is not None:
            self.input_layernorm = LlamaRMSNorm(hidden_size, eps=eps)
        if not ffn.get("no_op"):
            if ffn.get("replace_with_linear"):
                self.mlp = LinearMLP(hidden_size)
            else:
                own.intermediate_size = config.ffn_width(layer_idx)
                self.mlp = LlamaMLP(own)
            self.post_attention_layernorm = LlamaRMSNorm(hidden_size, eps=eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self.self_attn is not None:
            normed = self.input_layernorm(hidden_states)
            hidden_states = hidden_states + self.self_attn(normed, sliding_window=self.window, **kwargs)[0]
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class DeciLMPreTrainedModel(LlamaPreTrainedModel):
    config: DeciLMConfig
    _no_split_modules: ClassVar = ["DeciLMDecoderLayer"]
    _can_record_outputs: ClassVar = {"hidden_states": DeciLMDecoderLayer, "attentions": LlamaAttention}

    @staticmethod
    def create_masks_for_generate(config: DeciLMConfig, **kwargs: Any) -> dict[Any, Tensor | None]:
        """The mask of each of the model's windows; `generate` calls it for static caches."""
        names = ("inputs_embeds", "attention_mask", CACHE, "position_ids")
        arguments = {name: kwargs.get(name) for name in names}
        masks: dict[Any, Tensor | None] = {}
        for window in set(config.windows) - {None}:
            if window == "full":
                masks[window] = create_causal_mask(config, **arguments)
            else:
                own = copy.copy(config)
                own.sliding_window = window
                masks[window] = create_sliding_window_causal_mask(own, **arguments)
        return masks


class DeciLMModel(DeciLMPreTrainedModel):
    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__(config)
        if len(config.block_configs) != config.num_hidden_layers:
            raise ValueError(f"block_configs: expected {config.num_hidden_layers} entries, one for each layer")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        # transformers asks the cache's first layer how long it is, so attention layers are numbered without gaps.
        cached = [window is not None for window in config.windows]
        self.layers = nn.ModuleList(
            DeciLMDecoderLayer(config, index, cache_idx=sum(cached[:index])) for index in range(len(cached))
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
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
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        for layer, window in zip(self.layers, self.config.windows, strict=True):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks.get(window),
                position_ids=position_ids,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **{CACHE: cache},
                **kwargs,
            )
        return BaseModelOutputWithPast(self.norm(hidden_states), cache)


class DeciLMForCausalLM(DeciLMPreTrainedModel, LlamaForCausalLM):
    """Llama's language model head, loss and generation over `DeciLMModel`."""

    def __init__(self, config: DeciLMConfig) -> None:
        # Not LlamaForCausalLM's constructor, which would build a Llama first.
        LlamaPreTrainedModel.__init__(self, config)
        self.model = DeciLMModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
