"""The data of a training config as Megatron's arguments: a blend or packs, and rows of mixed lengths."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.data.blends.blend import planned
from nemo_ext.data.blends.hierarchy import read_tree
from nemo_ext.data.packs.mixed_lengths import MixedLengths
from nemo_ext.data.packs.packed_files import check_packed, packed_flags
from nemo_ext.data.text.indexed_dataset import index_digest


def with_data(config: Mapping[str, Any], *, tokens: int | None = None) -> dict[str, Any]:
    """The config with Megatron's data and tokenizer arguments; those that the user set stay.

    Args:
        config: config of a training run; without `data` it stays as it is.
        tokens: number of tokens read from this data; None: those of the whole run.

    Raises:
        ValueError: see `packed_flags`, `planned` and `MixedLengths.from_config`.
    """
    if config.get("data") is None:
        return dict(config)
    data = config["data"]
    data, flags = planned(config, tokens=tokens) if data.get("packed") is None else (data, packed_flags(config))
    made = {**config, "data": data, "megatron": {**config["megatron"], **flags}}
    MixedLengths.from_config(made)
    return made


def index_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the indices of all data that a run reads, by prefix; see `index_digest`.

    Args:
        config: config of a training run or of a segment of it, data arguments filled in.
    """
    keys = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    lists = [config["megatron"].get(key) for key in keys]
    lists += (config.get("segment") or {}).get("train_data_path", {}).values()
    words = [str(word) for words in lists if words for word in ([words] if isinstance(words, str) else words)]
    indices = {word: Path(f"{word}.idx") for word in words}
    return {word: index_digest(path) for word, path in indices.items() if path.is_file()}


def check_settings(config: Mapping[str, Any]) -> None:
    """Refuse settings that do not work with a training config's data, whether its files are there yet or not.

    Raises:
        ValueError: see `check_packed` and `MixedLengths.from_config`.
    """

    def check(data: Mapping[str, Any] | None, megatron: Mapping[str, Any]) -> None:
        one = {"data": data or {}, "megatron": megatron}
        if one["data"].get("packed") is not None:
            check_packed(one)
        MixedLengths.from_config(one)

    check(config.get("data"), config["megatron"])
    for phase in (config.get("phases") or {}).values():
        if isinstance(phase, Mapping):
            check(phase.get("data"), {**config["megatron"], **(phase.get("megatron") or {})})


def data_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The `data` sections of a training config and of its phases, where there are any."""
    phases = (config.get("phases") or {}).values()
    own = [phase.get("data") for phase in phases if isinstance(phase, Mapping)]
    return [data for data in (config.get("data"), *own) if data]


def check_validation(config: Mapping[str, Any], job: str) -> None:
    """Refuse packs without a validation set to a job that compares models.

    Raises:
        ValueError: says which key to set.
    """
    packed = (config.get("data") or {}).get("packed")
    if isinstance(packed, Mapping) and not packed.get("valid") and not config["megatron"].get("valid_data_path"):
        raise ValueError(f"data.packed.valid=null: {job} compares models on validation data: give a prefix of packs")


def tokenize_streams(data: Mapping[str, Any] | None) -> bool:
    """Tokenises the streams of a `data` section that have a source and are not tokenised yet, with progress.

    Returns:
        True if any were tokenised, so that their sizes changed.

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
                f"{manifest.prefix}: {manifest.contents()}: training measures each stream's validation loss: give the "
                "stream more documents, or leave it out"
            )
    return before != [path.read_bytes() for path in manifests]
