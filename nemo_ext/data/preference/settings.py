"""Checked settings of `nemo-ext preference_data`."""

import re
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.chat.template import Template
from nemo_ext.data.preference.filters import Filters
from nemo_ext.data.preference.hallucination import CALL_PATTERNS, GROUPS, HallucinationRules
from nemo_ext.data.preference.pairs import Rules
from nemo_ext.data.preference.records import RecordKeys
from nemo_ext.data.sft.sources import Paths
from nemo_ext.data.text.tokenizers import load_tokenizer
from nemo_ext.job.settings import check_keys, checked, checked_share, checked_whole, nearest

Kind = Literal["delta", "judged", "tool_hallucination", "safety", "pairs", "genrm"]
OUTPUTS = ("trl", "nemo_rl")
_KEYS = (
    "preset",
    "output",
    "sources",
    "filters",
    "outputs",
    "limit",
    "tokenizer",
    "template",
    "validation_share",
    "swap",
    "max_bad_share",
    "workers",
    "seed",
)
_FORBID = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_FORBID)
class GenrmLabels:
    """Labels that a reward model should give a pair, the chosen answer shown first."""

    chosen: int = 5
    rejected: int = 1
    ranking: int = 1


@dataclass(frozen=True, kw_only=True, config=_FORBID)
class SourceSettings:
    """Settings of a source: files of generations, and how pairs are made of them.

    Attributes:
        kind: kind of pairs: delta, judged, tool_hallucination, safety, pairs (made elsewhere) or genrm.
        path: files and globs, JSONL (plain, .gz, .zst) or Parquet.
        strong: files and globs whose answers are all strong, for delta learning; joined with `weak` by id.
        weak: files and globs whose answers are all weak.
        file_kind: kind of files whose names do not tell it.
        keys: keys of a record, see `RecordKeys`.
        task: task of records that do not have one.
        language: language of records that do not have one.
        turns: single or multi to leave out other prompts, any to keep all.
        limit: number of pairs to keep, drawn by the seed after the filters; null for all.
        as_genrm: labels with which to also write every pair as a sample for a reward model; null for none.
        filters: settings that replace the general filters', key by key.

    The others are those of `Rules` and `HallucinationRules`.
    """

    name: str
    kind: Kind
    path: Paths = ()
    strong: Paths = ()
    weak: Paths = ()
    file_kind: Literal["jsonl", "parquet"] | None = None
    keys: dict[str, str | None] = field(default_factory=dict)
    task: str = ""
    language: str = ""
    turns: Literal["any", "single", "multi"] = "any"
    limit: PositiveInt | None = None
    as_genrm: GenrmLabels | None = None
    filters: dict[str, Any] = field(default_factory=dict)
    strong_models: Paths = ()
    weak_models: Paths = ()
    pairs_per_prompt: PositiveInt = 1
    min_margin: NonNegativeFloat = 0.0
    require_weak: bool = False
    per_prompt: dict[str, NonNegativeInt] = field(default_factory=lambda: dict.fromkeys(GROUPS, 9))
    call_patterns: Paths = CALL_PATTERNS
    search_reasoning: bool = True
    chosen_correct: bool = True

    def __post_init__(self) -> None:
        if self.kind == "delta":
            if bool(self.strong) != bool(self.weak):
                raise ValueError("give both strong and weak, or path with strong_models and weak_models")
            if not self.strong and not (self.strong_models and self.weak_models):
                raise ValueError(
                    "say which answers are strong: files strong and weak, or strong_models and weak_models"
                )
        elif self.strong or self.weak:
            raise ValueError(f"strong and weak are for kind=delta, not {self.kind}")
        if not self.path and not self.strong:
            raise ValueError("path names no files")
        if self.require_weak and not self.weak_models:
            raise ValueError("require_weak needs weak_models, patterns of the deliberately weak models")
        if self.as_genrm is not None and self.kind == "genrm":
            raise ValueError("as_genrm is for pairs, not for kind=genrm")
        for name in self.per_prompt:
            if name not in GROUPS:
                raise ValueError(f"per_prompt: unknown group {name!r}: {nearest(name, GROUPS)}")
        for pattern in self.call_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"call_patterns: {pattern!r} is no regular expression ({error})") from None

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Paths by side ("", strong, weak)."""
        every = {"": self.path, "strong": self.strong, "weak": self.weak}
        return {side: paths for side, paths in every.items() if paths}

    @cached_property
    def rules(self) -> Rules:
        """Settings for making pairs of a group."""
        return Rules(
            strong_models=self.strong_models,
            weak_models=self.weak_models,
            pairs_per_prompt=self.pairs_per_prompt,
            min_margin=self.min_margin,
            require_weak=self.require_weak,
        )

    @cached_property
    def hallucination_rules(self) -> HallucinationRules:
        """Settings of the groups of tool hallucination."""
        return HallucinationRules(
            per_prompt=self.per_prompt,
            call_patterns=self.call_patterns,
            search_reasoning=self.search_reasoning,
            chosen_correct=self.chosen_correct,
        )

    @cached_property
    def record_keys(self) -> RecordKeys:
        """Checked keys of a record."""
        return checked(RecordKeys, self.keys, where=f"sources.{self.name}.keys")


@dataclass(frozen=True, kw_only=True, config=_FORBID)
class Settings:
    """Checked settings of the job; `filters` are those of each source, by name."""

    output: str
    sources: tuple[SourceSettings, ...]
    filters: dict[str, Filters]
    outputs: tuple[str, ...]
    limit: int | None
    tokenizer: dict[str, Any] | None
    template: str | None
    validation_share: float
    swap: bool
    max_bad_share: float
    workers: int | None
    seed: int
    preset: str | None = None


def settings(config: Mapping[str, Any]) -> Settings:
    """Check a composed config and return the settings.

    Raises:
        ValueError: a key is wrong; the message names it, what it holds and what it may hold.
    """
    given = {key: value for key, value in config.items() if key != "hydra"}
    check_keys(given, _KEYS, required=("output", "sources"), where="preference_data")
    named = given["sources"]
    if not isinstance(named, Mapping) or not named:
        raise ValueError("sources: name one at least: sources={mine: {kind: delta, path: ...}}, or preset=NAME")
    sources, filters = [], {}
    general = _mapping(given.get("filters"), "filters")
    for name, one in named.items():
        if one is None:
            continue  # a source of a preset that is left out
        where = f"sources.{name}"
        source = checked(SourceSettings, {"name": str(name), **_mapping(one, where)}, where=where)
        _ = source.record_keys
        filters[source.name] = checked(Filters, {**general, **source.filters}, where=f"{where}.filters")
        sources.append(source)
    tokenizer, template = given.get("tokenizer"), given.get("template")
    if tokenizer is not None:
        load_tokenizer(_mapping(tokenizer, "tokenizer"))
    else:
        for name, one in filters.items():
            if one.need_tokens:
                raise ValueError(
                    f"sources.{name}: the filters count tokens: give tokenizer={{kind: huggingface, path: ...}}, or "
                    "set filters.max_length_difference, max_prompt_tokens and max_tokens to null"
                )
    if template is not None:
        Template.load(str(template))
    outputs = OUTPUTS if given.get("outputs") is None else given["outputs"]
    outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    for one in outputs:
        if one not in OUTPUTS:
            raise ValueError(f"outputs: unknown format {one!r}: {nearest(str(one), OUTPUTS)}")
    swap = given.get("swap", True)
    if not isinstance(swap, bool):
        raise ValueError(f"swap must be true or false, not {swap!r}")
    workers, limit = given.get("workers"), given.get("limit")
    return Settings(
        preset=given.get("preset"),
        output=str(given["output"]),
        sources=tuple(sources),
        filters=filters,
        outputs=outputs,
        limit=None if limit is None else checked_whole("limit", limit, least=1),
        tokenizer=tokenizer,
        template=None if template is None else str(template),
        validation_share=checked_share("validation_share", given.get("validation_share", 0.0), below_one=True),
        swap=swap,
        max_bad_share=checked_share("max_bad_share", given.get("max_bad_share", 0.01)),
        workers=None if workers is None else checked_whole("workers", workers, least=1),
        seed=checked_whole("seed", given.get("seed", 1234)),
    )


def output_directory(path: str) -> Path:
    """Path of the directory to write to.

    Raises:
        ValueError: the path is a file.
    """
    output = Path(path).expanduser()
    if output.exists() and not output.is_dir():
        raise ValueError(f"output={path}: is a file; give a directory")
    return output


def _mapping(value: object, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected keys and values, not {value!r}")
    return {str(key): item for key, item in value.items()}
