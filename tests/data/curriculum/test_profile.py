import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from nemo_ext.data.curriculum import profile as profile_module
from nemo_ext.data.curriculum import records
from nemo_ext.data.curriculum.profile import Profile, read_profile, rows_of, write_profile
from nemo_ext.data.curriculum.prompts import key_of
from nemo_ext.data.curriculum.settings import RolloutKeys
from tests.json_lines import write_jsonl


def profile_of(files: list[Path], folder: Path, *, keys: RolloutKeys | None = None, **options: Any) -> Profile:
    write_profile(files, folder / "profile.parquet", keys=keys or RolloutKeys(), **options)
    return read_profile(folder / "profile.parquet")


def rate_of(profile: Profile, identity: str) -> tuple[int, float]:
    (row,) = rows_of(profile.key, np.array([key_of(identity)]))
    assert row >= 0
    return int(profile.rollouts[row]), float(profile.pass_rate[row])


def test_rollouts_become_pass_rates(tmp_path: Path) -> None:
    rewards = {"a": [1, 0, 1, 0.5], "b": [0], 7: [True, False]}
    lines = [{"id": name, "reward": reward, "tokens": 10} for name, some in rewards.items() for reward in some]
    path = write_jsonl(tmp_path / "r.jsonl", lines)

    strict = profile_of([path], tmp_path, keys=RolloutKeys(tokens="tokens"))
    table = pyarrow.parquet.read_table(tmp_path / "profile.parquet").to_pylist()
    lenient = profile_of([path], tmp_path, success=0.5)

    assert rate_of(strict, "a") == (4, 0.5)
    assert rate_of(lenient, "a") == (4, 0.75)
    assert rate_of(strict, "b") == (1, 0.0)
    assert rate_of(strict, "7") == (2, 0.5)
    assert [row["id"] for row in table] == ["7", "a", "b"]
    assert table[1]["mean_reward"] == 0.625 and table[1]["mean_tokens"] == 10


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_the_same_profile_from_every_kind_of_file(tmp_path: Path, suffix: str, problems: Path) -> None:
    plain = problems / "rollouts.jsonl"
    path = tmp_path / f"other.{suffix}"
    if suffix == "parquet":
        rows = [json.loads(line) for line in plain.read_text().splitlines()]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=500)
    elif suffix == "jsonl.gz":
        path.write_bytes(gzip.compress(plain.read_bytes()))
    elif suffix == "jsonl.zst":
        path.write_bytes(pyarrow.Codec("zstd").compress(plain.read_bytes(), asbytes=True))
    else:
        path = plain

    made, expected = profile_of([path], tmp_path), profile_of([plain], tmp_path)

    assert len(made) == 300 and (made.rollouts == 8).all()
    np.testing.assert_array_equal(made.pass_rate, expected.pass_rate)


def test_the_profile_does_not_depend_on_parts_processes_and_merges(
    tmp_path: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [problems / "rollouts.jsonl"]
    profile_of(files, tmp_path)
    expected = (tmp_path / "profile.parquet").read_bytes()
    monkeypatch.setattr(records.parts_of, "__kwdefaults__", {"part_bytes": 777})
    monkeypatch.setattr(profile_module, "MERGE_ROWS", 100)

    profile_of(files, tmp_path)

    assert len(records.parts_of(files)) > 50
    assert (tmp_path / "profile.parquet").read_bytes() == expected


def test_nested_keys_and_lists_of_one_reward(tmp_path: Path) -> None:
    record = {"info": {"uid": "x"}, "reward": [1.0]}
    path = write_jsonl(tmp_path / "r.jsonl", [record, record | {"reward": [0.0]}])

    profile = profile_of([path], tmp_path, keys=RolloutKeys(id="info.uid"))

    assert rate_of(profile, "x") == (2, 0.5)


def test_malformed_rollouts_are_counted_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    bad = [
        b"{",
        b"[1]",
        b'{"reward": 1}',
        b'{"id": "a"}',
        b'{"id": "a", "reward": "yes"}',
        b'{"id": "\xff", "reward": 1}',
    ]
    good = b'{"id": "a", "reward": 1}\n'
    path.write_bytes(good + b"\n" + b"\n".join(bad) + b"\n" + good)

    report = write_profile([path], tmp_path / "p.parquet", keys=RolloutKeys(), max_bad_share=0.9)

    assert report.skipped == {"malformed": 6} and report.records == 8
    assert report.examples["malformed"][0].startswith(f"{path}:3: not JSON")
    assert (
        report.examples["malformed"][3] == f"{path}:6: there is no value under key 'reward'; the record's keys are id"
    )
    assert rate_of(read_profile(tmp_path / "p.parquet"), "a") == (2, 1.0)
    with pytest.raises(ValueError, match=r"6 of 8 records are malformed, more than max_bad_share=0.01 \(.*r.jsonl:3"):
        write_profile([path], tmp_path / "p.parquet", keys=RolloutKeys())


def test_damaged_and_empty_files_are_refused(tmp_path: Path) -> None:
    packed = tmp_path / "r.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"id": "a", "reward": 1}\n' * 5000)[:-20])
    with pytest.raises(ValueError, match=r"r\.jsonl\.gz cannot be read to its end"):
        write_profile([packed], tmp_path / "p.parquet", keys=RolloutKeys())
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ValueError, match="the files have no records"):
        write_profile([empty], tmp_path / "p.parquet", keys=RolloutKeys())


def test_a_damaged_parquet_page_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    rows = [{"id": f"{n:x}" * 20, "reward": n % 2} for n in range(5000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[100:400] = bytes(300)
    path.write_bytes(data)

    with pytest.raises(ValueError, match=r"r\.parquet cannot be read to its end"):
        write_profile([path], tmp_path / "p.parquet", keys=RolloutKeys())


@pytest.mark.parametrize(
    ("rates", "levels"),
    [([0, 0.125, 0.5, 1], 8), ([0.25, 0.75], 4), ([0.333, 2 / 3, 1], 3), ([n / 99 for n in range(99)], 64), ([0.5], 2)],
)
def test_levels_of_pass_rates_without_rollout_counts(tmp_path: Path, rates: list[float], levels: int) -> None:
    rows = [{"id": n, "pass_rate": rate} for n, rate in enumerate(rates)]

    assert read_profile(write_jsonl(tmp_path / "profile.jsonl", rows)).levels(64) == levels
    counted = [row | {"rollouts": 5} for row in rows]
    assert read_profile(write_jsonl(tmp_path / "profile.jsonl", counted)).levels(64) == 5


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "a"}], "no column 'pass_rate'"),
        ([{"id": "a", "pass_rate": 1.5}], r"row 1: pass_rate must be a number from 0 to 1, not 1.5"),
        ([{"id": "a", "pass_rate": None}], r"pass_rate"),
        ([{"id": "a", "pass_rate": 1}, {"id": "a", "pass_rate": 1}], "more than one row with id a"),
        ([], "no records"),
    ],
)
def test_an_invalid_profile_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_profile(write_jsonl(tmp_path / "profile.jsonl", rows))


def test_a_profile_from_the_user(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "profile.jsonl", [{"id": "b", "pass_rate": 0.25, "rollouts": 4}])

    profile = read_profile(path)

    assert rate_of(profile, "b") == (4, 0.25)
    assert rows_of(profile.key, np.array([key_of("b"), key_of("c")])).tolist() == [0, -1]
