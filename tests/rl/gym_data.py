"""Data that NeMo Gym ships."""

from importlib.util import find_spec
from pathlib import Path

import pytest


def gym_data(server: str) -> Path:
    """Folder of one of Gym's servers with its examples; the test is skipped without Gym."""
    found = find_spec("resources_servers")
    if found is None or not found.submodule_search_locations:
        pytest.skip("nemo-gym is not installed")
    return Path(next(iter(found.submodule_search_locations))) / server / "data"
