"""Long and short sequences in one run: the ratio in every window, the sequences of Megatron's own datasets, the bounds
of sequences and documents, and training in every layout."""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.packs.mixed_lengths import MixedLengths, RowSchedule
from nemo_ext.data.text.indexed_dataset import write_index
from nemo_ext.job.config import compose

Train = Callable[..., list[dict[str, Any]]]

EOD = 256


@given(
    share=st.fractions(0, 1, max_denominator=60),
    together=st.integers(1, 4),
    first=st.integers(0, 500),
    length=st.integers(1, 200),
)
def test_any_window_has_the_ratio_to_one_row(share: Fraction, together: int, first: int, length: int) -> None:
    schedule = RowSchedule(share=share, together=together)
    rows = range(first * together, (first + length) * together)

    short = sum(schedule.is_short(row) for row in rows)

    assert abs(short - share * len(rows)) <= together
    assert short == schedule.short_before(rows.stop) - schedule.short_before(rows.start)
    assert all(schedule.is_short(row) == schedule.is_short(row - row % together) for row in rows)


def test_a_share_keeps_its_written_value() -> None:
    schedule = MixedLengths(short=4, short_share=0.1).schedule
    assert schedule.share == Fraction(1, 10) and schedule.short_before(10**12) == 10**11


def config_with(**mixed: object) -> dict[str, Any]:
    megatron = {"seq_length": 64, "micro_batch_size": 1, "context_parallel_size": mixed.pop("cp", 1)}
    megatron["micro_batch_size"] = mixed.pop("micro", 1)
    return {"data": {"mixed_lengths": mixed}, "megatron": megatron}


@pytest.mark.parametrize(
    ("mixed", "message"),
    [
        ({"short": 16}, "'short_share' is missing"),
        ({"short": 16, "short_shar": 0.5}, "did you mean 'short_share'"),
        ({"short": 24, "short_share": 0.5}, "short=24 must be smaller than megatron.seq_length=64 and divide it"),
        ({"short": 64, "short_share": 0.5}, "must be smaller than"),
        ({"short": 16, "short_share": 1.5}, "short_share=1.5"),
        ({"short": 16, "short_share": 0.5, "rows_together": 0}, "rows_together=0"),
        ({"short": 16, "short_share": 0.5, "micro": 2}, "micro_batch_size=1"),
        ({"short": 16, "short_share": 0.5, "cp": 2, "document_boundaries": True}, "set it to false"),
        ({"short": 2, "short_share": 0.5, "cp": 2}, r"multiple of 4 \(2 x context_parallel_size\)"),
    ],
)
def test_settings_that_do_not_fit_are_refused(mixed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedLengths.from_config(config_with(**mixed))


def test_a_config_without_the_section_has_no_mix() -> None:
    assert MixedLengths.from_config({"data": None, "megatron": {}}) is None
    found = MixedLengths.from_config(config_with(short=16, short_share=0.25))
    assert found == MixedLengths(short=16, short_share=0.25)


def arguments_of(streams: list[str], mixed: dict[str, Any] | None, seq_length: int = 64) -> Any:
    from nemo_ext.megatron.arguments import command_line, parse_arguments

    config = compose("train", ["data=mock", "run_dir=unused", f"megatron.seq_length={seq_length}"])
    config["megatron"] |= {"mock_data": False, "micro_batch_size": 1}
    blend = ["3", streams[0], "1", streams[1]]
    config["megatron"] |= {"train_data_path": blend, "valid_data_path": blend}
    arguments = parse_arguments(command_line(config), world_size=1)
    arguments.mixed_lengths = mixed
    return arguments


def test_rows_equal_the_sequences_of_megatrons_own_datasets(megatron: None, streams: list[str]) -> None:
    from nemo_ext.megatron.forward_step import build_datasets

    train, valid, _ = build_datasets(arguments_of(streams, {"short": 16, "short_share": 0.25}), [20, 4, 0])
    long, short = train.long, train.short

    assert (len(train), len(valid)) == (20, 4)
    taken_long = taken_short = 0
    for number in range(20):
        row = train[number]
        bounds = row["cu_seqlens"].tolist()
        if number % 4 == 3:
            assert bounds == [0, 16, 32, 48, 64]
            assert row["position_ids"].tolist() == [*range(16)] * 4
            for start in bounds[:-1]:
                for name in ("tokens", "labels"):
                    assert torch.equal(row[name][start : start + 16], short[taken_short][name])
                taken_short += 1
        else:
            assert bounds == [0, 64] and torch.equal(row["tokens"], long[taken_long]["tokens"])
            taken_long += 1
    assert (taken_long, taken_short) == (15, 20)
    # By the number alone: a resumed run asks for later rows first.
    assert torch.equal(train[7]["tokens"], train[np.int64(7)]["tokens"])
    with pytest.raises(IndexError):
        train[20]


def test_long_and_short_sequences_come_from_different_documents(megatron: None, tmp_path: Path) -> None:
    from nemo_ext.megatron.forward_step import build_datasets

    prefix = tmp_path / "all_different"
    np.arange(64_000, dtype=np.int32).tofile(f"{prefix}.bin")
    write_index(Path(f"{prefix}.idx"), np.full(640, 100), np.int32)
    arguments = arguments_of([str(prefix), str(prefix)], {"short": 16, "short_share": 0.25})
    arguments.train_data_path = arguments.valid_data_path = [str(prefix)]

    train, _, _ = build_datasets(arguments, [990, 4, 0])

    read = [token for row in range(990) for token in train[row]["tokens"].tolist()]
    assert len(read) == 63_360 and len(set(read)) > 0.99 * len(read), "one pass reads everything about once"
    again, _, _ = build_datasets(arguments, [2000, 4, 0])
    assert all(torch.equal(train[row]["tokens"], again[row]["tokens"]) for row in (0, 3, 500, 989))


def test_bounds_are_at_the_ends_of_documents(megatron: None, streams: list[str]) -> None:
    from nemo_ext.megatron.forward_step import build_datasets

    mixed = {"short": 16, "short_share": 0.5, "document_boundaries": True}
    train, _, _ = build_datasets(arguments_of(streams, mixed), [12, 4, 0])

    inside = 0
    for number in range(12):
        row = train[number]
        bounds = row["cu_seqlens"].tolist()
        sequences = [0, 16, 32, 48, 64] if number % 2 else [0, 64]
        ends = [place + 1 for place in (row["tokens"] == EOD).nonzero().flatten().tolist()]
        assert bounds == sorted({*sequences, *ends})
        for start, end in pairwise(bounds):
            assert row["position_ids"][start:end].tolist() == list(range(end - start))
        inside += len(bounds)
    assert inside > 40
