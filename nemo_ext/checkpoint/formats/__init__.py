"""Registry of Hugging Face formats, and selection of the format for a model or a checkpoint."""

from collections.abc import Mapping
from typing import Any

from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.formats.decilm import DECILM
from nemo_ext.checkpoint.formats.dense import LLAMA, NEMOTRON, OLMO, OLMO3
from nemo_ext.checkpoint.formats.format import CannotExpress, Entry, Format, Keys
from nemo_ext.checkpoint.formats.hybrid import NEMOTRON_H
from nemo_ext.checkpoint.formats.hybrid_puzzle import NEMOTRON_H_PUZZLE
from nemo_ext.checkpoint.formats.own import BLOCKS
from nemo_ext.checkpoint.formats.rest import ignored_keys
from nemo_ext.job.settings import nearest

__all__ = ["FORMATS", "CannotExpress", "Entry", "Format", "choose", "ignored", "named", "read"]

FORMATS = {
    entry.architecture: entry for entry in (NEMOTRON, NEMOTRON_H, NEMOTRON_H_PUZZLE, LLAMA, OLMO, OLMO3, DECILM, BLOCKS)
}
"""Mapping from class name to format; a model is written in the first format that can express it."""


def named(architecture: str) -> Format:
    """Look up a format by class name.

    Raises:
        ValueError: there is no such format; names the nearest one.
    """
    if architecture not in FORMATS:
        raise ValueError(
            f"{architecture!r} is not a supported checkpoint architecture; {nearest(architecture, FORMATS)}"
        )
    return FORMATS[architecture]


def choose(description: Description, architecture: str | None = None) -> tuple[Format, dict[str, Any]]:
    """Choose the format for a model; return it with the content of config.json.

    Args:
        architecture: class name of the format; if None, the first that can express the model is chosen.

    Raises:
        ValueError: no format can express the model; gives each format's reason.
    """
    candidates = FORMATS.values() if architecture is None else [named(architecture)]
    reasons = []
    for candidate in candidates:
        try:
            return candidate, candidate.config_json(description)
        except CannotExpress as reason:
            reasons.append(f"{candidate.architecture} does not support {reason}")
    raise ValueError(
        f"this model cannot be converted to {architecture or 'any Hugging Face class'}: {'; '.join(reasons)}; change "
        "these settings before training"
    )


def read(config: Mapping[str, Any]) -> tuple[Format, Description]:
    """Identify the format of a config.json, and read the model's description.

    Raises:
        ValueError: the architecture is unknown, or a setting is unknown or cannot be expressed in Megatron.
    """
    hf_format, description, _ = _read(config)
    return hf_format, description


def ignored(config: Mapping[str, Any]) -> list[str]:
    """Unknown config.json keys whose value disables them (such as false, null or 0), so that they can be ignored.

    Raises:
        ValueError: the architecture is unknown, or a setting is unknown or cannot be expressed in Megatron.
    """
    return _read(config)[2]


def _read(config: Mapping[str, Any]) -> tuple[Format, Description, list[str]]:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ValueError(f"config.json: architectures={architectures!r}: expected a list with one class name")
    if config.get("quantization_config"):
        raise ValueError(
            "config.json: the checkpoint is quantised (quantization_config): convert the original checkpoint instead"
        )
    layers = config.get("block_configs")
    paired = isinstance(layers, list) and any(isinstance(layer, dict) and "attention" in layer for layer in layers)
    if architectures == ["AnyModel"] or (paired and architectures != [DECILM.architecture]):
        raise ValueError(
            "config.json: a checkpoint in the anymodel form of ModelOpt's Puzzletron (block_configs with attention and "
            "ffn) is not supported: export it as NemotronHPuzzleForCausalLM or DeciLMForCausalLM first"
        )
    hf_format = named(str(architectures[0]))
    keys = Keys(config)
    description = hf_format.read(keys)
    return hf_format, description, ignored_keys(config, keys.read, hf_format.known, hf_format.architecture)
