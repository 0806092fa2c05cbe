"""Streams to tokenise: those of a blend, or a user's own files as a blend of one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.data.blends.blend import flattened
from nemo_ext.data.blends.hierarchy import read_tree
from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.text.tokenizers import Tokenizer, load_tokenizer, named_tokenizer
from nemo_ext.job.settings import check_keys, checked_share, checked_whole

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
_OVER_BLEND = ("tokenizer", "validation_share", "workers")


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A source whose tokenised files go to `<prefix>_train` and `<prefix>_valid`; `inputs` are the source's files."""

    name: str
    prefix: Path
    source: Source
    inputs: list[tuple[str, Path]]


@dataclass(frozen=True, kw_only=True)
class Blend:
    """The checked streams that have a source, and settings for tokenising them (`workers` None: one per core)."""

    streams: list[Stream]
    tokenizer: Tokenizer
    validation_share: float
    seed: int
    workers: int | None


def read_blend(config: Mapping[str, object]) -> Blend:
    """Check everything in a blend, including the weights, which only sampling uses, and that its input can be read.

    Args:
        config: `directory`, `tokenizer` (see `load_tokenizer`), `streams`, and, if wanted, `validation_share`, `seed`
            and `workers`. A stream is a mapping with `name`, `weight`, `source` (see `load_source`; without one the
            stream's files are made elsewhere) and `prefix` (where they are; `<directory>/<name>` if left out). A tree,
            `blend`, may stand in place of `streams`.

    Raises:
        ValueError: Anything is wrong or missing.
    """
    flat = flattened(config)
    required = ("directory", "tokenizer", "streams")
    known = (*required, "validation_share", "seed", "workers", "mixed_lengths")
    check_keys(flat, known, required=required, where="data")
    workers = flat.get("workers")
    return Blend(
        tokenizer=load_tokenizer(flat["tokenizer"]),
        validation_share=checked_share("validation_share", flat.get("validation_share", 0.05), below_one=True),
        seed=checked_whole("seed", flat.get("seed", 1234)),
        workers=None if workers is None else checked_whole("workers", workers, least=1),
        streams=[
            _read_stream(leaf.name, leaf.prefix, leaf.source)
            for leaf in read_tree(config).leaves()
            if leaf.source is not None
        ],
    )


def blend_to_tokenize(config: Mapping[str, object]) -> dict[str, object]:
    """Return the blend that the config of `nemo-ext tokenize` asks for: by `input` and `output`, or by `data`.

    Raises:
        ValueError: It asks for neither or for both, or does not say where to write or how to read.
    """
    data = config["data"]
    blend = flattened(data) if isinstance(data, Mapping) else {}
    if config["input"] is not None:
        if blend.get("streams"):
            raise ValueError("input and a blend (data=..., data.streams) exclude each other: use two commands")
        blend |= _blend_of_files(config["input"], config["output"], kind=config["kind"], text_key=config["text_key"])
    else:
        for key in ("output", "kind", "text_key"):
            if config[key] is not None:
                raise ValueError(f"{key}={config[key]} belongs to input=...; the streams of a blend have their own")
        streams = blend.get("streams")
        if not streams:
            raise ValueError("nothing to tokenise: give input=FILE output=PREFIX, or a blend such as data=local_text")
        if isinstance(streams, Sequence) and not any(isinstance(s, Mapping) and s.get("source") for s in streams):
            raise ValueError(
                "no stream of this blend has a source: add sources, or make each stream's files from your own with "
                "input=FILE output=PREFIX, where PREFIX is the stream's prefix"
            )
    blend |= {key: config[key] for key in _OVER_BLEND if config[key] is not None}
    tokenizer = blend.get("tokenizer") or "byte"
    if isinstance(tokenizer, str):
        blend["tokenizer"] = named_tokenizer(tokenizer)
    return {key: value for key, value in blend.items() if value is not None}


def sources_of(config: Mapping[str, Any], directory: Path, *, own: Path) -> dict[str, tuple[Source, float]]:
    """Sources of the streams that a config names by `input` or `data`, each with its weight, of which one is positive.

    Args:
        config: composed config.
        directory: folder of a blend that names none.
        own: where tokens of `input` would go.

    Raises:
        ValueError: no text is named, a source is wrong, or a tree has no weights before its sizes are known.
    """
    # A blend of one's own files names its stream by where their tokens would go.
    blend = blend_to_tokenize({**config, "output": None if config["input"] is None else str(own)})
    if config["data"].get("blend") is not None:
        raise ValueError("a tree of streams (data.blend) has no weights before its sizes are known: give streams")
    blend.setdefault("directory", str(directory))
    found = {}
    for leaf in read_tree(blend).leaves():
        if leaf.source is None:
            continue
        try:
            found[leaf.name] = load_source(leaf.source), float(leaf.amount or 0)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"stream {leaf.name!r}: {error}") from error
    if not sum(amount for _, amount in found.values()):
        raise ValueError(f"the weights of the {len(found)} streams with a source are all 0")
    return found


def _blend_of_files(given: object, output: object, *, kind: object, text_key: object) -> dict[str, object]:
    """Make `directory` and `streams` of a blend of one stream."""
    paths = [given] if isinstance(given, str) else given
    if not isinstance(paths, Sequence) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise ValueError(f"input must be a file, a glob, a directory or a list of files and globs, not {given!r}")
    if not isinstance(output, str):
        raise ValueError("output is not set: output=PREFIX writes PREFIX_train.bin, PREFIX_valid.bin and others")
    prefix = Path(output).expanduser()
    if output.endswith("/") or prefix.is_dir():
        raise ValueError(f"output={output} is a directory: give what the files begin with, e.g. {prefix / 'mine'}")
    kind = _kind_of(paths) if kind is None else kind
    source: dict[str, object] = {"kind": kind, "path": given}
    if text_key is not None:
        source["text_key"] = text_key
    if kind == "tree" and prefix.absolute().is_relative_to(Path(paths[0]).expanduser().absolute()):
        raise ValueError(f"output={output} is inside input={paths[0]}, which must not change: write elsewhere")
    stream = {"name": prefix.name, "weight": 1, "prefix": str(prefix), "source": source}
    return {"directory": str(prefix.parent), "streams": [stream]}


def _kind_of(paths: Sequence[str]) -> str:
    """Kind of source of a user's files, by their names."""
    kinds = set()
    for path in map(Path, paths):
        if path.expanduser().is_dir():
            records = next((name for end in ("jsonl*", "parquet") for name in path.expanduser().glob(f"*.{end}")), None)
            if records is not None:
                raise ValueError(
                    f"input={path} holds {records.name}: give input='{path}/*{records.suffix}' to read such files, or "
                    "kind=tree to make every file one document"
                )
            kinds.add("tree")
        else:
            kind = _KIND_OF_SUFFIX.get(Path(re.sub(r"\.(gz|zst)$", "", path.name)).suffix)
            packed = {"jsonl": (".gz", ".zst"), "warc": (".gz",)}.get(kind or "", ())
            if kind is None or (path.suffix in (".gz", ".zst") and path.suffix not in packed):
                raise ValueError(
                    f"input={path}: its name does not tell what it is: set kind to jsonl, parquet, text or warc"
                )
            kinds.add(kind)
    if len(kinds) > 1:
        raise ValueError(f"input has files of different kinds ({', '.join(sorted(kinds))}): use a command for each")
    return kinds.pop()


def _read_stream(name: str, prefix: Path, config: object) -> Stream:
    if not isinstance(config, Mapping):
        raise ValueError(f"stream {name!r}: source must be a mapping with a kind, not {config!r}")
    try:
        source = load_source(config)
        return Stream(name=name, prefix=prefix, source=source, inputs=source.check())
    except ValueError as error:
        raise ValueError(f"stream {name!r}: {error}") from error
