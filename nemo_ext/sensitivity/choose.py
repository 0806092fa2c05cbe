"""Find the plan that meets a budget with the fewest BF16 bytes, by Puzzle's integer program. No torch.

Sensitivities of single units add up only roughly, so the program's budget differs from the one asked for: plans are
measured, and the program's budget is bisected for the best plan whose measured loss meets the budget asked for.
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
        added: sum of their sensitivities, nats per token.
        measured: loss with all of them in FP8 together, nats per token.
    """

    low: tuple[Unit, ...]
    added: float
    measured: float


def cheapest(units: Sequence[Unit], losses: Sequence[float], budget: float) -> tuple[Unit, ...]:
    """The units in FP8 whose losses add up to at most a budget, with the fewest bytes left in BF16.

    Args:
        units: units to choose from.
        losses: loss of each unit alone, none negative.
        budget: largest sum of losses, in the same unit.
    """
    program = Program(
        objective=[np.array([0.0, float(unit.bytes)]) for unit in units],  # FP8, BF16
        rows=[np.array([[loss], [0.0]]) for loss in losses],
        lower=np.array([-np.inf]),
        upper=np.array([budget]),
    )
    answer = minimise(program, gap=GAP, time_limit=SECONDS)
    assert answer.choice is not None, "everything in BF16 keeps any budget"
    return tuple(unit for unit, chosen in zip(units, answer.choice, strict=True) if chosen == 0)


def propose(
    units: Sequence[Unit],
    losses: Sequence[float],
    budget: float,
    measure: Callable[[Sequence[Unit]], float],
    *,
    everything: float,
    attempts: int,
) -> list[Proposal]:
    """Plans that were tried, the best one last: its measured loss is within a budget with the fewest BF16 bytes.

    A unit without loss of its own counts as losing a little, because such units may add up to a loss.

    Args:
        units: units to choose from.
        losses: loss of each unit in FP8 alone, nats per token.
        budget: largest loss of a plan, nats per token.
        measure: returns the loss of units in FP8 together.
        everything: loss of all units in FP8 together.
        attempts: most plans to measure.
    """

    def added(low: Sequence[Unit]) -> float:
        return sum(loss for unit, loss in zip(units, losses, strict=True) if unit in low)

    nothing, whole = Proposal((), 0.0, 0.0), Proposal(tuple(units), added(units), everything)
    known = {found.low: found for found in (nothing, whole)}
    if everything <= budget:
        return [whole]
    counted = [max(loss, RESOLUTION * everything / len(units)) for loss in losses]
    total = sum(counted)
    least, most, within = 0.0, total, min(budget, total / 2)
    while len(known) < attempts + 2 and most - least > RESOLUTION * total:
        low = cheapest(units, counted, within)
        if low not in known:
            known[low] = Proposal(low, added(low), measure(low))
        if known[low].measured <= budget:
            least = within
        else:
            most = within
        within = (least + most) / 2
    kept = [found for found in known.values() if found.measured <= budget]
    best = max(kept, key=lambda found: sum(unit.bytes for unit in found.low))
    return [*(found for found in known.values() if found not in (nothing, whole, best)), best]
