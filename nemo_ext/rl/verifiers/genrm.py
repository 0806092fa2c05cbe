"""Verifier for training a generative reward model, which must prefer the same response as the data.

The reward is `genrm_training`. `nemo-ext rl_tasks environment=genrm records=...` makes the tasks from the output of
`nemo-ext preference_data`.
"""

from dataclasses import dataclass
from functools import partial

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import checked
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.rewards.comparison import NO_PREFERENCE
from nemo_ext.rl.rewards.genrm import parse_judgement, true_judgement
from nemo_ext.rl.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Human judgement of two responses.

    Attributes:
        ranking: preference from 1 (the first is far superior) to 6 (the second is far superior).
        score_1: helpfulness of the response shown first, 1 to 5; None if unknown.
        score_2: helpfulness of the response shown second, 1 to 5; None if unknown.
    """

    ranking: float
    score_1: float | None = None
    score_2: float | None = None

    def __post_init__(self) -> None:
        true_judgement((self.score_1, self.score_2), self.ranking)


check = partial(checked, Reference, where="reference", strict=True)
"""Parses a task's reference, {score_1: 4, score_2: null, ranking: 2}; raises ValueError if it is invalid."""


def verify(response: Response, reference: Reference) -> Verdict:
    """Return the verdict `correct` if the judgement prefers the same response as the data; no preference is wrong."""
    judgement = parse_judgement(response.answer)
    if judgement is None:
        return Verdict.wrong("no judgement, or more than one")
    found = f"{judgement.helpfulness[0]:g} {judgement.helpfulness[1]:g} {judgement.ranking:g}"
    agrees = (judgement.ranking - NO_PREFERENCE) * (reference.ranking - NO_PREFERENCE) > 0
    return Verdict.correct(found) if agrees else Verdict.wrong("prefers the other response, or neither", found)


def environment() -> Environment:
    """Create the environment `genrm`, for training a generative reward model."""
    return Environment(name="genrm", check=check, verify=verify)
