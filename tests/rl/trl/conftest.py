from pathlib import Path

import pytest


@pytest.fixture
def model(random_llama: Path) -> Path:
    """What is trained."""
    return random_llama
