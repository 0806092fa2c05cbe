"""Manifest `<prefix>.json` of a finished stream: contents, source, tokenizer and settings of its files."""

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.files import publish, unfinished
from nemo_ext.job.progress import notice

FORMAT_VERSION = 2
SPLITS = ("train", "valid")
_KEYS = ("format_version", "config_hash")


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """Counts for one split; `tokens` includes each document's eod, and `text_bytes` is the size in UTF-8."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished stream's contents, source, tokenizer and settings. A split without documents has no files.

    `report` counts skipped records by reason; `reached_max_bytes` is True if the source had more documents.
    `prefix` is the manifest's location and is not stored, so that the files can be moved together.
    """

    prefix: str
    config_hash: str
    source: dict[str, object]
    tokenizer: dict[str, object]
    tokenizer_identity: str
    vocab_size: int
    eod: int
    dtype: str
    validation_share: float
    seed: int
    splits: dict[str, SplitCounts]
    report: ReadReport
    reached_max_bytes: bool

    def split_prefix(self, split: str) -> str:
        """Return the path prefix (without .bin/.idx, as Megatron expects it) of the split "train" or "valid"."""
        assert split in SPLITS, split
        return f"{self.prefix}_{split}"

    def contents(self) -> str:
        """Return the numbers of documents and tokens, worded for notices."""
        train, valid = (self.splits[split] for split in SPLITS)
        documents, tokens = train.documents + valid.documents, train.tokens + valid.tokens
        if valid.documents:
            shares = f"{train.documents:,} for training, {valid.documents:,} for validation"
            return f"{documents:,} documents ({shares}), {tokens:,} tokens"
        why = "validation_share is 0" if self.validation_share == 0 else "one document cannot be split"
        return f"{documents:,} document{'s' * (documents > 1)}, {tokens:,} tokens; no validation files, because {why}"

    def where(self) -> str:
        """Return the paths of the files and the token that ends documents, worded for notices."""
        end = self.tokenizer.get("eod")
        return f"{self.prefix}_*.bin and .idx, documents end with {f'{end}, ' if end else ''}id {self.eod}"

    def skipped(self) -> str:
        """Return what notices say about skipped records and a `max_bytes` that was reached; "" if neither applies."""
        full = f"; stopped at max_bytes={self.source['max_bytes']}" if self.reached_max_bytes else ""
        return full + (f"; skipped {self.report.summary(examples=1)}" if self.report.skipped else "")


def read_manifest(prefix: str | Path) -> Manifest:
    """Read the manifest `<prefix>.json` of a finished stream.

    Raises:
        ValueError: The file is missing or damaged, or is not a manifest of this format version.
    """
    path = Path(f"{prefix}.json")
    values = stored(path, _KEYS)
    if values is None:
        raise ValueError(f"the manifest {path} does not exist: tokenise the stream first")
    if values.pop("format_version") != FORMAT_VERSION:
        raise ValueError(f"the manifest {path} was made by another version of nemo_ext: tokenise the stream again")
    try:
        values["splits"] = {split: SplitCounts(**values["splits"][split]) for split in SPLITS}
        values["report"] = ReadReport(**values["report"])
        return Manifest(prefix=str(prefix), **values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): remove it and tokenise the stream again") from error


def finished_manifest(prefix: Path, config_hash: str, tokenizer: str) -> Manifest | None:
    """Return the manifest if the stream was finished with these settings and its files are complete; otherwise None.

    If a manifest exists but does not match, the reason is printed.

    Args:
        config_hash: hash of the settings and input files.

    Raises:
        ValueError: `<prefix>.json` exists but is not a manifest, or names a tokenizer with a different identity.
    """
    values = stored(Path(f"{prefix}.json"), _KEYS)
    if values is None:
        return None
    if values.get("tokenizer_identity", tokenizer) != tokenizer:
        raise ValueError(
            f"the files of {prefix}.json were written with another tokenizer, {values.get('tokenizer')}: choose "
            "another location (output, or data_root or data.directory of a blend), or remove these files"
        )
    if values["config_hash"] != config_hash:
        notice(f"{prefix} was made from other settings or input files, or by another version: starting over")
        return None
    manifest = read_manifest(prefix)
    width = np.dtype(manifest.dtype).itemsize
    for split, counts in manifest.splits.items():
        data, index = (Path(f"{manifest.split_prefix(split)}.{end}") for end in ("bin", "idx"))
        whole = data.exists() and index.exists() and data.stat().st_size == counts.tokens * width
        if counts.documents and not whole:
            notice(f"{manifest.split_prefix(split)}.bin or .idx is missing or truncated: starting over")
            return None
    return manifest


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write `<prefix>.json` by way of a temporary file in `directory`."""
    values = {"format_version": FORMAT_VERSION} | dataclasses.asdict(manifest)
    del values["prefix"]
    complete = unfinished(directory / "manifest.json")
    complete.write_text(json.dumps(values, indent=2) + "\n")
    publish(complete, Path(f"{manifest.prefix}.json"))


def stored(path: Path, keys: Collection[str]) -> dict[str, Any] | None:
    """Read the values of a manifest; return None if the file does not exist.

    Raises:
        ValueError: the file is not JSON or does not have all of the keys.
    """
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        values = None
    if not isinstance(values, dict) or not values.keys() >= set(keys):
        raise ValueError(f"{path} is not a manifest of tokenised data: choose another prefix, or remove the file")
    return values
