"""nemo_ext's own format: a model is a list of residual blocks, each with its kind and sizes.

For children of pruning and fusion that no published format covers. Copied beside an exported config.json, so it imports
nothing but transformers.
"""

from dataclasses import field
from typing import Any, ClassVar

from transformers import PreTrainedConfig

KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window"),
    "mlp": ("intermediate_size",),
    "mamba": ("num_heads", "head_dim", "state_size", "n_groups"),
    "moe": ("n_routed_experts", "num_experts_per_tok", "intermediate_size", "shared_intermediate_size", "latent_size"),
}
"""Block kinds and the sizes of each. `linear: true` in their place makes the sub-layer one hidden x hidden map."""

MAY_BE_NULL = ("sliding_window", "shared_intermediate_size", "latent_size")
"""Sizes that may be null or absent: full attention, no shared expert, routed experts of the hidden size."""

_MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"),
    ("num_heads", "n_groups"),
)
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "hidden_act": ("silu", "relu2", "gelu"),
    "norm_type": ("rms_norm", "layer_norm", "layer_norm_1p"),
    "norm_placement": ("input", "output"),
    "qk_norm": (None, "head", "width"),
}


class NemoExtBlocksConfig(PreTrainedConfig):
    """Configuration of a sequence of residual blocks.

    Attributes:
        blocks: One `{"kind": ..., sizes}` per residual block, see `KINDS`.
        gated_mlp: Whether an MLP is down(act(gate(x)) * up(x)); without, down(act(up(x))). Experts are never gated.
        norm_affine: Whether norms have weights; without, the final norm has none either.
        norm_placement: "input" is x + mixer(norm(x)), "output" is x + norm(mixer(x)).
        qk_norm: RMSNorm of queries and keys over each head, or over all heads together ("width").
        rope_parameters: As transformers', null for no positions.
        rope_scaling_on_windowed: Whether blocks with a sliding window scale their rotary frequencies too.

    Raises:
        ValueError: Names the block and key, or the value, that this model cannot compute.
    """

    model_type = "nemo_ext_blocks"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "cache"]

    vocab_size: int = 32000
    hidden_size: int = 4096
    num_hidden_layers: int | None = None
    blocks: list = field(default_factory=list)
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    gated_mlp: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_type: str = "rms_norm"
    norm_eps: float = 1e-5
    norm_affine: bool = True
    norm_placement: str = "input"
    qk_norm: str | None = None
    rope_parameters: dict | None = None
    rope_scaling_on_windowed: bool = True
    routed_scaling_factor: float | int = 1.0
    norm_topk_prob: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_hidden_layers not in (None, len(self.blocks)):
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}, but there are {len(self.blocks)} blocks")
        self.num_hidden_layers = len(self.blocks)
        for index, block in enumerate(self.blocks):
            _check(block, f"blocks[{index}]")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {choices}, got {getattr(self, name)!r}")
        super().__post_init__(**kwargs)

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Null `rope_parameters` stay null, where transformers would put its default rotary embedding."""
        return kwargs if self.rope_parameters is None else super().convert_rope_params_to_dict(**kwargs)

    @property
    def kinds(self) -> list[str]:
        """The kind of each block, "linear" where it is one linear map."""
        return ["linear" if block.get("linear") else block["kind"] for block in self.blocks]

    @property
    def layer_types(self) -> list[str]:
        """What each block caches, in transformers' words; "moe" is its word for nothing."""
        caches = {"attention": "full_attention", "mamba": "linear_attention"}
        types = [caches.get(kind, "moe") for kind in self.kinds]
        if types and "full_attention" not in types:
            # generate() asks for the cache's length, which only a layer with keys has: here one that stays empty.
            types[0] = "hybrid" if types[0] == "linear_attention" else "full_attention"
        return types

    @property
    def masks(self) -> list[int | str | None]:
        """The mask that each block takes: its sliding window, "full", "mamba" (padding alone) or none."""
        windows = [block.get("sliding_window") or "full" for block in self.blocks]
        names: dict[str, int | str | None] = {"mamba": "mamba"}
        pairs = zip(self.kinds, windows, strict=True)
        return [window if kind == "attention" else names.get(kind) for kind, window in pairs]


def _check(block: dict[str, Any], path: str) -> None:
    kind = block.get("kind") if isinstance(block, dict) else None
    if kind not in KINDS:
        raise ValueError(f"{path}.kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    for flag in ("linear", "bias"):
        if not isinstance(block.get(flag, False), bool):
            raise ValueError(f"{path}.{flag}: expected true or false, got {block[flag]!r}")
    linear = block.get("linear", False)
    known = () if linear else KINDS[kind]
    for key in block:
        if key not in ("kind", "linear", *known, *(("bias",) if kind == "mlp" and not linear else ())):
            raise ValueError(f"{path}.{key}: a {'linear ' * linear}{kind} block has no such key")
    for key in known:
        value = block.get(key)
        if value is None and key in MAY_BE_NULL:
            continue
        if value is None:
            raise ValueError(f"{path}.{key}: missing, a {kind} block needs it")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{path}.{key}: expected a positive integer, got {value!r}")
    for number, divisor in _MULTIPLES:
        if number in known and divisor in known and block[number] % block[divisor]:
            raise ValueError(f"{path}.{number}: {block[number]} is not a multiple of {divisor} {block[divisor]}")
    if kind == "moe" and known and not max(2, block["num_experts_per_tok"]) <= block["n_routed_experts"]:
        raise ValueError(f"{path}.n_routed_experts: expected at least 2 and num_experts_per_tok")
