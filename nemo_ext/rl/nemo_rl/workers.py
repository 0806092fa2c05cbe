"""Registers our bridges in Ray workers as soon as these import Megatron-Bridge (docs/bridge.md).

Workers also get the MoE layers of hybrid models for NeMo-RL's routing replay.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from nemo_ext.job.progress import notice

HOOK = "worker_process_setup_hook"
VARIABLE = "RAY_RUNTIME_ENV_HOOK"
"""Environment variable that names the function that modifies the runtime environment of Ray jobs."""


def use() -> None:
    """Set Ray's hook so that workers of the next `ray.init` register our bridges; a hook set by the user is kept."""
    ours = f"{__name__}.{with_bridges.__name__}"
    if os.environ.setdefault(VARIABLE, ours) != ours:
        notice(
            f"the environment variable {VARIABLE}={os.environ[VARIABLE]} does not register nemo_ext's bridges in Ray "
            f"workers; call {ours} in its function"
        )


def with_bridges(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the runtime environment with a setup hook that registers our bridges, unless it already has a hook.

    Ray calls this function with `RAY_RUNTIME_ENV_HOOK=nemo_ext.rl.nemo_rl.workers.with_bridges`.
    """
    return {HOOK: _register_with_bridge, **(runtime_env or {})}


def _register_with_bridge() -> None:
    """Install an import hook that calls `nemo_ext.register` right after megatron.bridge is imported.

    NeMo-RL's module of routing replay gets `moe_layers` in the same way. The function is sent to workers by value,
    because workers without nemo_ext in their environment must also start.
    """
    import importlib.util
    import sys

    class Finder:
        """Import hook that registers our bridges when megatron.bridge is imported."""

        registers_bridges, asking = True, False
        modules: tuple[str, ...] = ("megatron.bridge", "nemo_rl.models.megatron.router_replay")

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name not in self.modules or self.asking:
                return None
            self.asking = True
            try:
                spec = importlib.util.find_spec(name)
            finally:
                self.asking = False
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: Any) -> None:
                    execute(module)
                    self.modules = tuple(other for other in self.modules if other != name)
                    try:
                        import nemo_ext
                    except ImportError:
                        return
                    if name == "megatron.bridge":
                        nemo_ext.register()
                    else:
                        from nemo_ext.rl.nemo_rl.workers import moe_layers

                        module._global_moe_layer_numbers = moe_layers(module._global_moe_layer_numbers)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    if not any(getattr(finder, "registers_bridges", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def moe_layers(otherwise: Callable[[Any], list[int]]) -> Callable[[Any], list[int]]:
    """Return a function that lists the 1-based numbers of a model's MoE layers, given its Megatron config.

    `otherwise`, NeMo-RL's function, is used for models without a hybrid pattern. It reads `moe_layer_freq`, which such
    models leave at 1, so that every layer would be an MoE layer: routes by MoE layer would not match, and pipeline
    stages without MoE layers would fail.
    """

    def numbers(config: Any) -> list[int]:
        pattern = getattr(config, "hybrid_layer_pattern", None) or getattr(config, "hybrid_override_pattern", None)
        if not pattern:
            return otherwise(config)
        from nemo_ext.architecture.pattern import parse

        return [number for number, block in enumerate(parse(pattern).blocks, start=1) if block.kind == "E"]

    return numbers


_register_with_bridge.__module__ = "__main__"  # cloudpickle sends functions of this module by value
