"""Search for the best plan within a budget, using Puzzle's integer program.

With a budget of loss, the plan has the fewest BF16 bytes; with a budget of bits per weight, the lowest sum of losses.

The sensitivities of single units add up only roughly. Plans are therefore measured, and the budget given to the program
is bisected until its plan's measured loss is as close as possible to the requested budget. Does not import torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_ext.puzzle.choice.integer_program import Program, minimise
from nemo_ext.sensitivity.units import Unit

GAP, SECONDS, RESOLUTION = 1e-6, 60.0, 1e-3


@dataclass(frozen=True, slots=True)
class Proposal:
    """A choice of units in FP8 and its loss.

    Attributes:
        low: units in FP8.
        added: sum of these units' single losses, in nats per token.
        measured: loss with all of them in FP8 together, in nats per token.
    """

    low: tuple[Unit, ...]
    added: float
    measured: float


def cheapest(units: Sequence[Unit], losses: Sequence[float], budget: float) -> tuple[Unit, ...]:
    """Choose units to put in FP8 so that their losses add up to at most a budget and the fewest bytes remain in BF16.

    Args:
        losses: loss of each unit alone in FP8, at least 0.
        budget: maximum sum of the chosen units' losses.
    """
    sizes = [(0.0, float(unit.bytes)) for unit in units]  # FP8, BF16
    chosen = _lowest(sizes, [(loss, 0.0) for loss in losses], budget)
    return tuple(unit for unit, option in zip(units, chosen, strict=True) if option == 0)


def _lowest(costs: Sequence[Sequence[float]], amounts: Sequence[Sequence[float]], budget: float) -> tuple[int, ...]:
    """Choose one option per unit with the lowest sum of costs and a sum of amounts of at most `budget`.

    Args:
        costs: costs of each unit's options.
        amounts: amounts of each unit's options.
        budget: maximum sum of amounts.

    Returns:
        0-based index of each unit's option.
    """
    program = Program(
        objective=[np.array(each) for each in costs],
        rows=[np.array(each)[:, None] for each in amounts],
        lower=np.array([-np.inf]),
        upper=np.array([budget]),
    )
    answer = minimise(program, gap=GAP, time_limit=SECONDS)
    assert answer.choice is not None, "the smallest options are within the budget"
    return answer.choice


def propose(
    units: Sequence[Unit],
    losses: Sequence[float],
    budget: float,
    measure: Callable[[Sequence[Unit]], float],
    *,
    everything: float,
    attempts: int,
) -> list[Proposal]:
    """Measure plans, and return them; the last has the fewest BF16 bytes of those with a loss within the budget.

    Every unit is assigned at least a small loss, as units that lose nothing alone may lose something together.

    Args:
        losses: loss of each unit alone in FP8, in nats per token.
        budget: maximum loss of a plan, in nats per token.
        measure: function that returns the loss with several units in FP8.
        everything: loss with all units in FP8.
        attempts: maximum number of plans to measure.
    """

    def added(low: Sequence[Unit]) -> float:
        return sum(loss for unit, loss in zip(units, losses, strict=True) if unit in low)

    nothing, whole = Proposal((), 0.0, 0.0), Proposal(tuple(units), added(units), everything)
    known = {proposal.low: proposal for proposal in (nothing, whole)}
    if everything <= budget:
        return [whole]
    counted = [max(loss, RESOLUTION * everything / len(units)) for loss in losses]
    total = sum(counted)
    lower, upper, within = 0.0, total, min(budget, total / 2)
    while len(known) < attempts + 2 and upper - lower > RESOLUTION * total:
        low = cheapest(units, counted, within)
        if low not in known:
            known[low] = Proposal(low, added(low), measure(low))
        if known[low].measured <= budget:
            lower = within
        else:
            upper = within
        within = (lower + upper) / 2
    valid = [proposal for proposal in known.values() if proposal.measured <= budget]
    best = max(valid, key=lambda proposal: sum(unit.bytes for unit in proposal.low))
    return [*(proposal for proposal in known.values() if proposal not in (nothing, whole, best)), best]


@dataclass(frozen=True, slots=True)
class Option:
    """A unit in one precision.

    Attributes:
        precision: `nvfp4`, `fp8` or `bf16`.
        bits: bits of the unit's weights.
        loss: loss of the unit alone in this precision, in nats per token.
    """

    precision: str
    bits: float
    loss: float


def within_bits(options: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """Choose one option per unit with the lowest sum of losses within a budget of bits.

    Args:
        options: the options of each unit.
        budget: maximum sum of bits; at least that of the smallest options.
    """
    losses, bits = ([[getattr(option, name) for option in each] for each in options] for name in ("loss", "bits"))
    return [each[number] for each, number in zip(options, _lowest(losses, bits, budget), strict=True)]


def random_within_bits(options: Sequence[Sequence[Option]], budget: float, seed: int) -> list[Option]:
    """Choose one option per unit at random within a budget of bits, and return the options.

    To use up the budget, units are then raised, in random order, to the largest option that still fits.
    """
    random = np.random.default_rng(seed)
    chosen = [min(each, key=lambda option: option.bits) for each in options]
    left = budget - sum(option.bits for option in chosen)
    for number in random.permutation(len(options)):
        affordable = [option for option in options[number] if option.bits - chosen[number].bits <= left]
        option = affordable[random.integers(len(affordable))]
        left -= option.bits - chosen[number].bits
        chosen[number] = option
    for number in random.permutation(len(options)):
        option = max((o for o in options[number] if o.bits - chosen[number].bits <= left), key=lambda o: o.bits)
        left -= option.bits - chosen[number].bits
        chosen[number] = option
    return chosen
