"""Exclusion of tasks from a plan; the draws of a plan are tested with NeMo-RL (tests/rl/nemo_rl)."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nemo_ext.data.curriculum.job import run as run_curriculum
from nemo_ext.job.config import compose
from nemo_ext.rl.plan import TaskFile, plan_tasks
from tests.json_lines import read_jsonl, write_jsonl


def write(folder: Path, count: int = 10) -> Path:
    records = (
        {"id": str(n), "environment": "math", "prompt": "x" * n, "reference": {"answer": "1"}} for n in range(count)
    )
    return write_jsonl(folder / "tasks.jsonl", records)


def test_excluded_tasks_are_not_drawn(tmp_path: Path) -> None:
    tasks = plan_tasks({"path": write(tmp_path)}, steps=4, prompts=5)

    left = tasks.exclude(lambda task: len(task.prompt[0].content) > 6, "they are long")

    assert left == ["7", "8", "9"]
    drawn = [tasks[number].id for number in range(len(tasks))]
    assert len(drawn) == 20
    assert sorted(set(drawn)) == [str(n) for n in range(7)]
    assert sorted(drawn[:7]) == sorted(set(drawn)), "each once before any repeats"


def test_other_orders_replace_the_rest_of_a_plan(tmp_path: Path) -> None:
    path = write(tmp_path)
    tasks = plan_tasks({"path": path, "shuffle": False}, steps=5, prompts=2)
    (tmp_path / "later.jsonl").write_text("".join(path.read_text().splitlines(keepends=True)[7:4:-1]))
    (tmp_path / "last.jsonl").write_text(path.read_text().splitlines(keepends=True)[9])

    tasks.follow(3, TaskFile(tmp_path / "later.jsonl"))
    tasks.follow(8, TaskFile(tmp_path / "last.jsonl"))

    assert [tasks[number].id for number in range(10)] == list("0127657699")


def test_a_file_must_keep_a_task(tmp_path: Path) -> None:
    tasks = plan_tasks({"path": write(tmp_path, 3)}, steps=1, prompts=2)

    with pytest.raises(ValueError, match=r"tasks\.jsonl: all of its 3 tasks are excluded, because all is"):
        tasks.exclude(lambda task: True, "all is unwanted")


def test_a_curriculum_may_begin_a_domain_again(tmp_path: Path) -> None:
    path = write(tmp_path)
    rollouts = tmp_path / "rollouts.jsonl"
    write_jsonl(rollouts, ({"id": str(n), "reward": n % 2} for n in range(10) for _ in "ab"))
    words = ["batch=2", "steps=9", "exhausted=repeat", "filters.drop_from=null"]
    run_curriculum(
        compose("curriculum", [f"prompts={path}", f"rollouts={rollouts}", f"output={tmp_path / 'c'}", *words])
    )

    tasks = plan_tasks({"curriculum": str(tmp_path / "c")}, steps=9, prompts=2)

    drawn = [tasks[number].id for number in range(len(tasks))]
    assert len(drawn) == 18
    assert len(set(drawn)) <= 10
    with pytest.raises(ValueError, match="duplicate id"):
        plan_tasks({"path": tmp_path / "c" / "curriculum.jsonl"}, steps=9, prompts=2)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_tasks_of_other_files_are_the_same(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path)
    other = tmp_path / f"other{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(read_jsonl(path)), other)
    else:
        other.write_bytes({".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}[suffix](path.read_bytes()))

    assert TaskFile(other).tasks == TaskFile(path).tasks


def test_a_share_of_every_files_prompts_is_in_thinking_mode(tmp_path: Path) -> None:
    for name in ("math", "code"):
        write(tmp_path, 7).rename(tmp_path / f"{name}.jsonl")
    streams = [{"name": "math", "weight": 3}, {"name": "code", "weight": 1}]
    settings = {"directory": str(tmp_path), "streams": streams}

    plan = plan_tasks(settings, steps=10, prompts=8, thinking_share=0.8)

    drawn = [[plan.nth(stream, number).thinking for number in range(70)] for stream in range(2)]
    assert [(modes.count(True), modes.count(False)) for modes in drawn] == [(56, 14)] * 2
    assert sum(plan[number].thinking is True for number in range(80)) == pytest.approx(64, abs=2)
    assert plan_tasks(settings, steps=1, prompts=8)[0].thinking is None


@pytest.mark.parametrize("size", [10, 14])
def test_repeated_tasks_are_seen_in_both_modes(size: int, tmp_path: Path) -> None:
    settings = {"path": str(write(tmp_path, size)), "shuffle": False}
    plan = plan_tasks(settings, steps=5 * size, prompts=1, thinking_share=0.8)

    modes = [[plan[row + epoch * size].thinking for epoch in range(5)] for row in range(size)]
    assert all((row.count(True), row.count(False)) == (4, 1) for row in modes)


@pytest.mark.parametrize("on", [79, 50])
def test_tasks_with_modes_must_have_the_share(tmp_path: Path, on: int) -> None:
    path = write(tmp_path, 100)
    records = [json.loads(line) | {"thinking": number < on} for number, line in enumerate(path.open())]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    if on == 79:
        assert plan_tasks({"path": str(path), "shuffle": False}, steps=1, prompts=8, thinking_share=0.8)[7].thinking
        return
    with pytest.raises(ValueError, match=r"50.0% of the tasks .* rl.thinking_share=0.8; remove `thinking`"):
        plan_tasks({"path": str(path)}, steps=1, prompts=8, thinking_share=0.8)
