"""Our block stack in NeMo 2's `SSMConfig`: `SSMConfig(mamba_stack_spec=mamba_stack_spec("(*{kv=4}-)x40"))`.

NeMo is not imported: it asks for a callable, and calls it without arguments (nemo/collections/llm/gpt/model/ssm.py,
2.7.3: `mamba_stack_spec()`) or, in later code of the same shape, with the config. docs/bridge.md says with which
versions of Megatron-Core that works.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_ext.architecture.pattern import compile as compile_pattern
from nemo_ext.architecture.pattern import parse
from nemo_ext.megatron.specs import hybrid_stack


def mamba_stack_spec(pattern: str = "", **options: Any) -> Callable[..., ModuleSpec]:
    """What `SSMConfig.mamba_stack_spec` takes: the stack spec of a pattern, made when the model is configured.

    Set `SSMConfig.hybrid_override_pattern` to `override_pattern(pattern)`: the spec refuses any other.

    Args:
        pattern: the notation; empty for "every block as the config says".
        options: see `nemo_ext.megatron.specs.hybrid_stack`.

    Returns:
        A `functools.partial` of a function with a name, so NeMo can save it with a model; called with or without a
        config.

    Raises:
        PatternError: if the pattern does not parse.
        ValueError: for an option's unknown value.
        TypeError: for an unknown option.
    """
    made = partial(_spec, pattern=pattern, options=options)
    made()  # a mistake shows here rather than on every rank
    return made


def override_pattern(pattern: str) -> str:
    """What `SSMConfig.hybrid_override_pattern` takes: the plain symbols of a pattern, without pipeline cuts.

    Raises:
        PatternError: if the pattern does not parse.
    """
    return compile_pattern(parse(pattern)).hybrid_layer_pattern.replace("|", "")


def _spec(config: object = None, *, pattern: str, options: dict[str, Any]) -> ModuleSpec:
    """The spec; `config` is not needed, because sub-layers are chosen from the config that Megatron passes in."""
    return hybrid_stack(pattern, **options)
