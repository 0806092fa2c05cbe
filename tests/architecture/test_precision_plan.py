"""Precision plans: the notation, the blocks that it selects, and Nano's published plan in one line."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydra_conf
from nemo_ext.architecture.cost import parameters
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import (
    NO_FP8,
    PARTS,
    Plan,
    Rule,
    Selector,
    assigned,
    fp8_shares,
    misfits,
    weight_bytes,
    weights,
)
from nemo_ext.job.config import compose

SELECTIVE = ("* bf16", "M>* bf16")


@cache
def architecture(model: str, *words: str) -> Architecture:
    return Architecture.from_config(compose("describe", [f"model={model}", *words]))


def plan(*rules: str, **given: str) -> Plan:
    return Plan.from_config({"default": "fp8", "rules": list(rules), **given})


def blocks(given: Plan, model: Architecture, precision: str) -> set[int | None]:
    found = assigned(given, model)
    return {each.weight.block for each in found if each.precision == precision and each.weight.part not in NO_FP8}


def test_nanos_selective_plan_is_one_line() -> None:
    """Nemotron 3 Nano, FP8 PTQ: blocks 5,12,19,26,33,42 and the blocks before them stay BF16."""
    model = architecture("nemotron3_nano_30b")

    assert blocks(plan(*SELECTIVE), model, "bf16") == {5, 12, 19, 26, 33, 42, 4, 11, 18, 25, 32, 41}
    assert {each.precision for each in assigned(plan(*SELECTIVE), model) if each.weight.part in NO_FP8} == {"bf16"}
    assert blocks(plan("5,12,19,26,33,42 bf16", "4,11,18,25,32,41 bf16"), model, "bf16") == blocks(
        plan(*SELECTIVE), model, "bf16"
    )


@pytest.mark.parametrize("model", ["nemotron3_nano_30b", "domyn_small_10b", "llama_nemotron_super_49b", "olmo1_1b"])
def test_weights_are_all_parameters_but_vectors(model: str) -> None:
    sizes = architecture(model)
    counted, every = sum(weight.parameters for weight in weights(sizes)), parameters(sizes).total

    assert 0 <= every - counted < 1e-3 * every


KINDS = st.lists(st.sampled_from("M*-E"), min_size=1, max_size=12)


@given(KINDS, st.sampled_from("M*-E"), st.sampled_from("M*-E"), st.integers(1, 4))
def test_selectors(kinds: list[str], kind: str, other: str, count: int) -> None:
    model = architecture("nemotron3_nano_tiny").with_pattern("".join(kinds))
    numbers = range(len(kinds))

    def selected(text: str) -> set[int | None]:
        return blocks(plan(f"{text} bf16"), model, "bf16")

    assert selected(kind) == {at for at in numbers if kinds[at] == kind}
    assert selected(f"{kind}>{other}") == {at for at in numbers[:-1] if kinds[at : at + 2] == [kind, other]}
    assert selected(f"{kind}<{other}") == {at for at in numbers[1:] if kinds[at - 1 : at + 1] == [other, kind]}
    assert selected(f"first {count}") == set(numbers[:count])
    assert selected(f"last {count}") == set(numbers[-count:])
    part = PARTS[kind][-3 if kind == "E" else -1]
    found = [each for each in assigned(plan(f"{kind}.{part} bf16"), model) if each.rule]
    assert {(each.weight.block, each.weight.part) for each in found} == {
        (at, part) for at in numbers if kinds[at] == kind
    }


def test_the_first_matching_rule_applies() -> None:
    model = architecture("nemotron3_nano_tiny")
    given = plan("first 1 fp32", "M bf16", "head bf16", ".router fp32")
    found = {(each.weight.block, each.weight.part): each.precision for each in assigned(given, model)}

    assert (found[0, "in_proj"], found[2, "in_proj"], found[3, "qkv"]) == ("fp32", "bf16", "fp8")
    assert (found[None, "head"], found[None, "embedding"], found[1, "router"]) == ("bf16", "bf16", "fp32")


def test_latent_projections_are_in_fp8_only_if_a_rule_names_them() -> None:
    model = architecture("nemotron3_nano_tiny", "model.pattern='E{latent=64}EE{latent=32}'")

    def low(*rules: str, default: str = "fp8") -> set[str]:
        found = assigned(plan(*rules, default=default), model)
        return {str(each.weight) for each in found if each.precision == "fp8" and "latent" in each.weight.part}

    assert low() == low("E fp8") == low("0 fp8", default="bf16") == set()
    assert low("E.latent_fc1 fp8") == {"block 0 latent_fc1", "block 2 latent_fc1"}
    assert low("2.latent_fc2 fp8", default="bf16") == {"block 2 latent_fc2"}
    sizes = {str(weight): (weight.rows, weight.columns) for weight in weights(model)}
    assert (sizes["block 0 fc1"], sizes["block 1 fc1"], sizes["block 2 fc1"]) == ((128, 64), (128, 192), (128, 32))
    assert (sizes["block 0 latent_fc1"], sizes["block 2 latent_fc2"]) == ((64, 192), (192, 32))
    assert "block 1 latent_fc1" not in sizes


def test_sizes_that_a_recipe_does_not_support_are_named() -> None:
    model = architecture("nemotron3_nano_tiny")

    assert "block 0 in_proj: out 656 is not a multiple of 128 (blockwise); use 640 or 768" in misfits(
        plan(recipe="blockwise"), model
    )
    narrow = architecture("nemotron3_nano_tiny", "model.pattern=M-{ffn=64}")
    assert "block 1 fc1: out 64 is not a multiple of 128 (blockwise); use 128 or 256" in misfits(
        plan(recipe="blockwise"), narrow
    )
    assert not misfits(plan("M bf16"), model)
    assert any(line.startswith("block 3 qkv: in 192") for line in misfits(plan("M bf16", recipe="blockwise"), model))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("M>*", "expected a selector and one of fp8, bf16, fp32"),
        ("X bf16", "expected a block kind"),
        ("M.qkv bf16", "must name one of the parts of Mamba-2 blocks, in_proj, conv1d, out_proj, not qkv"),
        (".in_pro bf16", "unknown part 'in_pro'; did you mean 'in_proj'?"),
        ("M.conv1d fp8", "conv1d does not support FP8: use bf16 or fp32"),
        ("embedding fp8", "embedding does not support FP8"),
        ("first 0 bf16", "expected a block kind"),
    ],
)
def test_wrong_rules(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as raised:
        Rule.parse(text)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"recipe": "delyed"}, "precision_plan.recipe='delyed': expected one of delayed"),
        ({"rule": []}, "precision_plan: unknown key 'rule': did you mean 'rules'"),
        ({"rules": "M bf16"}, "expected a list of rules"),
        (5, "precision_plan=5: expected a section"),
    ],
)
def test_wrong_plans(section: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as raised:
        Plan.from_config(section)
    assert said in str(raised.value)


def test_a_missing_block_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"precision_plan\.rules: '9 bf16' names block 9, but the model has blocks 0 to 7"
    ):
        assigned(plan("9 bf16"), architecture("nemotron3_nano_tiny"))


def test_selectors_are_read() -> None:
    assert Selector.parse("M > *") == Selector(kind="M", before="*")
    assert Selector.parse("first 2.fc1") == Selector(first=2, part="fc1")


def test_memory_that_a_plan_saves() -> None:
    model = architecture("nemotron3_nano_30b")
    stored, whole = weight_bytes(plan(*SELECTIVE), model), sum(weight.parameters for weight in weights(model))
    kept = [each.weight.parameters for each in assigned(plan(*SELECTIVE), model) if each.precision == "bf16"]

    assert stored == {"fp8": whole - sum(kept), "bf16": 2 * sum(kept), "fp32": 0}
    shares = fp8_shares(plan(*SELECTIVE), model)
    assert [number for number, share in shares.items() if share == 0] == [4, 5, 11, 12, 18, 19, 25, 26, 32, 33, 41, 42]
    assert shares[None] == 1.0


def test_every_shipped_plan_fits_every_compatible_model() -> None:
    names = sorted(path.stem for path in (Path(hydra_conf.__file__).parent / "precision").glob("*.yaml"))
    sections = {
        name: compose("describe", ["model=domyn_small_10b", f"precision={name}"])["precision_plan"] for name in names
    }

    assert sorted(name for name, section in sections.items() if section) == [
        *("fp8_blockwise", "fp8_current", "fp8_delayed", "mxfp8", "nemotron3_selective")
    ]
    for section in sections.values():
        if section is not None:
            assert not misfits(Plan.from_config(section), architecture("domyn_small_10b"))
