"""Selection of the prompts that may be trained on, with their pass rates and copies."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nemo_ext.data.curriculum.plan import Candidates, NoOrder
from nemo_ext.data.curriculum.pools import ordering_keys
from nemo_ext.data.curriculum.profile import Profile, rows_of
from nemo_ext.data.curriculum.prompts import Keys, Numbers, Prompts
from nemo_ext.data.curriculum.settings import Settings
from nemo_ext.data.curriculum.write import AS_IT_IS, OFF, ON, Modes
from nemo_ext.job.seeds import digest
from nemo_ext.job.settings import nearest

OFF_BITS = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Selection:
    """Prompts that may be trained on.

    Attributes:
        candidates: prompts, and their copies with thinking off.
        row: index of each candidate into the prompts.
        mode: mode of each candidate.
        left: number of prompts left out, by reason.
    """

    candidates: Candidates
    row: Numbers
    mode: Modes
    left: dict[str, int]


def select(prompts: Prompts, profile: Profile, at: Numbers, given: Settings, used: tuple[Keys, Numbers]) -> Selection:
    """Apply the filters, and make the copies with thinking off.

    Args:
        at: index of each prompt's entry in the profile, -1 for none.
        used: sorted keys that were trained on before, and their counts.

    Raises:
        ValueError: no prompt is in the profile.
        NoOrder: nothing is left, or no prompt is of a domain with a share.
    """
    filters = given.filters
    has = at >= 0
    if not len(profile) or not has.any():
        raise ValueError(
            f"no id of the {len(prompts):,} prompts is among the {len(profile):,} of the profile: "
            f"are keys.id={given.keys.id} and the rollouts' ids the same?"
        )
    rate = np.where(has, profile.pass_rate[at], np.nan)
    count = np.where(has, profile.rollouts[at], 0)
    reasons: list[tuple[str, npt.NDArray[np.bool_]]] = [
        ("without rollouts", ~has),
        (f"fewer than {filters.min_rollouts} rollouts", count < filters.min_rollouts),
    ]
    if given.domains is not None:
        for name in given.domains:
            if name not in prompts.domains:
                raise NoOrder(f"domains: no prompt is of {name!r}: {nearest(name, prompts.domains)}")
        wanted = np.array([given.domains.get(name, 0) > 0 for name in prompts.domains])
        reasons.append(("of a domain without a share", ~wanted[prompts.domain]))
    if filters.drop_from is not None:
        name = "always solved" if filters.drop_from == 1 else f"pass rate {filters.drop_from:g} or more"
        reasons.append((name, rate >= filters.drop_from))
    if filters.keep_from > 0:
        reasons.append((f"pass rate below {filters.keep_from:g}", rate < filters.keep_from))
    keep = np.ones(len(prompts), dtype=np.bool_)
    left: dict[str, int] = {}
    for reason, out in reasons:
        new = int((keep & out).sum())
        if new:
            left[reason] = new
        keep &= ~out
    if not keep.any():
        raise NoOrder(f"no prompt is left to train on: {', '.join(f'{n:,} {why}' for why, n in left.items())}")
    row = np.flatnonzero(keep)
    mode = np.full(len(row), ON if given.thinking.off_share else AS_IT_IS, dtype=np.int8)
    copies = _copied(row, prompts, given.thinking.off_share, given.seed)
    row = np.concatenate([row, copies])
    mode = np.concatenate([mode, np.full(len(copies), OFF, dtype=np.int8)])
    bits = np.where(mode == OFF, np.uint64(OFF_BITS), np.uint64(0))
    key = prompts.key[row] ^ bits
    at_before = rows_of(used[0], key)
    times = np.where(at_before >= 0, used[1][at_before], 0) if len(used[0]) else np.zeros(len(key), dtype=np.int64)
    if given.exhausted == "stop" and times.any():
        left["used before"] = int((times > 0).sum())
        fresh = times == 0
        row, mode, key, bits, times = row[fresh], mode[fresh], key[fresh], bits[fresh], times[fresh]
        if not len(row):
            raise NoOrder("all prompts were used before: exhausted=repeat begins them again")
    candidates = Candidates(
        key=key,
        text=prompts.text[row] ^ bits,
        domain=prompts.domain[row],
        rate=rate[row],
        used=times,
        domains=prompts.domains,
    )
    return Selection(candidates=candidates, row=row, mode=mode, left=left)


def _copied(row: Numbers, prompts: Prompts, off_share: float, seed: int) -> Numbers:
    """Rows of the prompts of each domain that get a copy, so many that the copies have their share of all."""
    if not off_share:
        return row[:0]
    draw = ordering_keys(prompts.key[row], digest(seed, "curriculum", "thinking"))
    chosen = []
    for domain in np.unique(prompts.domain[row]):
        own = np.flatnonzero(prompts.domain[row] == domain)
        number = round(len(own) * off_share / (1 - off_share))
        chosen.append(row[own[np.argsort(draw[own])[:number]]])
    return np.sort(np.concatenate(chosen))
