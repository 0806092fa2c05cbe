"""Best-fit decreasing: every sample is packed once, no pack exceeds its capacity, packs are full; packs on disk."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_ext.data.packs import packed_files
from nemo_ext.data.packs.packed_files import PackingSettings, is_packed, read_packed_manifest, write_packed
from nemo_ext.data.packs.packing import Packs, fit, pack
from nemo_ext.data.packs.sample_files import SampleFile, open_samples, write_samples
from nemo_ext.data.training import with_data
from nemo_ext.job.config import compose


def read(prefix: Path) -> Any:
    """Read packs as Megatron does, whose import takes seconds."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(str(prefix))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    capacity=st.integers(1, 80),
    align=st.integers(1, 4),
    even=st.booleans(),
    seed=st.none() | st.integers(0, 9),
)
def test_every_sample_is_in_one_pack_and_no_pack_is_over_its_limits(
    data: st.DataObject, capacity: int, align: int, even: bool, seed: int | None
) -> None:
    capacity *= align
    lengths = np.array(data.draw(st.lists(st.integers(1, capacity), max_size=60)), dtype=np.int64)
    most = data.draw(st.none() | st.integers(1, 5))

    packs = pack(lengths, capacity, even=even, max_samples=most, align=align, seed=seed)

    assert sorted(packs.samples.tolist()) == list(range(len(lengths)))
    assert packs.tokens == lengths.sum() and packs.starts[0] == 0 and packs.starts[-1] == len(lengths)
    for samples in packs:
        assert len(samples) and (-(-lengths[samples] // align) * align).sum() <= capacity
        assert most is None or len(samples) <= most
    # Best fit opens a pack only if no open one has room for the sample: at most one pack is half empty.
    if most is None and align == 1:
        assert sum(lengths[samples].sum() * 2 <= capacity for samples in packs) <= 1


def by_definition(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing sample by sample, by definition: the room left in each pack."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return sorted(rooms)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_it_is_best_fit_decreasing(lengths: list[int]) -> None:
    packs = pack(lengths, 50, seed=3)

    assert sorted(50 - sum(lengths[sample] for sample in samples) for samples in packs) == by_definition(lengths, 50)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(("median", "capacity"), [(600, 262_144), (2_000, 262_144), (20_000, 262_144), (800, 8_192)])
def test_realistic_lengths_fill_packs(median: int, capacity: int, even: bool) -> None:
    lengths = np.random.default_rng(median).lognormal(np.log(median), 1.0, 60_000).clip(16, capacity).astype(np.int64)

    packs = pack(lengths, capacity, even=even, seed=1)

    # The last pack of a small set is as full as what is left over.
    assert len(packs) <= lengths.sum() / capacity * 1.01 + 1
    assert packs.fill >= 0.99


def test_even_packs_have_the_same_mix_of_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(300), 1.0, 60_000).clip(16, 262_144).astype(np.int64)

    variation = {}
    for even in (False, True):
        packs = pack(lengths, 262_144, even=even)
        cost = np.array([(lengths[samples] ** 2).sum() for samples in packs])
        variation[even] = [float(values.std() / values.mean()) for values in (cost, np.diff(packs.starts))]

    assert max(variation[True]) < 0.3 and min(variation[False]) > 1


def test_packs_are_not_even_if_that_takes_many_more_packs() -> None:
    """For lengths like these, only best fit fills packs."""
    lengths = np.random.default_rng(0).integers(50_000, 150_000, 2000)

    even, best = (pack(lengths, 262_144, even=even) for even in (True, False))

    assert len(even) == len(best)


def test_the_order_depends_on_the_seed_only() -> None:
    lengths = np.random.default_rng(0).integers(1, 900, 3000)

    packs, again, other, plain = (pack(lengths, 1000, seed=seed) for seed in (1, 1, 2, None))

    assert np.array_equal(packs.samples, again.samples) and np.array_equal(packs.starts, again.starts)
    assert not np.array_equal(packs.samples, other.samples)
    assert (np.diff([lengths[samples].max() for samples in plain]) <= 0).all()  # as they were opened
    assert not (np.diff([lengths[samples].max() for samples in packs]) <= 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3, 0], 8), "sample 1 has length 0"),
        (([3, 9], 8), "sample 1 has 9 tokens, but a pack has 8"),
    ],
)
def test_lengths_and_capacities_that_do_not_fit_are_refused(arguments: tuple[list[int], int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(*arguments)
    with pytest.raises(ValueError, match="multiple of align=3"):
        pack([1], 8, align=3)
    limits: dict[str, Any]
    for limits in ({"max_samples": -1}, {"max_samples": 0}, {"align": 0}, {"capacity": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(limits))} must be a whole number of at least 1"):
            pack([1], **{"capacity": 8, **limits})


def test_longer_samples_are_dropped_truncated_or_refused() -> None:
    lengths = [3, 12, 8, 9]

    dropped, cut = fit(lengths, 8, "drop"), fit(lengths, 8, "truncate")

    assert dropped.samples.tolist() == [0, 2] and dropped.lengths.tolist() == [3, 8] and dropped.dropped == 2
    assert cut.lengths.tolist() == [3, 8, 8, 8] and (cut.truncated, cut.truncated_tokens) == (2, 5)
    with pytest.raises(ValueError, match=r"2 of 4 samples are longer than 8 tokens \(the first is sample 1, with 12\)"):
        fit(lengths, 8, "error")
    with pytest.raises(ValueError, match="did you mean 'truncate'"):
        fit(lengths, 8, "truncat")  # type: ignore[arg-type]


def test_no_samples_make_no_packs() -> None:
    packs = pack([], 8)
    assert len(packs) == 0 and packs.fill == 1.0
    assert isinstance(packs, Packs) and [list(samples) for samples in packs] == []


Rows = list[tuple[list[int], list[int]]]


def files_of(folder: Path, rows: Rows, *, files: int = 3, vocab_size: int = 100) -> list[SampleFile]:
    """The rows in several sample files."""
    parts = np.array_split(np.arange(len(rows)), files)
    return [
        write_samples(folder / f"part{n}", (rows[row] for row in part), vocab_size=vocab_size)
        for n, part in enumerate(parts)
    ]


def rows_of(count: int, seed: int = 0, longest: int = 30) -> Rows:
    generator = np.random.default_rng(seed)
    return [
        (generator.integers(0, 100, length).tolist(), generator.integers(0, 2, length).tolist())
        for length in generator.integers(1, longest, count).tolist()
    ]


@pytest.mark.parametrize("window", [1, 100, 1 << 24])
@pytest.mark.parametrize("vocab_size", [100, 100_000])
def test_packs_on_disk_contain_every_sample_with_its_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, vocab_size: int
) -> None:
    monkeypatch.setattr(packed_files, "_WINDOW_TOKENS", window)
    rows = rows_of(200)

    manifest = write_packed(
        tmp_path / "packs",
        files_of(tmp_path, rows, vocab_size=vocab_size),
        PackingSettings(capacity=64),
        vocab_size=vocab_size,
        progress=False,
    )

    tokens, loss = read(tmp_path / "packs"), read(tmp_path / "packs_loss")
    stored = [(a.tolist(), b.tolist()) for a, b in zip(tokens, loss, strict=True)]
    assert sorted(stored) == sorted(rows)
    bounds = tokens.document_indices
    assert len(bounds) - 1 == manifest.packs and np.array_equal(bounds, loss.document_indices)
    sizes = np.add.reduceat(tokens.sequence_lengths, bounds[:-1])
    assert sizes.max() <= 64 and sizes.sum() == manifest.tokens == sum(len(ids) for ids, _ in rows)
    assert manifest.trained_tokens == sum(sum(mask[1:]) for _, mask in rows)
    assert manifest.without_loss == sum(not any(mask[1:]) for _, mask in rows)
    assert manifest.fill == manifest.tokens / (manifest.packs * 64)
    assert read_packed_manifest(tmp_path / "packs") == manifest and is_packed(tmp_path / "packs")


def test_a_truncated_sample_keeps_its_beginning(tmp_path: Path) -> None:
    files = files_of(tmp_path, [(list(range(12)), [1] * 12), ([50, 51], [0, 1])], files=1)

    cut = write_packed(
        tmp_path / "cut", files, PackingSettings(capacity=8, longer="truncate"), vocab_size=100, progress=False
    )
    dropped = write_packed(tmp_path / "dropped", files, PackingSettings(capacity=8), vocab_size=100, progress=False)

    assert sorted(row.tolist() for row in read(tmp_path / "cut")) == [list(range(8)), [50, 51]]
    assert "1 samples truncated by 4 tokens" in cut.contents() and (cut.truncated, cut.truncated_tokens) == (1, 4)
    assert "1 longer samples dropped" in dropped.contents() and (dropped.samples, dropped.dropped) == (1, 1)
    with pytest.raises(ValueError, match="longer=drop"):
        write_packed(
            tmp_path / "no", files, PackingSettings(capacity=8, longer="error"), vocab_size=100, progress=False
        )


def test_finished_packs_are_kept_until_something_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = files_of(tmp_path, rows_of(50))

    def written(**changes: int) -> int:
        settings = PackingSettings(**{"capacity": 64, **changes})  # type: ignore[arg-type]
        write_packed(tmp_path / "packs", files, settings, vocab_size=100, progress=False)
        return (tmp_path / "packs.bin").stat().st_mtime_ns

    first = written()
    assert written() == first
    assert written(seed=2) > first
    (tmp_path / "packs.bin").write_bytes(b"")
    written(seed=2)
    assert read(tmp_path / "packs").sequence_lengths.sum() * 2 == (tmp_path / "packs.bin").stat().st_size
    assert "starting over" in capsys.readouterr().err


def test_a_refused_call_keeps_the_existing_packs(tmp_path: Path) -> None:
    files = files_of(tmp_path, rows_of(50))
    write_packed(tmp_path / "packs", files, PackingSettings(capacity=64), vocab_size=100, progress=False)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("packs*")}

    settings = PackingSettings(capacity=4, longer="error")
    with pytest.raises(ValueError, match="longer=drop"):
        write_packed(tmp_path / "packs", files, settings, vocab_size=100, progress=False)

    assert {path.name: path.read_bytes() for path in tmp_path.glob("packs*")} == before


def test_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    files = files_of(tmp_path, rows_of(50))
    killed = tmp_path / "out/.packs.packing"
    killed.mkdir(parents=True)
    for name in (".lock", "packs.bin", "packs_loss.bin"):
        (killed / name).write_bytes(b"left")

    write_packed(tmp_path / "out/packs", files, PackingSettings(capacity=64), vocab_size=100, progress=False)

    names = ["packs.bin", "packs.idx", "packs.json", "packs_loss.bin", "packs_loss.idx"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_two_runs_do_not_write_the_same_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(tmp_path, rows_of(50))
    publish = packed_files.publish
    told: list[str] = []

    def second(seed: int) -> None:
        settings = PackingSettings(capacity=64, seed=seed)
        write_packed(tmp_path / "packs", files, settings, vocab_size=100, progress=False)

    def meanwhile(complete: Path, path: Path) -> None:
        monkeypatch.setattr(packed_files, "publish", publish)
        with pytest.raises(ValueError, match="another run is using this directory") as error:
            second(seed=2)
        told.append(str(error.value))
        publish(complete, path)

    monkeypatch.setattr(packed_files, "publish", meanwhile)
    second(seed=1)

    assert told and read_packed_manifest(tmp_path / "packs").seed == 1


def test_invalid_samples_and_files_are_refused(tmp_path: Path) -> None:
    for rows, message in (
        ([([1, 2], [0, 2])], "values other than 0 and 1"),
        ([([1, 2], [0, -1])], "values other than 0 and 1"),
        ([([1, 2], [0, 0.5])], "values other than 0 and 1"),
        ([([1.9, 2.7], [0, 1])], "ids of type float64; they must be integers"),
        ([([1, 2], [1])], "of the same length"),
        ([([], [])], "of the same length"),
        ([([100], [1])], "ids outside the vocabulary; they must be from 0 to 99"),
    ):
        with pytest.raises(ValueError, match=message):
            write_samples(tmp_path / "bad", rows, vocab_size=100)
    with pytest.raises(ValueError, match="tokenise the samples first"):
        open_samples(tmp_path / "bad", vocab_size=100)
    (file,) = files_of(tmp_path, rows_of(3), files=1)
    file.tokens.write_bytes(b"\0")
    with pytest.raises(ValueError, match="truncated"):
        open_samples(file.base, vocab_size=100)
    with pytest.raises(ValueError, match="samples can be packed"):
        write_packed(tmp_path / "none", [], PackingSettings(capacity=8), vocab_size=100, progress=False)
    with pytest.raises(ValueError, match="does not exist: pack samples first"):
        read_packed_manifest(tmp_path / "none")
    (tmp_path / "cut.json").write_text(json.dumps({"kind": "packed sequences", "format_version": 1, "packs": 3}))
    with pytest.raises(ValueError, match=r"cut\.json is damaged"):
        read_packed_manifest(tmp_path / "cut")
    (tmp_path / "other.json").write_text(json.dumps({"kind": "else"}))
    with pytest.raises(ValueError, match="not a manifest of packs"):
        read_packed_manifest(tmp_path / "other")


def config_of(folder: Path, *overrides: str, **packed: str) -> dict[str, object]:
    config = compose("train", ["data=mock", "run_dir=unused", "megatron.seq_length=64", *overrides])
    for name in ("mock_data", "tokenizer_type", "vocab_size"):
        config["megatron"].pop(name)
    config["data"] = {"packed": {"train": str(folder / "packs"), **packed}}
    return config


def test_a_training_config_with_packs(tmp_path: Path) -> None:
    write_packed(
        tmp_path / "packs",
        files_of(tmp_path, rows_of(20)),
        PackingSettings(capacity=64),
        vocab_size=100,
        progress=False,
    )
    one = "megatron.micro_batch_size=1"

    filled = with_data(config_of(tmp_path, one))["megatron"]
    assert isinstance(filled, dict)
    assert filled["train_data_path"] == [str(tmp_path / "packs")] and "valid_data_path" not in filled
    assert filled["calculate_per_token_loss"] is True and filled["eval_iters"] == 0
    assert (filled["tokenizer_type"], filled["vocab_size"]) == ("NullTokenizer", 100)

    for overrides, message in (
        ((), "micro_batch_size=1"),
        ((one, "megatron.seq_length=32"), "packs require megatron.seq_length=64"),
        ((one, "megatron.context_parallel_size=2"), "packs with align=4"),
        ((one, "megatron.calculate_per_token_loss=false"), "requires megatron.calculate_per_token_loss=true"),
        ((one, "megatron.padded_vocab_size=64"), "100 ids, but the model has 64 "),
    ):
        with pytest.raises(ValueError, match=message):
            with_data(config_of(tmp_path, *overrides))
    with pytest.raises(ValueError, match="did you mean 'valid'"):
        with_data(config_of(tmp_path, one, vald="x"))
    with pytest.raises(ValueError, match="does not exist: pack samples first"):
        with_data(config_of(tmp_path, one, valid=str(tmp_path / "none")))
    nothing = config_of(tmp_path, one)
    nothing["data"] = {"packed": {"train": None, "valid": str(tmp_path / "packs")}}
    with pytest.raises(ValueError, match=r"data\.packed\.train=null: set it to the prefix"):
        with_data(nothing)
    for name, identity in (("one", "byte-257"), ("two", "other")):
        files = files_of(tmp_path, rows_of(20))
        settings = PackingSettings(capacity=64)
        write_packed(tmp_path / name, files, settings, vocab_size=100, tokenizer_identity=identity, progress=False)
    both = f"megatron.train_data_path=[3,{tmp_path / 'one'},1,{tmp_path / 'two'}]"
    with pytest.raises(ValueError, match=r"one and .*two were packed with different tokenizers"):
        with_data(config_of(tmp_path, one, both))
    (tmp_path / "packs.bin").write_bytes((tmp_path / "packs.bin").read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"packs: the \.bin or \.idx file is missing or truncated"):
        with_data(config_of(tmp_path, one))


def test_even_packs_keep_the_limit_of_samples_where_tokens_would_not() -> None:
    packs = pack(np.array([9, 1, 1, 1]), 10, even=True, max_samples=2)

    assert sorted(len(samples) for samples in packs) == [2, 2]
