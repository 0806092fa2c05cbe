"""Initial weights of a variant, derived from the parent's block.

Tensors are named as in Megatron's checkpoint after `decoder.layers.N.`. The channels, heads and experts kept are those
with the largest importance on calibration data (`Importance`) or, without it, with the largest norm of output weights.
A latent channel's importance is the norm of its row or column in the projection, times the norm of all experts' weights
for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import Architecture

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]
LATENT_DOWN, LATENT_UP = "mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight"


@dataclass(frozen=True)
class Importance:
    """Importance of channels, experts or heads of a block on calibration data; larger is more important.

    Attributes:
        channels: importance of channels, `[ffn]` for an MLP, `[experts, ffn]` for experts.
        experts: total router weight of each expert, `[experts]`.
        heads: importance of an attention or Mamba-2 block's heads, `[heads]`.
        state: importance of the entries of a Mamba-2 block's state, `[groups, state]`.
    """

    channels: Tensor | None = None
    experts: Tensor | None = None
    heads: Tensor | None = None
    state: Tensor | None = None


def initial_weights(
    parent: Block, variant: Block, tensors: Tensors, architecture: Architecture, importance: Importance | None = None
) -> dict[str, Tensor]:
    """Derive the tensors of a variant from its parent block.

    Args:
        parent: the parent's block with all values filled in.
        variant: a block of the same kind with all values filled in.
        importance: measured importance; None to use the norms of weights.

    Raises:
        ValueError: the variant is larger than its parent, of another kind, or differs in a value that cannot change.
    """
    if variant.kind != parent.kind or parent.is_linear:
        raise ValueError(f"{variant} cannot be made from {parent}: a variant must have its parent's kind")
    measured = importance or Importance()
    if variant.is_linear:
        return _linear(parent, tensors, architecture)
    changed = {name for name, value in variant.values if value != parent.get(name)}
    known = {
        "*": {"heads", "kv", "window"},
        "-": {"ffn"},
        "M": {"heads", "state"},
        "E": {"experts", "topk", "ffn", "latent"},
    }[parent.kind]
    if changed - known:
        raise ValueError(
            f"{variant} cannot be made from {parent}: {', '.join(sorted(changed - known))} must not change"
        )
    if "latent" in changed and not variant.size("latent"):
        raise ValueError(
            f"{variant} cannot be made from {parent}: latent may be smaller than the parent's, but not none"
        )
    larger = [n for n in changed - {"window"} if variant.size(n) > parent.size(n)]
    if larger:
        raise ValueError(
            f"{variant} cannot be made from {parent}: {', '.join(larger)} must not be larger than the parent's"
        )
    result = dict(tensors)
    if parent.kind == "*" and changed & {"heads", "kv"} and architecture.attention_output_gate:
        raise ValueError(
            f"{variant} cannot be made from {parent}, as megatron.attention_output_gate stores gates with the queries: "
            "set puzzle.variants.heads=[] and puzzle.variants.kv=[]"
        )
    if parent.kind == "*" and "heads" in changed:
        result |= _fewer_heads(parent, variant, tensors, measured.heads)
        parent = Block("*", tuple({**dict(parent.values), "heads": variant.size("heads")}.items()))
    if "kv" in changed:
        result |= _fewer_kv_heads(parent, variant, result)
    if parent.kind == "-" and "ffn" in changed:
        result |= _narrower_mlp(variant.size("ffn"), tensors, architecture, measured.channels)
    if parent.kind == "M" and "heads" in changed:
        result |= _fewer_mamba_heads(parent, variant, tensors, measured.heads)
    if "state" in changed:
        result |= _smaller_state(parent, variant, tensors, measured.state)
    if parent.kind == "E":
        result |= _smaller_moe(parent, variant, tensors, measured)
    return result


def _fewer_heads(parent: Block, variant: Block, tensors: Tensors, importance: Tensor | None) -> dict[str, Tensor]:
    """Return the attention tensors that change with fewer heads; each KV head keeps its most important queries.

    All KV heads keep the same number of queries. `importance`, `[heads]`, is the heads' importance; if None, the norm
    of their output weights is used.
    """
    import torch

    heads, groups, head_dim = (parent.size(name) for name in ("heads", "kv", "head_dim"))
    fewer = variant.size("heads")
    if fewer % groups:
        raise ValueError(f"{heads} heads cannot be reduced to {fewer}: expected a multiple of {groups} (KV heads)")
    each, left = heads // groups, fewer // groups
    out = tensors["self_attention.linear_proj.weight"]
    by_head = out.float().reshape(out.shape[0], heads, head_dim).square().sum((0, 2))
    ranked = (by_head if importance is None else importance).reshape(groups, each)
    kept = [_largest(row, left) for row in ranked]
    channels = torch.cat([row + group * each for group, row in enumerate(kept)])
    channels = (channels[:, None] * head_dim + torch.arange(head_dim)).reshape(-1)
    made = {"self_attention.linear_proj.weight": out[:, channels]}
    for name in ("weight", "bias"):
        fused = tensors.get(f"self_attention.linear_qkv.{name}")
        if fused is not None:
            grouped = fused.reshape(groups, each + 2, head_dim, *fused.shape[1:])
            key_value = torch.tensor([each, each + 1])
            rows = [group[torch.cat([row, key_value])] for group, row in zip(grouped, kept, strict=True)]
            made[f"self_attention.linear_qkv.{name}"] = torch.cat(rows).reshape(-1, *fused.shape[1:])
    width = tensors.get("self_attention.q_layernorm.weight")
    if width is not None and width.shape[0] == heads * head_dim:
        made["self_attention.q_layernorm.weight"] = width[channels]
    return made


def _fewer_kv_heads(parent: Block, variant: Block, tensors: Tensors) -> dict[str, Tensor]:
    """Return the attention tensors that change with fewer KV heads: neighbours are averaged (arXiv:2305.13245)."""
    import torch

    heads, groups, head_dim = (parent.size(name) for name in ("heads", "kv", "head_dim"))
    fewer = variant.size("kv")
    if groups % fewer:
        raise ValueError(f"{groups} KV heads cannot be pooled to {fewer}: expected a divisor of {groups}")
    queries_per_group, merged = heads // groups, groups // fewer
    result = {}
    for name in ("weight", "bias"):
        fused = tensors.get(f"self_attention.linear_qkv.{name}")
        if fused is None:
            continue
        grouped = fused.reshape(groups, queries_per_group + 2, head_dim, *fused.shape[1:])
        queries = grouped[:, :queries_per_group].reshape(fewer, merged * queries_per_group, head_dim, *fused.shape[1:])
        pooled = grouped[:, queries_per_group:].reshape(fewer, merged, 2, head_dim, *fused.shape[1:]).mean(1)
        result[f"self_attention.linear_qkv.{name}"] = torch.cat([queries, pooled], dim=1).reshape(-1, *fused.shape[1:])
    # A QK norm over the full width has one weight per key channel.
    width = tensors.get("self_attention.k_layernorm.weight")
    if width is not None and width.shape[0] == groups * head_dim:
        result["self_attention.k_layernorm.weight"] = width.reshape(fewer, merged, head_dim).mean(1).reshape(-1)
    return result


def _narrower_mlp(
    width: int, tensors: Tensors, architecture: Architecture, importance: Tensor | None
) -> dict[str, Tensor]:
    import torch

    second = tensors["mlp.linear_fc2.weight"]
    kept = _largest(second.float().norm(dim=0) if importance is None else importance, width)
    made = {"mlp.linear_fc2.weight": second[:, kept]}
    for name in ("weight", "bias"):
        first = tensors.get(f"mlp.linear_fc1.{name}")
        if first is not None:
            halves = first.chunk(2 if architecture.gated else 1)
            made[f"mlp.linear_fc1.{name}"] = torch.cat([half[kept] for half in halves])
    return made


def _fewer_mamba_heads(parent: Block, variant: Block, tensors: Tensors, importance: Tensor | None) -> dict[str, Tensor]:
    """Return a Mamba-2 block's tensors that change with fewer heads; the most important heads of every group are kept.

    All groups keep the same number of heads, as the heads of a group share its B and C. `importance`, `[heads]`, is the
    heads' importance; if None, the norm of their output weights is used.
    """
    import torch

    heads, head_dim, groups = (parent.size(name) for name in ("heads", "head_dim", "groups"))
    fewer = variant.size("heads")
    if fewer % groups:
        raise ValueError(f"{heads} Mamba heads cannot be reduced to {fewer}: expected a multiple of {groups} (groups)")
    out = tensors["mixer.out_proj.weight"]
    by_head = out.float().reshape(out.shape[0], heads, head_dim).square().sum((0, 2))
    ranked = (by_head if importance is None else importance).reshape(groups, -1)
    kept = torch.cat([_largest(row, fewer // groups) + group * (heads // groups) for group, row in enumerate(ranked)])
    channels = (kept[:, None] * head_dim + torch.arange(head_dim)).reshape(-1)
    made = {f"mixer.{name}": tensors[f"mixer.{name}"][kept] for name in ("dt_bias", "A_log", "D", "in_proj.weight.dt")}
    rows = ("in_proj.weight.z", "in_proj.weight.x", "conv1d.weight.x", "conv1d.bias.x", "norm.weight")
    made |= {f"mixer.{name}": tensors[f"mixer.{name}"][channels] for name in rows}
    return made | {"mixer.out_proj.weight": out[:, channels]}


def _smaller_state(parent: Block, variant: Block, tensors: Tensors, importance: Tensor | None) -> dict[str, Tensor]:
    """Return a Mamba-2 block's tensors that change with a smaller state; every group keeps its most important entries.

    `importance`, `[groups, state]`, is the entries' importance; if None, the product of the norms of their rows of B
    and C in the projection is used.
    """
    import torch

    groups, state = parent.size("groups"), parent.size("state")
    if importance is None:
        norms = [tensors[f"mixer.in_proj.weight.{part}"].float().norm(dim=1) for part in "BC"]
        importance = (norms[0] * norms[1]).reshape(groups, state)
    kept = torch.cat([_largest(row, variant.size("state")) + group * state for group, row in enumerate(importance)])
    names = [f"mixer.{name}.{part}" for name in ("in_proj.weight", "conv1d.weight", "conv1d.bias") for part in "BC"]
    return {name: tensors[name][kept] for name in names}


def _smaller_moe(parent: Block, variant: Block, tensors: Tensors, importance: Importance) -> dict[str, Tensor]:
    import torch

    first, second = (tensors[f"mlp.experts.experts.linear_fc{n}.weight"] for n in (1, 2))
    result: dict[str, Tensor] = {}
    channels = second.float().norm(dim=1) if importance.channels is None else importance.channels
    if variant.size("experts") < parent.size("experts"):
        mass = second.float().square().sum((1, 2)) if importance.experts is None else importance.experts
        kept = _largest(mass, variant.size("experts"))
        first, second, channels = first[kept], second[kept], channels[kept]
        router = ("mlp.router.weight", "mlp.router.expert_bias", "mlp.router.bias")
        result |= {name: tensors[name][kept] for name in router if name in tensors}
    if variant.size("ffn") < parent.size("ffn"):
        halves = first.shape[1] // second.shape[2]  # 2 for gated experts
        width = variant.size("ffn")
        narrow = [_largest(row, width) for row in channels]
        cut = [torch.cat([h[k] for h in e.chunk(halves)]) for e, k in zip(first, narrow, strict=True)]
        first = torch.stack(cut)
        second = torch.stack([e[:, k] for e, k in zip(second, narrow, strict=True)])
    if variant.size("latent") < parent.size("latent"):
        down, up, width = tensors[LATENT_DOWN], tensors[LATENT_UP], variant.size("latent")
        # The experts' inputs and outputs are different spaces, so each keeps its own channels.
        inputs = _largest(down.float().norm(dim=1) * first.float().norm(dim=(0, 1)), width)
        outputs = _largest(up.float().norm(dim=0) * second.float().norm(dim=(0, 2)), width)
        first, second = first[:, :, inputs], second[:, outputs]
        result |= {LATENT_DOWN: down[inputs], LATENT_UP: up[:, outputs]}
    return result | {
        "mlp.experts.experts.linear_fc1.weight": first,
        "mlp.experts.experts.linear_fc2.weight": second,
    }


def _linear(parent: Block, tensors: Tensors, architecture: Architecture) -> dict[str, Tensor]:
    """Reduce a block to one linear map after its norm: as if tokens attended only to themselves, and without gates.

    Attention: output x value; FFN: down x up; Mamba-2: out_proj x the in_proj rows of x (Puzzle, section 3). MoE: the
    shared expert's down x up, or the mean of the experts' products.
    """
    import torch

    kind = parent.kind
    if kind == "*":
        at, module = "self_attention.linear_qkv.layer_norm_", "self_attention"
        heads, groups, head_dim = (parent.size(name) for name in ("heads", "kv", "head_dim"))
        fused = tensors["self_attention.linear_qkv.weight"]
        value = fused.reshape(groups, heads // groups + 2, head_dim, -1)[:, -1]
        value = value.repeat_interleave(heads // groups, dim=0).reshape(heads * head_dim, -1)
        first, second, norm = value, tensors["self_attention.linear_proj.weight"], "input_layernorm."
    elif kind == "M":
        at, module, norm = "mixer.in_proj.layer_norm_", "mixer", "norm."
        first, second = tensors["mixer.in_proj.weight.x"], tensors["mixer.out_proj.weight"]
    elif kind == "-":
        at, module, norm = "mlp.linear_fc1.layer_norm_", "mlp", "pre_mlp_layernorm."
        first, second = (
            tensors["mlp.linear_fc1.weight"].chunk(2 if architecture.gated else 1)[-1],
            tensors["mlp.linear_fc2.weight"],
        )
    else:
        at, module, norm = "pre_mlp_layernorm.", "mlp", "pre_mlp_layernorm."
        shared = "mlp.shared_experts.linear_fc1.weight"
        if shared in tensors:
            first, second = tensors[shared], tensors["mlp.shared_experts.linear_fc2.weight"]
        else:
            first, second = (tensors[f"mlp.experts.experts.linear_fc{n}.weight"] for n in (1, 2))
            product = torch.einsum("ehf,efd->hd", second.double(), first.double()) / first.shape[0]
            if parent.size("latent"):
                product = tensors[LATENT_UP].double() @ product @ tensors[LATENT_DOWN].double()
            return _norms(tensors, at, norm, architecture) | {f"{module}.weight": product.to(first.dtype)}
    product = second.double() @ first.double()
    return _norms(tensors, at, norm, architecture) | {f"{module}.weight": product.to(first.dtype)}


def _norms(tensors: Tensors, prefix: str, norm: str, architecture: Architecture) -> dict[str, Tensor]:
    """Return the norm's tensors for a linear block; an identity norm if the parent's norm is on the block's output.

    Names of the norm's tensors begin with `prefix` in `tensors`, and with `norm` in the result.
    """
    import torch

    if architecture.norm_affine and architecture.norm_placement == "output":
        return {f"{norm}weight": torch.ones(architecture.hidden_size, dtype=next(iter(tensors.values())).dtype)}
    return {norm + name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _largest(importance: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values, in ascending order."""
    import torch

    return torch.sort(torch.topk(importance, count).indices).values
