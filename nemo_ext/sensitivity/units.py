"""What is quantised at a time, as rules of a precision plan. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision import BYTES
from nemo_ext.architecture.precision_plan import HEAD, NANO_IN_BF16, Plan, Rule, Weight, assigned


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are in FP8 or in BF16 together.

    Attributes:
        selector: of a rule, `5` or `5.in_proj` or `head`.
        group: what it is compared with: a kind of block, with its neighbour where it feeds attention (`M>*`).
        weights: those of it that the given plan has in FP8.
    """

    selector: str
    group: str
    weights: tuple[Weight, ...]

    @property
    def bytes(self) -> int:
        """In BF16."""
        return BYTES["bf16"] * sum(weight.parameters for weight in self.weights)

    @property
    def block(self) -> int | None:
        """The number of its block from 0; None for the output layer."""
        return self.weights[0].block


def units(plan: Plan, architecture: Architecture, per: str) -> list[Unit]:
    """All that a plan has in FP8, cut into blocks or parts, in the order of the model.

    Args:
        plan: that is to be improved.
        architecture: of the model.
        per: `block` or `part`.

    Raises:
        ValueError: nothing is in FP8.
    """
    kinds = [block.kind for block in architecture.sizes]
    found: dict[str, list[Weight]] = {}
    for each in assigned(plan, architecture):
        if each.precision != "fp8":
            continue
        weight = each.weight
        selector = HEAD if weight.block is None else str(weight.block)
        if per == "part" and weight.block is not None:
            selector += f".{weight.part}"
        found.setdefault(selector, []).append(weight)
    if not found:
        raise ValueError("precision_plan: nothing of this model is in FP8, so there is nothing to measure")
    return [Unit(name, _group(of[0], kinds), tuple(of)) for name, of in found.items()]


def _group(weight: Weight, kinds: Sequence[str]) -> str:
    if weight.block is None:
        return HEAD
    kind, following = kinds[weight.block], kinds[weight.block + 1 : weight.block + 2]
    return f"{kind}>*" if kind != "*" and following == ["*"] else kind


def only(plan: Plan, low: Sequence[Unit], every: Sequence[Unit]) -> Plan:
    """The plan with these units in FP8, and the others of `every` in BF16."""
    return with_rules(plan, bf16_rules([unit for unit in every if unit not in low]))


def with_rules(plan: Plan, rules: Sequence[Rule]) -> Plan:
    """The plan with more rules for what it has in FP8.

    They come after those of its own that select nothing for FP8, so that `2 bf16` leaves a router in FP32.
    """
    own = tuple(takewhile(lambda rule: rule.precision != "fp8", plan.rules))
    return replace(plan, rules=(*own, *rules, *plan.rules[len(own) :]))


def bf16_rules(kept: Sequence[Unit]) -> tuple[Rule, ...]:
    """Rules that keep units in BF16: one for whole blocks, one for each part, one for the output layer."""
    lists: dict[str, list[int]] = {}
    for unit in kept:
        if unit.block is not None:
            lists.setdefault(unit.selector.partition(".")[2], []).append(unit.block)
    texts = [",".join(map(str, numbers)) + (f".{part}" if part else "") for part, numbers in sorted(lists.items())]
    if any(unit.block is None for unit in kept):
        texts.append(HEAD)
    return tuple(Rule.parse(f"{text} bf16") for text in texts)


NAMED = (("*",), NANO_IN_BF16, ("M>*",), ("M",), ("E",), ("-",), ("first 1", "last 1"), ("first 2", "last 2"))
"""Rules by which people keep blocks in BF16."""


def named_rule(kept: Sequence[Unit], plan: Plan, architecture: Architecture) -> tuple[str, ...] | None:
    """The one of NAMED that keeps exactly these units, if any does; none for all that there are."""
    every = units(plan, architecture, "part" if any("." in unit.selector for unit in kept) else "block")
    for selectors in NAMED if len(kept) < len(every) else ():
        if {unit.selector for unit in kept} == {unit.selector for unit in kept_by(selectors, every, architecture)}:
            return selectors
    return None


def kept_by(selectors: Sequence[str], every: Sequence[Unit], architecture: Architecture) -> list[Unit]:
    """Those of the units that rules with these selectors keep in BF16."""
    rules = [Rule.parse(f"{selector} bf16") for selector in selectors]
    kinds = [block.kind for block in architecture.sizes]
    return [u for u in every if all(any(r.selector.selects(w, kinds) for r in rules) for w in u.weights)]
