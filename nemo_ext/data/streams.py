"""Streams to tokenise: those of a blend, or the user's files as a blend with a single stream."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.data.blends.blend import flattened
from nemo_ext.data.blends.hierarchy import read_tree
from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.text.tokenizers import Tokenizer, load_tokenizer, named_tokenizer
from nemo_ext.job.settings import STRICT, Count, Place, Places, checked, prefixed_errors

_KIND_OF_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".warc": "warc",
    ".wet": "warc",
}
ValidationShare = Annotated[float, Field(ge=0, lt=1)]
"""Share of the documents that is held out for validation."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class TextSettings:
    """Settings of `nemo-ext tokenize` other than `data`: the user's files, and settings that override a blend's.

    hydra_conf/tokenize.yaml and text.yaml describe them.
    """

    input: Annotated[Places, Field(min_length=1)] | None
    kind: Literal["jsonl", "parquet", "text", "tree", "warc"] | None
    text_key: str | None
    output: Place | None
    tokenizer: Place | dict[str, Any] | None
    validation_share: ValidationShare | None
    workers: Count | None


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class BlendSettings:
    """The `data` section of a blend with a flat list of streams, as `nemo_ext.data.blends.blend.flattened` returns it.

    Attributes:
        directory: folder of the streams' tokenised files.
        tokenizer: see `load_tokenizer`.
        streams: see `read_blend`.
        validation_share: share of the documents that is held out for validation.
        seed: seed of the choice of validation documents.
        workers: number of processes; null for one per core.
        mixed_lengths: only for training; ignored here.
    """

    directory: Place
    tokenizer: Any
    streams: Any
    validation_share: ValidationShare = 0.05
    seed: int = 1234
    workers: Count | None = None
    mixed_lengths: Any = None


_OVER_BLEND = ("tokenizer", "validation_share", "workers")


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A source, its input files, and the prefix of its tokenised files (`<prefix>_train` and `<prefix>_valid`)."""

    name: str
    prefix: Path
    source: Source
    inputs: list[tuple[str, Path]]


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Validated streams that have a source, and the settings for tokenising them (`workers` None: one per core)."""

    streams: list[Stream]
    tokenizer: Tokenizer
    validation_share: float
    seed: int
    workers: int | None


def read_blend(config: Mapping[str, object], tokenizer_key: str = "data.tokenizer") -> Blend:
    """Validate a whole blend, including the weights, which only sampling uses, and check that its input can be read.

    Args:
        config: `directory`, `tokenizer` (see `load_tokenizer`), `streams`, and optionally `validation_share`, `seed`
            and `workers`. A stream is a mapping with `name`, `weight`, `source` (see `load_source`; omitted if its
            files are made elsewhere) and `prefix` of its files (default `<directory>/<name>`). A tree in `blend` may
            replace `streams`.
        tokenizer_key: key with which the user set the tokenizer, for messages.

    Raises:
        ValueError: A key is missing or invalid, or the input cannot be read.
    """
    settings = checked(BlendSettings, flattened(config), "data", strict=True)
    return Blend(
        tokenizer=load_tokenizer(settings.tokenizer, tokenizer_key),
        validation_share=settings.validation_share,
        seed=settings.seed,
        workers=settings.workers,
        streams=[
            _read_stream(leaf.name, leaf.prefix, leaf.source)
            for leaf in read_tree(config).leaves()
            if leaf.source is not None
        ],
    )


def blend_to_tokenize(config: Mapping[str, object]) -> dict[str, object]:
    """Return the blend that a `nemo-ext tokenize` config describes, either by `input` and `output` or by `data`.

    Raises:
        ValueError: neither or both are set, `output` is missing, or the kind of the input is unknown.
    """
    settings = checked(TextSettings, {field.name: config[field.name] for field in fields(TextSettings)}, strict=True)
    data = config["data"]
    blend = flattened(data) if isinstance(data, Mapping) else {}
    if settings.input is not None:
        if not all(settings.input):
            raise ValueError(f"input={config['input']!r} contains an empty name: name files, globs or a directory")
        if blend.get("streams"):
            raise ValueError(
                "input cannot be combined with a blend (data=... or data.streams): use a separate command for each"
            )
        blend |= _blend_of_files(settings)
    else:
        for key, of_stream in (("output", "prefix"), ("kind", "source.kind"), ("text_key", "source.text_key")):
            if config[key] is not None:
                raise ValueError(f"{key}={config[key]} requires input=...; in a blend, set {of_stream} in each stream")
        streams = blend.get("streams")
        if not streams:
            raise ValueError(
                "no text is given: set input=FILE and output=PREFIX, or choose a blend such as data=local_text"
            )
        if isinstance(streams, Sequence) and not any(isinstance(s, Mapping) and s.get("source") for s in streams):
            raise ValueError(
                "no stream of this blend has a source: add sources, or tokenise your own files for each stream with "
                "input=FILE output=PREFIX, where PREFIX is the stream's prefix"
            )
    blend |= {key: config[key] for key in _OVER_BLEND if config[key] is not None}
    tokenizer = blend.get("tokenizer") or "byte"
    if isinstance(tokenizer, str):
        blend["tokenizer"] = named_tokenizer(tokenizer)
    return {key: value for key, value in blend.items() if value is not None}


def sources_of(config: Mapping[str, Any], directory: Path, *, own: Path) -> dict[str, tuple[Source, float]]:
    """Return (source, weight) of each of a config's streams, keyed by name; at least one weight is positive.

    Args:
        directory: folder to use if the blend sets no `directory`.
        own: prefix of the tokenised files of `input`; its last component names the stream.

    Raises:
        ValueError: no text is given, a source is invalid, or the blend is a tree, whose weights depend on stream sizes.
    """
    output = None if config["input"] is None else str(own)
    blend = blend_to_tokenize({**config, **dict.fromkeys(_OVER_BLEND), "output": output})
    if config["data"].get("blend") is not None:
        raise ValueError(
            "data.blend cannot be used to read text, since its weights depend on the sizes of tokenised streams: set "
            "data.streams instead"
        )
    blend.setdefault("directory", str(directory))
    weighted = {}
    for leaf in read_tree(blend).leaves():
        if leaf.source is None:
            continue
        with prefixed_errors(f"stream {leaf.name!r}"):
            weighted[leaf.name] = load_source(leaf.source), float(leaf.amount or 0)  # type: ignore[arg-type]
    if not sum(weight for _, weight in weighted.values()):
        raise ValueError(
            f"the weights of the {len(weighted)} streams with a source are all 0: set at least one above 0"
        )
    return weighted


def _blend_of_files(settings: TextSettings) -> dict[str, object]:
    """Return `directory` and `streams` of a single-stream blend for the user's files, globs or directory."""
    paths, output = settings.input or (), settings.output
    if output is None:
        raise ValueError(
            "output is not set: set output=PREFIX, which writes PREFIX_train.bin, PREFIX_valid.bin and others"
        )
    prefix = Path(output).expanduser()
    if output.endswith("/") or prefix.is_dir():
        raise ValueError(f"output={output} is a directory: give a prefix for the files, e.g. {prefix / 'mine'}")
    kind = settings.kind or _kind_of(paths)
    source: dict[str, object] = {"kind": kind, "path": paths[0] if len(paths) == 1 else list(paths)}
    if settings.text_key is not None:
        source["text_key"] = settings.text_key
    if kind == "tree" and prefix.absolute().is_relative_to(Path(paths[0]).expanduser().absolute()):
        raise ValueError(f"output={output} is inside input={paths[0]}, which must not change: choose another output")
    stream = {"name": prefix.name, "weight": 1, "prefix": str(prefix), "source": source}
    return {"directory": str(prefix.parent), "streams": [stream]}


def _kind_of(paths: Sequence[str]) -> str:
    """Infer the source kind of the user's files from their names."""
    kinds = set()
    for path in map(Path, paths):
        if path.expanduser().is_dir():
            records = next((name for end in ("jsonl*", "parquet") for name in path.expanduser().glob(f"*.{end}")), None)
            if records is not None:
                raise ValueError(
                    f"input={path} holds {records.name}: set input='{path}/*{records.suffix}' to read such files, or "
                    "kind=tree to read each file as one document"
                )
            kinds.add("tree")
        else:
            kind = _KIND_OF_SUFFIX.get(Path(re.sub(r"\.(gz|zst)$", "", path.name)).suffix)
            packed = {"jsonl": (".gz", ".zst"), "warc": (".gz",)}.get(kind or "", ())
            if kind is None or (path.suffix in (".gz", ".zst") and path.suffix not in packed):
                raise ValueError(
                    f"the kind of input={path} cannot be inferred from its name: set kind to jsonl, parquet, text or "
                    "warc"
                )
            kinds.add(kind)
    if len(kinds) > 1:
        raise ValueError(f"input has files of different kinds ({', '.join(sorted(kinds))}): use one command per kind")
    return kinds.pop()


def _read_stream(name: str, prefix: Path, config: object) -> Stream:
    if not isinstance(config, Mapping):
        raise ValueError(f"stream {name!r}: source must be a mapping with a kind, not {config!r}")
    with prefixed_errors(f"stream {name!r}"):
        source = load_source(config)
        return Stream(name=name, prefix=prefix, source=source, inputs=source.check())
