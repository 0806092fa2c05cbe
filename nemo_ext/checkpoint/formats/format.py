"""Definition of a Hugging Face format: its module names, and the reading and writing of config.json."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_ext.architecture.blocks import BIAS, NAMES, Block
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.parameters import Role, Row, rows

PREDICTION = ("enorm", "hnorm", "eh_proj", "final_layernorm")
"""Modules of a depth of multi-token prediction besides its blocks, which all formats name alike."""


class CannotExpress(ValueError):
    """Raised if a format cannot express a model; the message gives the reason."""


@dataclass(frozen=True)
class Entry(Row):
    """Row of the tensor mapping, with the names that its tensors have in a Hugging Face checkpoint."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Format:
    """Checkpoint format of one Hugging Face architecture.

    Attributes:
        architecture: class name in `architectures` of config.json.
        model_type: `model_type` of config.json.
        write: function from a description to config.json; raises `CannotExpress`.
        read: function from config.json to a description; raises `ValueError`.
        outside: mapping from `embedding`, `final_norm` and `head` to module names.
        layer: prefix of names inside a layer; `{layer}` stands for the layer's number.
        modules: mapping from block kind to module names inside a layer; `{expert}` stands for the expert's number.
        prediction: prefix of names inside a block of multi-token prediction; `{layer}` stands for the number of the
            block, counted over all depths. "" if the format has no multi-token prediction.
        linear: mapping from block kind to the name of the linear layer that replaces such a block.
        norms: mapping from block kind to the name of the norm inside a layer.
        layers: function that returns each block's layer number, and the number of layers.
        stacked_experts: whether a block's experts are stacked in one tensor.
        code: files in `nemo_ext.checkpoint.remote_code` that are copied into a checkpoint.
        remarks: function from a description to notes for users of the export.
        known: config.json keys that have no effect in Megatron, or only affect blocks that a model may not have.
        prefixes: alternative prefixes of tensor names outside `prediction` that the class can load; it writes the one
            in `layer`.
    """

    architecture: str
    model_type: str
    write: Callable[[Description], dict[str, Any]]
    read: Callable[["Keys"], Description]
    outside: Mapping[str, str]
    layer: str
    modules: Mapping[str, Mapping[str, str]]
    norms: Mapping[str, str]
    prediction: str = ""
    linear: Mapping[str, str] = field(default_factory=dict)
    layers: Callable[[Sequence[Block]], tuple[list[int], int]]
    stacked_experts: bool = False
    code: tuple[str, ...] = ()
    remarks: Callable[[Description], list[str]] = lambda description: []
    known: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    def as_named(self, names: Iterable[str]) -> "Format":
        """Return the format with the prefix that a checkpoint's tensor `names` have, if the class loads several."""
        found = {prefix for prefix in self.prefixes if any(name.startswith(prefix) for name in names)}
        own = next((prefix for prefix in self.prefixes if self.layer.startswith(prefix)), "")
        if len(found) != 1 or own in found:
            return self
        (other,) = found
        outside = {role: re.sub(f"^{re.escape(own)}", other, name) for role, name in self.outside.items()}
        return replace(self, outside=outside, layer=other + self.layer.removeprefix(own))

    def config_json(self, description: Description) -> dict[str, Any]:
        """Return the content of config.json for a model.

        Raises:
            CannotExpress: the format does not support the model; says why.
        """
        refuse((description.prediction and not self.prediction, "multi-token prediction (mtp=drop removes it)"))
        return self.write(description)

    def entries(self, description: Description) -> Iterator[Entry]:
        """Yield the entries of a model's tensor mapping, in model order.

        Raises:
            ValueError: the mapping cannot express a block.
        """
        stored = description.hf_layers if self.layers is attention_with_mlp else None
        numbers = stored or self.layers(description.blocks)[0]
        for row in rows(description, stacked_experts=self.stacked_experts):
            if row.block is None:
                names = [self.outside[module] + f".{parameter}" for module, parameter in row.roles]
            else:
                block = (*description.blocks, *description.prediction)[row.block]
                main = len(description.blocks)
                inside = (
                    self.layer.format(layer=numbers[row.block])
                    if row.block < main
                    else self.prediction.format(layer=row.block - main)
                )
                names = [inside + self._name(block, role) for role in row.roles]
            yield Entry(**vars(row), names=tuple(names))

    def _name(self, block: Block, role: Role) -> str:
        module, parameter = role
        if module in PREDICTION:
            return f"{module}.{parameter}"
        if module == "norm":
            return f"{self.norms[block.kind]}.{parameter}"
        if module == "linear":
            return f"{self.linear[block.kind]}.{parameter}"
        if module.startswith("experts."):
            _, expert, name = module.split(".")
            return self.modules[block.kind][f"experts.{name}"].format(expert=expert) + f".{parameter}"
        return f"{self.modules[block.kind][module]}.{parameter}"


def one_layer_a_block(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Return each block's layer number and the number of layers, for formats in which every layer is one block."""
    return list(range(len(blocks))), len(blocks)


def attention_with_mlp(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Return each block's layer number and the number of layers; attention and an MLP right after it share a layer."""
    layers: list[int] = []
    for number, block in enumerate(blocks):
        joins = block.kind == "-" and number > 0 and blocks[number - 1].kind == "*"
        layers.append(layers[-1] if joins else (layers[-1] + 1 if layers else 0))
    return layers, layers[-1] + 1 if layers else 0


class Keys:
    """Typed access to a config.json, which records the keys read and names the key in error messages.

    Attributes:
        values: content of config.json.
        read: keys read so far.
        where: prefix of keys in error messages, such as `block_configs[3].`.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values, self.where = values, where
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if it is absent or null."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the value of a key as a positive whole number, or `default` if it is absent or null.

        Raises:
            ValueError: the key is missing without a default, or the value is not a positive whole number.
        """
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {self.where}{key}={value!r}: expected a positive whole number")
        return value

    def number(self, key: str, default: float) -> float:
        """Return the value of a key as a number, or `default` if it is absent or null."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"config.json: {self.where}{key}={value!r}: expected a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the value of a key as a boolean, or `default` if it is absent or null."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {self.where}{key}={value!r}: expected true or false")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Reject a value that is not supported; an absent key counts as the first allowed value.

        Raises:
            ValueError: the value is not allowed; lists the allowed ones.
        """
        value = self.get(key, allowed[0])
        if value not in allowed:
            words = " or ".join(map(repr, allowed))
            raise ValueError(f"config.json: {self.where}{key}={value!r} is not supported: expected {words}")


def check_layers(keys: Keys, blocks: int, listed: str) -> None:
    """Reject a `num_hidden_layers` that differs from the number of entries, `blocks`, of the key `listed`.

    Raises:
        ValueError: the numbers differ.
    """
    if (count := keys.integer("num_hidden_layers", blocks)) != blocks:
        raise ValueError(
            f"config.json: num_hidden_layers={count} does not match the {blocks} entries of {listed}: correct one of "
            "them"
        )


def described(
    keys: Keys,
    blocks: Sequence[Block],
    settings: Mapping[str, Any],
    *,
    vocabulary: int | None = None,
    hidden: int | None = None,
    prediction: tuple[tuple[Block, ...], int] = ((), 0),
    **own: Any,
) -> Description:
    """Build a description from the keys shared by all config.json files.

    Args:
        keys: the config.json.
        blocks: the model's blocks.
        settings: further fields of `Architecture`.
        vocabulary: default of `vocab_size`; if None, the key is required.
        hidden: default of `hidden_size`; if None, the key is required.
        prediction: blocks of a depth of multi-token prediction, and the number of depths.
        own: further fields of `Description`.
    """
    size = keys.integer("vocab_size", vocabulary)
    architecture = Architecture(
        pattern=Pattern(tuple(blocks), (), *prediction),
        hidden_size=keys.integer("hidden_size", hidden),
        vocab_size=size,
        tied_embeddings=keys.flag("tie_word_embeddings"),
        **settings,
    )
    longest = keys.values.get("max_position_embeddings")
    return Description(architecture=architecture, vocab_size=size, max_positions=longest, **own)


def refuse(*conditions: tuple[object, str]) -> None:
    """Check (condition, reason) pairs in order; raise `CannotExpress` with the reason of the first true condition."""
    for holds, reason in conditions:
        if holds:
            raise CannotExpress(reason)


def own_bias(blocks: Sequence[Block]) -> tuple[bool, str]:
    """Return a condition and reason for `refuse`: an MLP block has biases of its own, which no format supports."""
    return any(block.get(BIAS) for block in blocks), "biases in an MLP block only"


def common_value(blocks: Sequence[Block], kind: str, name: str) -> int:
    """Return the value `name` that all blocks of kind `kind` share.

    Raises:
        CannotExpress: the blocks have different values, or there are none.
    """
    sizes = {block.size(name) for block in blocks if block.kind == kind}
    if len(sizes) != 1:
        words = ", ".join(str(size or "none") for size in sorted(sizes))
        raise CannotExpress(f"{NAMES[kind]} blocks with different values of {name} ({words})")
    return sizes.pop()


def common_facts(description: Description, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the keys, with values, that every config.json starts with, such as `architectures` and `vocab_size`."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": description.vocab_size,
        "hidden_size": description.architecture.hidden_size,
        "max_position_embeddings": description.max_positions or 4096,
        "tie_word_embeddings": description.architecture.tied_embeddings,
        "attention_dropout": 0.0,
    }
