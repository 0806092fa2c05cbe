"""Rewards for one response, selected by name in an environment's settings.

reward: outcome                                   1 for a correct response, else 0 (the default)
reward: {name: score}                             the verdict's score, which may be partial
reward: {name: domyn_math, max_tokens: 8192}      for this and the next one, see `nemo_ext.rl.rewards.verifiable`
reward: {name: accuracy_format, format_weight: 1}
reward: {name: genrm_training, format_penalty: 10, ranking_weight: 1}     for tasks of `genrm`
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import check_keys, nearest
from nemo_ext.rl.rewards.format import domyn_format, think_tags
from nemo_ext.rl.rewards.genrm import genrm_reward
from nemo_ext.rl.rewards.reward import Reward
from nemo_ext.rl.rewards.verifiable import accuracy_format_reward, domyn_math_reward, outcome_reward
from nemo_ext.rl.task import Task
from nemo_ext.rl.verdict import Verdict


@dataclass(frozen=True)
class Facts:
    """Facts about a task that a reward may use in addition to the verdict.

    Attributes:
        thinking: True if reasoning is requested or, for models without modes, if the prompt opens a trace.
        thinking_opened: True if the prompt ends inside a reasoning trace.
        reference: the task's reference.
    """

    thinking: bool = False
    thinking_opened: bool = False
    reference: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_task(cls, task: Task, *, thinking_opened: bool) -> "Facts":
        """Collect the facts about a task; `thinking_opened` says whether its prompt ends inside a reasoning trace."""
        return cls(thinking_opened if task.thinking is None else task.thinking, thinking_opened, task.reference)


Scoring = Callable[[Verdict, Response, Facts], Reward]


@dataclass(frozen=True)
class NamedReward:
    """A reward selected by name.

    Attributes:
        score: function that returns the reward of one response.
        counts_tokens: True if `score` needs `Response.tokens`.
        reference: required keys of the task's reference, which `score` reads.
    """

    score: Scoring
    counts_tokens: bool = False
    reference: tuple[str, ...] = ()

    def check(self, reference: Mapping[str, Any]) -> None:
        """Raise ValueError if a task's reference does not have a key that the reward reads."""
        if missing := [key for key in self.reference if key not in reference]:
            raise ValueError(
                f"reference: the environment's reward requires {', '.join(missing)}, which is missing; add it, or "
                "choose another reward"
            )


def reward_of(setting: Any, *, where: str = "reward") -> NamedReward:
    """Return the reward for a setting: a name, or a mapping with `name` and the reward's arguments.

    Args:
        setting: the setting; None for `outcome`.
        where: its key in the config, for messages.

    Raises:
        ValueError: the reward or one of its arguments is unknown, or an argument is invalid.
    """
    if setting is not None and not isinstance(setting, str | Mapping):
        raise ValueError(f"{where} must be the name of a reward, or a mapping with the key name, not {setting!r}")
    settings = {"name": setting} if isinstance(setting, str) else dict(setting or {"name": "outcome"})
    name = settings.pop("name", None)
    if not isinstance(name, str) or name not in _REWARDS:
        raise ValueError(f"{where}: unknown reward {name!r}: {nearest(str(name), _REWARDS)}")
    function, known, counts_tokens = _REWARDS[name]
    check_keys(settings, known, required=(), where=f"{where} ({name})")
    for key, value in settings.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{where}.{key} must be a number, not {value!r}")

    def score(verdict: Verdict, response: Response, facts: Facts) -> Reward:
        return function(verdict, response, facts, **settings)

    reference = _REFERENCES.get(name, {})
    try:  # checks that only the reward itself can make
        score(Verdict.correct(), Response(text="", tokens=0), Facts(reference=reference))
    except ValueError as error:
        raise ValueError(f"{where}: invalid settings of reward {name}: {error}") from None
    return NamedReward(score, counts_tokens, tuple(reference))


def _domyn_math(verdict: Verdict, response: Response, facts: Facts, **settings: Any) -> Reward:
    assert response.tokens is not None
    format_score = domyn_format(response, thinking=facts.thinking)
    return domyn_math_reward(verdict, format_score=format_score, tokens=response.tokens, **settings)


def _accuracy_format(verdict: Verdict, response: Response, facts: Facts, **settings: Any) -> Reward:
    format_score = think_tags(response, thinking=facts.thinking, opened=facts.thinking_opened)
    return accuracy_format_reward(verdict, format_score=format_score, **settings)


def _genrm_training(verdict: Verdict, response: Response, facts: Facts, **settings: Any) -> Reward:
    truth = facts.reference
    scores = (truth.get("score_1"), truth.get("score_2"))
    return genrm_reward(response.answer, helpfulness=scores, ranking=truth["ranking"], **settings)


_REWARDS: Mapping[str, tuple[Callable[..., Reward], tuple[str, ...], bool]] = {
    "outcome": (lambda verdict, response, facts: Reward(total=outcome_reward(verdict), parts={}), (), False),
    "score": (lambda verdict, response, facts: Reward(total=verdict.score, parts={}), (), False),
    "domyn_math": (_domyn_math, ("max_tokens",), True),
    "genrm_training": (_genrm_training, ("format_penalty", "ranking_weight"), False),
    "accuracy_format": (_accuracy_format, ("accuracy_weight", "format_weight"), False),
}
_REFERENCES: Mapping[str, Mapping[str, Any]] = {"genrm_training": {"ranking": 1}}
"""For each reward that reads the task's reference, an example reference with the required keys."""
