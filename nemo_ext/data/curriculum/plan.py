"""The order in which a run trains on prompts: every step draws its domains' quotas from pools by pass rate.

A pool holds the prompts of one domain and one level of pass rate that were not drawn yet, in an order that depends on
the seed and their ids alone. A step takes from the front of each pool as many as the Gaussian asks for or there are,
and what is then missing from the largest pools (Llama-Nemotron, section 5.1; Nemotron 3 Nano, section 3.2.2). A prompt
whose text is in the step already stays at the front for the next one. So the state after a step is just how often each
prompt was used: a plan made from there with the same settings and the same shares of the domains (the default shares
change once some prompts are used) is the rest of the whole plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nemo_ext.data.curriculum.pools import DomainPools, ordering_keys
from nemo_ext.data.curriculum.prompts import Keys, Numbers
from nemo_ext.data.curriculum.schedule import Floats, means, quotas, start_of, wanted
from nemo_ext.data.curriculum.settings import Settings
from nemo_ext.job.seeds import digest

BLOCK = 4096


class NoOrder(ValueError):
    """No order can be made of the prompts there are."""


@dataclass(frozen=True)
class Candidates:
    """Prompts that may be trained on, one entry of every array each.

    Attributes:
        key: key of the id; no two are equal.
        text: key of the text; equal for identical prompts, which are never in one step.
        domain: index into `domains`.
        rate: pass rate.
        used: number of times that the prompt was trained on before.
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
        order: [steps, batch], indices into the candidates, shuffled inside a step.
        first_step: number of the first step in the schedule.
        targets: [steps], mean pass rate that each step aims at.
        off_target: [steps], number of prompts from the largest pools for want of the right pass rate.
        epochs: number of times that each domain was begun again.
        stopped: reason why there are fewer steps than asked for, or "".
    """

    order: npt.NDArray[np.int64]
    first_step: int
    targets: Floats
    off_target: Numbers
    epochs: tuple[int, ...]
    stopped: str


def make_plan(candidates: Candidates, shares: Floats, given: Settings, *, levels: int) -> Plan:
    """Plan the steps of a curriculum.

    Args:
        candidates: prompts to choose from; `used` counts the steps before the first one.
        shares: shares of the domains in every step.
        given: settings of the schedule.
        levels: number of equal parts of pass rates, which are rounded to multiples of 1/levels.

    Raises:
        NoOrder: there are too few prompts for one step, or too few different ones.
    """
    batch, first_step, asked = given.batch, given.first_step, given.steps
    domains = [np.flatnonzero(candidates.domain == number) for number in range(len(candidates.domains))]
    pools = [
        DomainPools(
            members=members,
            level=np.rint(candidates.rate[members] * levels).astype(np.int64),
            levels=levels + 1,
            key=candidates.key,
            used=candidates.used[members],
            repeat=given.exhausted == "repeat",
            seed=digest(given.seed, "curriculum", "order"),
        )
        for members in domains
    ]
    steps = first_step + len(candidates) // batch + 1 if asked is None else asked
    if len(candidates) < batch:
        raise NoOrder(f"there are too few prompts for a step of {batch}: {_sizes(candidates, domains)}")
    needed = quotas(shares, batch=batch, steps=steps)[first_step:]
    marks = _repeated(candidates.text)
    _check_domains(candidates, domains, needed, marks)
    stopped = ""
    if given.exhausted == "stop" or asked is None:
        there = np.array([pool.left.sum() for pool in pools])
        short = np.cumsum(needed, axis=0) > there
        if short.any():
            last = int(np.argmax(short.any(axis=1)))
            name = candidates.domains[int(np.argmax(short[last]))]
            needed = needed[:last]
            stopped = f"{name} has too few prompts left for step {first_step + last}" if asked is not None else ""
            steps = first_step + last
    if not len(needed):
        raise NoOrder(f"there are too few prompts for a step of {batch}: {stopped or _sizes(candidates, domains)}")
    targets = means(first=given.mean_first, last=given.mean_last, steps=steps)
    off_target = []
    for count in _draw(candidates, pools, needed, targets, marks, given):
        if isinstance(count, str):
            stopped = count
            break
        off_target.append(count)
    if not off_target:
        raise NoOrder(f"no step can be made: {stopped}")
    made = len(off_target)
    return Plan(
        order=_order(pools, made, batch, candidates.key, first_step=first_step, seed=given.seed),
        first_step=first_step,
        targets=targets[first_step : first_step + made],
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
    given: Settings,
) -> Iterator[int | str]:
    """Draw step by step; yields the number off target, or at last the reason why no further step can be made."""
    first_step = given.first_step
    starts = [start_of(given.seed, name) for name in candidates.domains]
    for begin in range(0, len(needed), BLOCK):
        block = slice(begin, min(begin + BLOCK, len(needed)))
        step = first_step + begin
        asked = [
            wanted(
                targets[first_step:][block],
                needed[block, number],
                first_step=step,
                present=pool.present,
                sigma=given.sigma,
                start=starts[number],
            )
            if len(pool.members)
            else None
            for number, pool in enumerate(pools)
        ]
        for row in range(block.stop - block.start):
            in_step: set[int] | None = None if repeated is None and given.exhausted == "stop" else set()
            off_target = 0
            for number, (pool, want) in enumerate(zip(pools, asked, strict=True)):
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
                        f"{candidates.domains[number]} has {int(pool.left.sum())} prompts left, but too few whose text "
                        f"is not in step {first_step + begin + row} already"
                    )
                    return
                off_target += missing
            yield off_target


def _order(
    pools: list[DomainPools], steps: int, batch: int, keys: Keys, *, first_step: int, seed: int
) -> npt.NDArray[np.int64]:
    """Prompts of each step in a shuffled order, [steps, batch]."""
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


def _repeated(texts: Keys) -> npt.NDArray[np.bool_] | None:
    """Mask of the candidates that share their text with others; None if there are none."""
    _, text, counts = np.unique(texts, return_inverse=True, return_counts=True)
    return counts[text] > 1 if (counts > 1).any() else None


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
                f"domain {candidates.domains[number]} has {different} different prompts to train on, and its share "
                f"asks for {most} in a step: give it a smaller share, or make the batch smaller"
            )


def _sizes(candidates: Candidates, domains: list[npt.NDArray[np.int64]]) -> str:
    return ", ".join(f"{name} has {len(members):,}" for name, members in zip(candidates.domains, domains, strict=True))
