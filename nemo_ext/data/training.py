"""Conversion of a training config's data (a blend, rows of mixed lengths, or packs) to Megatron's arguments."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.data.blends.blend import planned
from nemo_ext.data.blends.hierarchy import read_tree
from nemo_ext.data.packs.mixed_lengths import MixedLengths
from nemo_ext.data.packs.packed_files import check_packed, packed_flags
from nemo_ext.data.text.indexed_dataset import index_digest


def with_data(config: Mapping[str, Any], *, tokens: int | None = None) -> dict[str, Any]:
    """Add Megatron's data and tokenizer arguments to a config; arguments set by the user are kept.

    Args:
        config: config of a training run; returned unchanged if it has no `data`.
        tokens: number of tokens read from this data; None for the whole run's tokens.

    Raises:
        ValueError: see `packed_flags`, `planned` and `MixedLengths.from_config`.
    """
    if config.get("data") is None:
        return dict(config)
    data = config["data"]
    data, flags = planned(config, tokens=tokens) if data.get("packed") is None else (data, packed_flags(config))
    filled = {**config, "data": data, "megatron": {**config["megatron"], **flags}}
    MixedLengths.from_config(filled)
    return filled


def index_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the .idx files of all data that a run reads, keyed by prefix; see `index_digest`."""
    keys = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    lists = [config["megatron"].get(key) for key in keys]
    lists += (config.get("segment") or {}).get("train_data_path", {}).values()
    words = [str(word) for words in lists if words for word in ([words] if isinstance(words, str) else words)]
    indices = {word: Path(f"{word}.idx") for word in words}
    return {word: index_digest(path) for word, path in indices.items() if path.is_file()}


def check_settings(config: Mapping[str, Any]) -> None:
    """Validate the settings of a training config's data, without requiring its files to exist.

    Raises:
        ValueError: see `check_packed` and `MixedLengths.from_config`.
    """
    phases = {f"phases.{name}": phase for name, phase in (config.get("phases") or {}).items()}
    for where, section in {"": config, **phases}.items():
        if not isinstance(section, Mapping):
            continue
        data, megatron = section.get("data") or {}, {**config["megatron"], **(section.get("megatron") or {})}
        try:
            if data.get("packed") is not None:
                check_packed({"data": data, "megatron": megatron})
            MixedLengths.from_config({"data": data, "megatron": megatron})
        except ValueError as error:
            raise ValueError(f"{where}: {error}" if where else str(error)) from error


def data_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the non-empty `data` sections of a training config and of its phases."""
    phases = (config.get("phases") or {}).values()
    of_phases = [phase.get("data") for phase in phases if isinstance(phase, Mapping)]
    return [data for data in (config.get("data"), *of_phases) if data]


def check_validation(config: Mapping[str, Any], job: str) -> None:
    """Check that `job`, a job that compares models, has validation data; `data.packed` may otherwise omit it.

    Raises:
        ValueError: the packs have no validation set.
    """
    packed = (config.get("data") or {}).get("packed")
    if isinstance(packed, Mapping) and not packed.get("valid") and not config["megatron"].get("valid_data_path"):
        raise ValueError(
            f"data.packed.valid=null, but {job} compares models on validation data: set it to the prefix of validation "
            "packs"
        )


def tokenize_streams(data: Mapping[str, Any] | None) -> bool:
    """Tokenise the streams of a `data` section that have a source and are not tokenised yet, showing progress.

    Returns:
        True if a stream was tokenised, so that sizes may have changed.

    Raises:
        ValueError: see `tokenize_blend`; or a stream has no documents for validation.
    """
    if data is None or (data.get("blend") is None and not data.get("streams")):
        return False
    manifests = [Path(f"{leaf.prefix}.json") for leaf in read_tree(data).leaves() if leaf.source is not None]
    if not manifests:
        return False
    from nemo_ext.data.tokenize import tokenize_blend

    before = [path.read_bytes() if path.is_file() else None for path in manifests]
    for manifest in tokenize_blend(data, workers=data.get("workers"), progress=True):
        if not manifest.splits["valid"].documents:
            raise ValueError(
                f"{manifest.prefix} has no validation documents, which training requires ({manifest.contents()}): add "
                "documents, or remove the stream"
            )
    return before != [path.read_bytes() for path in manifests]
