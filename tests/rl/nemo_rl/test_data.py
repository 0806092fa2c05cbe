import itertools
import json
import pickle
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.curriculum.job import run as make_curriculum
from nemo_ext.data.curriculum.layout import CURRICULUM
from nemo_ext.job.config import compose
from nemo_ext.rl.nemo_rl.data import AdaptiveTasks, Records
from nemo_ext.rl.plan import TaskFile, check_references, plan_tasks
from tests.json_lines import write_jsonl


def records(name: str, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{name}-{n}",
            "environment": "math",
            "domain": name,
            "prompt": f"{name} {n}?",
            "reference": {"answer": n},
        }
        for n in range(count)
    ]


@pytest.fixture
def blend(jsonl: Callable[..., Path]) -> dict[str, Any]:
    for name, count in (("algebra", 10), ("code", 7), ("chat_it", 4), ("chat_de", 3)):
        folder = jsonl(f"{name}.jsonl", records(name, count)).parent
    chat = {"share": 20, "by": "tiers", "names": "chat_*", "of": {"A": {"share": 0.75, "of": ["it"]}, "B": ["de"]}}
    return {"directory": str(folder), "blend": {"algebra": 50, "code": 30, "chat": chat}, "seed": 3}


def test_every_step_has_each_streams_quota(blend: dict[str, Any]) -> None:
    tasks = plan_tasks(blend, steps=30, prompts=20)

    steps = [Counter(tasks[20 * step + slot].domain for slot in range(20)) for step in range(30)]

    assert all(step == {"algebra": 10, "code": 6, "chat_it": 3, "chat_de": 1} for step in steps)
    # Every pass over a file has each of its tasks once.
    algebra = [tasks[at].id for at in range(len(tasks)) if tasks[at].domain == "algebra"]
    passes = [tuple(algebra[at : at + 10]) for at in range(0, len(algebra), 10)]
    assert all(len(set(one)) == 10 for one in passes) and len(set(passes)) == len(passes)


@given(
    weights=st.lists(st.integers(1, 50), min_size=3, max_size=3), prompts=st.integers(1, 17), steps=st.integers(1, 40)
)
def test_shares_that_do_not_divide_a_step_even_out(
    tmp_path_factory: pytest.TempPathFactory, weights: list[int], prompts: int, steps: int
) -> None:
    folder = tmp_path_factory.mktemp("blend")
    for name in "abc":
        write_jsonl(folder / f"{name}.jsonl", records(name, 5))
    blend = {"directory": str(folder), "blend": dict(zip("abc", weights, strict=True))}

    tasks = plan_tasks(blend, steps=steps, prompts=prompts)

    assert len(tasks) == steps * prompts
    drawn = Counter(tasks[at].domain for at in range(len(tasks)))
    for name, weight in zip("abc", weights, strict=True):
        assert abs(drawn[name] - Fraction(weight, sum(weights)) * steps * prompts) <= 2


def test_an_item_depends_on_its_number_alone(blend: dict[str, Any]) -> None:
    whole = plan_tasks(blend, steps=12, prompts=10)
    ids = [whole[at].id for at in range(len(whole))]
    again = pickle.loads(pickle.dumps(plan_tasks(blend, steps=50, prompts=10)))

    assert [again[at].id for at in reversed(range(60, 120))] == ids[:59:-1]
    assert [plan_tasks({**blend, "seed": 4}, steps=12, prompts=10)[at].id for at in range(120)] != ids
    with pytest.raises(IndexError):
        whole[len(whole)]


def test_a_file_is_read_in_its_order_or_anew_every_pass(jsonl: Callable[..., Path]) -> None:
    path = jsonl("tasks.jsonl", records("a", 6))

    kept = plan_tasks({"path": str(path), "shuffle": False}, steps=4, prompts=3)
    mixed = plan_tasks({"path": str(path)}, steps=4, prompts=3)

    assert [kept[at].id for at in range(12)] == [f"a-{n % 6}" for n in range(12)]
    passes = [[mixed[at].id for at in range(begin, begin + 6)] for begin in (0, 6)]
    assert sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1]


def test_a_curriculum_keeps_its_order(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    prompts = jsonl("prompts.jsonl", [*records("math", 40), *records("code", 20)])
    names = [f"{name}-{n}" for name, count in (("math", 40), ("code", 20)) for n in range(count)]
    rollouts = jsonl("rollouts.jsonl", [{"id": name, "reward": int(r < 2)} for name in names for r in range(4)])
    words = [f"prompts={prompts}", f"rollouts={rollouts}", f"output={tmp_path / 'made'}", "batch=6"]
    make_curriculum(compose("curriculum", words))
    order = [json.loads(line)["id"] for line in (tmp_path / "made" / CURRICULUM).read_text().splitlines()]
    steps = len(order) // 6

    tasks = plan_tasks({"curriculum": str(tmp_path / "made")}, steps=steps, prompts=6, spare=1)

    assert [tasks[at].id for at in range(len(tasks))] == [*order, *order[:6]]
    with pytest.raises(ValueError, match="has 6 prompts per step, but the run has 8"):
        plan_tasks({"curriculum": str(tmp_path / "made")}, steps=2, prompts=8)
    with pytest.raises(ValueError, match=f"curriculum has {steps} steps, fewer than the run's {steps + 1}"):
        plan_tasks({"curriculum": str(tmp_path / "made")}, steps=steps + 1, prompts=6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tasks"),
        ("\n \n", "no tasks"),
        ('{"id": 1', r"tasks.jsonl:1: the record cannot be read \(not JSON"),
        ("[1]", r"tasks.jsonl:1: .* \(not a JSON object but a list\)"),
        ('\n{"id": "a", "environment": "math"}', r"tasks.jsonl:2: the key 'prompt' is missing"),
        ('{"id": "a", "environment": "math", "prompt": "?"}\n' * 2, r"tasks.jsonl:2: duplicate id 'a'"),
        ('{"id": "a", "environment": "math", "promt": "?"}', "did you mean 'prompt'"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)

    with pytest.raises(ValueError, match=message):
        TaskFile(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set exactly one of path, curriculum and directory"),
        ({"path": "a", "curriculum": "b"}, "not path and curriculum"),
        ({"path": "nowhere.jsonl"}, "no such task file"),
        ({"path": "a", "shufle": True}, "did you mean 'shuffle'"),
        ({"path": "a", "shuffle": "no"}, "shuffle=.no.: input should be a valid boolean"),
        ({"curriculum": "nowhere"}, "nemo-ext curriculum"),
        ({"directory": "d", "blend": {"a": -1}}, r"^tasks\.train\.blend\.a must be a number above 0"),
        (
            {"directory": "d", "blend": {"a": {"share": 1, "source": {"kind": "jsonl"}}}},
            r"tasks.train.blend.a.source is not supported",
        ),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_tasks(settings, steps=1, prompts=1)


def test_a_reference_that_no_verifier_can_use_is_found_before_the_run(jsonl: Callable[..., Path]) -> None:
    path = jsonl("tasks.jsonl", records("a", 3))
    tasks = plan_tasks({"path": str(path)}, steps=1, prompts=1)

    def check(task: Any) -> None:
        if task.id in ("a-0", "a-2"):
            raise ValueError("reference.answer: none")

    lines = [rf"tasks.jsonl:{number}: task a-{number - 1}: reference.answer: none" for number in (1, 3)]
    with pytest.raises(ValueError, match=r"\n.*".join(lines)):
        check_references([tasks], check)


def test_all_wrong_lines_of_all_files_are_listed_together(tmp_path: Path) -> None:
    task = '{"id": "%s", "environment": "math", "prompt": "?"}\n'
    (tmp_path / "one.jsonl").write_text(task % "a" + "[1]\n" + task % "a" + task % "b" + task % "b")
    (tmp_path / "two.jsonl").write_text(task % "a" + '{"id": 1\n' * 30)
    settings = {"directory": str(tmp_path), "blend": {"one": {"share": 0.5}, "two": {"share": 0.5}}}

    with pytest.raises(ValueError, match="not a JSON object") as raised:
        plan_tasks(settings, steps=1, prompts=2)

    lines = str(raised.value).splitlines()
    for line, start in zip(
        lines, ("2: the record cannot be read", "3: duplicate id 'a'", "5: duplicate id 'b'"), strict=False
    ):
        assert f"one.jsonl:{start}" in line
    assert "one.jsonl:4; rename one" in lines[2]
    assert "two.jsonl:2: the record cannot be read (not JSON" in lines[3] and lines[-1] == "and 10 more"


def test_a_resumed_dataloader_goes_on_with_the_next_task(blend: dict[str, Any]) -> None:
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata, which NeMo-RL needs, is not there"
    )

    def loader() -> Any:
        ids = Ids(plan_tasks(blend, steps=10, prompts=5))
        return loaders.StatefulDataLoader(ids, batch_size=5, collate_fn=list, drop_last=True)

    whole = list(loader())
    first = loader()
    begun = iter(first)
    for _ in range(4):
        next(begun)
    state = pickle.loads(pickle.dumps(first.state_dict()))

    resumed = loader()
    resumed.load_state_dict(state)

    assert list(resumed) == whole[4:]


def test_a_resumed_dataloader_draws_what_adaptive_shares_would_have(blend: dict[str, Any]) -> None:
    """The state that NeMo-RL saves after a step includes its rewards, but not the next draw."""
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata, which NeMo-RL needs, is not there"
    )

    def begin() -> tuple[AdaptiveTasks, Any]:
        planned = plan_tasks({**blend, "adapt": {"groups": 4}}, steps=8, prompts=10)
        shares = planned.adaptive()
        assert shares is not None
        tasks = AdaptiveTasks(planned, shares, lambda tasks: Records(tasks, ""))
        return tasks, loaders.StatefulDataLoader(tasks, batch_size=10, collate_fn=list, drop_last=True)

    def steps(tasks: AdaptiveTasks, loader: Any, count: int) -> list[Any]:
        seen = []
        for batch in itertools.islice(loader, count):
            drawn = [record["task"] for record in batch]
            seen.append(([task.id for task in drawn], tasks.metrics()))
            tasks.learn([[0, task.domain == "algebra"] for task in drawn])
        return seen

    whole = steps(*begin(), 8)
    tasks, loader = begin()
    first = steps(tasks, loader, 3)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    tasks, loader = begin()
    loader.load_state_dict(state)

    assert first + steps(tasks, loader, 5) == whole
    assert whole[-1][1]["weight/algebra"] > 0.8 > 0.5 == whole[0][1]["weight/algebra"]
    with pytest.raises(ValueError, match="one per group"):
        tasks.learn([[0, 1]])


class Ids:
    def __init__(self, tasks: Any) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, number: int) -> str:
        return str(self.tasks[number].id)
