"""Settings of `nemo-ext sft_data`: sources, filters, template, reasoning, sampling, packing. No torch."""

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
    """Sampling of sources: small ones many times, large ones few (Nemotron 3 Nano, section 3.1; all (choice)).

    Attributes:
        tokens: number of training tokens in all; None to take every sample once.
        alpha: power of its size to which a source's share of the tokens is proportional; 1 for equal passes.
        max_epochs: largest number of passes over a source, whatever its share.
    """

    tokens: PositiveFloat | None = None
    alpha: Share = 0.5
    max_epochs: PositiveFloat = 8.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftSettings:
    """Checked settings of the job.

    Attributes:
        preset: name of the preset, for the report.
        output: output folder.
        tokenizer: config of the tokenizer, `{kind: ..., path: ...}`.
        template: name of a chat template, or a file or folder that has one.
        turns: splitting of a conversation into texts, see `Template.renderings`.
        sources: sources of conversations.
        filters: settings of the filters of single samples by name; None leaves one out.
        near_duplicates: filter of near duplicates; None to leave them in.
        duplicate_ids: `drop` all but the first sample of an id, or `error`.
        reasoning: control of reasoning; None to leave samples as they are.
        thinking_shares: task -> share of samples (by number) with thinking on; `*` for every task not named.
        sampling: sampling of sources.
        packing: settings of packing.
        validation_share: share of samples for validation, chosen by seed and id; they come once and are packed apart.
        max_bad_share: largest share of a source's records that are not conversations (malformed or schema).
        seed: seed of all decisions.
        workers: number of processes; None for one per core.
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
            raise ValueError("sources is empty: name at least one, '{name: ..., path: ...}'")
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"sources: two are called {name!r}")
        _ = self.screen

    @cached_property
    def screen(self) -> Screen:
        """Filters of single samples."""
        return load_filters(self.filters)

    def thinking_share(self, task: str) -> float | None:
        """Share of a task's samples with thinking on; None if it has none and is left alone."""
        return self.thinking_shares.get(task, self.thinking_shares.get(ANY_TASK))


def read_settings(config: Mapping[str, Any]) -> SftSettings:
    """Check a composed config and return the settings.

    Raises:
        ValueError: a key is wrong; the message names it, what it holds and what it may hold.
    """
    given = {key: value for key, value in config.items() if key != "data_root"}
    for name, what in (("output", "where the packs go"), ("template", "which chat template")):
        if not given.get(name):
            raise ValueError(f"{name}=null: say {what}")
    for name in ("filters", "thinking_shares", "sampling"):
        given[name] = given.get(name) or {}
    for name in ("reasoning", "packing"):
        if isinstance(given.get(name), Mapping):
            given[name] = {"seed": given.get("seed"), **given[name]}
    if isinstance(given.get("tokenizer"), str):
        given["tokenizer"] = named_tokenizer(given["tokenizer"])
    if length := given["filters"].get("length"):
        given["filters"] = {**given["filters"], "length": {"tokenizer": given.get("tokenizer"), **length}}
    return checked(SftSettings, given, strict=True)
