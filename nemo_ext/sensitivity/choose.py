"""The plan that keeps a budget at the fewest BF16 bytes, by Puzzle's integer program. No torch.

Sensitivities of single units add up only roughly, so the program's budget is not the one that is wanted: plans are
measured, and the program's budget is halved in on the best one whose measured loss keeps the wanted one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_ext.puzzle.choice.integer_program import Program, minimise
from nemo_ext.sensitivity.units import Unit

GAP, SECONDS, RESOLUTION = 1e-6, 60.0, 1e-3


@dataclass(frozen=True, slots=True)
class Proposal:
    """A choice and what it loses.

    Attributes:
        low: units in FP8.
        added: the sum of their sensitivities, nats a token.
        measured: what they lose together, nats a token.
    """

    low: tuple[Unit, ...]
    added: float
    measured: float


def cheapest(units: Sequence[Unit], losses: Sequence[float], budget: float) -> tuple[Unit, ...]:
    """The units in FP8 whose losses add up to a budget at most, with the fewest bytes left in BF16.

    Args:
        units: to choose from.
        losses: of each alone, none negative.
        budget: in the same unit.
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
    """Plans that were tried, the best one last: its measured loss keeps a budget with the fewest bytes in BF16.

    A unit that loses nothing alone counts as losing a little: together such units may.

    Args:
        units: to choose from.
        losses: of each in FP8 alone, nats a token.
        budget: nats a token.
        measure: what units lose in FP8 together.
        everything: the same for all of them.
        attempts: most plans that are measured.
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
