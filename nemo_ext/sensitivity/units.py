"""Units of weights that are quantised together, and precision plan rules for them. Pure Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision import BYTES, NVFP4_BLOCK
from nemo_ext.architecture.precision_plan import HEAD, LOW, NANO_IN_BF16, Plan, Rule, Weight, assigned, multiple


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are all in one precision: FP8 or BF16, or with a budget of bits, NVFP4, FP8 or BF16.

    Attributes:
        selector: selector of a rule, such as `5`, `5.in_proj` or `head`.
        group: group for comparisons: the block's kind, and its successor if that is attention (`M>*`), or `head`.
        weights: the unit's weights that the given plan puts in FP8 or NVFP4.
    """

    selector: str
    group: str
    weights: tuple[Weight, ...]

    @property
    def bytes(self) -> int:
        """Size of the weights in BF16, in bytes."""
        return BYTES["bf16"] * self.parameters

    @property
    def parameters(self) -> int:
        """Number of parameters in the weights."""
        return sum(weight.parameters for weight in self.weights)

    @property
    def block(self) -> int | None:
        """0-based number of the unit's block; None for the output layer."""
        return self.weights[0].block


def units(plan: Plan, architecture: Architecture, per: str) -> list[Unit]:
    """Group all weights that a plan puts in FP8 or NVFP4 into units, by block or part, in model order.

    Args:
        per: granularity, `block` or `part`.

    Raises:
        ValueError: the plan puts nothing in FP8 or NVFP4.
    """
    kinds = [block.kind for block in architecture.sizes]
    by_selector: dict[str, list[Weight]] = {}
    for assignment in assigned(plan, architecture):
        if assignment.precision not in LOW:
            continue
        weight = assignment.weight
        selector = HEAD if weight.block is None else str(weight.block)
        if per == "part" and weight.block is not None:
            selector += f".{weight.part}"
        by_selector.setdefault(selector, []).append(weight)
    if not by_selector:
        raise ValueError(
            "precision_plan puts nothing of this model in FP8, so there is nothing to measure: set "
            "precision_plan.default=fp8"
        )
    return [Unit(name, _group(weights[0], kinds), tuple(weights)) for name, weights in by_selector.items()]


def _group(weight: Weight, kinds: Sequence[str]) -> str:
    if weight.block is None:
        return HEAD
    kind, following = kinds[weight.block], kinds[weight.block + 1 : weight.block + 2]
    return f"{kind}>*" if kind != "*" and following == ["*"] else kind


def only(plan: Plan, low: Sequence[Unit], every: Sequence[Unit]) -> Plan:
    """Return the plan with only the units `low` in FP8, and the other units of `every` in BF16."""
    return with_rules(plan, bf16_rules([unit for unit in every if unit not in low]))


def with_rules(plan: Plan, rules: Sequence[Rule]) -> Plan:
    """Return the plan with additional rules for weights that it puts in FP8.

    They are inserted after its leading rules for FP32 and BF16, which thus take precedence: a router that such a rule
    puts in FP32 stays there despite a new rule `2 bf16`.
    """
    leading = tuple(takewhile(lambda rule: rule.precision not in LOW, plan.rules))
    return replace(plan, rules=(*leading, *rules, *plan.rules[len(leading) :]))


def precisions(unit: Unit, plan: Plan) -> list[str]:
    """Return the precisions that a checkpoint can store a unit's weights in, the one with the fewest bits first."""
    sizes = [size for weight in unit.weights for size in (weight.rows, weight.columns)]
    steps = {"nvfp4": NVFP4_BLOCK, "fp8": multiple(plan, "fp8")[1], "bf16": 1}
    return [name for name, step in steps.items() if not any(size % step for size in sizes)]


def average_bits(plan: Plan, every: Sequence[Unit], architecture: Architecture) -> float:
    """Return the average bits per weight of units in a plan, including scales."""
    of = {(each.weight.block, each.weight.part): each.precision for each in assigned(plan, architecture)}
    bits = sum(w.parameters * plan.bits(of[w.block, w.part]) for unit in every for w in unit.weights)
    return bits / sum(unit.parameters for unit in every)


def in_precisions(plan: Plan, choice: Mapping[Unit, str], architecture: Architecture) -> Plan:
    """Return the plan with units in the precisions of `choice`, and all other weights as before."""

    def of(made: Plan) -> dict[tuple[int | None, str], str]:
        return {(each.weight.block, each.weight.part): each.precision for each in assigned(made, architecture)}

    before = of(plan)
    wanted = {**before, **{(w.block, w.part): low for unit, low in choice.items() for w in unit.weights}}
    changed = {u: low for u, low in choice.items() if any(before[w.block, w.part] != low for w in u.weights)}
    by_precision = {
        low: [unit for unit, other in changed.items() if other == low] for low in sorted({*changed.values()})
    }
    made = with_rules(plan, [rule for low, units_ in by_precision.items() for rule in rules(units_, low)])
    if of(made) != wanted:  # a rule for a whole block reaches weights that the plan names otherwise
        single = {low: [part for unit in units_ for part in _parts(unit)] for low, units_ in by_precision.items()}
        made = with_rules(plan, [rule for low, units_ in single.items() for rule in rules(units_, low)])
    return made


def _parts(unit: Unit) -> list[Unit]:
    if unit.block is None:
        return [unit]
    return [Unit(f"{unit.block}.{weight.part}", unit.group, (weight,)) for weight in unit.weights]


def bf16_rules(kept: Sequence[Unit]) -> tuple[Rule, ...]:
    """Return rules that keep units in BF16 (`rules`)."""
    return rules(kept, "bf16")


def rules(kept: Sequence[Unit], precision: str) -> tuple[Rule, ...]:
    """Return rules for units in a precision: one for whole blocks, one per kind of part, one for the output layer."""
    lists: dict[str, list[int]] = {}
    for unit in kept:
        if unit.block is not None:
            lists.setdefault(unit.selector.partition(".")[2], []).append(unit.block)
    texts = [",".join(map(str, numbers)) + (f".{part}" if part else "") for part, numbers in sorted(lists.items())]
    if any(unit.block is None for unit in kept):
        texts.append(HEAD)
    return tuple(Rule.parse(f"{text} {precision}") for text in texts)


NAMED = (("*",), NANO_IN_BF16, ("M>*",), ("M",), ("E",), ("-",), ("first 1", "last 1"), ("first 2", "last 2"))
"""Common selectors for blocks kept in BF16."""


def named_rule(kept: Sequence[Unit], plan: Plan, architecture: Architecture) -> tuple[str, ...] | None:
    """Return the common selectors (an entry of NAMED) that keep exactly these units in BF16; None if none do.

    The result is also None if all of the plan's FP8 units are kept.
    """
    every = units(plan, architecture, "part" if any("." in unit.selector for unit in kept) else "block")
    for selectors in NAMED if len(kept) < len(every) else ():
        if {unit.selector for unit in kept} == {unit.selector for unit in kept_by(selectors, every, architecture)}:
            return selectors
    return None


def kept_by(selectors: Sequence[str], every: Sequence[Unit], architecture: Architecture) -> list[Unit]:
    """Return the units, among `every`, that rules with these selectors would keep completely in BF16."""
    rules = [Rule.parse(f"{selector} bf16") for selector in selectors]
    kinds = [block.kind for block in architecture.sizes]
    return [u for u in every if all(any(r.selector.selects(w, kinds) for r in rules) for w in u.weights)]
