"""FFN fusion: which blocks, and that the fused block is exactly the blocks side by side."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_ext.architecture.cost import parameters
from nemo_ext.checkpoint.description import Description, from_config, megatron_arguments, to_config
from nemo_ext.checkpoint.torch_dist import TorchDistReader
from nemo_ext.checkpoint.writing import MEGATRON, cut_into_parts, write_checkpoint
from nemo_ext.config import compose
from nemo_ext.puzzle.fusion import Group, fuse, fused, mean_dependency, plan, runs

KINDS = {
    "SwiGLU, RMSNorm": ["model=llama_nemotron_tiny"],
    "squared ReLU, LayerNorm with bias, centred": ["model=domyn_small_tiny"],
    "SwiGLU, LayerNorm without weights": ["model=olmo1_tiny"],
    "GELU, LayerNorm with bias": [
        "model=domyn_small_tiny",
        "megatron.squared_relu=false",
        "megatron.apply_layernorm_1p=false",
    ],
    "squared ReLU, biases": ["model=domyn_small_tiny", "megatron.disable_bias_linear=false"],
    "squared ReLU in a hybrid": ["model=nemotron3_nano_tiny"],
}
PATTERN = "*-{ffn=96}--{ffn=160}*--*-"


def description(pattern: str = PATTERN, *overrides: str) -> Description:
    return from_config(
        compose("describe", [*(overrides or ("model=llama_nemotron_tiny",)), f"model.pattern={pattern}"])
    )


def test_runs_are_maximal_and_end_at_a_linear_map() -> None:
    assert runs(description("-*--*---{linear}--")) == [Group(2, 3), Group(5, 6), Group(8, 9)]


def test_the_last_ffn_of_a_run_stays_and_limits_cut_evenly() -> None:
    seven = description("*-------*")

    assert plan(seven) == [Group(1, 6)]
    assert plan(seven, keep_last=False) == [Group(1, 7)]
    assert plan(seven, max_blocks=3) == [Group(1, 3), Group(4, 6)]
    assert plan(seven, max_width=1024) == [Group(1, 2), Group(3, 4), Group(5, 6)]  # each is 512 wide
    assert plan(seven, max_width=600) == []
    assert plan(description("*--*")) == []  # one of two stays, one alone is nothing to fuse


def test_groups_that_depend_least_on_each_other_come_first() -> None:
    model = description("*---*---")
    dependency = [[0.0] * 8 for _ in range(8)]
    dependency[1][2], dependency[5][6] = 0.5, 0.1

    assert plan(model, dependency=dependency) == [Group(5, 6), Group(1, 2)]
    assert plan(model, dependency=dependency, largest_dependency=0.3) == [Group(5, 6)]
    assert mean_dependency(dependency, Group(1, 2)) == 0.5


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    most=st.none() | st.integers(2, 5),
    keep_last=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_groups_are_disjoint_and_within_limits(lengths: list[int], most: int | None, keep_last: bool) -> None:
    model = description("*" + "*".join("-" * length for length in lengths) + "*")

    groups = plan(model, max_blocks=most, keep_last=keep_last)

    numbers = [number for group in groups for number in group.blocks]
    assert len(numbers) == len(set(numbers))
    for group in groups:
        assert 2 <= len(group.blocks) <= (most or 99)
        assert any(run.first <= group.first and group.last <= run.last - keep_last for run in runs(model))


def test_what_cannot_be_fused_is_refused() -> None:
    with pytest.raises(ValueError, match="norm_placement=output"):
        plan(description("*---", "model=olmo3_tiny"))
    with pytest.raises(ValueError, match=r"block 1 .* is not an FFN"):
        fused(description("*--"), [Group(0, 1)])
    with pytest.raises(ValueError, match="two groups"):
        fused(description("----"), [Group(0, 1), Group(1, 2)])
    with pytest.raises(ValueError, match="max_blocks=1"):
        plan(description("----"), max_blocks=1)


def test_parameters_are_kept_but_for_folded_norms() -> None:
    before = description("*---*--")
    after = fused(before, [Group(1, 3), Group(5, 6)])
    hidden = before.architecture.hidden_size

    assert str(after.architecture.pattern) == "*-{ffn=1536}*-{ffn=1024}"
    assert parameters(before.architecture).total - parameters(after.architecture).total == 3 * hidden


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_block_is_the_sum_of_its_parts(
    kind: str, build_sections: Callable[[Mapping[str, Any]], torch.nn.Module], tmp_path: Path
) -> None:
    """The whole model through checkpoints and Megatron's own loader, the blocks against its own layers."""
    before = description(PATTERN, *KINDS[kind])
    groups = [Group(5, 6), Group(1, 3)]
    after = fused(before, groups)
    original = build_sections(to_config(before))
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    save(original, tmp_path / "before")

    reader = TorchDistReader(tmp_path / "before")
    write_checkpoint(
        tmp_path / "after",
        MEGATRON,
        cut_into_parts(fuse(reader, before, groups), 1e-4),
        identity={"test": kind},
        finish=lambda folder: None,
        arguments=megatron_arguments(after.architecture),
        progress=False,
    )
    fused_model = build_sections(to_config(after))
    load(fused_model, tmp_path / "after" / "release")

    hidden = torch.randn(12, 2, before.architecture.hidden_size)
    for group, number in ((groups[0], 3), (groups[1], 1)):
        layers = [original.decoder.layers[block] for block in group.blocks]
        with torch.no_grad():
            beside = sum(output(layer, hidden) - hidden for layer in layers)
            whole = output(fused_model.decoder.layers[number], hidden) - hidden
        assert (whole - beside).norm() <= 1e-6 * beside.norm() + 1e-6 * hidden.norm()
    untouched = original.decoder.layers[8], fused_model.decoder.layers[5]
    assert torch.equal(*(output(layer, hidden) for layer in untouched))


def output(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    made = layer(hidden, attention_mask=None)
    return made[0] if isinstance(made, tuple) else made


def save(model: torch.nn.Module, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    folder.mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(folder))


def load(model: torch.nn.Module, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))["model"])
