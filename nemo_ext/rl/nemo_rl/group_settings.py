"""Settings of groups: baselines, standard deviations and rewards over a group."""

from collections.abc import Mapping
from typing import Any

from nemo_ext.job.settings import check_keys, nearest
from nemo_ext.rl.groups import KEYS, group_reward
from nemo_ext.rl.nemo_rl.group_rewards import Groups
from nemo_ext.rl.nemo_rl.register import PREFIX

_BASELINES = ("mean", "leave_one_out")
_NORMALISATIONS = ("std", "unbiased_std", "none")


def groups_of(*, generations: int, advantage: Mapping[str, Any] | None, group: Mapping[str, Any] | None) -> Groups:
    """Scoring of a run's groups.

    Args:
        generations: number of responses per prompt.
        advantage: `baseline` (mean, leave_one_out) and `normalise` (std, unbiased_std, none); NeMo-RL divides by the
            deviation if `grpo.normalize_rewards` is set.
        group: `environments`, names of those it applies to (default: all), and one of `length_control` (a
            `LengthControl`) or `judge` (a `JudgeSettings`) with it; `show`, see `nemo_ext.rl.groups`.

    Raises:
        ValueError: naming the key.
    """
    given = dict(advantage or {})
    check_keys(given, ("baseline", "normalise"), required=(), where="advantage")
    baseline, normalise = given.get("baseline", "mean"), given.get("normalise", "unbiased_std")
    for key, value, known in (("baseline", baseline, _BASELINES), ("normalise", normalise, _NORMALISATIONS)):
        if value not in known:
            raise ValueError(f"advantage.{key}: unknown {value!r}: {nearest(str(value), known)}")
    environments = None
    reward = None
    if group is not None:
        check_keys(group, ("environments", *KEYS), required=(), where="group")
        names = group.get("environments")
        environments = None if names is None else frozenset(PREFIX + name for name in names)
        reward = group_reward({key: value for key, value in group.items() if key != "environments"})
    return Groups(
        generations=generations,
        leave_one_out=baseline == "leave_one_out",
        biased=normalise == "std",
        reward=reward,
        tasks=environments,
    )
