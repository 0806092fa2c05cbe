"""Plug-ins for Megatron-Core and NeMo: one block notation, four model families, no forks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

__version__ = "0.2.0"

REPLACED = ("DeciLMForCausalLM",)
"""Classes that `register` replaces although Megatron-Bridge has them: its mapping names no linear-replaced blocks, so
these would keep their random weights after a warning (megatron/bridge/models/llama_nemotron, 0.6.2)."""


@dataclass(frozen=True)
class Registration:
    """Result of `register`.

    Attributes:
        registered: Hugging Face classes that our bridge now serves.
        skipped: reason by name of what was left alone: a Hugging Face class, or `megatron-bridge` as a whole.
    """

    registered: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


def register(*, bridge: bool | None = None, replace: Collection[str] = REPLACED) -> Registration:
    """Registers our models with Megatron-Bridge. Call it in every process, before `AutoBridge`; it is idempotent.

    Args:
        bridge: None registers if Megatron-Bridge can be imported, True requires it, False does nothing.
        replace: Hugging Face classes for which our bridge replaces Megatron-Bridge's own. Classes for which it has no
            bridge are registered in any case.

    Raises:
        ImportError: if `bridge=True` and Megatron-Bridge cannot be imported.
        ValueError: if `replace` names a class that has no format here.
    """
    if bridge is False:
        return Registration(skipped={"megatron-bridge": "not asked for (bridge=False)"})
    try:
        from nemo_ext.megatron.bridge import register_bridges

        return Registration(*register_bridges(replace))
    except (ImportError, OSError) as error:  # torch raises OSError where its libraries do not fit
        if bridge:
            raise ImportError(
                f"{error}: install it with `pip install megatron-bridge` beside megatron-core and transformer-engine "
                "(`nemo-ext doctor` says what is missing)"
            ) from error
        return Registration(skipped={"megatron-bridge": str(error)})
