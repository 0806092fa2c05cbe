"""FFN fusion: selection of blocks, and exactness compared with the blocks in parallel."""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.architecture.cost import block_parameters, parameters
from nemo_ext.blockwise.parent import Parent
from nemo_ext.checkpoint.description import Description, from_config, megatron_arguments, to_config
from nemo_ext.checkpoint.torch_dist import TorchDistReader
from nemo_ext.checkpoint.writing import MEGATRON, cut_into_parts, write_checkpoint
from nemo_ext.job.config import compose
from nemo_ext.megatron.session import build_model, load_weights
from nemo_ext.puzzle.fusion.fusion import Group, fuse, fuse_weights, fused, mean_dependency, plan, runs, width_of_bytes

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
QUICK = ("squared ReLU, biases", "squared ReLU in a hybrid")
PATTERN = "*-{ffn=96}--{ffn=160}*--*-"
GROUPS = [Group(5, 6), Group(1, 3)]

ACTIVATIONS = {"SwiGLU": {"swiglu": True}, "squared ReLU": {"squared_relu": True}, "GELU": {}}
NORMS = {
    f"{norm}{remark}": ({"normalization": norm, "apply_layernorm_1p": centred}, {"norm_affine": affine})
    for norm in ("RMSNorm", "LayerNorm")
    for remark, centred, affine in (("", False, True), (", centred", True, True), (" without weights", False, False))
}
LAYOUTS = {"tensor": {}, "tensor and sequence": {"sequence_parallel": True}}


@dataclass(frozen=True)
class Kind:
    activation: str
    norm: str
    bias: bool

    def __str__(self) -> str:
        return f"{self.activation}, {self.norm}, {'with' if self.bias else 'no'} biases"

    def config(self, pattern: str = PATTERN, **megatron: Any) -> dict[str, Any]:
        """A composed training config of a model with FFNs of this kind."""
        flags, model = NORMS[self.norm]
        config = deepcopy(tiny())
        config["model"] |= {"pattern": pattern, **model}
        config["megatron"] |= {"swiglu": False, **ACTIVATIONS[self.activation], **flags, **megatron}
        config["megatron"]["disable_bias_linear"] = not self.bias
        return config


EVERY_KIND = [Kind(*each) for each in product(ACTIVATIONS, NORMS, (False, True))]
ALTERNATE = [kind for number, kind in enumerate(EVERY_KIND) if (number // 2 + number // 12) % 2 == kind.bias]
"""Every activation with every norm, biases in every second one."""
LAYOUT_OF = {kind: list(LAYOUTS)[(n % 6 // 2 + n // 6) % 2] for n, kind in enumerate(ALTERNATE)}
"""Each layout with every activation and every norm, with biases and without."""
FEW = ALTERNATE[::5]
"""Every activation, and four of the norms."""
SAVED = Kind("SwiGLU", "RMSNorm", True)


@cache
def tiny() -> dict[str, Any]:
    return compose(
        "train",
        ["run_dir=unused", "data=mock", "model=llama_nemotron_tiny", "precision=fp32", "megatron.seq_length=64"],
    )


@cache
def described(*overrides: str) -> Description:
    return from_config(compose("describe", [*overrides]))


def description(pattern: str = PATTERN, *overrides: str) -> Description:
    model = described(*(overrides or ("model=llama_nemotron_tiny",)))
    return replace(model, architecture=model.architecture.with_pattern(pattern))


def test_runs_are_maximal_and_end_at_a_linear_map() -> None:
    assert runs(description("-*--*---{linear}--")) == [Group(2, 3), Group(5, 6), Group(8, 9)]


def test_the_last_ffn_of_a_run_stays_and_limits_cut_evenly() -> None:
    seven = description("*-------*")

    assert plan(seven) == [Group(1, 6)]
    assert plan(seven, keep_last=False) == [Group(1, 7)]
    assert plan(seven, max_blocks=3) == [Group(1, 3), Group(4, 6)]
    assert plan(seven, max_width=1024) == [Group(1, 2), Group(3, 4), Group(5, 6)]  # each is 512 wide
    assert plan(seven, max_width=600) == []
    assert plan(description("*--*")) == []  # one of two is kept, and a single one cannot be fused


def test_groups_that_depend_least_on_each_other_come_first() -> None:
    model = description("*---*---")
    dependency = [[0.0] * 8 for _ in range(8)]
    dependency[1][2], dependency[5][6] = 0.5, 0.1

    assert plan(model, dependency=dependency) == [Group(5, 6), Group(1, 2)]
    assert plan(model, dependency=dependency, largest_dependency=0.3) == [Group(5, 6)]
    assert mean_dependency(dependency, Group(1, 2)) == 0.5


def test_groups_are_added_by_measured_dependency() -> None:
    model = description("*---*---*---")
    dependency = [[0.3] * 12 for _ in range(12)]
    dependency[5][6] = 0.1

    steps = [plan(model, dependency=dependency, max_groups=count) for count in (1, 2, 9)]

    assert steps == [[Group(5, 6)], [Group(5, 6), Group(1, 2)], [Group(5, 6), Group(1, 2), Group(9, 10)]]
    assert [len(fused(model, groups).blocks) for groups in steps] == [11, 10, 9]  # blocks in sequence
    # Groups above the largest dependency are removed before they are counted.
    assert plan(model, dependency=dependency, largest_dependency=0.2, max_groups=2) == [Group(5, 6)]
    assert plan(model, max_groups=1) == [Group(1, 2)]


def test_a_long_group_above_the_largest_dependency_is_not_cut_further() -> None:
    model = description("-----")
    dependency = [[0.0] * 5 for _ in range(5)]
    for early in (0, 1):
        dependency[early][2] = dependency[early][3] = 0.6

    assert plan(model, dependency=dependency, largest_dependency=0.2) == []
    assert plan(model, dependency=dependency, largest_dependency=0.2, max_blocks=2) == [Group(0, 1), Group(2, 3)]


def test_limits_hold_together_and_a_block_that_fits_nowhere_stays_alone() -> None:
    model = description("--{ffn=128}--{ffn=2048}--{ffn=128}-{ffn=128}-{ffn=128}-")

    assert plan(model, max_width=1200) == [Group(0, 2), Group(4, 7)]  # 512 + 128 + 512; 512 + 3 x 128
    assert plan(model, max_width=1200, max_blocks=3) == [Group(0, 2), Group(4, 5), Group(6, 7)]
    assert plan(model, max_width=1200, max_blocks=2) == [Group(1, 2), Group(4, 5), Group(6, 7)]
    assert plan(model, max_width=300) == [Group(6, 7)]
    assert plan(model, max_width=1200, keep_last=False) == [Group(0, 2), Group(4, 5), Group(6, 8)]


@pytest.mark.parametrize("kind", EVERY_KIND[::5], ids=str)
def test_bytes_of_a_fused_block_are_a_width(kind: Kind) -> None:
    model = from_config(kind.config("-{ffn=96}-{ffn=96}-{ffn=96}-{ffn=96}-"))
    pair = fused(model, [Group(0, 1)]).architecture
    size = 2 * block_parameters(pair, 1).total

    assert plan(model, max_bytes=size) == [Group(0, 1), Group(2, 3)]
    assert plan(model, max_bytes=size - 1) == []
    assert plan(model, max_bytes=size // 2, precision="fp8") == [Group(0, 1), Group(2, 3)]
    assert plan(model, max_bytes=100 * size) == [Group(0, 3)]
    assert plan(model, max_bytes=100 * size, max_width=300) == [Group(0, 1), Group(2, 3)]
    assert plan(model, max_bytes=size, max_width=10**6) == [Group(0, 1), Group(2, 3)]
    assert width_of_bytes(model, size, "bf16") == 192
    assert width_of_bytes(model, 1, "bf16") == 0


@given(widths=st.lists(st.integers(1, 9), min_size=1, max_size=7), widest=st.integers(1, 30), most=st.integers(2, 5))
def test_no_other_cut_within_the_limits_leaves_fewer_blocks(widths: list[int], widest: int, most: int) -> None:
    model = description("".join(f"-{{ffn={width}}}" for width in widths))

    groups = plan(model, max_width=widest, max_blocks=most, keep_last=False)

    def fewest(start: int) -> int:
        if start == len(widths):
            return 0
        lengths = [
            n for n in range(2, most + 1) if start + n <= len(widths) and sum(widths[start : start + n]) <= widest
        ]
        return 1 + min(fewest(start + length) for length in [1, *lengths])

    assert len(fused(model, groups).blocks) == fewest(0)
    assert all(sum(widths[number] for number in group.blocks) <= widest for group in groups)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    most=st.none() | st.integers(2, 5),
    keep_last=st.booleans(),
)
def test_groups_are_disjoint_and_within_limits(lengths: list[int], most: int | None, keep_last: bool) -> None:
    model = description("*" + "*".join("-" * length for length in lengths) + "*")

    groups = plan(model, max_blocks=most, keep_last=keep_last)

    numbers = [number for group in groups for number in group.blocks]
    assert len(numbers) == len(set(numbers))
    for group in groups:
        assert 2 <= len(group.blocks) <= (most or 99)
        assert any(run.first <= group.first and group.last <= run.last - keep_last for run in runs(model))


def test_invalid_fusions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block 1 .* is not an FFN"):
        fused(description("*--"), [Group(0, 1)])
    with pytest.raises(ValueError, match="two groups"):
        fused(description("----"), [Group(0, 1), Group(1, 2)])
    with pytest.raises(ValueError, match="at least two blocks"):
        Group(2, 2)


def test_an_invalid_dependency_is_refused() -> None:
    model = description("----")
    with pytest.raises(ValueError, match=r"has 3 rows, but the model has 4 blocks"):
        plan(model, dependency=[[0.0] * 3] * 3)
    with pytest.raises(ValueError, match=r"dependency of block 2 on block 1 was not measured"):
        plan(model, dependency=[[nan] * 4] * 4)


def test_only_norm_parameters_are_lost() -> None:
    before = description("*---*--")
    after = fused(before, [Group(1, 3), Group(5, 6)])
    hidden = before.architecture.hidden_size

    assert str(after.architecture.pattern) == "*-{ffn=1536}*-{ffn=1024}"
    assert parameters(before.architecture).total - parameters(after.architecture).total == 3 * hidden


def test_ultra_from_a_run_before_fusion() -> None:
    """Only norms are lost. Its FFNs before fusion are not published: equal parts are assumed."""
    ultra = described("model=llama_nemotron_ultra_253b")
    fused_widths = {399360: 15, 425984: 16, 343040: 10, 301056: 14}
    pattern = str(ultra.architecture.pattern)
    for width, count in fused_widths.items():
        assert pattern.count(f"-{{ffn={width}}}") == 1
        pattern = pattern.replace(f"-{{ffn={width}}}", f"-{{ffn={width // count}}}" * count)
    before = replace(ultra, architecture=ultra.architecture.with_pattern(pattern))
    (run,) = [run for run in runs(before) if len(run.blocks) >= sum(fused_widths.values())]
    ends = [run.last - sum(fused_widths.values()) + end for end in accumulate(fused_widths.values())]
    groups = [Group(end - count, end - 1) for end, count in zip(ends, fused_widths.values(), strict=True)]

    after = fused(before, groups)

    assert after.architecture.pattern == ultra.architecture.pattern
    total = parameters(after.architecture).total
    assert total == pytest.approx(253.40e9, rel=5e-5)
    assert parameters(before.architecture).total - total == 51 * ultra.architecture.hidden_size
    assert len(before.blocks) - len(after.blocks) == 51


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_fused_block_is_the_sum_of_its_parts(
    kind: str, build_sections: Callable[[Mapping[str, Any]], torch.nn.Module], tmp_path: Path
) -> None:
    """The whole model by checkpoints and Megatron's loader, and blocks compared with Megatron's layers."""
    before = description(PATTERN, *KINDS[kind])
    groups = GROUPS
    after = fused(before, groups)
    original = build_sections(to_config(before))
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    save(original, tmp_path / "before")

    write_fused(tmp_path / "before", tmp_path / "after", before, groups)
    fused_model = build_sections(to_config(after))
    load_weights(fused_model, tmp_path / "after" / "release")

    hidden = torch.randn(12, 2, before.architecture.hidden_size)
    for group, number in ((groups[0], 3), (groups[1], 1)):
        layers = [original.decoder.layers[block] for block in group.blocks]
        with torch.no_grad():
            beside = sum(output(layer, hidden) - hidden for layer in layers)
            whole = output(fused_model.decoder.layers[number], hidden) - hidden
        assert (whole - beside).norm() <= 1e-6 * beside.norm() + 1e-6 * hidden.norm()
    untouched = original.decoder.layers[8], fused_model.decoder.layers[5]
    assert torch.equal(*(output(layer, hidden) for layer in untouched))


def test_multi_token_prediction_is_not_fused(
    build_sections: Callable[[Mapping[str, Any]], torch.nn.Module], tmp_path: Path
) -> None:
    before, groups = description("-{ffn=96}-*/--*E", "model=nemotron3_super_tiny"), [Group(0, 1)]
    save(build_sections(to_config(before)), tmp_path / "before")

    write_fused(tmp_path / "before", tmp_path / "after", before, groups)

    assert str(fused(before, groups).architecture.pattern) == "-{ffn=608}*/--*E"
    old, new = TorchDistReader(tmp_path / "before"), TorchDistReader(tmp_path / "after" / "release")
    depths = [name for name in old.tensors if name.startswith("mtp.") and "_extra_state" not in name]
    assert len(depths) > 10 and all(torch.equal(old.read(name), new.read(name)) for name in depths)
    load_weights(build_sections(to_config(fused(before, groups))), tmp_path / "after" / "release")  # has every key


def output(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    made = layer(hidden, attention_mask=None)
    return made[0] if isinstance(made, tuple) else made


def save(model: torch.nn.Module, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    folder.mkdir(parents=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(folder))


def write_fused(checkpoint: Path, to: Path, before: Description, groups: Sequence[Group]) -> None:
    write_checkpoint(
        to,
        MEGATRON,
        cut_into_parts(fuse(TorchDistReader(checkpoint), before, groups), 1e-4),
        identity={"test": str(checkpoint)},
        finish=lambda folder: None,
        arguments=megatron_arguments(fused(before, groups).architecture),
        progress=False,
    )


class SideBySide(torch.nn.Module):
    """x + sum_j FFN_j(norm_j(x)), computed by the blocks' layers."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.layer_number = layers[0].layer_number

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        made = [layer(hidden_states, **kwargs) for layer in self.layers]
        outputs = [each[0] if isinstance(each, tuple) else each for each in made]
        return hidden_states + torch.stack([output - hidden_states for output in outputs]).sum(0)


def side_by_side(parent: Parent, groups: Sequence[Group]) -> dict[int, torch.nn.Module | None]:
    """Replacements for the blocks of groups in a model."""
    replaced: dict[int, torch.nn.Module | None] = {number: None for group in groups for number in group.blocks}
    return replaced | {group.first: SideBySide([parent.layers[number] for number in group.blocks]) for group in groups}


def spread(parent: Parent, seed: int = 0) -> Parent:
    """Weights for which every folded term matters, with activations of order one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parent.model.parameters():
            scale = 0.3 if parameter.dim() == 1 else 0.05
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return parent


def tokens() -> torch.Tensor:
    return torch.randint(0, 384, (2, 16), generator=torch.Generator().manual_seed(1))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in EVERY_KIND], ids=str
)
def test_every_kind_of_ffn_is_fused_exactly(kind: Kind, megatron: None) -> None:
    config = kind.config("*-{ffn=96}--{ffn=160}-")
    before, group = from_config(config), Group(1, 3)
    parent = spread(Parent(*build_model(config)))
    parts = [
        {name.removeprefix("mlp."): tensor for name, tensor in parent.tensors(number).items()}
        for number in group.blocks
    ]
    after = fused(before, [group])

    weights = fuse_weights(parts, before)
    layer = parent.layer(1, after.blocks[1], {f"mlp.{name}": tensor for name, tensor in weights.items()})

    replaced = {1: layer, 2: None, 3: None}
    hidden = torch.randn(12, 2, 128, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        beside = sum(parent.block_output(number, hidden, parent.layers[number]) - hidden for number in group.blocks)
        assert relative_error(parent.block_output(1, hidden, layer) - hidden, beside) <= 1e-6
        expected = parent.logits(tokens(), side_by_side(parent, [group]))
        assert relative_error(parent.logits(tokens(), replaced), expected) <= 1e-6
        assert relative_error(parent.logits(tokens()), expected) > 1e-2  # in sequence the result differs
    count = sum(parameter.numel() for parameter in layer.parameters())
    assert count == block_parameters(after.architecture, 2).total
    assert sum(t.numel() for t in weights.values() if t.dim() == 2) == sum(
        t.numel() for part in parts for t in part.values() if t.dim() == 2
    )


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_block_is_where_its_parts_are(bias: bool) -> None:
    description = from_config(compose("describe", ["model=domyn_small_tiny"]))
    hidden, shapes = 128, {"linear_fc1.weight": (96, 128), "linear_fc2.weight": (128, 96)}
    shapes |= {f"linear_fc1.layer_norm_{name}": (hidden,) for name in ("weight", "bias")}
    one = {name: torch.zeros(shape, device="meta") for name, shape in shapes.items()}
    biases = {f"linear_fc{n}.bias": torch.zeros(shape, device="meta") for n, shape in ((1, 96), (2, hidden))}

    whole = fuse_weights([one | (biases if bias else {}), one], description)

    assert {name: tensor.device.type for name, tensor in whole.items()} == dict.fromkeys(whole, "meta")
    assert one.keys() <= whole.keys()


def test_a_fused_block_can_be_fused_again(megatron: None) -> None:
    """Its biases, which its neighbours do not have, are kept."""
    config = Kind("SwiGLU", "LayerNorm", False).config("-{ffn=96,bias}-{ffn=64}-{ffn=32,bias}*")
    before, group = from_config(config), Group(0, 2)
    parent = spread(Parent(*build_model(config)))
    parts = [
        {name.removeprefix("mlp."): tensor for name, tensor in parent.tensors(number).items()}
        for number in group.blocks
    ]

    weights = fuse_weights(parts, before)
    layer = parent.layer(0, fused(before, [group]).blocks[0], {f"mlp.{name}": t for name, t in weights.items()})

    with torch.no_grad():
        expected = parent.logits(tokens(), side_by_side(parent, [group]))
        assert relative_error(parent.logits(tokens(), {0: layer, 1: None, 2: None}), expected) <= 1e-6


@dataclass(frozen=True)
class Ranks:
    """Results of two tensor-parallel ranks.

    Attributes:
        logits: by kind, of the fused checkpoint; and of parallel blocks on one rank.
        before: a model in one process.
        checkpoint: its weights as saved by the ranks.
    """

    logits: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    before: Parent
    checkpoint: Path


@pytest.fixture(scope="module")
def ranks(megatron: None, on_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("tensor_parallel")
    pattern, groups = "*-{ffn=96}--{ffn=160}*-", [Group(1, 3)]
    jobs, expected = [], {}
    for number, kind in enumerate(ALTERNATE):
        before = from_config(kind.config(pattern))
        parent = spread(Parent(*build_model(kind.config(pattern))))
        with torch.no_grad():
            expected[kind] = parent.logits(tokens(), side_by_side(parent, groups))
        save(parent.model, folder / str(number) / "before")
        write_fused(folder / str(number) / "before", folder / str(number) / "after", before, groups)
        after = str(fused(before, groups).architecture.pattern)
        config = kind.config(after, tensor_model_parallel_size=2, **LAYOUTS[LAYOUT_OF[kind]])
        checkpoint = folder / str(number) / "after" / "release"
        jobs.append({"config": config, "checkpoint": str(checkpoint), "logits": str(folder / f"{number}.pt")})
    parent = spread(Parent(*build_model(SAVED.config())))
    save(parent.model, folder / "whole")
    (folder / "divided").mkdir()
    config = SAVED.config(tensor_model_parallel_size=2, **LAYOUTS["tensor and sequence"])
    jobs.append({"config": config, "checkpoint": str(folder / "whole"), "saved": str(folder / "divided")})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    torch.save(tokens(), folder / "tokens.pt")
    on_ranks(Path(__file__).with_name("logits_rank.py"), folder)
    made = {str(kind): (torch.load(folder / f"{n}.pt"), expected[kind]) for n, kind in enumerate(ALTERNATE)}
    return Ranks(made, parent, folder / "divided")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALTERNATE, ids=lambda kind: f"{kind}-{LAYOUT_OF[kind]}")
def test_a_fused_checkpoint_is_exact_under_tensor_parallelism(kind: Kind, ranks: Ranks) -> None:
    found, expected = ranks.logits[str(kind)]
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= 1e-6


@pytest.mark.slow
def test_a_checkpoint_of_tensor_parallel_ranks_is_fused(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's file has its part of the gate followed by its part of up."""
    parent, before = ranks.before, from_config(SAVED.config())
    write_fused(ranks.checkpoint, tmp_path / "after", before, GROUPS)

    found = Parent(*build_model(SAVED.config(str(fused(before, GROUPS).architecture.pattern))))
    load_weights(found.model, tmp_path / "after" / "release")
    with torch.no_grad():
        expected = parent.logits(tokens(), side_by_side(parent, GROUPS))
        assert relative_error(found.logits(tokens()), expected) <= 1e-6
        assert relative_error(parent.logits(tokens()), expected) > 1e-4
