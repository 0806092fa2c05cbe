from pathlib import Path

import pytest


@pytest.fixture
def model(random_llama: Path) -> Path:
    """Folder of the model to train."""
    return random_llama
