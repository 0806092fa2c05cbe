"""DeciLM ("nemotron-nas"), Puzzle's published format: Llama's keys and one entry of `block_configs` per layer.

Copied beside an exported config.json, so it imports nothing but transformers.
"""

from typing import Any

from transformers import LlamaConfig

FFN_MULTIPLE = 256
"""Puzzle rounds the FFN width of an `ffn_mult` up to a multiple of this."""

_KEYS = {
    "attention": ("n_heads_in_group", "no_op", "replace_with_linear", "window_length"),
    "ffn": ("ffn_mult", "intermediate_size", "no_op", "replace_with_linear"),
}
# Keys of the published configs that this model does not compute: harmless while they are off.
_MUST_BE_OFF = {
    "attention": ("num_sink_tokens", "sparsify", "unshifted_sink", "use_prefill_window_in_sink_attention"),
    "ffn": ("sparsify",),
}


class Namespace(dict):
    """A dict whose keys are attributes too: vLLM reads `block_configs` by attribute, JSON and `==` see plain dicts."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def computes(part: Namespace) -> bool:
    """Whether the part is attention or an MLP, neither left out nor replaced by one linear map."""
    return not part.get("no_op") and not part.get("replace_with_linear")


class DeciLMConfig(LlamaConfig):
    """Llama's configuration with `block_configs`, one `{"attention": {...}, "ffn": {...}}` per layer.

    `num_key_value_heads` and `intermediate_size` are null, as published: every layer has its own.

    Raises:
        ValueError: Names the layer and the key of `block_configs` that this model cannot compute.
    """

    model_type = "nemotron-nas"

    def __init__(self, block_configs: list[dict[str, Any]] | None = None, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name, None) for name in ("num_key_value_heads", "intermediate_size")}
        super().__init__(**kwargs)
        for name, value in own.items():
            # Llama's own setter refuses a null intermediate_size, and its constructor fills both in.
            object.__setattr__(self, name, value)
        layers = block_configs or []
        if layers and len(layers) != self.num_hidden_layers:
            raise ValueError(f"block_configs has {len(layers)} entries, num_hidden_layers is {self.num_hidden_layers}")
        self.block_configs = [self._layer(layer, f"block_configs[{index}]") for index, layer in enumerate(layers)]

    def _layer(self, layer: dict[str, Any], path: str) -> Namespace:
        parts = Namespace()
        for name in ("attention", "ffn"):
            if not isinstance(layer, dict) or not isinstance(layer.get(name), dict):
                raise ValueError(f"{path}.{name}: expected a mapping, got {layer!r}")
            parts[name] = Namespace(layer[name])
            for key, value in layer[name].items():
                if key not in (*_KEYS[name], *_MUST_BE_OFF[name]):
                    raise ValueError(f"{path}.{name}.{key}: unknown key, expected one of {', '.join(_KEYS[name])}")
                if key in _MUST_BE_OFF[name] and value:
                    raise ValueError(f"{path}.{name}.{key}: must be null or false, got {value!r}")
        attention, ffn = parts.attention, parts.ffn
        if ffn.get("intermediate_size") is not None and ffn.get("ffn_mult") is None:
            # vLLM takes the width from ffn_mult wherever that attribute is there at all.
            ffn.pop("ffn_mult", None)
        if computes(attention):
            heads, group, window = (
                self.num_attention_heads,
                attention.get("n_heads_in_group"),
                attention.get("window_length"),
            )
            if not isinstance(group, int) or group < 1 or heads % group:
                raise ValueError(f"{path}.attention.n_heads_in_group: expected a divisor of {heads}, got {group!r}")
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ValueError(f"{path}.attention.window_length: expected a positive integer or null, got {window!r}")
        if computes(ffn) and (ffn.get("ffn_mult") is None) == (ffn.get("intermediate_size") is None):
            raise ValueError(f"{path}.ffn: expected either ffn_mult or intermediate_size, got {dict(ffn)}")
        return parts

    @property
    def windows(self) -> list[int | str | None]:
        """How many tokens each layer's attention sees, or "full"; `None` where the layer has no attention."""
        parts = (layer.attention for layer in self.block_configs)
        return [(part.get("window_length") or "full") if computes(part) else None for part in parts]

    def ffn_width(self, layer: int) -> int:
        """FFN width of a layer: `intermediate_size` as it is, or `ffn_mult` times 2/3 hidden size, rounded up."""
        ffn = self.block_configs[layer].ffn
        if ffn.get("intermediate_size") is not None:
            return int(ffn.intermediate_size)
        return -(-int(2 * ffn.ffn_mult * self.hidden_size / 3) // FFN_MULTIPLE) * FFN_MULTIPLE
