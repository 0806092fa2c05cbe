"""Ray's workers register our bridges when they import Megatron-Bridge, without a line of code (docs/bridge.md)."""

import os
from collections.abc import Mapping
from typing import Any

from nemo_ext.job.progress import notice

HOOK = "worker_process_setup_hook"
VARIABLE = "RAY_RUNTIME_ENV_HOOK"
"""Environment variable with the function that Ray asks for the runtime environment of a job."""


def use() -> None:
    """Makes the next `ray.init` of this process start workers so, unless the user has a function of their own."""
    ours = f"{__name__}.{with_bridges.__name__}"
    if os.environ.setdefault(VARIABLE, ours) != ours:
        notice(f"note: {VARIABLE}={os.environ[VARIABLE]} is yours: have it call {ours}, or workers lack our bridges")


def with_bridges(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """A job's runtime environment whose workers register our bridges; one with a set-up of its own stays as it is.

    `RAY_RUNTIME_ENV_HOOK=nemo_ext.rl.nemo_rl.workers.with_bridges` has Ray call it.
    """
    return {HOOK: _register_with_bridge, **(runtime_env or {})}


def _register_with_bridge() -> None:
    """Has this process call `nemo_ext.register` right after it imports megatron.bridge; nothing is imported now.

    It goes to workers as code, not by its name, as one whose environment has no nemo_ext must start all the same.
    """
    import importlib.util
    import sys

    class Finder:
        """Finds megatron.bridge as the others do."""

        registers_bridges, asking = True, False

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name != "megatron.bridge" or self.asking:
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
                    if self in sys.meta_path:
                        sys.meta_path.remove(self)
                    try:
                        import nemo_ext
                    except ImportError:
                        return
                    nemo_ext.register()

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    if not any(getattr(each, "registers_bridges", False) for each in sys.meta_path):
        sys.meta_path.insert(0, Finder())


_register_with_bridge.__module__ = "__main__"  # cloudpickle sends functions of this module by value
