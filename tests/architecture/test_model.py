"""Reading sizes from a configuration, with Megatron's defaults."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import Architecture, Flags
from nemo_ext.architecture.pattern import parse

ArchitectureOf = Callable[..., Architecture]
SMALL = {"hidden_size": 96, "vocab_size": 1000, "position_embedding_type": "rope"}


def small(pattern: str, **flags: Any) -> Architecture:
    return Architecture.from_config({"model": {"pattern": pattern}, "megatron": {**SMALL, **flags}})


def resolved(pattern: str, **flags: Any) -> Block:
    return small(pattern, **flags).sizes[0]


def test_megatrons_defaults_for_absent_flags() -> None:
    assert resolved("-") == Block.from_values("-", ffn=4 * 96)
    assert resolved("-", swiglu=True) == Block.from_values("-", ffn=256)  # int(4 * 96 * 2 / 3 / 64) * 64
    assert resolved("*", num_attention_heads=4) == Block.from_values("*", heads=4, kv=4, head_dim=24, window=None)
    experts = Block.from_values("E", experts=4, topk=2, ffn=4 * 96, shared=None, latent=None)
    assert resolved("E", num_experts=4) == experts


def test_mamba_heads_follow_from_twice_the_hidden_size() -> None:
    sizes = resolved("M", hidden_size=256)
    assert sizes == Block.from_values("M", heads=8, head_dim=64, state=128, groups=8)
    assert resolved("M{head_dim=32}", hidden_size=256).size("heads") == 16
    assert resolved("M{head_dim=32}", hidden_size=256, mamba_num_heads=8).size("heads") == 8
    with pytest.raises(ValueError, match="2 x hidden_size = 192 is not divisible by mamba_head_dim = 128"):
        small("M", mamba_head_dim=128)


def test_query_groups_count_only_with_group_query_attention() -> None:
    assert resolved("*", num_attention_heads=4, num_query_groups=2).size("kv") == 4
    assert resolved("*", num_attention_heads=4, num_query_groups=2, group_query_attention=True).size("kv") == 2


def test_a_blocks_own_values_win() -> None:
    sizes = resolved("*{kv=1,window=16}", num_attention_heads=4, window_size="[31,0]")
    assert sizes == Block.from_values("*", heads=4, kv=1, head_dim=24, window=16)
    assert resolved("*{window=none}", num_attention_heads=4, window_size=[31, 0]).size("window") == 0
    assert resolved("E{latent=none}", num_experts=4, moe_latent_size=8).size("latent") == 0
    assert resolved("E{latent=6}", num_experts=4, moe_latent_size=8).size("latent") == 6
    assert resolved("E", num_experts=4, moe_latent_size=8).size("latent") == 8
    assert resolved("E{shared=none}", num_experts=4, moe_shared_expert_intermediate_size=8).size("shared") == 0
    assert resolved("*{linear}") == Block.from_values("*", linear=True)


@pytest.mark.parametrize("value", ["[4095,0]", "(4095, 0)", "4095,0", [4095, 0], (4095, 0)])
def test_window_size_counts_the_tokens_before_the_query(value: object) -> None:
    assert resolved("*", num_attention_heads=4, window_size=value).size("window") == 4096


def test_an_infinite_window_is_full_attention() -> None:
    assert resolved("*", num_attention_heads=4, window_size=[-1, 0]).size("window") == 0


@pytest.mark.parametrize("frequency", [2, "2", [1, 0, 1, 0], "[1, 0, 1, 0]"])
def test_every_other_layer_is_full_attention(frequency: object) -> None:
    flags = {"num_attention_heads": 4, "window_size": [7, 0], "window_attn_skip_freq": frequency}
    windows = [block.size("window") for block in small("**{window=4}*{window=4}*", **flags).sizes]
    assert windows == [8, 4, 4, 0]
    with pytest.raises(ValueError, match="pass layer="):
        small("*", **flags).resolved(Block("*"))


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ({"vocab_size": 50257}, 50304),
        ({"vocab_size": 50257, "tensor_model_parallel_size": 4}, 50688),
        ({"vocab_size": 1000, "make_vocab_size_divisible_by": 1}, 1000),
        ({"vocab_size": 1000, "padded_vocab_size": 1001}, 1001),
    ],
)
def test_vocabulary_is_padded_as_megatron_pads_it(flags: dict[str, int], rows: int) -> None:
    assert small("-", **flags).vocab_size == rows


def test_learned_positions_are_megatrons_default() -> None:
    flags = {"hidden_size": 96, "vocab_size": 1000}
    config = {"model": {"pattern": "-"}, "megatron": flags}
    with pytest.raises(ValueError, match=r"megatron\.max_position_embeddings is missing"):
        Architecture.from_config(config)
    flags["max_position_embeddings"] = 128
    assert Architecture.from_config(config).learned_positions == 128
    assert small("-").learned_positions == 0


@pytest.mark.parametrize(
    ("pattern", "flags", "message"),
    [
        ("M*", {"hidden_size": 256}, r"block 2 \(\*\): megatron\.num_attention_heads is missing"),
        (
            "E",
            {},
            r"block 1 \(E\): megatron\.num_experts is missing: set it, or write E\{experts=\.\.\.\} in model\.pattern",
        ),
        ("*", {"num_attention_heads": 7}, r"megatron\.kv_channels is missing"),
        ("*{kv=3}", {"num_attention_heads": 4}, "4 attention heads are not divisible by 3 KV heads: set kv "),
        ("M{heads=4}", {"hidden_size": 256}, "4 Mamba heads are not divisible by 8 groups"),
        ("E{topk=8}", {"num_experts": 4}, "topk=8 is more than the 4 experts"),
        ("-", {"hidden_size": None}, r"megatron\.hidden_size is missing"),
        ("-", {"vocab_size": None}, r"megatron\.vocab_size is missing"),
        ("-", {"ffn_hidden_size": "wide"}, r"megatron\.ffn_hidden_size: expected a positive integer, got 'wide'"),
        ("-", {"swiglu": 1}, r"megatron\.swiglu: expected true or false, got 1"),
        ("-", {"swiglu": True, "squared_relu": True}, "choose one activation"),
        ("-", {"normalization": "rms"}, "expected one of RMSNorm, LayerNorm, got 'rms'"),
        ("*", {"num_attention_heads": 4, "window_size": [8, 8]}, "is not causal"),
        ("*", {"num_attention_heads": 4, "window_size": 8}, "expected two integers"),
        ("*", {"num_attention_heads": 4, "window_attn_skip_freq": "[1]*3+[0]"}, "write the windows into model.pattern"),
        ("-", {"softmax_type": "learnable"}, "softmax_type=learnable"),
        ("", {}, "expected at least one block"),
    ],
)
def test_mistakes_are_named(pattern: str, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(pattern, **flags)


def test_sections_are_required() -> None:
    with pytest.raises(ValueError, match="config section model: expected a mapping"):
        Architecture.from_config({"megatron": SMALL})
    with pytest.raises(ValueError, match=r"model\.pattern: expected a pattern"):
        Architecture.from_config({"model": {}, "megatron": SMALL})


def test_numbers_may_come_as_text_from_a_command_line() -> None:
    assert small("-", hidden_size="96", swiglu="true") == small("-", swiglu=True)
    flags = Flags({"norm_epsilon": "1e-6", "rotary_percent": None})
    assert flags.number("norm_epsilon", 1e-5) == 1e-6
    assert flags.number("rotary_percent", 0.5) == flags.number("mscale", 0.5) == 0.5


@pytest.mark.parametrize("value", ["small", "", True, [1.0], "nan", float("inf")])
def test_values_that_are_not_numbers_are_named(value: object) -> None:
    with pytest.raises(ValueError, match=r"megatron\.norm_epsilon: expected a number, got " + re.escape(repr(value))):
        Flags({"norm_epsilon": value}).number("norm_epsilon", 1e-5)


def test_with_pattern_keeps_everything_else(architecture_of: ArchitectureOf) -> None:
    nano = architecture_of("nemotron3_nano")
    other = nano.with_pattern("M*|E")
    assert other.pattern == parse("M*|E")
    assert (other.hidden_size, other.defaults) == (nano.hidden_size, nano.defaults)
    with pytest.raises(ValueError, match="block 1"):
        nano.with_pattern("*{kv=7}")


def test_sequence_length_is_the_models_unless_given() -> None:
    assert small("-", seq_length=128).sequence_length() == 128
    assert small("-", seq_length=128).sequence_length(64) == 64
    with pytest.raises(ValueError, match="pass seq_length"):
        small("-").sequence_length()
