"""Settings of `nemo-ext sft_data`: sources, filters, template, reasoning, sampling, packing. Does not import torch."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.chat.reasoning import ANY_TASK, ReasoningSettings
from nemo_ext.data.packs.packed_files import PackingSettings
from nemo_ext.data.sft.filters.near_duplicates import NearDuplicates
from nemo_ext.data.sft.filters.screen import Screen, load_filters
from nemo_ext.data.sft.sources import ConversationSource
from nemo_ext.data.text.tokenizers import named_tokenizer
from nemo_ext.job.settings import REPLACED, STRICT, Place, Share, checked


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sampling:
    """Sampling of sources: small sources are repeated more often than large ones (Nemotron 3 Nano, 3.1; (choice)).

    Attributes:
        tokens: total number of training tokens; None for `passes` times the tokens of all sources.
        passes: average number of passes, if `tokens` is None; None to use every sample once.
        alpha: exponent; a source's share of the tokens is proportional to its size to this power, 1 for equal passes.
        max_epochs: maximum number of passes over a source.
    """

    tokens: PositiveFloat | None = None
    passes: PositiveFloat | None = None
    alpha: Share = 0.5
    max_epochs: PositiveFloat = 8.0

    def __post_init__(self) -> None:
        if self.tokens is None and self.passes is not None and self.passes > self.max_epochs:
            raise ValueError(
                f"passes={self.passes:g} must be at most max_epochs={self.max_epochs:g}: lower passes, or raise "
                "max_epochs"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftSettings:
    """Validated settings of `nemo-ext sft_data`; hydra_conf/sft_data.yaml describes the other keys.

    Attributes:
        output: output folder.
        turns: how to split a conversation into texts; see `Template.renderings`.
        filters: settings of the filters of single samples, keyed by name; None disables a filter.
        validation_share: share of samples for validation, chosen by seed and id; used once and packed separately.
        seed: seed of all decisions.
    """

    preset: str | None
    output: Path
    tokenizer: dict[str, Any]
    template: Place
    turns: Literal["split", "last", "whole"]
    sources: tuple[ConversationSource, ...]
    filters: dict[str, dict[str, Any] | None]
    near_duplicates: Annotated[NearDuplicates | None, REPLACED]
    duplicate_ids: Literal["drop", "error"]
    reasoning: Annotated[ReasoningSettings | None, REPLACED]
    thinking_shares: Annotated[dict[str, Share], REPLACED]
    sampling: Annotated[Sampling, REPLACED]
    packing: Annotated[PackingSettings, REPLACED]
    validation_share: Annotated[Share, Field(lt=1)]
    max_bad_share: Share
    seed: int
    workers: PositiveInt | None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty: set sources=[{name: NAME, path: FILES}]")
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"sources has two sources named {name!r}: rename one of them")
        _ = self.screen

    @cached_property
    def screen(self) -> Screen:
        """Filters of single samples, built from the settings in `filters`."""
        return load_filters(self.filters)

    def thinking_share(self, task: str) -> float | None:
        """Return the target share of a task's samples with thinking on; None to keep the task unchanged."""
        return self.thinking_shares.get(task, self.thinking_shares.get(ANY_TASK))


def read_settings(config: Mapping[str, Any]) -> SftSettings:
    """Validate a composed config and return its settings.

    Raises:
        ValueError: a value is invalid; the message names the key, the value and the expected values.
    """
    values = {key: value for key, value in config.items() if key != "data_root"}
    for name, meaning in (("output", "the output folder"), ("template", "a chat template")):
        if not values.get(name):
            raise ValueError(f"{name}=null: set it to {meaning}")
    for name in ("filters", "thinking_shares", "sampling"):
        values[name] = values.get(name) or {}
    for name in ("reasoning", "packing"):
        if isinstance(values.get(name), Mapping):
            values[name] = {"seed": values.get("seed"), **values[name]}
    if isinstance(values.get("tokenizer"), str):
        values["tokenizer"] = named_tokenizer(values["tokenizer"])
    if length := values["filters"].get("length"):
        values["filters"] = {**values["filters"], "length": {"tokenizer": values.get("tokenizer"), **length}}
    return checked(SftSettings, values, strict=True)
