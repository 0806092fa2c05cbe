"""Validated settings of `nemo-ext preference_data`."""

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
    """Labels that a pair gets as a training sample for a reward model, with the chosen answer first."""

    chosen: int = 5
    rejected: int = 1
    ranking: int = 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SourceSettings(Rules, HallucinationRules):
    """Settings of a source: files with generations, and the method of making pairs from them.

    Attributes:
        kind: kind of pairs: delta, judged, tool_hallucination, safety, pairs (existing pairs) or genrm.
        path: files and globs, JSONL (plain, .gz, .zst) or Parquet.
        strong: files and globs with the strong models' answers, for delta learning; joined with `weak` by id.
        weak: files and globs with the weak models' answers.
        file_kind: kind of the files; by default inferred from their names.
        keys: keys of a record.
        task: default task, for records without one.
        language: default language.
        turns: prompts to keep: single (one turn), multi (several turns) or any.
        limit: number of pairs to keep, drawn by the seed after the filters; null for all.
        as_genrm: labels for writing every pair as a reward model sample, too; null to disable.
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
                raise ValueError(
                    "kind=delta has only one of strong and weak: set both, or set path, strong_models and weak_models "
                    "instead"
                )
            if not self.strong and not (self.strong_models and self.weak_models):
                raise ValueError(
                    "kind=delta requires strong and weak answers: set strong and weak to files, or strong_models and "
                    "weak_models to patterns of models"
                )
        elif self.strong or self.weak:
            raise ValueError(f"strong and weak are only for kind=delta, not kind={self.kind}: use path instead")
        if not self.path and not self.strong:
            raise ValueError("path is empty: set it to the files of the source")
        if self.require_weak and not self.weak_models:
            raise ValueError("require_weak=true requires weak_models: set it to patterns of deliberately weak models")
        if self.as_genrm is not None and self.kind == "genrm":
            raise ValueError("as_genrm is only for pairs, which kind=genrm does not make: remove as_genrm")

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Paths by side: strong or weak, or "" for files of no side; sides without paths are omitted."""
        by_side = {"": self.path, "strong": self.strong, "weak": self.weak}
        return {side: paths for side, paths in by_side.items() if paths}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Validated settings of `nemo-ext preference_data`; `filters` are the defaults for every source."""

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
                raise ValueError(f"outputs: unknown format {name!r}; {nearest(name, OUTPUTS)}")
        for source in self.sources:
            filters = source.filters
            limits = (filters.max_length_difference, filters.max_prompt_tokens, filters.max_tokens)
            if self.tokenizer is None and limits != (None, None, None):
                raise ValueError(
                    f"sources.{source.name}: filters count tokens, but tokenizer is not set: set "
                    "tokenizer={kind: huggingface, path: ...}, or set filters.max_length_difference, "
                    "max_prompt_tokens and max_tokens to null"
                )


def settings(config: Mapping[str, Any], *, files: bool = True) -> Settings:
    """Validate a composed config and return its settings.

    Args:
        files: True to also check that the tokenizer and the template can be read; False if an earlier job has yet to
            write them.

    Raises:
        ValueError: a value is invalid; the message names the key, the value and what was expected.
    """
    values = {key: value for key, value in config.items() if key != "hydra"}
    if values.get("outputs") is None:
        values["outputs"] = OUTPUTS
    named, defaults = values.get("sources"), _section(config.get("filters"), "filters")
    if not isinstance(named, Mapping) or not named:
        raise ValueError("sources is empty: set sources={NAME: {kind: KIND, path: FILES}} or preset=NAME")
    sources = []
    for name, section in named.items():
        if section is not None:  # null removes a preset's source
            where = f"sources.{name}"
            source = _section(section, where)
            filters = defaults | _section(source.get("filters"), f"{where}.filters")
            sources.append({**source, "name": str(name), "filters": filters})
            checked(SourceSettings, sources[-1], where=where, strict=True)
    parsed = checked(Settings, {**values, "filters": defaults, "sources": sources}, strict=True)
    if files and parsed.tokenizer is not None:
        load_tokenizer(parsed.tokenizer, "tokenizer")
    if files and parsed.template is not None:
        Template.load(parsed.template)
    return parsed


def _section(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{where}: expected a mapping, not {value!r}")
    return dict(value or {})
