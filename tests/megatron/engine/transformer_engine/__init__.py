"""Modules with Transformer Engine's names and empty classes: Megatron-Bridge always imports Transformer Engine.

For PYTHONPATH, where it cannot run: `make bridge`, and workers in tests/rl/nemo_rl.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch

__version__ = "2.9.0"


FUNCTIONS = {"_SplitAlongDim", "general_gemm"}
"""What Megatron-Core calls where it finds it, and does without elsewhere."""


def is_module(name: str) -> bool:
    """True if a name belongs to a module rather than a class or a function."""
    return name.islower() and name not in FUNCTIONS


class Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below this one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        found = name.startswith("transformer_engine.") and is_module(name.rpartition(".")[2])
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda attribute: made(module.__name__, attribute)  # type: ignore[method-assign]


def made(module: str, attribute: str) -> Any:
    """A module for a name in lower case, a class for any other."""
    if attribute.startswith("_") or attribute in FUNCTIONS:
        raise AttributeError(attribute)
    if is_module(attribute):
        return importlib.import_module(f"{module}.{attribute}")
    found = type(attribute, (torch.nn.Module,), {"__module__": module})
    setattr(sys.modules[module], attribute, found)
    return found


def __getattr__(attribute: str) -> Any:
    return made("transformer_engine", attribute)


sys.meta_path.insert(0, Parts())
