"""Profiles: the pass rate, mean reward and mean tokens of each prompt's rollouts.

Rollouts are summed per prompt, part by part, and the sums are merged from time to time. So memory is proportional to
the number of prompts rather than rollouts, plus the records of one part per process.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.data.curriculum.prompts import Keys, Numbers
from nemo_ext.data.curriculum.records import (
    Malformed,
    check_share,
    checked_id,
    digest,
    lines_of,
    new_hash,
    note_malformed,
    parse,
    parts_of,
    prompt_bytes,
    read_parts,
    required,
)
from nemo_ext.data.curriculum.settings import PROMPT, RolloutKeys
from nemo_ext.data.text.documents import Part, ReadReport
from nemo_ext.data.text.user_files import JsonlSource, pyarrow_module
from nemo_ext.job.files import publish, unfinished

MERGE_ROWS = 1 << 20
SUMS = ("rollouts", "successes", "reward", "tokens", "with_tokens")


@dataclass(frozen=True)
class Profile:
    """Pass rates of prompts; every array has one entry per prompt, sorted by key.

    Attributes:
        key: key of the prompt's id.
        rollouts: number of rollouts; 1 if unknown.
        pass_rate: share of the rollouts that succeeded.
        counted: True if the number of rollouts is known.
    """

    key: Keys
    rollouts: Numbers
    pass_rate: npt.NDArray[np.float64]
    counted: bool = True

    def __len__(self) -> int:
        return len(self.key)

    def levels(self, most: int) -> int:
        """Return the number of equal steps from 0 to 1 that distinguish the pass rates, at most `most`.

        This is the largest number of rollouts of any prompt or, if rollouts are not counted, the smallest n for which
        all pass rates are multiples of 1/n.
        """
        if self.counted:
            return min(most, int(self.rollouts.max()))
        rates = np.unique(self.pass_rate)
        if len(rates) > most + 1:
            return most
        errors = (np.abs(rates * number - np.rint(rates * number)).max() for number in range(1, most + 1))
        # The tolerance is a hundredth of a step, since rates are written with about three digits.
        return next((number for number, error in enumerate(errors, start=1) if error < 0.01), most)


def write_profile(
    files: Sequence[Path],
    path: Path,
    *,
    keys: RolloutKeys,
    success: float = 1.0,
    max_bad_share: float = 0.01,
    workers: int = 1,
) -> ReadReport:
    """Write statistics of each prompt's rollouts to a Parquet file, sorted by id; return the counts of records read.

    Columns: id, key, rollouts, successes, pass_rate, mean_reward, mean_tokens (null if no rollout has tokens).

    Args:
        files: JSONL (plain, .gz, .zst) or Parquet, one rollout per record, in any order.
        success: minimum reward that counts as a success.

    Raises:
        ValueError: a file is damaged, there are no records, or too many are malformed.
    """
    arrow = pyarrow_module()
    report = ReadReport()
    merged, pending, rows = None, list[Any](), 0
    read = functools.partial(_read_part, keys=keys, success=success)
    for table, part_report in read_parts(parts_of(files), read, workers=workers, label="rollouts"):
        report.add(part_report)
        pending.append(table)
        rows += table.num_rows
        if rows > max(MERGE_ROWS, 0 if merged is None else merged.num_rows):
            merged, pending, rows = _grouped([merged, *pending]), [], 0
    check_share(report, "rollouts", max_bad_share)
    merged = _grouped([merged, *pending]).sort_by("id")
    count = merged["rollouts"].to_numpy()
    with_tokens = merged["with_tokens"].to_numpy()
    mean_tokens = np.divide(merged["tokens"].to_numpy(), with_tokens, out=np.zeros(len(count)), where=with_tokens > 0)
    ids = merged["id"]
    columns = {
        "id": ids,
        "key": arrow.array(_keys_of(ids)),
        "rollouts": merged["rollouts"],
        "successes": merged["successes"],
        "pass_rate": arrow.array(merged["successes"].to_numpy() / count),
        "mean_reward": arrow.array(merged["reward"].to_numpy() / count),
        "mean_tokens": arrow.array(mean_tokens, mask=with_tokens == 0),
    }
    arrow.parquet.write_table(arrow.table(columns), unfinished(path), compression="zstd")
    publish(unfinished(path), path)
    return report


def read_profile(path: Path) -> Profile:
    """Read a profile from `write_profile`, or a Parquet or JSONL file with id, pass_rate and optional rollouts.

    Raises:
        ValueError: the file or a column is missing or has the wrong type, a pass rate is not from 0 to 1, or an id is
            repeated.
    """
    arrow = pyarrow_module()
    if not path.is_file():
        raise ValueError(f"profile={path} does not exist: set it to an earlier profile, or set rollouts instead")
    if path.suffix == ".parquet":
        try:
            table = arrow.parquet.read_table(path)
        except (OSError, arrow.ArrowInvalid) as error:
            raise ValueError(f"profile {path} is not a readable Parquet file ({error}): make it again") from None
    else:
        table = _table_of_lines(path)
    for name in ("id", "pass_rate"):
        if name not in table.column_names:
            known = ", ".join(table.column_names)
            raise ValueError(f"profile {path} has no column {name!r}, only {known}: add it, or rename one of them")
    try:
        rates = table["pass_rate"].to_numpy().astype(np.float64)
        counts = np.ones(len(rates), dtype=np.int64)
        if "rollouts" in table.column_names:
            counts = table["rollouts"].to_numpy().astype(np.int64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"profile {path}: pass_rate and rollouts must be numbers in every row ({error})") from None
    invalid = ~((rates >= 0) & (rates <= 1))
    if invalid.any():
        row = int(np.argmax(invalid))
        raise ValueError(f"profile {path}, row {row + 1}: pass_rate must be a number from 0 to 1, not {rates[row]}")
    keys = table["key"].to_numpy() if "key" in table.column_names else _keys_of(table["id"].cast("string"))
    order = np.argsort(keys)
    keys = keys[order].astype(np.uint64)
    same = keys[1:] == keys[:-1]
    if same.any():
        repeated = table["id"][int(order[np.argmax(same)])]
        raise ValueError(f"profile {path} has more than one row with id {repeated}: keep only one of them")
    return Profile(
        key=keys,
        rollouts=counts[order],
        pass_rate=rates[order],
        counted="rollouts" in table.column_names,
    )


def rows_of(known: Keys, keys: Keys) -> Numbers:
    """Return the index of every key in the sorted `known` keys, such as a profile's; -1 if it is not among them."""
    if not len(known):
        return np.full(len(keys), -1)
    # Searching in sorted order reads memory sequentially.
    order = np.argsort(keys)
    rows = np.empty(len(keys), dtype=np.int64)
    rows[order] = np.searchsorted(known, keys[order])
    rows[rows == len(known)] = 0
    rows[known[rows] != keys] = -1
    return rows


def _read_part(part: Part, *, keys: RolloutKeys, success: float) -> tuple[Any, ReadReport]:
    """Return an Arrow table with the sums of a part's rollouts, one row per prompt, and counts of the records read."""
    ids, rewards, tokens, report = list[str](), list[float](), list[int | None](), ReadReport()
    for number, _, line in lines_of(part):
        report.records += 1
        try:
            record = parse(line)
            if keys.id == PROMPT:
                identity = digest(prompt_bytes(required(record, keys.prompt))).hex()
            else:
                identity = checked_id(required(record, keys.id), keys.id)
            reward = _reward(required(record, keys.reward), keys.reward)
            length = _tokens(required(record, keys.tokens), keys.tokens) if keys.tokens else None
        except Malformed as problem:
            note_malformed(report, part, number, str(problem))
            continue
        ids.append(identity)
        rewards.append(reward)
        tokens.append(length)
    arrow = pyarrow_module()
    values = np.array(rewards, dtype=np.float64)
    table = arrow.table(
        {
            "id": arrow.array(ids, type=arrow.string()),
            "rollouts": np.ones(len(ids), dtype=np.int64),
            "successes": (values >= success).astype(np.int64),
            "reward": values,
            "tokens": np.array([length or 0 for length in tokens], dtype=np.int64),
            "with_tokens": np.array([length is not None for length in tokens], dtype=np.int64),
        }
    )
    return _grouped([table]), report


def _reward(value: Any, path: str) -> float:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise Malformed(f"{path!r}: expected a finite number, not {value!r}")
    return float(value)


def _tokens(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 40:
        raise Malformed(f"{path!r}: expected a number of tokens, not {value!r}")
    return int(value)


def _grouped(tables: Sequence[Any]) -> Any:
    """Sum tables into one row per id, in one thread, so that floating-point sums are the same on every machine."""
    whole = pyarrow_module().concat_tables([table for table in tables if table is not None])
    grouped = whole.group_by("id", use_threads=False).aggregate([(name, "sum") for name in SUMS])
    return grouped.rename_columns([name.removesuffix("_sum") for name in grouped.column_names]).select(["id", *SUMS])


def _keys_of(ids: Any) -> Keys:
    """Return the keys for a column of ids: the `digest` of each id, inlined for speed."""
    digests = bytearray()
    for chunk in ids.chunks:
        for identity in chunk.cast("binary").to_pylist():
            hashed = new_hash()
            hashed.update(identity)
            digests += hashed.digest()
    return np.frombuffer(digests, dtype=np.uint64)


def _table_of_lines(path: Path) -> Any:
    """Read a JSONL profile as a table."""
    records = []
    for place, record in JsonlSource(path=(str(path),)).rows(strict=True):
        try:
            identity = checked_id(required(record, "id"), "id")
        except Malformed as problem:
            raise ValueError(f"profile {place}: {problem}") from None
        records.append({**record, "id": identity})
    if not records:
        raise ValueError(f"profile {path} has no records: set profile to a file with pass rates, or set rollouts")
    return pyarrow_module().Table.from_pylist(records)
