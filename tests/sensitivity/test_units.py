"""Units that are quantised together, and rules for units kept in BF16."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan, assigned
from nemo_ext.job.config import compose
from nemo_ext.sensitivity.units import kept_by, named_rule, only, units

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
