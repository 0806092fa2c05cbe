"""Checked settings of `nemo-ext curate`, and the kinds of stages."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.stage import Stage
from nemo_ext.data.curation.stages.addresses import Listed
from nemo_ext.data.curation.stages.buckets import BUCKET, Buckets
from nemo_ext.data.curation.stages.duplicates import NearDuplicates, SameParagraphs, SamePassages, SameText, SameUrl
from nemo_ext.data.curation.stages.languages import Language
from nemo_ext.data.curation.stages.models import Classifier, Decontamination, Perplexity
from nemo_ext.data.curation.stages.personal import Personal
from nemo_ext.data.curation.stages.rules import RULES
from nemo_ext.data.streams import sources_of
from nemo_ext.data.text.documents import Source
from nemo_ext.job.settings import STRICT, Count, Place, Shard, StringsOrNone, checked, nearest
from nemo_ext.job.units import OutputFolder

_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_-]*")
KINDS: dict[str, type[Stage]] = {
    **RULES,
    **{
        each.kind: each
        for each in (
            *(Language, Listed, Personal, Perplexity, Classifier, Decontamination),
            *(SameUrl, SameText, SameParagraphs, SamePassages, NearDuplicates, Buckets),
        )
    },
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Curate:
    """Section `curate` of the config.

    Attributes:
        stages: names of the blocks to carry out, in order.
        blocks: name -> `kind` and settings of a stage; one that `stages` does not name is left alone.
        keep_dropped: which of the dropped documents are kept beside: none, one in a hundred, or all.
        divide: keys of documents by whose values the output is divided into folders.
        tokenizer: tokenizer by which the funnel counts tokens, besides; null to count none.
        unit: bytes of input that are worked on as a whole and written to files of their own, where files can be cut.
        memory: bytes of memory that deciding on duplicates takes, about.
    """

    stages: Annotated[StringsOrNone, Field(min_length=1)]
    blocks: dict[str, dict[str, Any]]
    keep_dropped: Literal["none", "sample", "all"]
    divide: StringsOrNone
    tokenizer: Place | dict[str, Any] | None
    unit: Count
    memory: Count


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(OutputFolder):
    """Settings of the job but for its text and the section `curate`.

    Attributes:
        preset: name of the preset, for the report.
        output: folder to write.
        workers: number of processes; null for one on each core.
        shard: this process's share of the work, as 0/64; null for all of it.
    """

    preset: str | None
    output: Annotated[Place, Field(min_length=1)]
    workers: Count | None
    shard: Shard | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a composed config asks for.

    Attributes:
        settings: settings of the job.
        curate: section `curate`.
        stages: stages by name, in order.
        streams: sources by the name of their stream.
    """

    settings: Settings
    curate: Curate
    stages: dict[str, Stage]
    streams: dict[str, Source]


def read_plan(config: Mapping[str, Any]) -> Plan:
    """Settings, stages and sources of a composed config; whether their files are there is not looked at.

    Raises:
        ValueError: a setting is wrong, or no text is named.
    """
    if config["output"] is None:
        raise ValueError("output=null: name a folder")
    settings = checked(Settings, {field.name: config[field.name] for field in dataclasses.fields(Settings)})
    if not config["curate"]["stages"]:
        raise ValueError("curate.stages is empty: choose a preset (dolma, dolma3, fineweb, domyn), or name blocks")
    curate = checked(Curate, config["curate"], where="curate")
    if len(set(curate.stages)) < len(curate.stages):
        raise ValueError("curate.stages: names a stage twice: give it a second block under another name")
    for name, block in curate.blocks.items():  # those too that are left alone: a name may be mistyped
        _kind(name, block)
    stages = dict[str, Stage]()
    for name in curate.stages:
        if not _NAME.fullmatch(name) or name == "read":
            raise ValueError(f"curate.stages: {name!r} cannot be a name: write letters, digits, - and _, but not read")
        if name not in curate.blocks:
            near = f"'curate.blocks.{name}={{}}' adds it" if name in KINDS else nearest(name, {*curate.blocks, *KINDS})
            raise ValueError(f"curate.stages: {name!r}: the config has no such block; a preset has some; {near}")
        stages[name] = _stage(name, curate.blocks[name])
    buckets = {name: stage for name, stage in stages.items() if isinstance(stage, Buckets)}
    if len(buckets) > 1:
        raise ValueError(f"curate.stages: {' and '.join(buckets)} both make buckets: leave one out")
    for name, bucket in buckets.items():
        if bucket.rate is not None and curate.divide[-1:] != (BUCKET,):
            raise ValueError(f"curate.blocks.{name}.rate: wants a stream of each bucket: 'curate.divide=[{BUCKET}]'")
    given = {**config, "tokenizer": None, "validation_share": None, "workers": None}
    found = sources_of(given, settings.folder, own=settings.own / "text")
    streams = {name: source for name, (source, _) in found.items()}
    for name, source in streams.items():
        if source.max_bytes is not None:
            raise ValueError(f"stream {name!r}: max_bytes is not for curation, which reads everything: leave it out")
    return Plan(settings, curate, stages, streams)


def _kind(name: str, block: Mapping[str, Any]) -> type[Stage]:
    kind = block.get("kind", name)
    if kind not in KINDS:
        raise ValueError(f"curate.blocks.{name}: kind: {kind!r}: {nearest(str(kind), KINDS)}")
    return KINDS[kind]


def _stage(name: str, block: Mapping[str, Any]) -> Stage:
    given = {key: value for key, value in block.items() if key != "kind"}
    return checked(_kind(name, block), given, where=f"curate.blocks.{name}")
