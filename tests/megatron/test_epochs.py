"""Epochs of a stream, each in its own order: the first is Megatron's, and a longer run has the same ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_ext.data.blends.blend import other_order
from nemo_ext.data.packs.mixed_lengths import Reading
from nemo_ext.data.text.indexed_dataset import write_index
from nemo_ext.job.config import compose

LENGTH = 16


def stream_at(prefix: Path, documents: int) -> str:
    """Documents of 5 to 14 tokens, no token twice."""
    lengths = np.arange(documents) % 10 + 5
    np.arange(lengths.sum(), dtype=np.int32).tofile(f"{prefix}.bin")
    write_index(Path(f"{prefix}.idx"), lengths.astype(np.int64), np.int32)
    return str(prefix)


def sequences(words: list[str], samples: int, *, drawn: dict[str, int] | None) -> list[list[int]]:
    from nemo_ext.megatron.arguments import command_line, parse_arguments
    from nemo_ext.megatron.forward_step import build_datasets

    config = compose("train", ["data=mock", "run_dir=unused", f"megatron.seq_length={LENGTH}"])
    config["megatron"] |= {"mock_data": False, "vocab_size": 100_000, "train_data_path": words}
    arguments = parse_arguments(command_line(config), world_size=1)
    arguments.mixed_lengths = None
    before = None if drawn is None else {Reading(LENGTH): drawn}
    train, _, _ = build_datasets(arguments, [samples, 0, 0], drawn=before)
    return [train[n]["tokens"].tolist() for n in range(samples)]


def test_the_first_epoch_is_megatrons_and_later_ones_do_not_change_it(megatron: None, tmp_path: Path) -> None:
    stream = stream_at(tmp_path / "a", 400)  # 3800 tokens: 237 sequences

    megatrons = sequences([stream], 237, drawn=None)
    three = sequences([stream], 711, drawn={})

    assert three[:237] == megatrons
    epochs = [three[:237], three[237:474], three[474:]]
    for epoch in epochs:
        assert len({token for row in epoch for token in row}) == 237 * LENGTH, "a token came twice, or not at all"
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert sequences([stream], 300, drawn={stream: 400}) == three[400:700]


@pytest.mark.parametrize("drawn", [None, {}])
def test_rewritten_data_have_a_new_index(megatron: None, tmp_path: Path, drawn: dict[str, int] | None) -> None:
    """Fewer documents, more, or the same number with other lengths; the first cache stays in its folder."""
    for documents in (400, 200, 800):
        stream = stream_at(tmp_path / "a", documents)
        rows = sequences([stream], 110, drawn=drawn)
        read = {token for row in rows for token in row}
        assert len(read) == 110 * LENGTH and max(read) < 9.5 * documents, documents
    lengths = np.random.default_rng(0).permutation(np.arange(800) % 10 + 5)
    write_index(Path(f"{stream}.idx"), lengths.astype(np.int64), np.int32)
    assert sequences([stream], 110, drawn=drawn) != rows


def test_a_stream_shorter_than_a_sequence_is_read_too(megatron: None, tmp_path: Path) -> None:
    stream = stream_at(tmp_path / "tiny", 2)  # 11 tokens

    rows = sequences([stream], 250, drawn={stream: 30})

    read = np.bincount([token for row in rows for token in row])
    assert len(read) == 11 and read.min() > 0.9 * read.max()
    assert sequences([stream], 10, drawn={stream: 230}) == rows[200:210]


def test_parts_of_the_documents_are_all_of_them(megatron: None) -> None:
    from nemo_ext.megatron.epochs import part_of

    lengths = np.array([5, 50, 7, 30, 8, 10, 20, 40, 30, 100, 3, 9], dtype=np.int32)
    documents = np.arange(1, 12, dtype=np.int32)

    short, long = (part_of(documents, lengths, part, seed=3) for part in ((0.0, 0.4), (0.4, 1.0)))

    assert sorted([*short, *long]) == documents.tolist() and len(short) and len(long)
    assert part_of(documents[:1], lengths, (0.0, 0.4), seed=3).tolist() == [1], "one document is read by both"


def run_of(words: list[str], steps: int, **data: Any) -> dict[str, Any]:
    sizes = {"train_iters": steps, "global_batch_size": 1, "seq_length": LENGTH}
    return {"data": data, "megatron": {**sizes, "train_data_path": words}}


@pytest.mark.parametrize(
    ("shorter", "longer"), [(150, 237), (200, 300), (300, 350), (350, 450), (400, 470), (470, 500)]
)
def test_a_longer_run_gets_a_remark_where_megatron_reorders(
    megatron: None, tmp_path: Path, shorter: int, longer: int
) -> None:
    stream = stream_at(tmp_path / "a", 400)  # 237.4 sequences an epoch

    kept = sequences([stream], longer, drawn=None)[:shorter] == sequences([stream], shorter, drawn=None)
    told = other_order(run_of([stream], shorter), run_of([stream], longer))

    assert (told is None) == kept
    if told:
        assert f"{stream} {shorter / 237.5:.3g} -> {longer / 237.5:.3g}." in told


def test_remarks_on_a_blend_name_its_streams(tmp_path: Path) -> None:
    a, b = stream_at(tmp_path / "a", 400), stream_at(tmp_path / "b", 4000)

    told = other_order(run_of(["0.5", a, "0.5", b], 400), run_of(["0.5", a, "0.5", b], 600))

    assert told is not None and f"{a} 0.842 -> 1.26." in told and b not in told
    mixed = {"mixed_lengths": {"short": 4, "short_share": 0.5}}  # its order stays
    assert other_order(run_of(["1", a], 200, **mixed), run_of(["1", a], 400, **mixed)) is None
    # Without weights Megatron takes the shares from the sizes.
    assert other_order(run_of([a, b, f"{b}2"], 200), run_of([a, b, f"{b}2"], 400)) is None
