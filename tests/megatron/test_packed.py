"""Packed sequences do not affect each other: logits and gradients of a hybrid with every kind of block and of a
windowed dense model; the dataset of packs; training on packs in every layout."""

import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_ext.data.packs.packed_files import PackingSettings, write_packed
from nemo_ext.data.packs.sample_files import write_samples
from nemo_ext.job import run_directory
from nemo_ext.job.config import compose

Build = Callable[..., torch.nn.Module]
PackedConfig = Callable[..., dict[str, Any]]

# Without the load-balancing loss, which is one of a whole micro-batch.
HYBRID = (
    "model=nemotron3_nano_tiny",
    "precision=fp32",
    "model.pattern=ME*EM-",
    "megatron.moe_router_load_balancing_type=none",
)
WINDOWED = ("model=olmo3_tiny", "precision=fp32", 'model.pattern="*{window=8}-*{window=4}-*-"')
LENGTHS = [23, 1, 40, 9, 2, 21]
"""Lengths of the samples of one pack; the windows are 4 or 8, and no bound is at the end of a chunk."""


@pytest.fixture(autouse=True, scope="module")
def eager() -> Iterator[None]:
    """Compiling Megatron's small functions and importing the compiler take longer than the tests."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def hybrid(megatron: None) -> torch.nn.Module:
    """One model for all examples of a property."""
    from nemo_ext.megatron.session import build_model

    return build_model(compose("train", ["run_dir=unused", "data=mock", *HYBRID]))[0].eval()


def samples_of(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 300, (length,), generator=generator) for length in lengths]


def run_packed(model: torch.nn.Module, samples: list[torch.Tensor], **changes: Any) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of samples in one pack."""
    from nemo_ext.megatron.packed import packing_of

    bounds = torch.tensor([0, *torch.tensor([len(sample) for sample in samples]).cumsum(0).tolist()])
    packing = packing_of(bounds)
    for name, value in changes.items():
        setattr(packing, name, value)
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])
    return model(torch.cat(samples)[None], positions[None], None, packed_seq_params=packing)[0]


def run_alone(model: torch.nn.Module, samples: list[torch.Tensor]) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of each sample, computed separately."""
    alone = [model(sample[None], torch.arange(len(sample))[None], None)[0] for sample in samples]
    return torch.cat(alone)


@pytest.mark.parametrize("overrides", [HYBRID, WINDOWED], ids=["hybrid", "windowed"])
def test_logits_and_gradients_of_a_pack_equal_those_of_its_samples(build: Build, overrides: tuple[str, ...]) -> None:
    model, samples = build(*overrides).train(), samples_of(LENGTHS)
    weight = torch.randn(sum(LENGTHS), 384, generator=torch.Generator().manual_seed(1))
    found = {}
    for run in (run_packed, run_alone):
        model.zero_grad()
        logits = run(model, samples)
        (torch.log_softmax(logits.float(), -1) * weight).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found[run] = logits.detach(), gradients

    (packed, packed_gradients), (alone, alone_gradients) = found[run_packed], found[run_alone]
    assert torch.allclose(packed, alone, atol=1e-5, rtol=1e-5)
    assert packed_gradients.keys() == alone_gradients.keys() and len(alone_gradients) > 10
    for name, gradient in alone_gradients.items():
        assert torch.allclose(packed_gradients[name], gradient, atol=1e-5 * float(gradient.abs().max()) + 1e-7), name


@pytest.mark.parametrize(
    ("overrides", "dropped"),
    [
        (HYBRID, {"seq_idx": None}),
        (HYBRID, {"cu_seqlens_q": torch.tensor([0, sum(LENGTHS)]), "cu_seqlens_kv": torch.tensor([0, sum(LENGTHS)])}),
    ],
    ids=["Mamba without seq_idx", "attention without bounds"],
)
def test_without_its_bounds_a_block_mixes_samples(
    build: Build, overrides: tuple[str, ...], dropped: dict[str, Any]
) -> None:
    """The failure that the previous test would find if a layer did not get the bounds."""
    model, samples = build(*overrides).eval(), samples_of(LENGTHS)

    with torch.no_grad():
        difference = (run_packed(model, samples, **dropped) - run_alone(model, samples)).abs().amax(1)

    assert difference[: LENGTHS[0]].max() < 1e-5 < 1e-3 < difference[LENGTHS[0] :].max()


@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=6), data=st.data())
def test_a_change_in_one_sample_does_not_change_others(
    hybrid: torch.nn.Module, lengths: list[int], data: st.DataObject
) -> None:
    model, samples = hybrid, samples_of(lengths, seed=len(lengths))
    changed = data.draw(st.integers(0, len(lengths) - 1))
    others = [(sample + 1) % 300 if number == changed else sample for number, sample in enumerate(samples)]

    with torch.no_grad():
        before, after = run_packed(model, samples), run_packed(model, others)

    start = sum(lengths[:changed])
    difference = (after - before).abs().amax(1)
    inside = torch.zeros(sum(lengths), dtype=torch.bool)
    inside[start : start + lengths[changed]] = True
    # Not bitwise: an expert's matmul also has tokens of other samples.
    assert difference[~inside].max() < 1e-5 < 1e-3 < difference[inside].max()


def rows_of(lengths: list[int], seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and masks; the first tokens of a sample are not trained."""
    generator = np.random.default_rng(seed)
    return [
        (generator.integers(0, 300, length), (np.arange(length) >= generator.integers(0, length + 1)).astype(np.uint8))
        for length in lengths
    ]


def test_a_row_trains_the_marked_tokens_and_padding_has_no_loss(megatron: None) -> None:
    from nemo_ext.megatron.packed import packed_row

    row = packed_row([[10, 11, 12], [20, 21]], [[1, 0, 1], [0, 1]], seq_length=9)

    assert row["tokens"].tolist() == [10, 11, 12, 20, 21, 10, 11, 12, 20]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0]
    assert row["cu_seqlens"].tolist() == [0, 3, 5, 8, 9]
    trained = row["loss_mask"].bool()
    assert trained.nonzero().flatten().tolist() == [1, 3]
    assert row["labels"][trained].tolist() == [12, 21]


def test_samples_are_aligned_by_repeating_their_last_token(megatron: None) -> None:
    from nemo_ext.megatron.packed import packed_row

    row = packed_row([[10, 11, 12], [20, 21, 22, 23]], [[0, 1, 1], [0, 1, 1, 1]], seq_length=12, align=4)

    assert row["tokens"].tolist() == [10, 11, 12, 12, 20, 21, 22, 23, 10, 11, 12, 12]
    assert row["cu_seqlens"].tolist() == [0, 4, 8, 12]
    assert row["loss_mask"].tolist() == [1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8), room=st.integers(0, 70), align=st.integers(1, 4))
def test_every_position_of_a_row_has_its_sequence(megatron: None, lengths: list[int], room: int, align: int) -> None:
    from nemo_ext.megatron.packed import packed_row

    rows = rows_of(lengths)
    places = sum(-(-length // align) * align for length in lengths)
    row = packed_row(*zip(*rows, strict=True), seq_length=places + room // align * align, align=align)

    bounds = row["cu_seqlens"].tolist()
    assert (
        bounds[0] == 0
        and bounds[-1] == len(row["tokens"])
        and all(b > a and not b % align for a, b in pairwise(bounds))
    )
    for start, end in pairwise(bounds):
        assert row["position_ids"][start:end].tolist() == list(range(end - start))
        assert row["labels"][start : end - 1].tolist() == row["tokens"][start + 1 : end].tolist()
        assert row["loss_mask"][end - 1] == 0
    assert row["loss_mask"].sum() == sum(mask[1:].sum() for _, mask in rows)


def test_the_loss_of_a_pack_is_the_sum_over_its_samples(build: Build) -> None:
    from nemo_ext.megatron.forward_step import forward_step
    from nemo_ext.megatron.packed import packed_row

    model, rows = build(*HYBRID).eval(), rows_of(LENGTHS)
    row = packed_row(*zip(*rows, strict=True), seq_length=128)

    with torch.no_grad():
        output, loss_of = forward_step(iter([{name: tensor[None] for name, tensor in row.items()}]), model)
        loss, tokens, _ = loss_of(output)

        expected, count = 0.0, 0
        for ids, mask in rows:
            sample = torch.from_numpy(ids)
            logits = model(sample[None], torch.arange(len(sample))[None], None)[0].float()
            losses = torch.nn.functional.cross_entropy(logits[:-1], sample[1:], reduction="none")
            expected += float((losses * torch.from_numpy(mask[1:])).sum())
            count += int(mask[1:].sum())
    assert int(tokens) == count > 10
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_several_packs_in_a_micro_batch_are_refused(megatron: None) -> None:
    from nemo_ext.megatron.packed import take_packing

    with pytest.raises(ValueError, match="micro_batch_size=2"):
        take_packing({"cu_seqlens": torch.tensor([[0, 4], [0, 4]], dtype=torch.int32)})


def dataset_of(config: dict[str, Any], samples: int) -> Any:
    from nemo_ext.megatron.arguments import command_line, parse_arguments
    from nemo_ext.megatron.forward_step import build_datasets

    return build_datasets(parse_arguments(command_line(config), world_size=1), [samples, 4, 0])


def test_every_epoch_has_every_pack_once_in_its_own_order(
    megatron: None, packs: Path, packed_config: PackedConfig
) -> None:
    from nemo_ext.megatron.packed import PackedDataset

    config = packed_config(packs, "run_dir=unused", "megatron.micro_batch_size=1")
    train, valid, _ = dataset_of(config, 300)
    again, _, _ = dataset_of(config, 120)

    assert isinstance(train, PackedDataset) and isinstance(valid, PackedDataset) and len(train) >= 300
    count = len(train.dataset)
    keys = [tuple(train[number]["tokens"].tolist()) for number in range(2 * count)]
    first, second = keys[:count], keys[count:]
    assert sorted(first) == sorted(second) and first != second
    # A sample depends only on its number, so a resumed run continues with the same samples.
    assert [tuple(again[number]["tokens"].tolist()) for number in (5, 3)] == [keys[5], keys[3]]


def test_packs_blend_by_weight(megatron: None, packs: Path, packed_config: PackedConfig) -> None:
    config = packed_config(packs, "run_dir=unused", "megatron.micro_batch_size=1")
    config["megatron"]["train_data_path"] = ["3", str(packs / "train"), "1", str(packs / "valid")]

    train, _, _ = dataset_of(config, 40)

    assert len([1 for number in range(40) if train[number]["dataset_id"] == 0]) == 30
    assert train[0].keys() >= {"tokens", "cu_seqlens"}


def test_packs_and_plain_streams_do_not_blend(packs: Path, megatron: None) -> None:
    from nemo_ext.megatron.packed import all_packed

    assert all_packed([str(packs / "train"), str(packs / "valid")]) and not all_packed([str(packs / "none")])
    with pytest.raises(ValueError, match="a blend must hold only packs"):
        all_packed([str(packs / "train"), str(packs / "none")])


@pytest.mark.deep
def test_training_on_packs_resumes_on_the_same_pack(
    packs: Path, packed_config: PackedConfig, train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    filled = packed_config(packs, "run_dir=unused", "megatron.micro_batch_size=1")["megatron"]
    names = ("train_data_path", "valid_data_path", "calculate_per_token_loss", "micro_batch_size")
    words = [f"megatron.{name}={str(filled[name]).lower()}" for name in names]
    words += ["megatron.mock_data=false", "megatron.global_batch_size=4", "train.tokens=2560"]
    whole = train_ranks(tmp_path / "whole", *words)
    checkpoints = tmp_path / "parts" / run_directory.CHECKPOINTS
    shutil.copytree(tmp_path / "whole" / run_directory.CHECKPOINTS, checkpoints)
    shutil.rmtree(checkpoints / "iter_0000010")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("5")

    resumed = train_ranks(tmp_path / "parts", *words)

    assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in whole[5:]], rel=1e-6)


def test_packs_of_two_tokenizers_do_not_blend(megatron: None, tmp_path: Path) -> None:
    from nemo_ext.megatron.packed import all_packed

    file = write_samples(tmp_path / "samples", [(np.arange(30), np.ones(30))] * 9, vocab_size=257)
    for name in ("byte-257", "other", ""):
        settings = PackingSettings(capacity=64)
        prefix = tmp_path / f"packs{name}"
        write_packed(prefix, [file], settings, vocab_size=257, tokenizer_identity=name, progress=False)

    assert all_packed([str(tmp_path / "packsbyte-257"), str(tmp_path / "packs")])  # of one it is not known
    with pytest.raises(ValueError, match="packed with different tokenizers"):
        all_packed([str(tmp_path / "packsbyte-257"), str(tmp_path / "packsother")])


def test_a_later_phase_continues_in_the_packs(
    megatron: None, tmp_path: Path, packs_at: Callable[..., None], packed_config: PackedConfig
) -> None:
    from nemo_ext.data.packs.mixed_lengths import Reading
    from nemo_ext.megatron.arguments import command_line, parse_arguments
    from nemo_ext.megatron.forward_step import build_datasets

    for name in ("train", "valid"):
        packs_at(tmp_path / name)
    config = packed_config(tmp_path, "run_dir=unused", "megatron.micro_batch_size=1")
    arguments = parse_arguments(command_line(config), world_size=1)

    whole, _, _ = build_datasets(arguments, [20, 4, 0])
    later, _, _ = build_datasets(arguments, [8, 4, 0], drawn={Reading(64): {str(tmp_path / "train"): 12}})

    assert all(torch.equal(later[n]["tokens"], whole[12 + n]["tokens"]) for n in range(8))
