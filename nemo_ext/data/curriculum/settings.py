"""Validated settings of `nemo-ext curriculum`. Does not import torch."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.job.settings import STRICT, Place, PlacesOrNone, Share, checked

Text = Annotated[str, Field(min_length=1)]
_Place = Annotated[Place, Field(min_length=1)]

LINE, PROMPT = "line", "prompt"
"""Values of `id` that are not keys: the record's line number, from 0 over all files, and the text of its prompt."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PromptKeys:
    """Keys of a prompt's record; dots lead into nested objects.

    Attributes:
        id: key of the id, a string or a whole number; or `line` or `prompt` to use its line number or text.
        prompt: key of the model's input, a string or any other JSON value.
        domain: key of the domain's name; null puts all prompts into one domain.
    """

    id: Text = "id"
    prompt: Text = "prompt"
    domain: Text | None = "domain"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutKeys:
    """Keys of a rollout's record; dots lead into nested objects.

    Attributes:
        id: key of the prompt's id, or `prompt` to identify prompts by their text.
        prompt: key of the prompt, used if `id` is `prompt`.
        reward: key of the reward: a number, true or false, or a list with one of them.
        tokens: key of the number of generated tokens; null if records have none.
    """

    id: Text = "id"
    prompt: Text = "prompt"
    reward: Text = "reward"
    tokens: Text | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Filters:
    """Filters of the prompts to train on.

    Attributes:
        drop_from: prompts with at least this pass rate are excluded; 1 excludes those always solved, null excludes
            none.
        keep_from: minimum pass rate of a prompt.
        min_rollouts: minimum number of rollouts of a prompt.
    """

    drop_from: Share | None = 1.0
    keep_from: Share = 0.0
    min_rollouts: PositiveInt = 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Thinking:
    """Prompts with reasoning on, and copies of some of them with reasoning off.

    Attributes:
        off_share: share of copies among all prompts; at 0, no copies are made and no modes written.
        key: key of the mode (true or false) in the written records.
        system_on: system message of prompts with reasoning on; prompts must then be lists of messages.
        system_off: system message of prompts with reasoning off.
    """

    off_share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    key: Text = "thinking"
    system_on: Text | None = None
    system_off: Text | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Settings of `nemo-ext curriculum`, described in hydra_conf/curriculum.yaml."""

    output: _Place
    prompts: PlacesOrNone = ()
    rollouts: PlacesOrNone = ()
    profile: _Place | None = None
    previous: _Place | None = None
    previous_steps: NonNegativeInt | None = None
    batch: PositiveInt = 128
    steps: PositiveInt | None = None
    first_step: NonNegativeInt = 0
    seed: int = 1234
    success: FiniteFloat = 1.0
    mean_first: Share = 0.8
    mean_last: Share = 0.2
    sigma: PositiveFloat = 0.15
    levels: PositiveInt | None = None
    domains: dict[str, Annotated[FiniteFloat, Field(ge=0)]] | None = None
    adapt: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    exhausted: Literal["stop", "repeat"] = "stop"
    keys: PromptKeys = field(default_factory=PromptKeys)
    rollout_keys: RolloutKeys = field(default_factory=RolloutKeys)
    filters: Filters = field(default_factory=Filters)
    thinking: Thinking = field(default_factory=Thinking)
    split_domains: bool = False
    max_bad_share: Share = 0.01
    workers: PositiveInt | None = None


def settings(config: Mapping[str, Any]) -> Settings:
    """Validate the composed config and return its settings.

    Raises:
        ValueError: a value is invalid (the message names the key, the value and what was expected), or keys conflict.
    """
    parsed = checked(Settings, {key: value for key, value in config.items() if key != "hydra"}, strict=True)
    if parsed.rollouts and parsed.profile:
        raise ValueError("rollouts and profile are both set: set only one of them, as the source of the pass rates")
    if not parsed.rollouts and not parsed.profile:
        raise ValueError("pass rates are required: set rollouts to files of rollouts, or profile to an earlier profile")
    if not parsed.prompts and parsed.profile:
        raise ValueError(f"prompts is required with profile={parsed.profile}: set it to the files of prompts to order")
    if parsed.first_step and parsed.steps is None:
        raise ValueError(f"first_step={parsed.first_step} requires steps: set steps to the length of the schedule")
    if parsed.steps is not None and parsed.first_step >= parsed.steps:
        raise ValueError(f"first_step={parsed.first_step} must be below steps={parsed.steps}; steps are counted from 0")
    if parsed.previous_steps is not None and parsed.previous is None:
        raise ValueError(
            f"previous_steps={parsed.previous_steps} requires previous: set previous to the previous curriculum's "
            "directory"
        )
    if parsed.domains is not None and not sum(parsed.domains.values()) > 0:
        raise ValueError(f"domains={parsed.domains}: the shares sum to zero; give at least one domain a positive share")
    if (parsed.thinking.system_on or parsed.thinking.system_off) and not parsed.thinking.off_share:
        raise ValueError(
            "thinking.system_on and thinking.system_off require copies with thinking off: set thinking.off_share to "
            "their share of all prompts"
        )
    if (parsed.rollout_keys.id == PROMPT) != (parsed.keys.id == PROMPT) and parsed.prompts and parsed.rollouts:
        raise ValueError(
            f"keys.id={parsed.keys.id} and rollout_keys.id={parsed.rollout_keys.id} identify prompts differently: set "
            "both to `prompt`, or neither"
        )
    return parsed
