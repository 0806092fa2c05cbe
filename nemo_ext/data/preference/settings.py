"""Checked settings of `nemo-ext preference_data`."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.chat.template import Template
from nemo_ext.data.preference.filters import Filters
from nemo_ext.data.preference.hallucination import HallucinationRules
from nemo_ext.data.preference.pairs import Rules
from nemo_ext.data.preference.records import RecordKeys
from nemo_ext.data.text.tokenizers import load_tokenizer
from nemo_ext.job.settings import STRICT, Place, PlacesOrNone, Share, Strings, StringsOrNone, checked, nearest

Kind = Literal["delta", "judged", "tool_hallucination", "safety", "pairs", "genrm"]
OUTPUTS = ("trl", "nemo_rl")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenrmLabels:
    """Labels that a reward model should give a pair, the chosen answer shown first."""

    chosen: int = 5
    rejected: int = 1
    ranking: int = 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SourceSettings(Rules, HallucinationRules):
    """Settings of a source: files of generations, and how pairs are made of them.

    Attributes:
        kind: kind of pairs: delta, judged, tool_hallucination, safety, pairs (made elsewhere) or genrm.
        path: files and globs, JSONL (plain, .gz, .zst) or Parquet.
        strong: files and globs whose answers are all strong, for delta learning; joined with `weak` by id.
        weak: files and globs whose answers are all weak.
        file_kind: kind of files whose names do not tell it.
        keys: keys of a record.
        task: task of records that do not have one.
        language: language of records that do not have one.
        turns: single or multi to leave out other prompts, any to keep all.
        limit: number of pairs to keep, drawn by the seed after the filters; null for all.
        as_genrm: labels with which to also write every pair as a sample for a reward model; null for none.
        filters: filters of the pairs.
    """

    name: str
    kind: Kind
    path: PlacesOrNone = ()
    strong: StringsOrNone = ()
    weak: StringsOrNone = ()
    file_kind: Literal["jsonl", "parquet"] | None = None
    keys: RecordKeys = field(default_factory=RecordKeys)
    task: str = ""
    language: str = ""
    turns: Literal["any", "single", "multi"] = "any"
    limit: PositiveInt | None = None
    as_genrm: GenrmLabels | None = None
    filters: Filters = field(default_factory=Filters)

    def __post_init__(self) -> None:
        HallucinationRules.__post_init__(self)
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

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Paths by side ("", strong, weak)."""
        every = {"": self.path, "strong": self.strong, "weak": self.weak}
        return {side: paths for side, paths in every.items() if paths}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Checked settings of the job; `filters` are those of every source that does not replace them."""

    preset: str | None = None
    output: Place
    sources: tuple[SourceSettings, ...]
    filters: Filters = field(default_factory=Filters)
    outputs: Strings = OUTPUTS
    limit: PositiveInt | None = None
    tokenizer: dict[str, Any] | None = None
    template: Place | None = None
    validation_share: Annotated[Share, Field(lt=1)] = 0.0
    swap: bool = True
    max_bad_share: Share = 0.01
    workers: PositiveInt | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        for name in self.outputs:
            if name not in OUTPUTS:
                raise ValueError(f"outputs: unknown format {name!r}: {nearest(name, OUTPUTS)}")
        for source in self.sources:
            if self.tokenizer is None and source.filters.need_tokens:
                raise ValueError(
                    f"sources.{source.name}: the filters count tokens: give tokenizer={{kind: huggingface, path: ...}} "
                    "or set filters.max_length_difference, max_prompt_tokens and max_tokens to null"
                )


def settings(config: Mapping[str, Any], *, files: bool = True) -> Settings:
    """Check a composed config and return the settings.

    Args:
        config: composed config of the job.
        files: if False, do not read tokenizer and template, which an earlier job may have to write.

    Raises:
        ValueError: a key is wrong; the message names it, what it holds and what it may hold.
    """
    given = {key: value for key, value in config.items() if key != "hydra"}
    if given.get("outputs") is None:
        given["outputs"] = OUTPUTS
    named, general = given.get("sources"), _section(config.get("filters"), "filters")
    if not isinstance(named, Mapping) or not named:
        raise ValueError("sources: name one at least: sources={mine: {kind: delta, path: ...}}, or preset=NAME")
    sources = []
    for name, one in named.items():
        if one is not None:  # null leaves a preset's source out
            where = f"sources.{name}"
            source = _section(one, where)
            filters = general | _section(source.get("filters"), f"{where}.filters")
            sources.append({**source, "name": str(name), "filters": filters})
            checked(SourceSettings, sources[-1], where=where, strict=True)
    found = checked(Settings, {**given, "filters": general, "sources": sources}, strict=True)
    if files and found.tokenizer is not None:
        load_tokenizer(found.tokenizer)
    if files and found.template is not None:
        Template.load(found.template)
    return found


def _section(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{where}: expected keys and values, not {value!r}")
    return dict(value or {})
