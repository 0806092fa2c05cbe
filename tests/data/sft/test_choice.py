"""Selection over all shards: duplicates, lengths, shares of thinking, invalid records."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_ext.data.packs.packed_files import read_packed_manifest
from nemo_ext.data.sft import job
from nemo_ext.data.sft.choice import Chosen, Table
from nemo_ext.data.sft.shards import MODES
from nemo_ext.job.config import compose

Run = Callable[..., tuple[Table, Chosen]]


def chat(number: int, *, trace: str | None = "because", words: int = 12, **more: Any) -> dict[str, Any]:
    drawn = np.random.default_rng(number).integers(0, 9999, (2, words))
    said = [" ".join(f"w{word}" for word in row) for row in drawn.tolist()]
    answer = said[1] if trace is None else f"<think>{trace} {said[0]}</think>{said[1]}"
    turns = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": answer}]
    return {"id": f"s{number}", "task": "math", "messages": turns} | more


@pytest.fixture
def sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the job on the records of one source, without a report; returns the table and the selection."""
    seen: list[tuple[Table, Chosen]] = []

    def note(settings: object, table: Table, chosen: Chosen, packed: object) -> Path:
        seen.append((table, chosen))
        return Path()

    monkeypatch.setattr(job, "write_report", note)

    def run(records: list[dict[str, Any]] | None = None, **changes: Any) -> tuple[Table, Chosen]:
        if records is not None:
            (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        given = {"output": str(tmp_path / "out"), "template": "domyn", "workers": 1, "validation_share": 0.0}
        given |= {"sources": [{"name": "a", "path": str(tmp_path / "a.jsonl")}], "filters": {}, "reasoning": None}
        job.run({**compose("sft_data"), **given, **changes})
        return seen[-1]

    return run


def modes(table: Table, chosen: Chosen) -> dict[str, int]:
    return {name: int((table.modes[chosen.train] == number).sum()) for number, name in enumerate(MODES)}


def test_texts_longer_than_a_pack_do_not_count_toward_the_budget(sft: Run, tmp_path: Path) -> None:
    records = [chat(n, trace=None, words=200 if n % 3 else 12) for n in range(60)]
    packing = {"capacity": 512}

    table, chosen = sft(records, packing=packing, sampling={"tokens": 12_000})

    packed = read_packed_manifest(tmp_path / "out" / "train")
    assert packed.dropped == 0 and chosen.skipped.skipped == {"text longer than a pack": 40}
    assert packed.tokens == table.lengths[chosen.train].sum() == pytest.approx(12_000, rel=0.03)
    with pytest.raises(ValueError, match="the sources have"):
        sft(packing=packing, sampling={"tokens": 100_000})
    with pytest.raises(ValueError, match="40 of 60 samples are longer than 512"):
        sft(packing=packing | {"longer": "error"})


def test_truncated_texts_have_their_truncated_lengths(sft: Run, tmp_path: Path) -> None:
    records = [chat(n, trace=None, words=200 if n % 3 else 12) for n in range(30)]

    table, chosen = sft(records, packing={"capacity": 1400, "longer": "truncate"})

    packed = read_packed_manifest(tmp_path / "out" / "train")
    assert packed.truncated == 20 and not chosen.skipped.skipped
    assert packed.tokens == table.lengths[chosen.train].sum()
    assert packed.trained_tokens == table.trained[chosen.train].sum()


def test_the_mode_of_a_text_is_its_turn_s(sft: Run) -> None:
    first, second = chat(1), chat(2, trace=None)
    both = {"id": "both", "task": "math", "messages": first["messages"] + second["messages"]}

    assert modes(*sft([both])) == {"off": 1, "on": 1}
    assert modes(*sft([both], reasoning={"strip": 0.0, "truncate": 0.0})) == {"off": 1, "on": 1}
    assert modes(*sft([both], reasoning={"strip": 1.0, "truncate": 0.0})) == {"off": 1, "on": 0}


@pytest.mark.parametrize("reasoning", [None, {"strip": 0.0, "truncate": 0.0}])
def test_shares_of_thinking_are_over_the_samples_left_after_deduplication(
    sft: Run, reasoning: dict[str, float] | None
) -> None:
    on = [chat(n, id=f"s{n}.{copy}") for n in range(20) for copy in range(4)]
    off = [chat(100 + n, trace=None) for n in range(60)]

    table, chosen = sft(on + off, thinking_shares={"math": 0.5}, reasoning=reasoning)

    assert modes(table, chosen) == {"off": 20, "on": 20}
    assert chosen.skipped.skipped == {"near duplicate": 60, "thinking share": 40}
    assert chosen.shares == {"math": (0.5, 20, 20)}


def test_samples_are_stripped_for_a_share_and_another_share_reuses_the_shards(sft: Run, tmp_path: Path) -> None:
    records = [chat(n, task="math" if n % 2 else "chat") for n in range(80)]
    table, chosen = sft(records, thinking_shares={"math": 0.25})
    shard = tmp_path / "out" / ".work" / "000000.tokens"
    before = shard.stat().st_mtime_ns

    assert chosen.shares == {"math": (0.25, 10, 30)} and chosen.changed == {"math: stripped for its share": 30}
    assert modes(table, chosen) == {"off": 30, "on": 50}
    assert len(set(table.samples[chosen.train])) == len(chosen.train) == 80, "every sample once, in one mode"
    assert sft(thinking_shares={"*": 0.5})[1].shares == {"chat": (0.5, 20, 20), "math": (0.5, 20, 20)}
    assert shard.stat().st_mtime_ns == before


def test_the_two_samples_of_a_pair_are_balanced_separately(sft: Run) -> None:
    paired = {"strip": 0.0, "truncate": 0.0, "pair": 1.0}

    table, chosen = sft([chat(n) for n in range(40)], thinking_shares={"math": 0.8}, reasoning=paired)

    assert chosen.shares == {"math": (0.8, 40, 10)}
    assert modes(table, chosen) == {"off": 10, "on": 40}


def test_an_unknown_task_of_a_share_is_refused_or_reported(sft: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"thinking_shares\.mth is not the task of any sample; did you mean 'math'\?"):
        sft([chat(n) for n in range(5)], thinking_shares={"mth": 0.1})

    sft(thinking_shares={"function_calling": 0.1}, preset="domyn")

    assert "thinking_shares.function_calling is not the task of any sample" in capsys.readouterr().err


def test_an_id_of_two_samples_causes_a_warning(sft: Run, capsys: pytest.CaptureFixture[str]) -> None:
    records = [chat(file * 100 + n, id=str(n)) for file in range(4) for n in range(10)] + [chat(0, id="0")]

    _, chosen = sft(records)

    assert chosen.skipped.skipped == {"duplicate id": 1, "duplicate id of another sample": 30}
    said = capsys.readouterr().err
    assert "warning: 30 samples are skipped because they repeat the id of an earlier sample of their source" in said
    assert "skipped: 1 duplicate id, 30 duplicate id of another sample" in said


def test_invalid_records_are_reported_and_too_many_are_an_error(sft: Run, capsys: pytest.CaptureFixture[str]) -> None:
    records = [chat(n) for n in range(100)]
    for bad in records[:3]:
        bad["messages"][1]["role"] = "asistant"

    with pytest.raises(ValueError, match=r"source a: 3 of 100 records are malformed, more than max_bad_share=0"):
        sft(records)
    sft([*records[2:], chat(200), chat(201)])

    assert "skipped: 1 schema" in capsys.readouterr().err


def test_skipped_samples_are_not_in_the_validation_data(sft: Run) -> None:
    records = [chat(n, id=f"s{n}.{copy}", trace=None if n % 4 else "why") for n in range(50) for copy in range(3)]
    records += records[:30]

    table, chosen = sft(records, validation_share=0.5, thinking_shares={"math": 0.9}, packing={"capacity": 400})

    rows = Counter([*chosen.train.tolist(), *chosen.valid.tolist()])
    samples = {table.samples[row] for row in rows}
    assert set(rows.values()) == {1} and len(chosen.valid) > 3 and table.lengths[list(rows)].max() <= 400
    assert len(samples) == len(rows) == sum(chosen.shares["math"][1:])
    assert len({records[sample]["messages"][0]["content"] for sample in samples}) == len(samples)
