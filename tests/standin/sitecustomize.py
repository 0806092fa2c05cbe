"""Modules in the place of those that need Megatron, for processes with this folder on their PYTHONPATH.

A start of Megatron's trainer takes a quarter of a minute. What Slurm does with a job is the same for ranks that take
their steps without a model: batch script, start, record, requeueing and report are the package's own.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

STAND_INS = {
    "nemo_ext.megatron.rank": "rank.py",
    "nemo_ext.megatron.check": "check.py",
    "nemo_ext.checkpoint.sound": "sound.py",
    "nemo_ext.puzzle.job": "job.py",
    "nemo_ext.puzzle.rank": "stage.py",
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the stand-ins before what they stand for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See importlib."""
        if fullname not in STAND_INS:
            return None
        return importlib.util.spec_from_file_location(fullname, Path(__file__).with_name(STAND_INS[fullname]))


sys.meta_path.insert(0, Finder())
