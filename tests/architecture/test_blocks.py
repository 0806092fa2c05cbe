"""One block: its values, its notation, and values that it refuses."""

import re

import pytest

from nemo_ext.architecture.blocks import NAMES, VALUES, Block


def test_values_are_sorted_so_that_equal_blocks_are_equal() -> None:
    one, other = Block.from_values("E", topk=4, experts=64), Block.from_values("E", experts=64, topk=4)
    assert one == other
    assert hash(one) == hash(other)
    assert one.values == (("experts", 64), ("topk", 4))


def test_values_are_written_in_the_order_of_the_notation() -> None:
    assert str(Block.from_values("*", window=4096, kv=4, heads=16)) == "*{heads=16,kv=4,window=4096}"
    assert str(Block.from_values("M")) == "M"


def test_none_switches_off_a_window_and_shared_experts() -> None:
    assert str(Block.from_values("*", window=None)) == "*{window=none}"
    assert Block.from_values("E", shared=None).get("shared") == 0
    assert Block.from_values("E", latent=None).get("latent") == 0
    with pytest.raises(ValueError, match="'kv' of '\\*' cannot be none"):
        Block.from_values("*", kv=None)


def test_get_distinguishes_a_blocks_value_from_a_default() -> None:
    block = Block.from_values("-", ffn=5376)
    assert block.get("ffn") == 5376
    assert block.get("linear") is None
    assert Block.from_values("-").get("ffn", 8192) == 8192
    with pytest.raises(ValueError, match=r"Architecture\.resolved first"):
        Block.from_values("-").size("ffn")


def test_linear_is_a_flag_without_other_values() -> None:
    assert Block.from_values("*", linear=True).is_linear
    assert Block.from_values("*", linear=False) == Block.from_values("*")
    with pytest.raises(ValueError, match="cannot have other values: remove kv"):
        Block.from_values("*", linear=True, kv=4)
    with pytest.raises(ValueError, match="is a flag"):
        Block("*", (("linear", 1),))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("X", {}, "unknown block kind 'X'"),
        ("-", {"fnn": 3}, "unknown value 'fnn' for '-' (MLP): expected one of ffn, bias, linear; did you mean 'ffn'?"),
        ("*", {"num_query_groups": 4}, "did you mean 'kv'?"),
        ("G", {"heads": 4}, "a gated delta net block ('G') takes no values"),
        ("-", {"ffn": 0}, "'ffn' of '-' must be a positive integer, got 0"),
        ("*", {"window": -1}, "'window' of '*' must be a positive integer, got -1"),
        ("M", {"heads": True}, "'heads' of 'M' must be an integer, got True"),
    ],
)
def test_mistakes_are_named(kind: str, values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Block.from_values(kind, **values)


def test_every_kind_has_a_name_and_values() -> None:
    assert NAMES.keys() == VALUES.keys()
