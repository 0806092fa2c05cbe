"""Operations and Python calls of a block's step, compared with Megatron's own layer and the same sub-layers."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_ext.job.config import compose

PATTERN = "M{heads=8}*{kv=2}-{ffn=96}E{experts=4}"
KINDS = ("mamba", "attention", "mlp", "moe")
WITHOUT_LAUNCH = ("view", "detach", "expand", "transpose", "t.", "slice", "select", "unsqueeze", "squeeze", "split")
WITHOUT_LAUNCH += ("permute", "alias", "as_strided", "unbind", "reshape", "_unsafe_view", "empty", "lift_fresh")
"""Names of operations that compute nothing on a GPU: they change a tensor's shape or reserve memory."""


class Operations(TorchDispatchMode):
    """Counts the operations that reach the device, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        if not name.startswith(WITHOUT_LAUNCH):
            self.counted[name] += 1
        return function(*args, **(kwargs or {}))


def step(layer: torch.nn.Module, mask: torch.Tensor | None = None) -> Callable[[], None]:
    """A forward and backward pass of a layer."""
    hidden = torch.randn(32, 2, layer.config.hidden_size, generator=torch.Generator().manual_seed(5))

    def run() -> None:
        x = hidden.clone().requires_grad_()
        out = layer(hidden_states=x, attention_mask=mask)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()

    return run


def operations(run: Callable[[], None]) -> Counter[str]:
    run()  # builds caches
    with Operations() as mode:
        run()
    return mode.counted


def python_calls(run: Callable[[], None]) -> int:
    """Number of Python functions that a step calls."""
    run()
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture(scope="module")
def blocks(megatron: None) -> dict[str, torch.nn.Module]:
    """One block of each kind, with its own sizes."""
    from nemo_ext.megatron.session import build_model

    words = ["run_dir=unused", "data=mock", "model=nemotron3_nano_tiny", f"model.pattern='{PATTERN}'"]
    model, _ = build_model(compose("train", words))
    return dict(zip(KINDS, model.decoder.layers, strict=True))


def upstream(kind: str, block: Any, *, local: bool) -> Any:
    """Megatron's own layer with the block's config: with the same sub-layers, or with those of its local back end."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

    from nemo_ext.megatron import specs

    provider = LocalSpecProvider if local else specs.LocalBackend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specs, "LocalBackend", provider)
        patch.setattr(specs, "LocalMoELayer", MoELayer)
        parts = specs.stack_submodules(block.config, specs.StackOptions())
    classes = {"mamba": MambaLayer, "attention": TransformerLayer, "mlp": MLPLayer, "moe": MoETransformerLayer}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return classes[kind](
        block.config, getattr(parts, f"{kind}_layer").submodules, block.layer_number, pg_collection=groups
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_launches_and_calls_what_megatron_s_own_layer_does(blocks: dict[str, Any], kind: str) -> None:
    ours, theirs = step(blocks[kind]), step(upstream(kind, blocks[kind], local=False))

    assert operations(ours) == operations(theirs)
    assert sum(operations(ours).values()) > 20
    assert python_calls(ours) == python_calls(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_launches_no_more_than_with_megatron_s_local_back_end(blocks: dict[str, Any], kind: str) -> None:
    ours = operations(step(blocks[kind]))
    mask = torch.ones(32, 32).triu(1).bool()[None, None]  # Megatron would make it on a GPU
    theirs = operations(step(upstream(kind, blocks[kind], local=True), mask))

    assert ours.total() <= theirs.total(), (ours - theirs, theirs - ours)
