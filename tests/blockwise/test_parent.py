"""A model run block by block computes the same as the complete model."""

from collections.abc import Callable
from dataclasses import replace as change
from typing import Any

import pytest
import torch

from nemo_ext.megatron.session import put_tensors, take_tensors
from nemo_ext.puzzle.stages.initialise import initial_weights
from nemo_ext.puzzle.variants import Choices, variants

FAMILIES = ["nemotron3_nano_tiny", "domyn_small_tiny", "llama_nemotron_tiny", "olmo1_tiny", "olmo3_tiny"]


def tokens() -> torch.Tensor:
    return torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("model", FAMILIES)
def test_runs_from_any_block_give_the_same_logits(model: str, opened: Callable[..., Any]) -> None:
    parent, _, _ = opened(model)
    with torch.no_grad(), parent.recorded() as record:
        whole = parent.logits(tokens())
        seen = list(record)
    assert len(seen) == len(parent.layers)
    with torch.no_grad(), parent.recorded([1]) as record:
        parent.logits(tokens())
    assert [torch.equal(*pair) for pair in zip(record[0], seen[1], strict=True)] == [True, True] and len(record) == 1
    with torch.no_grad():
        for number, (hidden, out) in enumerate(seen):
            assert torch.equal(parent.logits_of(parent.hidden_from(number, hidden)), whole)
            assert torch.equal(parent.block_output(number, hidden, parent.layers[number]), out)
        assert torch.equal(parent.logits(tokens()), whole)  # no block stays replaced


@pytest.mark.parametrize("model", FAMILIES)
def test_a_copied_block_is_the_block(model: str, opened: Callable[..., Any]) -> None:
    parent, description, _ = opened(model)
    copies = {n: parent.layer(n, block, parent.tensors(n)) for n, block in enumerate(description.blocks)}

    with torch.no_grad():
        assert torch.equal(parent.logits(tokens(), copies), parent.logits(tokens()))


@pytest.mark.parametrize(
    "model", [m if m == "nemotron3_nano_tiny" else pytest.param(m, marks=pytest.mark.slow) for m in FAMILIES]
)
def test_every_variant_can_replace_its_block(model: str, opened: Callable[..., Any]) -> None:
    """Nano has every kind of block; other models have few kinds."""
    parent, description, _ = opened(model, *(["model.pattern=ME*-"] if model == "nemotron3_nano_tiny" else []))
    choices = Choices(ffn_multiple=8, windows=(8,), top_k=(1,))
    with torch.no_grad():
        whole = parent.logits(tokens())
        for found in variants(description.architecture, choices):
            number, block = found[0].number, description.blocks[found[0].number]
            given = parent.tensors(number)
            for variant in found[1:]:
                layer = None
                if variant.block is not None:
                    made = initial_weights(block, variant.block, given, description.architecture)
                    layer = parent.layer(number, variant.block, made)
                changed = parent.logits(tokens(), {number: layer})
                assert changed.isfinite().all()
                assert not torch.equal(changed, whole), variant


def test_weights_are_set_and_read_by_checkpoint_names(opened: Callable[..., Any]) -> None:
    parent, _, _ = opened("nemotron3_nano_tiny")
    tensors = take_tensors(parent.model)
    assert tensors["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape == (8, 128, 192)
    doubled = {name: tensor * 2 for name, tensor in tensors.items()}

    put_tensors(parent.model, doubled)

    assert all(torch.equal(tensor, doubled[name]) for name, tensor in take_tensors(parent.model).items())
    with pytest.raises(ValueError, match=r"output_layer\.weight is missing from the loaded weights"):
        put_tensors(parent.model, {name: t for name, t in doubled.items() if name != "output_layer.weight"})


def test_a_window_variant_sees_less(opened: Callable[..., Any]) -> None:
    parent, description, _ = opened("llama_nemotron_tiny", 'model.pattern="*-"')
    block = description.blocks[0]
    narrow = change(block, values=tuple({**dict(block.values), "window": 4}.items()))
    layer = parent.layer(0, narrow, parent.tensors(0))
    first = tokens()
    second = first.clone()
    second[:, 0] = (first[:, 0] + 1) % 384

    with torch.no_grad():
        far = [parent.logits(each, {0: layer})[:, 10:] for each in (first, second)]
        near = [parent.logits(each)[:, 10:] for each in (first, second)]

    assert torch.equal(*far) and not torch.equal(*near)


def test_attention_without_a_kernel_says_what_to_install(opened: Callable[..., Any]) -> None:
    def no_kernel(*_: Any) -> None:
        raise ValueError("No dot product attention backend is available for the provided inputs. Please run with")

    parent, _, _ = opened("olmo1_tiny")
    layer = parent.layers[0]
    handle = layer.register_forward_pre_hook(no_kernel)
    try:
        with torch.no_grad(), pytest.raises(ValueError, match="install flash-attn"):
            parent.logits(tokens())
        with torch.no_grad(), pytest.raises(ValueError, match="install flash-attn"):
            parent.block_output(0, torch.zeros(24, 2, parent.model.config.hidden_size), layer)
    finally:
        handle.remove()
