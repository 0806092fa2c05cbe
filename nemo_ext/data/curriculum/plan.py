"""Order in which a run trains on prompts: every step draws its domains' quotas from pools by pass rate.

A pool holds the undrawn prompts of one domain and one pass-rate level, in an order that depends only on the seed and
their ids. A step takes from the front of each pool the number set by a Gaussian around the target pass rate, or all
that are left, and fills the rest from the largest pools (Llama-Nemotron, section 5.1; Nemotron 3 Nano, section 3.2.2).
A prompt whose text is already in the step stays at the front for the next step. So the only state after a step is how
often each prompt was used: a plan made from it with the same settings and domain shares equals the rest of the original
plan (the default shares change as prompts are used).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nemo_ext.data.curriculum.pools import DomainPools, ordering_keys
from nemo_ext.data.curriculum.profile import rows_of
from nemo_ext.data.curriculum.prompts import Keys, Numbers, repeated_values
from nemo_ext.data.curriculum.schedule import Floats, means, quotas, wanted
from nemo_ext.data.curriculum.settings import Settings
from nemo_ext.job.seeds import digest, uniform

BLOCK = 4096


class NoOrder(ValueError):
    """Raised if the prompts cannot be ordered into a curriculum, for example because there are too few for one step."""


@dataclass(frozen=True)
class Candidates:
    """Prompts that may be trained on; every array has one entry per prompt.

    Attributes:
        key: unique key of the id.
        text: key of the text; equal for identical prompts, which are never in the same step.
        domain: index into `domains`.
        rate: pass rate.
        used: number of times that previous curricula trained on the prompt.
        domains: names of the domains.
    """

    key: Keys
    text: Keys
    domain: npt.NDArray[np.int16]
    rate: Floats
    used: Numbers
    domains: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True)
class Plan:
    """Prompts to train on, step by step.

    Attributes:
        order: [steps, batch] indices into the candidates, shuffled within each step.
        first_step: number of the first step in the schedule.
        targets: [steps] target mean pass rate.
        off_target: [steps] number of prompts from other levels, taken because the requested ones were exhausted.
        epochs: number of times that each domain was started over.
        stopped: reason why there are fewer steps than requested; "" if there are not.
    """

    order: npt.NDArray[np.int64]
    first_step: int
    targets: Floats
    off_target: Numbers
    epochs: tuple[int, ...]
    stopped: str


def make_plan(candidates: Candidates, shares: Floats, settings: Settings, *, levels: int) -> Plan:
    """Plan the steps of a curriculum.

    Args:
        candidates: prompts to choose from; `used` counts their uses before the first step.
        shares: [domains] share of each domain in every step.
        levels: pass rates are rounded to multiples of 1/levels.

    Raises:
        NoOrder: there are too few prompts for one step, or too few distinct ones.
    """
    batch, first_step, requested = settings.batch, settings.first_step, settings.steps
    domains = [np.flatnonzero(candidates.domain == number) for number in range(len(candidates.domains))]
    pools = [
        DomainPools(
            members=members,
            level=np.rint(candidates.rate[members] * levels).astype(np.int64),
            levels=levels + 1,
            key=candidates.key,
            used=candidates.used[members],
            repeat=settings.exhausted == "repeat",
            seed=digest(settings.seed, "curriculum", "order"),
        )
        for members in domains
    ]
    steps = first_step + len(candidates) // batch + 1 if requested is None else requested
    if len(candidates) < batch:
        why = _sizes(candidates, domains)
        raise NoOrder(f"too few prompts are left for a step of batch={batch} ({why}): lower batch or add prompts")
    needed = quotas(shares, batch=batch, steps=steps)[first_step:]
    repeated_texts = repeated_values(candidates.text)
    repeated = rows_of(repeated_texts, candidates.text) >= 0 if len(repeated_texts) else None
    _check_domains(candidates, domains, needed, repeated)
    stopped = ""
    if settings.exhausted == "stop" or requested is None:
        available = np.array([pool.left.sum() for pool in pools])
        short = np.cumsum(needed, axis=0) > available
        if short.any():
            last = int(np.argmax(short.any(axis=1)))
            name = candidates.domains[int(np.argmax(short[last]))]
            needed = needed[:last]
            stopped = (
                f"domain {name} has too few prompts left for step {first_step + last}" if requested is not None else ""
            )
            steps = first_step + last
    if not len(needed):
        why = stopped or _sizes(candidates, domains)
        raise NoOrder(f"too few prompts are left for a step of batch={batch} ({why}): lower batch or add prompts")
    targets = means(first=settings.mean_first, last=settings.mean_last, steps=steps)
    off_target = []
    for missed in _draw(candidates, pools, needed, targets, repeated, settings):
        if isinstance(missed, str):
            stopped = missed
            break
        off_target.append(missed)
    if not off_target:
        raise NoOrder(f"the first step cannot be filled, as {stopped}: lower batch or add prompts")
    count = len(off_target)
    return Plan(
        order=_order(pools, count, batch, candidates.key, first_step=first_step, seed=settings.seed),
        first_step=first_step,
        targets=targets[first_step : first_step + count],
        off_target=np.array(off_target, dtype=np.int64),
        epochs=tuple(pool.begun_again for pool in pools),
        stopped=stopped,
    )


def _draw(
    candidates: Candidates,
    pools: list[DomainPools],
    needed: Numbers,
    targets: Floats,
    repeated: npt.NDArray[np.bool_] | None,
    settings: Settings,
) -> Iterator[int | str]:
    """Draw the prompts of each step from the pools; yield how many are from other levels than requested.

    If a step is impossible, the reason is yielded instead, as the last item.

    Args:
        pools: pools of each domain, which record what is drawn.
        needed: [steps, domains] number of prompts.
        targets: target mean pass rate of each step of the schedule, from step 0.
        repeated: mask of the candidates that share their text with another one; None if none do.
    """
    first_step = settings.first_step
    starts = [uniform(settings.seed, "curriculum", "levels", name) for name in candidates.domains]
    for begin in range(0, len(needed), BLOCK):
        block = slice(begin, min(begin + BLOCK, len(needed)))
        step = first_step + begin
        requested = [
            wanted(
                targets[first_step:][block],
                needed[block, number],
                first_step=step,
                present=pool.present,
                sigma=settings.sigma,
                start=starts[number],
            )
            if len(pool.members)
            else None
            for number, pool in enumerate(pools)
        ]
        for row in range(block.stop - block.start):
            in_step: set[int] | None = None if repeated is None and settings.exhausted == "stop" else set()
            off_target = 0
            for number, (pool, want) in enumerate(zip(pools, requested, strict=True)):
                if want is None or not (quota := int(needed[begin + row, number])):
                    continue
                missing = pool.draw(
                    want[row],
                    quota,
                    step=begin + row,
                    texts=candidates.text,
                    repeated=repeated,
                    in_step=in_step,
                )
                if missing is None:
                    yield (
                        f"domain {candidates.domains[number]} has {int(pool.left.sum())} prompts left, but too many of "
                        f"them have a text that is already in step {first_step + begin + row}"
                    )
                    return
                off_target += missing
            yield off_target


def _order(
    pools: list[DomainPools], steps: int, batch: int, keys: Keys, *, first_step: int, seed: int
) -> npt.NDArray[np.int64]:
    """Return the indices of the candidates drawn in each step, [steps, batch], in an order set by `seed` and `keys`."""
    drawn = [piece for pool in pools for piece in pool.drawn(steps)]
    items = np.concatenate([items for items, _ in drawn])
    at = np.concatenate([at for _, at in drawn])
    assert len(items) == steps * batch
    order = items[np.argsort(at, kind="stable")].reshape(steps, batch)
    seeds = ordering_keys(
        np.arange(first_step, first_step + steps, dtype=np.uint64), digest(seed, "curriculum", "shuffle")
    )
    shuffled = np.empty_like(order)
    for begin in range(0, steps, BLOCK):
        rows = slice(begin, begin + BLOCK)
        places = np.argsort(ordering_keys(keys[order[rows]] ^ seeds[rows, None], 0), axis=1)
        shuffled[rows] = np.take_along_axis(order[rows], places, axis=1)
    return shuffled


def _check_domains(
    candidates: Candidates,
    domains: list[npt.NDArray[np.int64]],
    needed: Numbers,
    repeated: npt.NDArray[np.bool_] | None,
) -> None:
    for number, members in enumerate(domains):
        most = int(needed[:, number].max())
        different = len(members)
        if repeated is not None:
            copies = members[repeated[members]]
            different += len(np.unique(candidates.text[copies])) - len(copies)
        if different < most:
            raise NoOrder(
                f"domain {candidates.domains[number]} has {different} distinct prompts to train on, but its share "
                f"requires {most} per step: lower batch or its share in domains, or add prompts"
            )


def _sizes(candidates: Candidates, domains: list[npt.NDArray[np.int64]]) -> str:
    return ", ".join(f"{name} has {len(members):,}" for name, members in zip(candidates.domains, domains, strict=True))
