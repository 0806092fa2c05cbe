"""Self-attention of the block stack: core attention based on torch's SDPA, and per-block rotary embeddings."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nemo_ext.megatron.norms import HeadsRMSNorm, reduced_norms


class SDPACoreAttention(MegatronModule):
    """Causal attention (full, sliding-window or packed) based on torch's `scaled_dot_product_attention`.

    Megatron's local `DotProductAttention` materialises the score matrix and does not support packed sequences. Here
    memory is linear in the sequence length: windows are computed in query blocks, packs sequence by sequence.

    Shapes: query `[seq, batch, heads / tp, head_dim]`, key and value `[seq, batch, groups / tp, head_dim]`; packed
    (`qkv_format == "thd"`): `[tokens, heads / tp, head_dim]`. Output `[seq, batch, heads / tp * head_dim]`
    (packed: `[tokens, heads / tp * head_dim]`).

    Raises:
        ValueError: context parallelism, a learned softmax offset, an attention bias or a non-causal mask type is
            requested, all of which need Transformer Engine.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size={config.context_parallel_size} needs Transformer Engine's attention: set "
                "model.backend=transformer_engine, or context_parallel_size=1 for the local back end"
            )
        if config.softmax_type != "vanilla":
            raise ValueError(
                f"softmax_type={config.softmax_type!r} needs Transformer Engine: set model.backend=transformer_engine"
            )
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        if config.apply_query_key_layer_scaling:
            self.softmax_scale /= max(1, layer_number)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            left, right = config.window_size
            if right > 0:
                raise ValueError(f"window_size={config.window_size}: the local back end is causal; set ({left}, 0)")
            self.window = None if left < 0 else left + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute attention, with the heads flattened into the last dimension (see the class for shapes)."""
        if attention_bias is not None:
            raise ValueError("attention_bias needs Transformer Engine: set model.backend=transformer_engine")
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.no_mask):
            raise ValueError(
                f"attn_mask_type={mask_type} needs Transformer Engine: set model.backend=transformer_engine"
            )
        # Once the cache holds a prompt, Megatron's inference passes no_mask to every layer, windowed ones included.
        # Queries are the last tokens of their context, so a causal layer stays causal, and keeps its window.
        causal = self.attn_mask_type is not AttnMaskType.no_mask
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            starts = packed_seq_params.cu_seqlens_q
            if packed_seq_params.cu_seqlens_q_padded is not None:
                starts = packed_seq_params.cu_seqlens_q_padded
            bounds = starts.tolist()
            pieces = [
                self._attend(query[a:b, None], key[a:b, None], value[a:b, None], causal=causal)
                for a, b in pairwise(bounds)
                if b > a
            ]
            tail = query.shape[0] - bounds[-1]
            if tail:  # tokens after the last boundary are padding: nothing attends to them
                pieces.append(query.new_zeros(tail, 1, query.shape[1] * query.shape[2]))
            return torch.cat(pieces).squeeze(1)
        return self._attend(query, key, value, causal=causal)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """Compute attention for a batch of unpacked sequences `[seq, batch, heads, head_dim]`."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        length, context = q.shape[2], k.shape[2]
        if causal and self.window is not None and self.window < context:
            out = self._attend_window(q, k, v)
        elif causal and length == context:
            out = self._sdpa(q, k, v, is_causal=True)
        elif causal and length > 1:
            out = self._sdpa(q, k, v, attn_mask=_band(length, context, context - length, None, q.device))
        else:
            out = self._sdpa(q, k, v)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend_window(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute windowed attention in query blocks of `window` tokens: query i sees keys i - window + 1 to i."""
        assert self.window is not None
        length, offset = q.shape[2], k.shape[2] - q.shape[2]
        outputs = []
        for start in range(0, length, self.window):
            stop = min(start + self.window, length)
            first = max(0, start + offset - self.window + 1)
            last = stop + offset
            mask = None  # a single query sees all keys in its slice
            if stop - start > 1:
                mask = _band(stop - start, last - first, start + offset - first, self.window, q.device)
            outputs.append(self._sdpa(q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], attn_mask=mask))
        return torch.cat(outputs, dim=2)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        dropout = self.dropout if self.training else 0.0
        forked = dropout and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if forked else nullcontext():
            return scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, scale=self.softmax_scale, enable_gqa=grouped, **mask
            )


def _band(rows: int, columns: int, offset: int, window: int | None, device: torch.device) -> Tensor:
    """Build a boolean mask `[rows, columns]`, True for the columns that each row may attend to.

    Row r sees the columns up to `r + offset`, or only the last `window` of them if it is not None.
    """
    row = torch.arange(rows, device=device)[:, None] + offset
    column = torch.arange(columns, device=device)[None, :]
    visible = column <= row
    return visible if window is None else visible & (column > row - window)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Settings of a single block's rotary embedding, which replaces the model's.

    Attributes:
        base: RoPE base (theta).
        percent: share of each head that is rotated, from 0 to 1.
        llama3_factor: factor of Llama 3's frequency scaling (low 1, high 4, 8192 original positions), or None.
        interpolation_factor: divisor of positions (linear interpolation), or None.
        yarn: True for YaRN with the model's settings, on the rotated share of the head; upstream's own YaRN embedding
            rotates the whole head regardless of `percent`.
    """

    base: int
    percent: float = 1.0
    llama3_factor: float | None = None
    interpolation_factor: float | None = None
    yarn: bool = False


class BlockSelfAttention(SelfAttention):
    """Megatron's SelfAttention, with a separate rotary embedding for each block that `rotary` lists.

    HybridModel builds one embedding for all attention blocks. It supports neither Llama 3's frequency scaling (GPTModel
    does) nor YaRN on the full-attention blocks only, as in OLMo 3. `rotary` maps 1-based layer numbers to the settings
    of these blocks' embeddings.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *,
        rotary: Mapping[int, Rotary] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, **kwargs)
        for norm in (self.q_layernorm, self.k_layernorm):
            if isinstance(norm, HeadsRMSNorm):  # Megatron's norm builders do not receive the process group
                norm.tp_group = self.pg_collection.tp
        settings = (rotary or {}).get(layer_number)
        self.rotary: RotaryEmbedding | None = None
        if settings is not None:
            common = {"use_cpu_initialization": config.use_cpu_initialization, "cp_group": self.pg_collection.cp}
            self.rotary = (_yarn if settings.yarn else _plain)(settings, config, **common)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Compute query, key and value as `SelfAttention` does, with one all-reduce for both QK norms if needed."""
        norm = self.q_layernorm
        deferred = isinstance(norm, HeadsRMSNorm) and norm.tensor_parallel > 1 and split_qkv and not output_gate
        if not deferred:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        mixed, sizes = super().get_query_key_value_tensors(hidden_states, key_value_states, split_qkv=False)
        query, key, value = torch.split(mixed, sizes, dim=-1)
        # The query is normalised by group of heads, as single heads would be a copy of `mixed`, not a view.
        pairs = norm(query, deferred=True), self.k_layernorm(key, deferred=True)
        query, key = reduced_norms(norm.tp_group, norm.eps, *pairs)
        return query.view(*query.shape[:2], -1, self.hidden_size_per_attention_head), key, value

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run `SelfAttention.forward` on hidden states `[seq, batch, hidden]`, with this block's embedding if set."""
        if self.rotary is not None:
            packed = kwargs.get("packed_seq_params")
            length = self.rotary.get_rotary_seq_len(
                kwargs.get("inference_context"), None, hidden_states, self.config, packed
            )
            embedding = self.rotary(length, packed_seq=packed is not None and packed.qkv_format == "thd")
            # YaRN also returns its attention factor, which Megatron's attention computes from the config itself.
            kwargs["rotary_pos_emb"] = embedding[0] if isinstance(embedding, tuple) else embedding
        return super().forward(hidden_states, attention_mask, **kwargs)


def _plain(settings: Rotary, config: TransformerConfig, **common: Any) -> RotaryEmbedding:
    return RotaryEmbedding(
        kv_channels=config.kv_channels,
        rotary_percent=settings.percent,
        rotary_interleaved=config.rotary_interleaved,
        rotary_base=settings.base,
        seq_len_interpolation_factor=settings.interpolation_factor,
        rope_scaling=settings.llama3_factor is not None,
        rope_scaling_factor=settings.llama3_factor or 1.0,
        **common,
    )


def _yarn(settings: Rotary, config: TransformerConfig, **common: Any) -> YarnRotaryEmbedding:
    return YarnRotaryEmbedding(
        kv_channels=int(config.kv_channels * settings.percent),
        rotary_base=settings.base,
        scaling_factor=config.yarn_rotary_scaling_factor,
        original_max_position_embeddings=config.yarn_original_max_position_embeddings,
        beta_fast=config.yarn_beta_fast,
        beta_slow=config.yarn_beta_slow,
        mscale=config.yarn_mscale,
        mscale_all_dim=config.yarn_mscale_all_dim,
        correction_range_round_to_int=config.yarn_correction_range_round_to_int,
        **common,
    )
