"""Megatron's data arguments from the `data` of a training config: a blend or packs, and rows of mixed lengths."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.data.blends.blend import use_blend
from nemo_ext.data.blends.hierarchy import read_tree
from nemo_ext.data.packs.mixed_lengths import MixedLengths
from nemo_ext.data.packs.packed_files import use_packed


def use_data(config: dict[str, Any], *, tokens: int | None = None) -> None:
    """Fills Megatron's data and tokenizer arguments; arguments that the user set stay, as does a config without data.

    Args:
        config: config of a training run; changed in place.
        tokens: number of tokens read from this data; None: those of the whole run.

    Raises:
        ValueError: see `use_packed`, `use_blend` and `MixedLengths.from_config`.
    """
    if config.get("data") is not None and not use_packed(config):
        use_blend(config, tokens=tokens)
        MixedLengths.from_config(config)


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
