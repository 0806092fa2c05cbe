"""Block-wise distillation, and the child made of its variants."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_map

from nemo_ext.blockwise import data_parallel
from nemo_ext.checkpoint.description import megatron_arguments, to_config
from nemo_ext.checkpoint.torch_dist import TorchDistReader
from nemo_ext.checkpoint.writing import MEGATRON, cut_into_parts, write_checkpoint
from nemo_ext.job.config import compose
from nemo_ext.megatron.session import load_weights
from nemo_ext.puzzle.stages.block_inputs import BlockInputs
from nemo_ext.puzzle.stages.distill import Training, _buckets, _InTraining, distill, trainable
from nemo_ext.puzzle.stages.library import Library, build
from nemo_ext.puzzle.stages.realise import child, realise


def data(start: int) -> Iterator[torch.Tensor]:
    for step in itertools.count(start):
        yield torch.randint(0, 384, (4, 16), generator=torch.Generator().manual_seed(step))


@pytest.mark.slow
def test_every_kind_of_variant_learns(opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, found = opened("nemotron3_nano_tiny", 'model.pattern="M*E-"')
    before = {name: tensor.clone() for name, tensor in parent.model.state_dict().items() if hasattr(tensor, "clone")}
    library, trained = Library(tmp_path / "library"), Library(tmp_path / "trained")
    build(parent, description, found, library, calibration=[])

    results = distill(parent, found, library, trained, data, Training(steps=40, lr=3e-3))

    assert [(r.block, r.variant) for r in results] == [(v.number + 1, v.name) for v in trainable(found)]
    for result in results:
        # Fewer random heads or experts can learn almost nothing from random tokens.
        if not result.variant.startswith(("kv", "experts")):
            assert result.last < 0.9 * result.first, result
    after = parent.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())  # the parent is unchanged


def test_small_gradients_in_fp16_do_not_underflow() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, bias=False).half()
    hidden = torch.randn(1 << 15, 8).half()
    target = layer(hidden).detach() + 0.002

    def error() -> torch.Tensor:
        return (layer(hidden) - target).float().square().mean()

    (lost,) = torch.autograd.grad(error(), layer.parameters())
    variant = _InTraining(layer, Training(steps=10, lr=1e-2))
    (master,), first = variant.masters, variant.scale
    before = master.clone()
    variant.step(error() * 2**24)
    assert not lost.any() and master.ne(before).all() and variant.scale < first, "the first step finds a scale"
    before, scale = master.clone(), variant.scale
    variant.step(error() * torch.inf)
    assert torch.equal(master, before) and variant.scale == scale / 2, "a later overflow skips the step"
    variant.step(error())
    assert master.ne(before).all()


def test_weights_of_a_dtype_share_buckets_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_ext.puzzle.stages.distill._BUCKET", 10)
    weights = [torch.zeros(size, dtype=dtype) for size, dtype in ((6, torch.half), (2, torch.float), (4, torch.half))]
    large = torch.zeros(20, dtype=torch.half)
    buckets = _buckets([*weights, large])
    assert sorted([len(weight) for weight in bucket] for bucket in buckets) == [[2], [6, 4], [20]]


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=() if call in (5, 11) else pytest.mark.slow) for call in range(2, 15, 3)]
)
def test_groups_and_interruptions_change_nothing(call: int, opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, by_block = opened("llama_nemotron_tiny", 'model.pattern="*-"')
    library = Library(tmp_path / "library")
    build(parent, description, by_block, library, calibration=[])
    whole, parts = Library(tmp_path / "whole"), Library(tmp_path / "parts")
    calls, steps = 0, 0

    def stop(count: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt

    def count(number: int) -> None:
        nonlocal steps
        steps += number

    every = distill(parent, by_block, library, whole, data, Training(steps=5))
    training = Training(steps=5, together=1, save_interval=2)
    inputs = BlockInputs(tmp_path / "inputs")
    with pytest.raises(KeyboardInterrupt):
        distill(parent, by_block, library, parts, data, training, inputs=inputs, advance=stop)
    first = {file: file.stat().st_mtime_ns for file in parts.folder.rglob("*.safetensors")}
    again = distill(parent, by_block, library, parts, data, training, inputs=inputs, advance=count)

    assert all(file.stat().st_mtime_ns == time for file, time in first.items())
    assert steps == 5 * len(trainable(by_block))
    assert again == every
    assert not (parts.folder / "in_training.pt").exists() and not inputs.folder.exists()
    for variant in trainable(by_block):
        one, other = whole.read(variant), parts.read(variant)
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3))])
def test_a_checkpoint_of_another_number_of_ranks_is_resumed(
    ranks: int, opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, description, by_block = opened("llama_nemotron_tiny", 'model.pattern="*-"')
    library, whole, parts = (Library(tmp_path / name) for name in ("library", "whole", "parts"))
    build(parent, description, by_block, library, calibration=[])
    distill(parent, by_block, library, whole, data, training := Training(steps=5, save_interval=3))
    steps = itertools.count()

    def stop(count: int) -> None:
        if next(steps) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(parent, by_block, library, parts, data, training, advance=stop)
    (own,) = (parts.folder / "in_training.parts").iterdir()
    assert own.name == "step_000003_0of1.pt"
    state, index = torch.load(own), torch.load(parts.folder / "in_training.pt")
    own.unlink()
    with pytest.raises(ValueError, match=r"step_000003_0of1.pt is missing"):
        distill(parent, by_block, library, parts, data, training)
    for rank in range(ranks):
        with monkeypatch.context() as there:
            there.setattr(data_parallel, "number", lambda rank=rank: rank)
            there.setattr(data_parallel, "count", lambda: ranks)
            part = tree_map(lambda each: data_parallel.part_of(each) if getattr(each, "ndim", 0) else each, state)
            torch.save(part, own.with_name(f"step_000003_{rank}of{ranks}.pt"))
    torch.save(index | {"ranks": ranks}, parts.folder / "in_training.pt")
    distill(parent, by_block, library, parts, data, training)

    for variant in trainable(by_block):
        one, other = whole.read(variant), parts.read(variant)
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_sharded_states_train_the_same_as_whole_states(on_ranks: Callable[..., None], tmp_path: Path) -> None:
    words = ["run_dir=unused", "data=mock", "precision=bf16", "model=nemotron3_nano_tiny", 'model.pattern="M*E-"']
    (tmp_path / "config.json").write_text(json.dumps(compose("train", words)))
    on_ranks(Path(__file__).with_name("distill_rank.py"), tmp_path)

    files = [file.relative_to(tmp_path / "initial") for file in (tmp_path / "initial").rglob("*.safetensors")]
    assert len(files) == 4
    # Tolerances of BF16 and of half a step: norms are summed in another order, and where a gradient is about 0, Adam's
    # steps have any size.
    ulp = {"rtol": 2**-7, "atol": Training().lr / 2}
    for way, other, tolerance in (
        ("shared_1e+09", "plain_1e+09", {"rtol": 0, "atol": 0}),
        ("shared_0.05", "plain_0.05", ulp),
        ("resumed_1", "plain_1e+09", {"rtol": 0, "atol": 0}),
        ("resumed_3", "plain_1e+09", {"rtol": 0, "atol": 0}),
    ):
        for file in files:
            made, expected = load_file(tmp_path / way / file), load_file(tmp_path / other / file)
            torch.testing.assert_close(made, expected, **tolerance)
    clipped, free = (load_file(tmp_path / f"plain_{clip}" / files[0]) for clip in ("0.05", "1e+09"))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(clipped, free, **ulp)
    # Two ranks: groups M, E, - and -, each from the inputs of the previous one; * runs in between. Then M E - and -.
    assert json.loads((tmp_path / "done.json").read_text()) == [
        {"runs": [7, 7, 5, 0], "files": {"block_003": 2 * 4, "block_004": 2 * 5}},  # a checkpoint after three steps
        {"runs": [0, 0, 4, 14], "files": {}},
        {"runs": [5, 5, 5, 5], "files": {"block_004": 2 * 5}},
        {"runs": [4, 4, 4, 4 + 7], "files": {}},
    ]


def test_a_group_killed_while_its_files_are_written_is_written_again(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, description, by_block = opened("llama_nemotron_tiny", 'model.pattern="*-"')
    library, trained = Library(tmp_path / "library"), Library(tmp_path / "trained")
    build(parent, description, by_block, library, calibration=[])
    last = trainable(by_block)[-1]
    write = Library.write

    def full(self: Library, variant: Any, *args: Any, **notes: str) -> None:
        if variant == last:
            raise OSError("disk full")
        write(self, variant, *args, **notes)

    with monkeypatch.context() as patch:
        patch.setattr(Library, "write", full)
        with pytest.raises(OSError, match="disk full"):
            distill(parent, by_block, library, trained, data, Training(steps=3))
    assert not trained.has(last)

    def nothing(start: int) -> Iterator[torch.Tensor]:
        return iter(()) if start == 3 else data(start)  # all steps are done

    distill(parent, by_block, library, trained, nothing, Training(steps=3))
    assert all(trained.has(variant) for variant in trainable(by_block))


def test_a_checkpoint_with_other_settings_is_refused(opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, by_block = opened("llama_nemotron_tiny", 'model.pattern="-"')
    library, trained = Library(tmp_path / "library"), Library(tmp_path / "trained")
    build(parent, description, by_block, library, calibration=[])
    with pytest.raises(ValueError, match="the data have only 2"):
        distill(
            parent,
            by_block,
            library,
            trained,
            lambda start: itertools.islice(data(0), 2),
            Training(steps=3, save_interval=1),
        )
    with pytest.raises(ValueError, match="from a distillation with other settings"):
        distill(parent, by_block, library, trained, data, Training(steps=4))


def test_too_little_data_is_reported(opened: Callable[..., Any], tmp_path: Path) -> None:
    parent, description, found = opened("llama_nemotron_tiny", 'model.pattern="-"')
    library = Library(tmp_path / "library")
    build(parent, description, found, library, calibration=[])
    with pytest.raises(ValueError, match="needs 3 batches, but the data have only 2"):
        distill(
            parent,
            found,
            library,
            Library(tmp_path / "t"),
            lambda start: itertools.islice(data(0), 2),
            Training(steps=3),
        )


@pytest.mark.parametrize(
    "model",
    ["nemotron3_nano_tiny", *(pytest.param(m, marks=pytest.mark.slow) for m in ("llama_nemotron_tiny", "olmo3_tiny"))],
)
def test_a_child_s_checkpoint_computes_the_same_as_the_replaced_parent(
    model: str, opened: Callable[..., Any], build_sections: Callable[..., Any], tmp_path: Path
) -> None:
    from megatron.core import dist_checkpointing

    parent, description, found = opened(model)
    library = Library(tmp_path / "library")
    build(parent, description, found, library, calibration=[])
    choice = [each[number % len(each)] for number, each in enumerate(found)]
    (tmp_path / "parent").mkdir()
    dist_checkpointing.save(parent.model.sharded_state_dict(), str(tmp_path / "parent"))

    made = child(description, choice)
    write_checkpoint(
        tmp_path / "child",
        MEGATRON,
        cut_into_parts(realise(TorchDistReader(tmp_path / "parent"), description, choice, library), 1e-3),
        identity={"choice": [variant.name for variant in choice]},
        finish=lambda folder: None,
        arguments=megatron_arguments(made.architecture),
        progress=False,
    )
    model_ = build_sections(to_config(made)).eval()
    load_weights(model_, tmp_path / "child" / "release")

    tokens = next(data(0))
    with torch.no_grad():
        expected = parent.logits(tokens, {v.number: library.layer(parent, v) for v in choice})
        got = model_(tokens, torch.arange(16).expand(4, -1), None)
    assert (got - expected).abs().max() <= 1e-4


def test_a_child_needs_every_block_once(opened: Callable[..., Any]) -> None:
    _, description, found = opened("llama_nemotron_tiny", 'model.pattern="*-"')
    with pytest.raises(ValueError, match="one variant for each of the 2 blocks"):
        child(description, [found[1][0], found[0][0]])
    with pytest.raises(ValueError, match="every chosen variant is a no-op"):
        child(description, [each[-1] for each in found])
