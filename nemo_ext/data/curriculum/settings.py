"""Checked settings of `nemo-ext curriculum`. No torch."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.job.settings import STRICT, Place, PlacesOrNone, Share, checked

Text = Annotated[str, Field(min_length=1)]
_Place = Annotated[Place, Field(min_length=1)]

LINE, PROMPT = "line", "prompt"
"""Ids that are not a key of a record: the number of its line, from 0 over all files, and the text of its prompt."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PromptKeys:
    """Keys of a prompt's record; dots lead into nested objects.

    Attributes:
        id: key with a text or whole number, or `line`, or `prompt`.
        prompt: key of the model's input, a text or any JSON.
        domain: key of the domain's name; null puts all prompts into one domain.
    """

    id: Text = "id"
    prompt: Text = "prompt"
    domain: Text | None = "domain"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutKeys:
    """Keys of a rollout's record; dots lead into nested objects.

    Attributes:
        id: key of the prompt's id, or `prompt` if the prompts are identified by their text.
        prompt: key of the prompt, used if `id` is `prompt`.
        reward: key of the reward: a number, true or false, or a list of one of them.
        tokens: key of the number of generated tokens; null if there is none.
    """

    id: Text = "id"
    prompt: Text = "prompt"
    reward: Text = "reward"
    tokens: Text | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Filters:
    """Filters of the prompts to train on.

    Attributes:
        drop_from: pass rate from which on a prompt is left out; 1 leaves out those always solved, null none.
        keep_from: pass rate below which a prompt is left out.
        min_rollouts: least number of rollouts of a prompt; those with fewer are left out.
    """

    drop_from: Share | None = 1.0
    keep_from: Share = 0.0
    min_rollouts: PositiveInt = 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Thinking:
    """Prompts with reasoning on, and copies of some of them with reasoning off.

    Attributes:
        off_share: share of the copies in all; 0 makes none and marks nothing.
        key: key of a written record that holds the mode, true or false.
        system_on: system message of prompts with reasoning on; prompts are then lists of messages.
        system_off: system message of prompts with reasoning off.
    """

    off_share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    key: Text = "thinking"
    system_on: Text | None = None
    system_off: Text | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Settings of the job.

    Attributes:
        output: directory of the result.
        prompts: files or globs of prompts, JSONL (also .gz, .zst) or Parquet.
        rollouts: files or globs of rollouts.
        profile: file of pass rates made before, in place of rollouts.
        previous: directory of the curriculum that was trained on before.
        previous_steps: number of its steps that were trained on; null for all.
        batch: number of prompts in a step.
        steps: number of steps of the whole schedule; null for as many as the prompts last.
        first_step: step of the schedule that is written first.
        success: least reward of a success.
        mean_first, mean_last: mean of the Gaussian over pass rates in the first and last step.
        sigma: standard deviation of the Gaussian.
        levels: number of equal parts that pass rates are rounded to; null: see `Profile.levels`, at most 64.
        domains: share of each domain in every batch; null for the shares of the prompts.
        adapt: power of what a domain can still teach in its share, see `job.adapted`; 0 leaves the shares as they are.
        exhausted: action when a domain has too few prompts left: `stop` or `repeat`.
        split_domains: true to also write a file for each domain, for NeMo-RL's `custom_dataloader`.
        max_bad_share: share of malformed records above which reading fails.
        workers: number of reading processes; null for one per CPU.
    """

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
    """Check the composed config and return the settings.

    Raises:
        ValueError: a key is wrong (the message names it, what it holds and what it may hold), or keys contradict.
    """
    given = checked(Settings, {key: value for key, value in config.items() if key != "hydra"}, strict=True)
    if given.rollouts and given.profile:
        raise ValueError("rollouts and profile are both set: pass rates come from one of them")
    if not given.rollouts and not given.profile:
        raise ValueError("not set: rollouts (files of rollouts) or profile (pass rates made before)")
    if not given.prompts and given.profile:
        raise ValueError("not set: prompts; with rollouts alone their profile is written, which is here already")
    if given.first_step and given.steps is None:
        raise ValueError(f"first_step={given.first_step} is a step of a schedule whose length is not known: set steps")
    if given.steps is not None and given.first_step >= given.steps:
        raise ValueError(f"first_step={given.first_step}: the schedule has steps={given.steps}, counted from 0")
    if given.previous_steps is not None and given.previous is None:
        raise ValueError(f"previous_steps={given.previous_steps} without previous, the directory that they were in")
    if given.domains is not None and not sum(given.domains.values()) > 0:
        raise ValueError(f"domains={given.domains}: the shares sum to zero; give at least one domain a positive share")
    if (given.thinking.system_on or given.thinking.system_off) and not given.thinking.off_share:
        raise ValueError(
            "thinking.system_on or system_off without thinking.off_share: set the share of copies with off"
        )
    if (given.rollout_keys.id == PROMPT) != (given.keys.id == PROMPT) and given.prompts and given.rollouts:
        raise ValueError("keys.id and rollout_keys.id: if one of them is `prompt`, the other must be, too")
    return given
