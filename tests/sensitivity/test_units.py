"""Units that are quantised together, and rules for units kept in BF16."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import LOW, Plan, assigned
from nemo_ext.job.config import compose
from nemo_ext.sensitivity.units import average_bits, in_precisions, kept_by, named_rule, only, precisions, units

NANO = Architecture.from_config(compose("describe", ["model=nemotron3_nano_30b"]))
TINY = Architecture.from_config(compose("describe", ["model=nemotron3_nano_tiny"]))
PLAN = Plan.from_config({"default": "fp8", "rules": ["head bf16"]})


def test_blocks_are_grouped_by_kind_and_successor() -> None:
    groups: dict[str, list[int | None]] = {}
    for unit in units(PLAN, NANO, "block"):
        groups.setdefault(unit.group, []).append(unit.block)

    assert groups["*"] == [5, 12, 19, 26, 33, 42]
    assert groups["M>*"] == [4, 11, 18, 25, 32, 41]
    assert set(groups) == {"M", "M>*", "*", "E"}


@given(
    st.lists(st.sampled_from(["M", "*", "-", "E", "E{latent=64}"]), min_size=1, max_size=12),
    st.sampled_from(["block", "part"]),
    st.sampled_from([(), ("head bf16",), ("M bf16",), (".fc1 bf16", "head bf16"), (".latent_fc1 fp8",)]),
    st.data(),
)
def test_exactly_the_chosen_units_are_in_fp8(
    kinds: list[str], per: str, rules: tuple[str, ...], data: st.DataObject
) -> None:
    model = TINY.with_pattern("".join(kinds))
    plan = Plan.from_config({"default": "fp8", "rules": list(rules)})
    if not any(each.precision == "fp8" for each in assigned(plan, model)):
        with pytest.raises(ValueError, match="puts nothing of this model in FP8"):
            units(plan, model, per)
        return
    every = units(plan, model, per)
    low = data.draw(st.lists(st.sampled_from(every), unique=True))

    found = [each.weight for each in assigned(only(plan, low, every), model) if each.precision == "fp8"]

    assert set(found) == {weight for unit in low for weight in unit.weights}
    assert sum(2 * weight.parameters for weight in found) == sum(unit.bytes for unit in low)


@pytest.mark.parametrize("per", ["block", "part"])
def test_a_common_rule_is_recognised(per: str) -> None:
    every = units(PLAN, NANO, per)
    kept = kept_by(("*", "M>*"), every, NANO)

    assert {unit.block for unit in kept} == {5, 12, 19, 26, 33, 42, 4, 11, 18, 25, 32, 41}
    assert named_rule(kept, PLAN, NANO) == ("*", "M>*")
    assert named_rule(kept[1:], PLAN, NANO) is None


@given(st.data())
def test_routers_keep_their_precision_for_any_choice(data: st.DataObject) -> None:
    model = TINY.with_pattern("ME*EM-")
    plan = Plan.from_config({"default": "fp8", "rules": ["* bf16", ".router fp32", "head bf16"]})
    every = units(plan, model, "block")
    low = data.draw(st.lists(st.sampled_from(every), unique=True))

    found = {each.precision for each in assigned(only(plan, low, every), model) if each.weight.part == "router"}

    assert found == {"fp32"}


def test_all_blocks_are_not_a_rule_by_position() -> None:
    model = TINY.with_pattern("M*E-")
    every = units(PLAN, model, "block")

    assert named_rule(every, PLAN, model) is None


@given(
    st.lists(st.sampled_from("M*-E"), min_size=1, max_size=8),
    st.sampled_from(["block", "part"]),
    st.sampled_from(
        [
            *((), ("head bf16",), ("* fp8", "first 1.fc2 bf16", "head bf16")),
            ("E.fc1 fp8", "M.in_proj bf16", "E.router fp32"),
        ]
    ),
    st.data(),
)
def test_units_get_the_chosen_precisions_and_no_other_weight_changes(
    kinds: list[str], per: str, rules: tuple[str, ...], data: st.DataObject
) -> None:
    model = TINY.with_pattern("".join(kinds))
    plan = Plan.from_config({"default": "nvfp4", "rules": ["embedding bf16", *rules]})
    every = units(plan, model, per) if any(each.precision in LOW for each in assigned(plan, model)) else []
    choice = {unit: data.draw(st.sampled_from(["nvfp4", "fp8", "bf16"])) for unit in every}

    made = in_precisions(plan, choice, model)

    wanted = {(weight.block, weight.part): low for unit, low in choice.items() for weight in unit.weights}
    for before, after in zip(assigned(plan, model), assigned(made, model), strict=True):
        key = (after.weight.block, after.weight.part)
        assert after.precision == wanted.get(key, before.precision), key
    if every:
        numbers = sum(unit.parameters for unit in every)
        bits = {"nvfp4": 4.5, "fp8": 8, "bf16": 16}
        used = sum(bits[low] * unit.parameters for unit, low in choice.items())
        assert average_bits(made, every, model) == pytest.approx(used / numbers)


def test_precisions_are_those_that_the_sizes_allow() -> None:
    """The tiny Nano's in_proj has 656 = 16 x 41 rows."""
    plan = Plan.from_config({"default": "nvfp4", "rules": ["head bf16"]})
    found = {unit.selector: precisions(unit, plan) for unit in units(plan, TINY.with_pattern("ME"), "part")}

    assert found["0.in_proj"] == found["0.out_proj"] == found["1.fc1"] == ["nvfp4", "fp8", "bf16"]
    odd = units(plan, TINY.with_pattern("-{ffn=40}"), "block")[0]
    assert precisions(odd, plan) == ["bf16"]
    mx = Plan.from_config({"default": "nvfp4", "recipe": "mxfp8", "rules": ["head bf16"]})
    assert precisions(units(mx, TINY.with_pattern("M"), "block")[0], mx) == ["nvfp4", "bf16"]
    assert (mx.bits("fp8"), mx.bits("nvfp4")) == (8.25, 4.5)
