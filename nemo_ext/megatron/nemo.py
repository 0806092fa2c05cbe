"""Our block stack in NeMo 2's `SSMConfig`: `SSMConfig(mamba_stack_spec=mamba_stack_spec("(*{kv=4}-)x40"))`.

This module does not import NeMo. NeMo calls the given callable without arguments (nemo/collections/llm/gpt/model/ssm.py
in 2.7.3) or, in later versions, with the config. docs/bridge.md lists the supported versions of Megatron-Core.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_ext.architecture.pattern import compile as compile_pattern
from nemo_ext.architecture.pattern import parse
from nemo_ext.megatron.specs import hybrid_stack


def mamba_stack_spec(pattern: str = "", **options: Any) -> Callable[..., ModuleSpec]:
    """Return the value for `SSMConfig.mamba_stack_spec`: a callable that builds a pattern's stack spec.

    Set `SSMConfig.hybrid_override_pattern` to `override_pattern(pattern)`; the spec rejects any other pattern.

    Args:
        pattern: block notation; empty if every block has the config's sizes.
        options: see `nemo_ext.megatron.specs.hybrid_stack`.

    Returns:
        A `functools.partial` of a module-level function, so that NeMo can save it with a model. It can be called with a
        config or without arguments.

    Raises:
        PatternError: the pattern does not parse.
        ValueError: an option has an unknown value.
        TypeError: an option is unknown.
    """
    spec = partial(_spec, pattern=pattern, **options)
    spec()  # raises here rather than on every rank
    return spec


def override_pattern(pattern: str) -> str:
    """Return the value for `SSMConfig.hybrid_override_pattern`: a pattern's plain symbols, without pipeline cuts.

    Raises:
        PatternError: the pattern does not parse.
    """
    return compile_pattern(parse(pattern)).hybrid_layer_pattern.replace("|", "")


def _spec(config: object = None, *, pattern: str, **options: Any) -> ModuleSpec:
    """Build the stack spec. `config` is not used, as sub-layers are chosen from the config that Megatron passes in."""
    return hybrid_stack(pattern, **options)
