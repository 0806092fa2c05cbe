"""Plug-ins for Megatron-Core and NeMo: one block notation, four model families, no forks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

__version__ = "0.1.0"

REPLACED = ("DeciLMForCausalLM",)
"""What `register` replaces although Megatron-Bridge has it: the mapping there names no linear-replaced blocks, so they
would keep their random weights after a warning (megatron/bridge/models/llama_nemotron, 0.6.2)."""


@dataclass(frozen=True)
class Registration:
    """What `register` did.

    Attributes:
        registered: the Hugging Face classes that our bridge now serves.
        skipped: what was left alone, a Hugging Face class or `megatron-bridge` as a whole, and why.
    """

    registered: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


def register(*, bridge: bool | None = None, replace: Collection[str] = REPLACED) -> Registration:
    """Makes our models known to Megatron-Bridge. Call it in every process, before `AutoBridge`; twice is once.

    Args:
        bridge: None registers if Megatron-Bridge can be imported, True insists on it, False leaves it alone.
        replace: Hugging Face classes for which our bridge takes the place of Megatron-Bridge's own. Those that it
            has no bridge for are registered in any case.

    Raises:
        ImportError: with `bridge=True`, if Megatron-Bridge cannot be imported.
        ValueError: `replace` names a class that has no format here.
    """
    if bridge is False:
        return Registration(skipped={"megatron-bridge": "not asked for (bridge=False)"})
    try:
        from nemo_ext.megatron.bridge import register_bridges

        return register_bridges(replace)
    except ImportError as error:
        if bridge:
            raise ImportError(
                f"{error}: install it with `pip install megatron-bridge` beside megatron-core and transformer-engine "
                "(`nemo-ext doctor` says what is missing)"
            ) from error
        return Registration(skipped={"megatron-bridge": str(error)})
