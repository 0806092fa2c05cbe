"""Settings of `nemo-ext online`."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass

from nemo_ext.generate.settings import Sampling
from nemo_ext.job.settings import REPLACED, STRICT, Count, Extra, Open, Place, checked
from nemo_ext.rl.algorithms import Preference, algorithm_of, of_steps
from nemo_ext.rl.settings import TrainingSettings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OnlineSettings:
    """Settings of the section `online`.

    Attributes:
        prompts: number of prompts per round; if None, steps times batch size if steps are set, otherwise all tasks.
        temperature, top_p, extra: sampling parameters, as in `Sampling`.
        max_tokens: maximum response length in tokens; if None, `rl.lengths.total` minus `rl.lengths.prompt`.
        environments: mapping from environment names to their settings.
        group: group reward, as GRPO's `rl.group`; if None, the environments' scores are the rewards.
        min_margin: minimum difference between a pair's rewards; equal rewards never form a pair.
    """

    prompts: Count | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    extra: Extra = field(default_factory=dict)
    max_tokens: Count | None = None
    environments: Annotated[Mapping[str, Mapping[str, JsonValue]], REPLACED] = field(default_factory=dict)
    group: Mapping[str, Any] | None = None
    min_margin: Annotated[float, Field(ge=0)] = 0.0

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters of the responses."""
        return checked(Sampling, {name: getattr(self, name) for name in ("temperature", "top_p", "extra")}, "online")

    def tokens(self, algorithm: Preference) -> int:
        """Return the maximum response length in tokens, from these settings or the algorithm's maximum lengths.

        Raises:
            ValueError: neither sets a maximum.
        """
        lengths = algorithm.lengths
        if self.max_tokens is not None:
            return self.max_tokens
        if lengths.prompt is None or lengths.total is None or lengths.total <= lengths.prompt:
            raise ValueError(
                "online.max_tokens=null: set it to the maximum length of a response, or set rl.lengths.prompt to less "
                "than rl.lengths.total"
            )
        return lengths.total - lengths.prompt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(TrainingSettings):
    """Settings of `nemo-ext online`; `nemo_ext.evaluation.job.read` checks `serving` and `evaluate`."""

    served: Place | None
    files_from: Place | None
    serving: Open
    evaluate: Open
    online: OnlineSettings


def algorithm_in_rounds(config: Mapping[str, Any]) -> Preference:
    """Return the preference algorithm of a composed config.

    Raises:
        ValueError: the config has no algorithm, or its algorithm does not train on pairs in rounds.
    """
    if not config.get("rl"):
        raise ValueError("preset=null: set it to a preset that trains on pairs, such as rpo_online or dpo_delta")
    algorithm = algorithm_of(of_steps(config["rl"]), where="rl")
    if not isinstance(algorithm, Preference):
        raise ValueError(
            f"preset={config['preset']} does not train on pairs, as {algorithm.algorithm} generates during training; "
            "use `nemo-ext rl`"
        )
    if algorithm.online is None:
        raise ValueError(
            f"preset={config['preset']} does not set rounds; set the numbers of responses per prompt and of rounds, as "
            "in 'rl.online={generations_per_prompt: 4, rounds: 2}'"
        )
    return algorithm
