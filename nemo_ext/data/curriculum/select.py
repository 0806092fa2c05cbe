"""Selection of the prompts to train on, with their pass rates and with copies that have thinking off."""

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
        row: index of each candidate's prompt.
        mode: mode of each candidate.
        left: number of excluded prompts, keyed by reason.
    """

    candidates: Candidates
    row: Numbers
    mode: Modes
    left: dict[str, int]


def select(
    prompts: Prompts, profile: Profile, at: Numbers, settings: Settings, used: tuple[Keys, Numbers]
) -> Selection:
    """Select the prompts to train on: apply the filters in `settings`, and add copies of some prompts without thinking.

    Args:
        at: index of each prompt in the profile; -1 if it is not there.
        used: sorted keys of the prompts that were trained on before, and how often each was used.

    Returns:
        The selected prompts and copies, and how many were excluded for each reason.

    Raises:
        ValueError: no prompt is in the profile.
        NoOrder: no prompt is left, or a domain in `domains` has no prompt.
    """
    filters = settings.filters
    has = at >= 0
    if not len(profile) or not has.any():
        raise ValueError(
            f"none of the {len(prompts):,} prompts has an id that is in the profile of {len(profile):,} prompts: "
            f"set keys.id ({settings.keys.id}) and rollout_keys.id ({settings.rollout_keys.id}) to keys of the same ids"
        )
    rate = np.where(has, profile.pass_rate[at], np.nan)
    count = np.where(has, profile.rollouts[at], 0)
    reasons: list[tuple[str, npt.NDArray[np.bool_]]] = [
        ("without rollouts", ~has),
        (f"fewer than {filters.min_rollouts} rollouts", count < filters.min_rollouts),
    ]
    if settings.domains is not None:
        for name in settings.domains:
            if name not in prompts.domains:
                raise NoOrder(f"domains.{name} is not the domain of any prompt; {nearest(name, prompts.domains)}")
        wanted = np.array([settings.domains.get(name, 0) > 0 for name in prompts.domains])
        reasons.append(("of a domain without a share", ~wanted[prompts.domain]))
    if filters.drop_from is not None:
        name = "always solved" if filters.drop_from == 1 else f"pass rate {filters.drop_from:g} or more"
        reasons.append((name, rate >= filters.drop_from))
    if filters.keep_from > 0:
        reasons.append((f"pass rate below {filters.keep_from:g}", rate < filters.keep_from))
    keep = np.ones(len(prompts), dtype=np.bool_)
    left: dict[str, int] = {}
    for reason, excluded in reasons:
        if new := int((keep & excluded).sum()):
            left[reason] = new
        keep &= ~excluded
    if not keep.any():
        why = ", ".join(f"{count:,} {reason}" for reason, count in left.items())
        raise NoOrder(f"no prompt is left to train on (excluded: {why}): relax filters, or add prompts or rollouts")
    row = np.flatnonzero(keep)
    mode = np.full(len(row), ON if settings.thinking.off_share else AS_IT_IS, dtype=np.int8)
    copies = _copied(row, prompts, settings.thinking.off_share, settings.seed)
    row = np.concatenate([row, copies])
    mode = np.concatenate([mode, np.full(len(copies), OFF, dtype=np.int8)])
    bits = np.where(mode == OFF, np.uint64(OFF_BITS), np.uint64(0))
    key = prompts.key[row] ^ bits
    at_before = rows_of(used[0], key)
    times = np.where(at_before >= 0, used[1][at_before], 0) if len(used[0]) else np.zeros(len(key), dtype=np.int64)
    if settings.exhausted == "stop" and times.any():
        left["used before"] = int((times > 0).sum())
        fresh = times == 0
        row, mode, key, bits, times = row[fresh], mode[fresh], key[fresh], bits[fresh], times[fresh]
        if not len(row):
            raise NoOrder("all prompts were used before: set exhausted=repeat to use them again")
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
    """Draw prompts to copy at random from the indices `row`; return the drawn indices in ascending order.

    In each domain, the copies will be a fraction `off_share` of all candidates, copies included.
    """
    if not off_share:
        return row[:0]
    draw = ordering_keys(prompts.key[row], digest(seed, "curriculum", "thinking"))
    chosen = []
    for domain in np.unique(prompts.domain[row]):
        members = np.flatnonzero(prompts.domain[row] == domain)
        number = round(len(members) * off_share / (1 - off_share))
        chosen.append(row[members[np.argsort(draw[members])[:number]]])
    return np.sort(np.concatenate(chosen))
