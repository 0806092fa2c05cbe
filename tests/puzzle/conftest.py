"""A small random model opened up, with the variants of its blocks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_ext.blockwise.parent import Parent
from nemo_ext.checkpoint.description import Description, from_config
from nemo_ext.job.config import compose
from nemo_ext.megatron.session import build_model
from nemo_ext.puzzle.variants import Choices, variants

CHOICES = Choices(ffn=(0.5,), ffn_multiple=8, kv=(0.5,), experts=(0.5,), expert_ffn=(), mamba_heads=(0.5,))


@pytest.fixture
def opened(megatron: None) -> Callable[..., tuple[Parent, Description, list[Any]]]:
    """Builds a model in fp32 from its name and overrides: the parent, its description, a few variants of each block."""

    def make(model: str, *overrides: str) -> tuple[Parent, Description, list[Any]]:
        config = compose("train", ["run_dir=unused", "data=mock", f"model={model}", "precision=fp32", *overrides])
        torch.manual_seed(0)
        description = from_config(config)
        return Parent(*build_model(config)), description, variants(description.architecture, CHOICES)

    return make
