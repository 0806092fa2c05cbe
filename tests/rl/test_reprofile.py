"""Measurement of pass rates and new curricula, without an engine; with TRL in tests/rl/trl/test_reprofile.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.rl.plan import PlannedTasks, plan_tasks
from nemo_ext.rl.reprofile import BEGUN, ROLLOUTS, Change, Curricula
from tests.json_lines import write_jsonl


def tasks(folder: Path, count: int = 12) -> Path:
    records = (
        {"id": f"t{n}", "environment": "math", "prompt": str(n), "reference": {"answer": "1"}} for n in range(count)
    )
    return write_jsonl(folder / "tasks.jsonl", records)


def made(folder: Path, train: dict[str, Any] | None = None, **reprofile: Any) -> Curricula:
    train = {**(train or {"path": str(tasks(folder))}), "reprofile": {"every": 2, **reprofile}}
    curricula = Curricula.from_config(train, folder / "run", prompts=2, steps=8)
    assert curricula is not None
    curricula.tasks = curricula.read_tasks(plan(folder, train)).tasks
    return curricula


def plan(folder: Path, train: dict[str, Any] | None = None) -> PlannedTasks:
    return plan_tasks(train or {"path": str(tasks(folder))}, steps=8, prompts=2)


def answer(curricula: Curricula, number: int, right: Callable[[int], int], *, step: int) -> None:
    """Write rollouts of a checkpoint with a number of correct responses per task, and make the curriculum."""
    curricula.begin(Change(step=step, drawn=2 * step, why="2 steps", checkpoint=f"checkpoint-{step}"))
    lines = (
        {"id": f"t{n}", "reward": float(sample < right(n))}
        for n in range(len(curricula.tasks))
        for sample in range(curricula.settings.samples)
    )
    write_jsonl(curricula.of_number(number) / ROLLOUTS, lines)
    curricula.make(number)


@pytest.mark.parametrize(
    ("settings", "step", "rewards", "due"),
    [
        ({"every": 3}, 2, [], False),
        ({"every": 3}, 3, [], True),
        ({"every": 3}, 8, [], False),  # the end of the run
        ({"plateau": 2}, 4, [0.5, 0.4], False),
        ({"plateau": 2}, 4, [0.5, 0.4, 0.5], True),
        ({"plateau": 2}, 4, [0.5, 0.4, 0.6], False),
        ({"plateau": 2}, 4, [0.5, 0.6, 0.5], False),
        ({"plateau": 2}, 5, [0.5, 0.6, 0.5, 0.5], True),
        ({"every": 5, "plateau": 3}, 4, [0.5, 0.4, 0.5], False),
    ],
)
def test_when_pass_rates_are_measured(
    settings: dict[str, int], step: int, rewards: list[float], due: bool, tmp_path: Path
) -> None:
    curricula = made(tmp_path, **{"every": None, **settings})

    why = curricula.due(step, [(at, reward) for at, reward in enumerate(rewards, start=step - len(rewards) + 1)])

    assert (why is not None) == due


def test_measurements_are_spaced_and_limited(tmp_path: Path) -> None:
    curricula = made(tmp_path, plateau=1, times=2)
    flat = [(step, 0.5) for step in range(9)]

    curricula.begin(Change(step=2, drawn=4, why="", checkpoint="checkpoint-2"))

    assert curricula.due(2, flat) is None, "a run that resumes at the change does not change again"
    assert curricula.due(3, flat[:3]) is None, "validations before the change do not count"
    assert curricula.due(3, flat)
    curricula.begin(Change(step=3, drawn=6, why="", checkpoint="checkpoint-3"))
    assert curricula.due(7, flat) is None
    curricula.forget_after(2)
    assert [change.step for change in curricula.changes()] == [2]


@pytest.mark.slow
def test_the_next_tasks_come_from_the_new_curriculum(tmp_path: Path) -> None:
    curricula, before = made(tmp_path, samples=4), plan(tmp_path)
    answer(curricula, 1, lambda n: n % 5, step=2)
    after = plan(tmp_path)

    curricula.follow(after)

    assert [after[n].id for n in range(4)] == [before[n].id for n in range(4)]
    drawn = [int(after[n].id[1:]) for n in range(4, 16)]
    assert all(n % 5 != 4 for n in drawn), "tasks that are always solved are excluded"
    assert sum(n % 5 for n in drawn[:4]) > sum(n % 5 for n in drawn[-4:]), "from easy to hard"
    result = curricula.result(1)
    assert result is not None and result.kept is None
    assert result.solved == [3, 3, 2, 2, 2]
    assert result.pass_rate == pytest.approx((3 + 4 + 6 + 8) / 48)


@pytest.mark.slow
def test_curricula_follow_each_other(tmp_path: Path) -> None:
    """New curricula have the settings of the run's first one and none of its drawn prompts."""
    from nemo_ext.data.curriculum.job import run
    from nemo_ext.job.config import compose

    path, rollouts = tasks(tmp_path, 40), tmp_path / "rollouts.jsonl"
    write_jsonl(rollouts, ({"id": f"t{n}", "reward": n % 2} for n in range(40) for _ in "ab"))
    words = [f"prompts={path}", f"rollouts={rollouts}", f"output={tmp_path / 'first'}", "batch=2", "steps=8"]
    run(compose("curriculum", [*words, "filters.drop_from=null", "sigma=0.3"]))
    train = {"curriculum": str(tmp_path / "first")}
    curricula = made(tmp_path, train, samples=2, times=2, curriculum={"mean_last": 0.4})
    assert len(curricula.tasks) == 40, "all prompts of the first curriculum, not only the drawn ones"

    for number, step in ((1, 2), (2, 5)):
        answer(curricula, number, lambda n: n % 3, step=step)
    planned = plan(tmp_path, train)
    curricula.follow(planned)

    drawn = [planned[n].id for n in range(16)]
    assert len(set(drawn)) == 16, "none is drawn twice"
    for number, steps in ((1, 6), (2, 3)):
        stats = json.loads((curricula.of_number(number) / "curriculum.json").read_text())
        assert (stats["steps"], stats["settings"]["sigma"], stats["settings"]["mean_last"]) == (steps, 0.3, 0.4)
        assert stats["settings"]["filters"]["drop_from"] is None


def test_the_order_is_kept_if_all_tasks_are_solved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curricula = made(tmp_path, samples=2)
    answer(curricula, 1, lambda n: 2, step=2)
    planned = plan(tmp_path)

    curricula.follow(planned)

    assert [planned[n].id for n in range(16)] == [plan(tmp_path)[n].id for n in range(16)]
    result = curricula.result(1)
    assert result is not None and "no prompt is left to train on" in str(result.kept)
    assert "training continues in the old order" in capsys.readouterr().err


def test_rollouts_of_other_tasks_are_an_error(tmp_path: Path) -> None:
    curricula = made(tmp_path, samples=2)
    curricula.begin(Change(step=2, drawn=4, why="2 steps", checkpoint="checkpoint-2"))
    (curricula.of_number(1) / ROLLOUTS).write_text('{"id": "other", "reward": 1.0}\n')

    with pytest.raises(ValueError, match="none of the 12 prompts has an id that is in the profile"):
        curricula.make(1)
    assert curricula.result(1) is None


def test_a_curriculum_without_its_prompts_is_reported(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    (first / "curriculum.json").write_text(json.dumps({"settings": {"prompts": ["gone.jsonl"]}, "steps": 8}))
    train = {"curriculum": str(first), "reprofile": {"every": 2}}
    curricula = Curricula.from_config(train, tmp_path / "run", prompts=2, steps=8)
    assert curricula is not None

    with pytest.raises(ValueError, match=r"requires the prompts of the curriculum .*first \(gone\.jsonl\)"):
        curricula.read_tasks(plan(tmp_path))


@pytest.mark.parametrize(
    ("reprofile", "said"),
    [
        ({}, "^tasks.train.reprofile requires every"),
        ({"every": 0}, "every"),
        ({"plateu": 3}, "did you mean 'plateau'"),
        ({"every": 2, "curriculum": {"sigmo": 1}}, r"reprofile\.curriculum is invalid .*'sigmo'"),
        ({"every": 2, "curriculum": {"steps": 9}}, "is determined by the run"),
        ({"every": 2, "curriculum": {"split_domains": True}}, "is determined by the run"),
    ],
)
def test_invalid_settings_are_reported(reprofile: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        Curricula.from_config({"path": "x", "reprofile": reprofile}, tmp_path, prompts=2, steps=8)


def test_ids_must_be_unique(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        tasks(tmp_path / name).rename(tmp_path / f"{name}.jsonl")
    train = {"directory": str(tmp_path), "blend": {"a": 1, "b": 1}}

    with pytest.raises(ValueError, match="2 tasks have the id 't0'"):
        made(tmp_path, train)
    with pytest.raises(ValueError, match=r"reprofile and tasks\.train\.adapt"):
        made(tmp_path, {**train, "adapt": {}})
    assert Curricula.from_config(train, tmp_path, prompts=2, steps=8) is None
    assert not (tmp_path / "run" / "curricula" / "1" / BEGUN).exists()
