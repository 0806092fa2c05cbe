"""Units of weights that are quantised together, and precision plan rules for them. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision import BYTES
from nemo_ext.architecture.precision_plan import HEAD, NANO_IN_BF16, Plan, Rule, Weight, assigned


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are either all in FP8 or all in BF16.

    Attributes:
        selector: selector of a rule, such as `5`, `5.in_proj` or `head`.
        group: group for comparisons: the block's kind, and its successor if that is attention (`M>*`), or `head`.
        weights: the unit's weights that the given plan puts in FP8.
    """

    selector: str
    group: str
    weights: tuple[Weight, ...]

    @property
    def bytes(self) -> int:
        """Size of the weights in BF16, in bytes."""
        return BYTES["bf16"] * sum(weight.parameters for weight in self.weights)

    @property
    def block(self) -> int | None:
        """0-based number of the unit's block; None for the output layer."""
        return self.weights[0].block


def units(plan: Plan, architecture: Architecture, per: str) -> list[Unit]:
    """Group all weights that a plan puts in FP8 into units, by block or part, in model order.

    Args:
        plan: plan to improve.
        architecture: the model's architecture.
        per: granularity, `block` or `part`.

    Raises:
        ValueError: the plan puts nothing in FP8.
    """
    kinds = [block.kind for block in architecture.sizes]
    by_selector: dict[str, list[Weight]] = {}
    for assignment in assigned(plan, architecture):
        if assignment.precision != "fp8":
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

    They are inserted after its leading rules that do not select FP8, so that `2 bf16` leaves a router in FP32.
    """
    leading = tuple(takewhile(lambda rule: rule.precision != "fp8", plan.rules))
    return replace(plan, rules=(*leading, *rules, *plan.rules[len(leading) :]))


def bf16_rules(kept: Sequence[Unit]) -> tuple[Rule, ...]:
    """Return rules that keep units in BF16: one for whole blocks, one per kind of part, one for the output layer."""
    lists: dict[str, list[int]] = {}
    for unit in kept:
        if unit.block is not None:
            lists.setdefault(unit.selector.partition(".")[2], []).append(unit.block)
    texts = [",".join(map(str, numbers)) + (f".{part}" if part else "") for part, numbers in sorted(lists.items())]
    if any(unit.block is None for unit in kept):
        texts.append(HEAD)
    return tuple(Rule.parse(f"{text} bf16") for text in texts)


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
