"""Reading and writing of Puzzle's block_configs JSON."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.architecture.block_configs import ffn_multiplier, ffn_width, from_block_configs, to_block_configs
from nemo_ext.architecture.pattern import format, parse

PARENTS = {"llama_nemotron_super_49b": 28672, "llama_nemotron_ultra_253b": 53248}
NO_OP = {"no_op": True}


def small(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_size": 512, "num_attention_heads": 8, "block_configs": list(layers)}


@pytest.mark.parametrize("name", PARENTS)
def test_shipped_files_survive_with_every_number(name: str, puzzle_json: Callable[[str], dict[str, Any]]) -> None:
    config, ffn = puzzle_json(name), PARENTS[name]
    pattern = from_block_configs(config, num_query_groups=8, ffn_hidden_size=ffn)
    written = to_block_configs(
        pattern,
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=8,
        ffn_hidden_size=ffn,
    )
    kept = [layer for layer in config["block_configs"] if layer != {"attention": NO_OP, "ffn": NO_OP}]
    assert written == kept


@pytest.mark.parametrize(
    ("name", "attention", "ffn"),
    [("llama_nemotron_super_49b", 80 - 31, 80), ("llama_nemotron_ultra_253b", 162 - 98, 162 - 81)],
)
def test_no_ops_of_the_shipped_files_are_absent(
    name: str, attention: int, ffn: int, puzzle_json: Callable[[str], dict[str, Any]]
) -> None:
    kinds = [block.kind for block in from_block_configs(puzzle_json(name)).blocks]
    assert (kinds.count("*"), kinds.count("-")) == (attention, ffn)


def test_values_equal_to_the_models_are_omitted() -> None:
    config = small(
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 3.0}},
        {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 1.5}},
    )
    assert format(from_block_configs(config)) == "*{kv=2}-{ffn=1024}*{kv=1}-{ffn=512}"
    assert format(from_block_configs(config, num_query_groups=2, ffn_hidden_size=512)) == "*-{ffn=1024}*{kv=1}-"


def test_no_ops_linears_windows_and_keys_that_are_off() -> None:
    config = small(
        {"attention": {"replace_with_linear": True}, "ffn": NO_OP},
        {"attention": NO_OP, "ffn": NO_OP},
        {
            "attention": {"n_heads_in_group": 4, "no_op": False, "sparsify": None, "window_length": 64},
            "ffn": {"replace_with_linear": True, "ffn_mult": None, "no_op": False},
        },
    )
    assert format(from_block_configs(config, num_query_groups=2)) == "*{linear}*{window=64}-{linear}"


def test_an_attention_block_and_the_mlp_after_it_share_a_layer() -> None:
    written = to_block_configs(
        parse("-*-{ffn=512}*{kv=4}*{linear}-{linear}|-"),
        hidden_size=512,
        num_attention_heads=8,
        num_query_groups=2,
        ffn_hidden_size=1024,
    )
    assert written == [
        {"attention": NO_OP, "ffn": {"ffn_mult": 3.0}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.5}},
        {"attention": {"n_heads_in_group": 2}, "ffn": NO_OP},
        {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
        {"attention": NO_OP, "ffn": {"ffn_mult": 3.0}},
    ]


@given(
    multiple=st.integers(1, 2000),
    hidden=st.sampled_from([512, 2688, 4096, 5120, 8192, 16384]),
    parent=st.none() | st.integers(1, 300),
)
def test_every_width_has_an_exact_multiplier(multiple: int, hidden: int, parent: int | None) -> None:
    width, ffn = 256 * multiple, None if parent is None else 256 * parent
    assert ffn_width(ffn_multiplier(width, hidden, ffn_hidden_size=ffn), hidden) == width


def test_width_rule_of_the_released_models() -> None:
    assert ffn_width(5.25, 8192) == 28672
    assert ffn_width(1.0, 8192) == 5632  # int(5461.33) up to a multiple of 256
    assert ffn_width(0.4875, 16384) == 5376


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            {"attention": {"n_heads_in_group": 4, "foo": 1}, "ffn": NO_OP},
            r"block_configs\[1\]\.attention\.foo=1: unknown key",
        ),
        ({"attention": {"n_heads_in_groups": 4}, "ffn": NO_OP}, "did you mean 'n_heads_in_group'"),
        ({"attention": {"n_heads_in_group": 3}, "ffn": NO_OP}, r"block_configs\[1\]\.attention\.n_heads_in_group"),
        (
            {"attention": {"n_heads_in_group": 4, "num_sink_tokens": 4}, "ffn": NO_OP},
            r"attention\.num_sink_tokens=4: unknown key",
        ),
        (
            {"attention": NO_OP, "ffn": {}},
            r"block_configs\[1\]\.ffn\.ffn_mult: expected a positive number, .* got None",
        ),
        ({"attention": NO_OP, "ffn": {"no_op": "yes"}}, r"ffn\.no_op: expected true or false"),
        ({"attention": NO_OP}, r"block_configs\[1\]\.ffn: expected a mapping"),
        (
            {"attention": NO_OP, "ffn": NO_OP, "mamba": {"state": 8}},
            r"block_configs\[1\]\.mamba={'state': 8}: unknown key",
        ),
    ],
)
def test_reading_mistakes_are_named_by_path(layer: dict[str, Any], message: str) -> None:
    good = {"attention": NO_OP, "ffn": {"ffn_mult": 3.0}}
    with pytest.raises(ValueError, match=message):
        from_block_configs(small(good, layer))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*M", r"block 2 \(M\): block_configs supports only attention \('\*'\) and MLP \('-'\), not Mamba-2"),
        ("*{heads=4,kv=2}", "cannot express 'heads' for a single block"),
        ("-", "pass ffn_hidden_size"),
        ("*{kv=3}", "8 attention heads are not divisible by 3 KV heads"),
    ],
)
def test_writing_refuses_values_that_the_format_cannot_express(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_block_configs(parse(text), hidden_size=512, num_attention_heads=8, num_query_groups=2)


def test_a_width_without_a_multiplier_is_written_directly() -> None:
    pattern = parse("-{ffn=1000}-{ffn=1024}")

    written = to_block_configs(pattern, hidden_size=512, num_attention_heads=8)

    assert written[0]["ffn"] == {"intermediate_size": 1000}
    assert written[1]["ffn"] == {"ffn_mult": 3.0}
    assert from_block_configs(small(*written)) == pattern
    assert format(from_block_configs(small(*written), ffn_hidden_size=1000)) == "--{ffn=1024}"
