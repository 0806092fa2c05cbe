"""Plug-ins for Megatron-Core and NeMo: one block notation, four model families, no forks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

__version__ = "0.2.0"

REPLACED = ("DeciLMForCausalLM",)
"""Classes for which `register` replaces Megatron-Bridge's own bridge. Its mapping does not cover linear-replaced
blocks, which would keep their random weights after a warning (megatron/bridge/models/llama_nemotron, 0.6.2)."""


@dataclass(frozen=True)
class Registration:
    """Result of `register`.

    Attributes:
        registered: Hugging Face classes that now use our bridge.
        skipped: mapping from each class that was not registered to the reason; the key `megatron-bridge` stands for all
            classes.
    """

    registered: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


def register(*, bridge: bool | None = None, replace: Collection[str] = REPLACED) -> Registration:
    """Register our models with Megatron-Bridge. Call this in every process, before `AutoBridge`; it is idempotent.

    Args:
        bridge: None registers if Megatron-Bridge can be imported, True requires it, False does nothing.
        replace: Hugging Face classes for which our bridge replaces Megatron-Bridge's own. Classes for which
            Megatron-Bridge has no bridge are always registered.

    Raises:
        ImportError: `bridge=True`, but Megatron-Bridge cannot be imported.
        ValueError: `replace` names a class that none of our formats covers.
    """
    if bridge is False:
        return Registration(skipped={"megatron-bridge": "not requested (bridge=False)"})
    try:
        from nemo_ext.megatron.bridge import register_bridges

        return Registration(*register_bridges(replace))
    except (ImportError, OSError) as error:  # torch raises OSError for incompatible libraries
        if bridge:
            raise ImportError(
                f"bridge=True requires Megatron-Bridge, which cannot be imported ({error}): pip install "
                "megatron-bridge, in addition to megatron-core and transformer-engine"
            ) from error
        return Registration(skipped={"megatron-bridge": str(error)})
