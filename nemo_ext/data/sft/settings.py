"""Settings of `nemo-ext sft_data`: sources, filters, template, reasoning, sampling, packing. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.chat.reasoning import ModeShares, ReasoningSettings
from nemo_ext.data.packs.packed_files import PackingSettings
from nemo_ext.data.sft.filters.near_duplicates import NearDuplicates
from nemo_ext.data.sft.filters.screen import Screen, load_filters
from nemo_ext.data.sft.sources import ConversationSource, load_conversations
from nemo_ext.data.text.tokenizers import named_tokenizer
from nemo_ext.job.settings import check_keys, checked, checked_share, checked_whole

KEYS = (
    *("preset", "output", "tokenizer", "template", "turns", "sources", "filters", "near_duplicates", "duplicate_ids"),
    *("reasoning", "thinking_shares", "sampling", "packing", "validation_share", "max_bad_share", "seed", "workers"),
)


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Sampling:
    """Sampling of sources: small ones many times, large ones few (Nemotron 3 Nano, section 3.1; all (choice)).

    Attributes:
        tokens: number of training tokens in all; None to take every sample once.
        alpha: power of its size to which a source's share of the tokens is proportional; 1 for equal passes.
        max_epochs: largest number of passes over a source, whatever its share.
    """

    tokens: PositiveFloat | None = None
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    max_epochs: PositiveFloat = 8.0


@dataclass(frozen=True, kw_only=True)
class SftSettings:
    """Checked settings of the job.

    Attributes:
        preset: name of the preset, for the report.
        output: output folder.
        tokenizer: config of the tokenizer, `{kind: ..., path: ...}`.
        template: name of a chat template, or a file or folder that has one.
        turns: splitting of a conversation into texts, see `Template.renderings`.
        sources: sources of conversations.
        screen: filters of single samples.
        near_duplicates: filter of near duplicates; None to leave them in.
        duplicate_ids: `drop` all but the first sample of an id, or `error`.
        reasoning: control of reasoning; None to leave samples as they are.
        thinking_shares: task -> share of samples with thinking on, see `ModeShares`.
        sampling: sampling of sources.
        packing: settings of packing.
        validation_share: share of samples for validation, chosen by seed and id; they come once and are packed apart.
        max_bad_share: largest share of a source's records that are not conversations (malformed or schema).
        seed: seed of all decisions.
        workers: number of processes; None for one per core.
    """

    preset: str | None
    output: Path
    tokenizer: Mapping[str, Any]
    template: str
    turns: Literal["split", "last", "whole"]
    sources: tuple[ConversationSource, ...]
    screen: Screen
    near_duplicates: NearDuplicates | None
    duplicate_ids: Literal["drop", "error"]
    reasoning: ReasoningSettings | None
    thinking_shares: Mapping[str, float]
    sampling: Sampling
    packing: PackingSettings
    validation_share: float
    max_bad_share: float
    seed: int
    workers: PositiveInt | None


def read_settings(config: Mapping[str, Any]) -> SftSettings:
    """Check a composed config and return the settings.

    Raises:
        ValueError: a key is wrong; the message names it, what it holds and what it may hold.
    """
    given = {key: value for key, value in config.items() if key != "data_root"}
    check_keys(given, KEYS, required=KEYS, where="sft_data")
    for name in ("output", "template"):
        if not given[name]:
            raise ValueError(f"{name}=null: say {'where the packs go' if name == 'output' else 'which chat template'}")
    for name, allowed in (("turns", ("split", "last", "whole")), ("duplicate_ids", ("drop", "error"))):
        if given[name] not in allowed:
            raise ValueError(f"{name}={given[name]!r}: expected one of {', '.join(allowed)}")
    if not given["sources"]:
        raise ValueError("sources is empty: name at least one, '{name: ..., path: ...}'")
    sources = tuple(load_conversations(source) for source in given["sources"])
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise ValueError(f"sources: two are called {next(name for name in names if names.count(name) > 1)!r}")
    seed = checked_whole("seed", given["seed"])
    tokenizer = given["tokenizer"]
    if isinstance(tokenizer, str):
        tokenizer = named_tokenizer(tokenizer)
    filters = dict(given["filters"] or {})
    if filters.get("length"):
        filters["length"] = {"tokenizer": tokenizer, **filters["length"]}
    near = given["near_duplicates"]
    reasoning = given["reasoning"]
    return SftSettings(
        preset=given["preset"],
        output=Path(given["output"]),
        tokenizer=tokenizer,
        template=str(given["template"]),
        turns=given["turns"],
        sources=sources,
        screen=load_filters(filters),
        near_duplicates=None if near is None else checked(NearDuplicates, near, where="near_duplicates"),
        duplicate_ids=given["duplicate_ids"],
        reasoning=None if reasoning is None else ReasoningSettings.of({"seed": seed, **reasoning}),
        thinking_shares=dict(ModeShares(given["thinking_shares"] or {}).targets),
        sampling=checked(Sampling, given["sampling"] or {}, where="sampling"),
        packing=checked(PackingSettings, {"seed": seed, **given["packing"]}, where="packing"),
        validation_share=checked_share("validation_share", given["validation_share"], below_one=True),
        max_bad_share=checked_share("max_bad_share", given["max_bad_share"]),
        seed=seed,
        workers=None if given["workers"] is None else checked_whole("workers", given["workers"], least=1),
    )
