"""vLLM models of any sequence of blocks, built from vLLM's layers.

Every format that `nemo_ext.checkpoint.formats` reads becomes one chain of residual blocks, each with its own sizes.
Modules keep their names in the checkpoint, which quantisation, KV-cache scales and error messages refer to.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from math import prod
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.attention import Attention as CachedAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsHybrid,
    SupportsPP,
    SupportsQuant,
)
from vllm.model_executor.models.nemotron import NemotronLayerNorm1P
from vllm.model_executor.models.nemotron_h import NemotronHMoE
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    is_pp_missing_parameter,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors
from vllm.v1.kv_cache_interface import MambaSpec

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import CONV_KERNEL
from nemo_ext.architecture.widths import has_bias
from nemo_ext.checkpoint.description import Description, Rope
from nemo_ext.checkpoint.formats.format import Format
from nemo_ext.checkpoint.formats.hybrid import GATED_NORM_EPSILON
from nemo_ext.checkpoint.formats.rope import rope_parameters
from nemo_ext.vllm.config import model_of

Shapes = tuple[tuple[int, ...], ...]
_PARAMETERS = {"A_log": "A"}
"""Mapping from a parameter's name in checkpoints to its name in vLLM, where they differ."""


def _norm(description: Description) -> nn.Module:
    """Create a norm of the model's kind and width, for a block or as the final norm."""
    architecture = description.architecture
    hidden, epsilon, affine = architecture.hidden_size, description.norm_epsilon, architecture.norm_affine
    if architecture.normalization == "RMSNorm":
        return RMSNorm(hidden, epsilon, has_weight=affine)
    if description.zero_centred_norm and affine:
        return NemotronLayerNorm1P(hidden, epsilon)
    return nn.LayerNorm(hidden, epsilon, elementwise_affine=affine)


class Attention(nn.Module):
    """Causal attention with the heads, window and RoPE of one block."""

    def __init__(self, description: Description, block: Block, names: dict[str, str], vllm: VllmConfig) -> None:
        super().__init__()
        own, ranks = description.architecture, get_tensor_model_parallel_world_size()
        heads, groups, head = (block.size(name) for name in ("heads", "kv", "head_dim"))
        if heads % ranks or max(groups, ranks) % min(groups, ranks):
            raise ValueError(
                f"{names['q']}: {heads} heads and {groups} KV heads cannot be split evenly over {ranks} GPUs: set "
                "tensor_parallel_size to a divisor of both"
            )
        at = names["q"].rpartition(".")[0]
        self.qkv_proj = QKVParallelLinear(
            own.hidden_size,
            head,
            heads,
            groups,
            bias=own.bias or own.qkv_bias,
            quant_config=vllm.quant_config,
            prefix=f"{at}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * head, own.hidden_size, bias=own.bias, quant_config=vllm.quant_config, prefix=names["o"]
        )
        self.head, self.widths = head, (heads // ranks * head, max(1, groups // ranks) * head)
        self.wide = own.qk_norm_scope == "width"
        self.q_norm = self.k_norm = None
        if own.qk_layernorm and self.wide:
            if groups < ranks:
                raise ValueError(
                    f"{names['q']}: a norm over {groups} KV heads cannot be split over {ranks} GPUs: set "
                    f"tensor_parallel_size to at most {groups}"
                )
            self.q_norm = MiniMaxText01RMSNormTP(heads * head, description.norm_epsilon)
            self.k_norm = MiniMaxText01RMSNormTP(groups * head, description.norm_epsilon)
        elif own.qk_layernorm:
            self.q_norm = RMSNorm(head, description.norm_epsilon)
            self.k_norm = RMSNorm(head, description.norm_epsilon)
        window = block.size("window") or None
        self.rotary_emb = None
        if description.rope is not None:
            scaled = window is None or description.rope.on_windowed
            rope = description.rope if scaled else Rope(base=description.rope.base, percent=description.rope.percent)
            longest = vllm.model_config.max_model_len
            self.rotary_emb = get_rope(head, max_position=longest, rope_parameters=rope_parameters(rope))
        self.attn = CachedAttention(
            heads // ranks,
            head,
            head**-0.5,
            num_kv_heads=max(1, groups // ranks),
            cache_config=vllm.cache_config,
            quant_config=vllm.quant_config,
            per_layer_sliding_window=window,
            prefix=f"{at}.attn",
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """Compute attention for hidden states `[tokens, hidden]` at positions `[tokens]`, keeping their shape."""
        query, key, value = self.qkv_proj(hidden)[0].split([self.widths[0], *[self.widths[1]] * 2], dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self._normalised(self.q_norm, query), self._normalised(self.k_norm, key)
        if self.rotary_emb is not None:
            query, key = self.rotary_emb(positions, query, key)
        return self.o_proj(self.attn(query, key, value))[0]

    def _normalised(self, norm: nn.Module, heads: Tensor) -> Tensor:
        return norm(heads) if self.wide else norm(heads.unflatten(-1, (-1, self.head))).flatten(-2)


class Mlp(nn.Module):
    """MLP that computes down(act(up(x))), or down(act(gate(x)) * up(x)) if it is gated."""

    def __init__(self, description: Description, block: Block, names: dict[str, str], vllm: VllmConfig) -> None:
        super().__init__()
        own, width = description.architecture, block.size("ffn")
        words = {"bias": has_bias(own, block), "quant_config": vllm.quant_config}
        self.gated = own.gated
        if own.gated:
            at = names["up"].rpartition(".")[0]
            self.gate_up_proj = MergedColumnParallelLinear(
                own.hidden_size, [width, width], prefix=f"{at}.gate_up_proj", **words
            )
        else:
            self.up_proj = ColumnParallelLinear(own.hidden_size, width, prefix=names["up"], **words)
        self.down_proj = RowParallelLinear(width, own.hidden_size, prefix=names["down"], **words)
        self.act = get_act_fn(description.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[tokens, hidden]` to the same shape."""
        if self.gated:
            gate, up = self.gate_up_proj(hidden)[0].chunk(2, dim=-1)
            return self.down_proj(self.act(gate) * up)[0]
        return self.down_proj(self.act(self.up_proj(hidden)[0]))[0]


def _mamba(description: Description, block: Block, names: dict[str, str], vllm: VllmConfig) -> nn.Module:
    heads, head, state, groups = (block.size(name) for name in ("heads", "head_dim", "state", "groups"))
    return MambaMixer2(
        hidden_size=description.architecture.hidden_size,
        ssm_state_size=state,
        conv_kernel_size=CONV_KERNEL,
        intermediate_size=heads * head,
        use_conv_bias=True,
        use_bias=False,
        n_groups=groups,
        num_heads=heads,
        head_dim=head,
        rms_norm_eps=GATED_NORM_EPSILON,
        activation="silu",
        model_config=vllm.model_config,
        cache_config=vllm.cache_config,
        quant_config=vllm.quant_config,
        prefix=names["in_proj"].rpartition(".")[0],
    )


def _moe(description: Description, block: Block, names: dict[str, str], vllm: VllmConfig) -> nn.Module:
    router = description.router
    assert router is not None
    sizes = SimpleNamespace(
        hidden_size=description.architecture.hidden_size,
        n_routed_experts=block.size("experts"),
        num_experts_per_tok=block.size("topk"),
        moe_intermediate_size=block.size("ffn"),
        n_shared_experts=1 if block.size("shared") else 0,
        moe_shared_expert_intermediate_size=block.size("shared"),
        moe_latent_size=block.size("latent") or None,
        mlp_hidden_act=description.activation,
        mlp_bias=False,
        norm_topk_prob=block.size("topk") > 1,
        routed_scaling_factor=router.scaling,
        n_group=1,
        topk_group=1,
    )
    at = names["router"].rpartition(".")[0]
    if vllm.model_config.dtype == torch.float16 and block.size("shared") and router.scaling != 1.0:
        raise ValueError(f"{at}: vLLM scales shared experts differently in float16; set dtype=bfloat16")
    moe = NemotronHMoE(sizes, quant_config=vllm.quant_config, parallel_config=vllm.parallel_config, prefix=at)
    if moe.shared_experts is not None:
        moe.shared_experts.act_fn = get_act_fn(description.activation)  # vLLM's are always squared ReLU
    return moe


class ResidualBlock(nn.Module):
    """Residual block that computes x + mixer(norm(x)), or x + norm(mixer(x)) if the model has norms on outputs."""

    def __init__(self, description: Description, block: Block, names: dict[str, str], vllm: VllmConfig) -> None:
        super().__init__()
        self.kind = "linear" if block.is_linear else block.kind
        self.norm_first = description.architecture.norm_placement == "input"
        self.norm = _norm(description)
        self.mixer: nn.Module
        if block.is_linear:
            hidden = description.architecture.hidden_size
            self.mixer = ColumnParallelLinear(
                hidden,
                hidden,
                bias=False,
                gather_output=True,
                quant_config=vllm.quant_config,
                prefix=names["linear"],
            )
        else:
            made = {"*": Attention, "-": Mlp, "M": _mamba, "E": _moe}[block.kind]
            self.mixer = made(description, block, names, vllm)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """Run the block on hidden states `[tokens, hidden]` at positions `[tokens]`, keeping their shape."""
        mixed = self.norm(hidden) if self.norm_first else hidden
        if self.kind == "*":
            mixed = self.mixer(positions, mixed)
        elif self.kind == "linear":
            mixed = self.mixer(mixed)[0]
        else:
            mixed = self.mixer(mixed)
        return hidden + (mixed if self.norm_first else self.norm(mixed))


@support_torch_compile
class BlocksModel(nn.Module):
    """Embedding, blocks and final norm; each pipeline rank holds a range of the blocks."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        found, description = model_of(vllm_config.model_config.hf_config)
        names = module_names(found, description)
        hidden, group = description.architecture.hidden_size, get_pp_group()
        tied = description.architecture.tied_embeddings
        self.embed_tokens: nn.Module = PPMissingLayer()
        if group.is_first_rank or (tied and group.is_last_rank):
            self.embed_tokens = VocabParallelEmbedding(description.vocab_size, hidden)

        def block(prefix: str) -> nn.Module:
            number = int(prefix.rpartition(".")[2])
            return ResidualBlock(description, description.blocks[number], names[number], vllm_config)

        self.start_layer, self.end_layer, self.layers = make_layers(
            len(description.blocks), block, prefix=f"{prefix}.layers"
        )
        self.norm: nn.Module = _norm(description) if group.is_last_rank else PPMissingLayer()
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(["hidden_states"], hidden)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Run this pipeline rank's blocks.

        Args:
            input_ids: token ids `[tokens]`; only the first rank uses them.
            positions: positions of the tokens in their sequences, `[tokens]`.
            intermediate_tensors: result of the previous pipeline rank; None on the first.
            inputs_embeds: embeddings `[tokens, hidden]` to use instead of the token ids, or None.

        Returns:
            Hidden states `[tokens, hidden]` after the final norm, or tensors for the next pipeline rank.
        """
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None
            hidden = intermediate_tensors["hidden_states"]
        else:
            hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden = layer(positions, hidden)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden})
        return self.norm(hidden)


def module_names(found: Format, description: Description) -> dict[int | None, dict[str, str]]:
    """Return the modules' names in the checkpoint, keyed by block number and role.

    Block numbers start at 0; modules outside the blocks, such as the embedding, are under None.
    """
    names: dict[int | None, dict[str, str]] = {number: {} for number in (None, *range(len(description.blocks)))}
    for entry in found.entries(description):
        for (module, _), name in zip(entry.roles, entry.names, strict=True):
            names[entry.block][module] = name.rpartition(".")[0]
    return names


def places(found: Format, description: Description) -> dict[str, tuple[str, str | int | None]]:
    """Map each module's checkpoint name to the name of our module, and to the module's shard in it.

    The shard, as vLLM's weight loaders name it, is None unless our module fuses several modules (QKV, gate and up).
    """
    outside = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    moved: dict[str, tuple[str, str | int | None]] = {name: ("qkv_proj", name) for name in "qkv"}
    if description.architecture.gated:
        moved |= {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1)}
    else:
        moved["up"] = ("up_proj", None)
    moved |= {"o": ("o_proj", None), "down": ("down_proj", None), "router": ("gate", None)}
    moved |= {f"shared_{name}": (f"shared_experts.{name}_proj", None) for name in ("up", "down")}
    moved |= {"gated_norm": ("norm", None), "latent_down": ("fc1_latent_proj", None)}
    moved["latent_up"] = ("fc2_latent_proj", None)
    table: dict[str, tuple[str, str | int | None]] = {}
    for number, roles in module_names(found, description).items():
        for role, name in roles.items():
            if number is None:
                table[name] = (outside[role], None)
                continue
            at = f"model.layers.{number}"
            if role == "norm":
                table[name] = (f"{at}.norm", None)
            elif role in ("linear", "mamba"):
                table[name] = (f"{at}.mixer", None)
            elif role.startswith("experts"):
                table[name] = (f"{at}.mixer.experts{name.partition('.experts')[2]}", None)
            else:
                place, shard = moved.get(role, (role, None))
                table[name] = (f"{at}.mixer.{place}", shard)
    return table


class NemoExtBlocksForCausalLM(nn.Module, SupportsPP, SupportsQuant):
    """Language model for any sequence of blocks without Mamba-2."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        found, description = model_of(vllm_config.model_config.hf_config)
        self.places = places(found, description)
        self.model = BlocksModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head: nn.Module = PPMissingLayer()
        self.logits_processor = LogitsProcessor(description.vocab_size)
        if get_pp_group().is_last_rank:
            hidden = description.architecture.hidden_size
            head = ParallelLMHead(
                description.vocab_size,
                hidden,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            tied = description.architecture.tied_embeddings
            self.lm_head = head.tie_weights(self.model.embed_tokens) if tied else head
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings `[tokens, hidden]` of token ids."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """Return hidden states, or tensors for the next pipeline rank, like `BlocksModel.forward`."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return logits `[tokens, vocabulary]` on the ranks that sample the next tokens; None on others."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors, given as pairs of checkpoint name and tensor, and return the names of the loaded parameters.

        Raises:
            ValueError: the model has no parameter for a tensor.
        """
        parameters: dict[str, Any] = dict(self.named_parameters())
        loaded = set()

        def whole() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                place, shard, parameter = self._place(name)
                if place.endswith(".experts") and tensor.dim() == 3:
                    for expert, each in enumerate(tensor):
                        yield f"{place}.{expert}.{parameter}.weight", each
                elif shard is None:
                    yield f"{place}.{parameter}", tensor
                elif (found := parameters.get(f"{place}.{parameter}")) is not None:
                    found.weight_loader(found, tensor, shard)
                    loaded.add(f"{place}.{parameter}")
                elif not is_pp_missing_parameter(place, self):
                    raise ValueError(
                        f"{name}: the model has no parameter for this tensor of the checkpoint; export the model again"
                    )

        return AutoWeightsLoader(self).load_weights(whole()) | loaded

    def _place(self, name: str) -> tuple[str, str | int | None, str]:
        module, _, parameter = name.rpartition(".")
        if parameter in ("k_scale", "v_scale") and module in self.places:
            return self.places[module][0].rpartition(".")[0] + ".attn", None, parameter
        if module not in self.places:
            experts, _, matrix = module.rpartition(".")
            above, _, number = experts.rpartition(".")
            if above not in self.places or not number.isdecimal():
                raise ValueError(
                    f"{name}: the model has no module for this tensor of the checkpoint; export the model again"
                )
            # `nemo-ext quantize` writes experts separately that our own format stacks.
            return f"{self.places[above][0]}.{number}.{matrix}", None, parameter
        place, shard = self.places[module]
        return place, shard, _PARAMETERS.get(parameter, parameter)


class NemoExtHybridBlocksForCausalLM(NemoExtBlocksForCausalLM, HasInnerState, IsHybrid):
    """Language model for sequences of blocks that include Mamba-2."""

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Return the dtypes of a Mamba-2 block's convolution state and SSM state."""
        cache = vllm_config.cache_config
        return MambaStateDtypeCalculator.mamba2_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )

    @classmethod
    def get_mamba_specs_from_config(cls, vllm_config: VllmConfig) -> list[MambaSpec]:
        """Return a state spec for each size of Mamba-2 block; the largest determines the cache's page size."""
        dtypes = cls.get_mamba_state_dtype_from_config(vllm_config)
        return [MambaSpec(shapes=shapes, dtypes=dtypes, block_size=-1) for shapes in _state_shapes(vllm_config)]

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Shapes:
        """Return the shapes of the convolution state and SSM state of the Mamba-2 block with the largest state."""
        return max(_state_shapes(vllm_config), key=lambda shapes: sum(map(prod, shapes)))

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """Return the functions with which vLLM copies a Mamba-2 block's convolution state and SSM state."""
        return MambaStateCopyFuncCalculator.mamba2_state_copy_func()


def _state_shapes(vllm_config: VllmConfig) -> list[Shapes]:
    """Return the shapes of the convolution state and SSM state for each different size of Mamba-2 block."""
    _, description = model_of(vllm_config.model_config.hf_config)
    blocks = dict.fromkeys(block for block in description.blocks if block.kind == "M" and not block.is_linear)
    return [
        MambaStateShapeCalculator.mamba2_state_shape(
            intermediate_size=block.size("heads") * block.size("head_dim"),
            tp_world_size=vllm_config.parallel_config.tensor_parallel_size,
            n_groups=block.size("groups"),
            num_heads=block.size("heads"),
            head_dim=block.size("head_dim"),
            state_size=block.size("state"),
            conv_kernel=CONV_KERNEL,
            num_spec=vllm_config.num_speculative_tokens,
        )
        for block in blocks
    ]
