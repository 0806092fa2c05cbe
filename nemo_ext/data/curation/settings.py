"""Validated settings of `nemo-ext curate`, and the kinds of stages."""

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
from nemo_ext.data.curation.stages.models import Classifier, Decontamination, Perplexity, Sentences
from nemo_ext.data.curation.stages.personal import Personal
from nemo_ext.data.curation.stages.rules import RULES
from nemo_ext.data.streams import sources_of
from nemo_ext.data.text.documents import Source
from nemo_ext.job.settings import STRICT, Count, Place, Shard, StringsOrNone, check_keys, checked, keys_of, nearest
from nemo_ext.job.units import OutputFolder

_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_-]*")
KINDS: dict[str, type[Stage]] = {
    **RULES,
    **{
        each.kind: each
        for each in (
            *(Language, Listed, Personal, Perplexity, Classifier, Sentences, Decontamination),
            *(SameUrl, SameText, SameParagraphs, SamePassages, NearDuplicates, Buckets),
        )
    },
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Curate:
    """The config's `curate` section; hydra_conf/curate.yaml describes its other keys.

    Attributes:
        blocks: mapping from name to a stage's `kind` and settings; blocks that `stages` does not name are not run.
    """

    stages: Annotated[StringsOrNone, Field(min_length=1)]
    blocks: dict[str, dict[str, Any]]
    optional: StringsOrNone
    keep_dropped: Literal["none", "sample", "all"]
    divide: StringsOrNone
    tokenizer: Place | dict[str, Any] | None
    unit: Count
    memory: Count


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Datatrove:
    """The `datatrove` section, for `engine=datatrove`, described in hydra_conf/curate.yaml."""

    executor: Literal["local", "slurm", "ray"]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(OutputFolder):
    """Settings of `nemo-ext curate` other than its text and the `curate` section; see hydra_conf/curate.yaml."""

    preset: str | None
    output: Annotated[Place, Field(min_length=1)]
    workers: Count | None
    shard: Shard | None
    engine: Literal["datatrove"] | None
    datatrove: Datatrove
    dry_run: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """Validated contents of a composed config.

    Attributes:
        curate: the `curate` section.
        stages: stages in order, keyed by name.
        streams: sources, keyed by stream name.
        skipped: optional stages that do not run, each mapped to the settings that it needs (any one of them).
    """

    settings: Settings
    curate: Curate
    stages: dict[str, Stage]
    streams: dict[str, Source]
    skipped: dict[str, str]

    def made_of(self) -> dict[str, Any]:
        """Return the settings and input that determine the output; shards, workers and memory do not affect it."""
        curate = dataclasses.asdict(self.curate)
        del curate["memory"], curate["optional"]
        curate["stages"] = list(self.stages)
        curate["blocks"] = {name: curate["blocks"][name] for name in self.stages}
        files = {}
        for name, stage in self.stages.items():
            for path in stage.reads():
                status = path.stat()
                files[f"{name}: {path}"] = [status.st_size, status.st_mtime_ns]
        return {
            "engine": self.settings.engine,
            "curate": curate,
            "files": files,
            "streams": {name: source.identity() for name, source in self.streams.items()},
        }


def read_plan(config: Mapping[str, Any]) -> Plan:
    """Read the settings, stages and sources of a composed config, without checking that their files exist.

    Raises:
        ValueError: a setting is invalid, or no text is given.
    """
    if config["output"] is None:
        raise ValueError("output=null: set it to a folder")
    settings = checked(Settings, {field.name: config[field.name] for field in dataclasses.fields(Settings)})
    if settings.engine and settings.shard:
        raise ValueError(f"shard={settings.shard}: datatrove divides the work itself; remove shard")
    if not settings.engine and (settings.datatrove.executor != "local" or settings.datatrove.options):
        raise ValueError(
            "datatrove.executor and datatrove.options require engine=datatrove: set this engine, or remove them"
        )
    if not config["curate"]["stages"]:
        raise ValueError("curate.stages is empty: choose a preset (dolma, dolma3, fineweb, domyn), or list blocks")
    curate = checked(Curate, config["curate"], where="curate")
    for number, name in enumerate(curate.stages):
        if name in curate.stages[:number]:
            raise ValueError(
                f"curate.stages lists {name!r} twice: remove one, or, to apply it twice, add a second block under "
                "another name"
            )
    for name in curate.optional:
        if name not in curate.blocks or not _kind(name, curate.blocks[name]).needs:
            names = [block for block in curate.blocks if _kind(block, curate.blocks[block]).needs]
            raise ValueError(f"curate.optional: {name!r} is not a block with a model or list: {nearest(name, names)}")
    for name, block in curate.blocks.items():  # including unused blocks, whose name may be a typo
        _kind(name, block)
    stages, skipped = dict[str, Stage](), dict[str, str]()
    for name in curate.stages:
        if not _NAME.fullmatch(name) or name == "read":
            raise ValueError(
                f"curate.stages: {name!r} is not a valid stage name; use letters, digits, - and _ (`read` is reserved)"
            )
        if name not in curate.blocks:
            near = (
                f"add it with 'curate.blocks.{name}={{}}'" if name in KINDS else nearest(name, {*curate.blocks, *KINDS})
            )
            raise ValueError(f"curate.stages: {name!r} is not in curate.blocks, which a preset defines; {near}")
        values = {key: value for key, value in curate.blocks[name].items() if key != "kind"}
        kind, where = _kind(name, curate.blocks[name]), f"curate.blocks.{name}"
        if name in curate.optional and not any(values.get(key) for key in kind.needs):
            check_keys(values, keys_of(kind), required=(), where=where)  # a misspelt key must not hide a model
            skipped[name] = " or ".join(kind.needs)
            continue
        stages[name] = checked(kind, values, where=where)
    if not stages:
        raise ValueError(
            f"curate.stages: none of {', '.join(skipped)} can run without a model, list or test sets: set one in "
            f"curate.blocks.{name}"
        )
    buckets = {name: stage for name, stage in stages.items() if isinstance(stage, Buckets)}
    if len(buckets) > 1:
        raise ValueError(f"curate.stages: {' and '.join(buckets)} both assign buckets; remove one of them")
    for name, bucket in buckets.items():
        if bucket.rate is not None and curate.divide[-1:] != (BUCKET,):
            raise ValueError(
                f"curate.blocks.{name}.rate requires one stream per bucket: set 'curate.divide=[{BUCKET}]'"
            )
    weighted = sources_of(config, settings.folder, own=settings.own / "text")
    streams = {name: source for name, (source, _) in weighted.items()}
    for name, source in streams.items():
        if source.max_bytes is not None:
            raise ValueError(f"stream {name!r}: curation always reads whole streams; remove max_bytes from its source")
    return Plan(settings, curate, stages, streams, skipped)


def _kind(name: str, block: Mapping[str, Any]) -> type[Stage]:
    kind = block.get("kind", name)
    if kind not in KINDS:
        raise ValueError(f"curate.blocks.{name}: unknown kind {kind!r}: {nearest(str(kind), KINDS)}")
    return KINDS[kind]
