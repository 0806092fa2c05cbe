"""Puzzle children of Llama, in the format published for Llama-Nemotron (`DeciLMForCausalLM`, type nemotron-nas).

vLLM serves the format with its own model class; transformers loads it with the modelling file next to the weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_ext.architecture.block_configs import from_block_configs, to_block_configs
from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.formats.dense import biases, dense_format, read_llama, rms_settings
from nemo_ext.checkpoint.formats.format import Keys, attention_with_mlp, check_layers, common_facts, own_bias, refuse
from nemo_ext.checkpoint.formats.rope import write_rope

NO_OP: Mapping[str, Mapping[str, object]] = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
_FLAGS = ("no_op", "replace_with_linear")
_ATTENTION_KEYS = (
    *("n_heads_in_group", "num_sink_tokens", "sparsify", "unshifted_sink", "use_prefill_window_in_sink_attention"),
    *("window_length", *_FLAGS),
)


def _write(description: Description) -> dict[str, Any]:
    architecture, blocks = description.architecture, description.blocks
    rms_settings(description)
    kept = [block for block in blocks if block.kind == "*" and not block.is_linear]
    heads = {(block.size("heads"), block.size("head_dim")) for block in kept}
    refuse(
        (description.kinds - {"*", "-"} or {block.kind for block in blocks} - {"*", "-"}, "Mamba or MoE blocks"),
        (
            architecture.norm_placement != "input" or architecture.qk_layernorm,
            "norms on outputs or on queries and keys",
        ),
        (architecture.qkv_bias and not architecture.bias, "biases on q, k and v only"),
        own_bias(blocks),
        (description.rope is None, "attention without positions"),
        (description.rope is not None and description.rope.percent != 1.0, "partial rotary embedding"),
        (len(heads) != 1, "attention blocks with different numbers of heads, or no attention"),
        (description.rope is not None and not description.rope.on_windowed, "plain RoPE in blocks with a window"),
    )
    ((number, head_dim),) = heads
    refuse((architecture.hidden_size % number, "a hidden size that is not a multiple of the number of heads"))
    assert description.rope is not None
    layers = _layers(description)
    return (
        common_facts(description, "nemotron-nas", "DeciLMForCausalLM")
        | write_rope(description.rope)
        | biases(description)
        | {
            "auto_map": {
                "AutoConfig": "configuration_decilm.DeciLMConfig",
                "AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM",
            },
            "num_hidden_layers": len(layers),
            "num_attention_heads": number,
            "num_key_value_heads": None,
            "head_dim": head_dim,
            "intermediate_size": None,
            "hidden_act": "silu",
            "rms_norm_eps": description.norm_epsilon,
            "block_configs": layers,
        }
    )


def _layers(description: Description) -> list[dict[str, dict[str, object]]]:
    """Return the content of `block_configs`: one entry per layer, with every key written out, as in published models.

    Layers without blocks have entries too, with two no-ops.
    """
    heads = next(block.size("heads") for block in description.blocks if block.kind == "*" and not block.is_linear)
    blocks = [_plain(block) for block in description.blocks]
    widths = [block.size("ffn") for block in blocks if block.kind == "-" and not block.is_linear]
    inherited = [default.get("ffn") for default in description.architecture.defaults if default.kind == "-"]
    parent = next(iter(inherited), max(widths, default=None))
    numbers, count = description.hf_layers, description.hf_layer_count
    if numbers is None:
        numbers, count = tuple(attention_with_mlp(blocks)[0]), attention_with_mlp(blocks)[1]
    assert count is not None
    layers = [{part: dict(values) for part, values in NO_OP.items()} for _ in range(count)]
    for block, number in zip(blocks, numbers, strict=True):
        part = "attention" if block.kind == "*" else "ffn"
        (alone,) = to_block_configs(
            Pattern((block,)),
            hidden_size=description.architecture.hidden_size,
            num_attention_heads=heads,
            ffn_hidden_size=parent,
        )
        layers[number][part] = alone[part]
    return [
        {"attention": _complete(layer["attention"], _ATTENTION_KEYS), "ffn": _complete(layer["ffn"], _FLAGS)}
        for layer in layers
    ]


def _plain(block: Block) -> Block:
    """Copy of a block with only the values that `block_configs` can express."""
    if block.is_linear:
        return block
    if block.kind == "*":
        window = block.size("window")
        return Block.from_values("*", kv=block.size("kv"), **({"window": window} if window else {}))
    return block


def _complete(part: Mapping[str, object], keys: Sequence[str]) -> dict[str, object]:
    return {**{key: False if key in _FLAGS else None for key in keys}, **part}


def _read(keys: Keys) -> Description:
    layers = keys.get("block_configs")
    if not isinstance(layers, list):
        raise ValueError(
            f"config.json: block_configs: expected a list with one entry per layer, not {type(layers).__name__}"
        )
    check_layers(keys, len(layers), "block_configs")
    blocks, numbers = [], []
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    whole = {"heads": heads, "head_dim": keys.integer("head_dim", hidden // heads)}
    for number, layer in enumerate(layers):
        try:
            pattern = from_block_configs(
                {"hidden_size": hidden, "num_attention_heads": heads, "block_configs": [layer]}
            )
        except ValueError as error:
            raise ValueError(
                f"config.json: {str(error).replace('block_configs[0]', f'block_configs[{number}]')}"
            ) from None
        for block in pattern.blocks:
            if block.kind == "*" and not block.is_linear:
                block = Block.from_values("*", **{"window": None, **dict(block.values), **whole})
            blocks.append(block)
            numbers.append(number)
    gaps = (numbers, len(layers)) != attention_with_mlp(blocks)
    return read_llama(
        keys, blocks=blocks, hf_layers=tuple(numbers) if gaps else None, hf_layer_count=len(layers) if gaps else None
    )


def beyond_vllm(description: Description) -> list[str]:
    """Remarks on features that vLLM's own class for this format (nemotron_nas.py) does not support."""
    blocks = description.blocks
    remarks = []
    if any(block.is_linear for block in blocks):
        remarks.append(
            "vLLM's own DeciLM does not support linear-replaced blocks: nemo_ext's plug-in serves this child instead"
        )
    if any(block.kind == "*" and block.get("window") for block in blocks):
        remarks.append("vLLM's own DeciLM ignores window_length: nemo_ext's plug-in serves this child instead")
    if blocks and blocks[0].kind != "*":
        remarks.append(
            "vLLM's own DeciLM fails on a first layer without attention: nemo_ext's plug-in serves this child instead"
        )
    return remarks


DECILM = dense_format(
    architecture="DeciLMForCausalLM",
    model_type="nemotron-nas",
    write=_write,
    read=_read,
    linear={"*": "self_attn.linear_attn", "-": "mlp.linear_mlp"},
    code=("configuration_decilm.py", "modeling_decilm.py"),
    remarks=beyond_vllm,
)
