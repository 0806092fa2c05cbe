import json
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job.config import compose
from nemo_ext.rl.plan import TaskFile
from nemo_ext.rl.rewards.genrm import genrm_reward
from nemo_ext.rl.tasks import generate
from nemo_ext.rl.tasks.job import run
from nemo_ext.rl.worlds.python_tool import TOOL
from tests.json_lines import write_jsonl

CHATS = [
    {
        "id": "two",
        "messages": [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "yo"), ("user", "so?"))],
    },
    {"conversations": [{"from": "human", "value": "ShareGPT"}, {"from": "gpt", "value": "yes"}]},
    {"id": "two", "messages": [{"role": "user", "content": "again"}]},
    {"id": "none", "messages": [{"role": "assistant", "content": "first"}]},
    {"id": "bad"},
]


def comparison(**changed: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "2 + 2?"}]
    messages += [{"role": f"response_{place}", "content": text} for place, text in ((1, "4"), (2, "<|eot|>5"))]
    return {"id": "p", "messages": messages, "score_1": 5, "score_2": None, "ranking": 1, "swapped": False} | changed


def job(*words: str) -> None:
    run(compose("rl_tasks", list(words)))


def test_conversations_become_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, output = write_jsonl(tmp_path / "chats.jsonl", CHATS), tmp_path / "tasks.jsonl"

    job(f"records={records}", "environment=chat", f"output={output}", "thinking=true")

    tasks = TaskFile(output).tasks
    assert [[message.content for message in task.prompt] for task in tasks] == [
        ["hi", "yo", "so?"],
        ["ShareGPT"],
    ]
    assert {(task.environment, task.thinking) for task in (tasks[0], tasks[1])} == {("chat", True)}
    said = capsys.readouterr().out
    for reason in ("1 schema", "1 with a duplicate id", "1 without a prompt"):
        assert reason in said


def test_tasks_of_mathematics_get_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks, output = [*generate("arithmetic", 2, seed=1), *generate("tables", 1, seed=1)], tmp_path / "tasks.jsonl"

    job(
        f"records={write_jsonl(tmp_path / 'math.jsonl', [task.record() for task in tasks])}",
        "environment=python_tool",
        f"output={output}",
    )

    made = TaskFile(output).tasks
    assert [(task.prompt, task.reference) for task in made] == [(task.prompt, task.reference) for task in tasks[:2]]
    assert all(task.environment == "python_tool" and task.tools == (TOOL.schema,) for task in made)
    assert "1 of another environment than math" in capsys.readouterr().out


def test_tasks_in_a_terminal_get_the_shell(tmp_path: Path) -> None:
    record = {"id": "1", "environment": "terminal", "prompt": "Write 7 to total.txt.", "reference": {"test": "true"}}
    output = tmp_path / "tasks.jsonl"

    job(f"records={write_jsonl(tmp_path / 'shell.jsonl', [record])}", "environment=terminal", f"output={output}")

    (task,) = TaskFile(output).tasks
    assert task.environment == "terminal" and task.tools[0]["function"]["name"] == "bash"


def test_comparisons_become_tasks_for_any_chat_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [comparison(), comparison(id="q", ranking=7), comparison(id="r", messages=[])]
    output = tmp_path / "tasks.jsonl"

    job(f"records={write_jsonl(tmp_path / 'genrm.jsonl', records)}", "environment=genrm", f"output={output}")

    (task,) = TaskFile(output).tasks
    assert task.reference == {"score_1": 5, "ranking": 1}
    (asked,) = task.prompt
    assert asked.role == "user"
    assert "user: 2 + 2?" in asked.content
    assert "<|eot|>" not in asked.content, "no special token of the policy's template"
    assert "2 schema" in capsys.readouterr().out


def test_labels_become_judgements_to_train_on(tmp_path: Path) -> None:
    scores = {"score_1": 5, "score_2": 1, "ranking": 1}
    records, chats = write_jsonl(tmp_path / "genrm.jsonl", [comparison(**scores)]), tmp_path / "chats.jsonl"
    words = ["environment=genrm", f"output={tmp_path / 'tasks.jsonl'}", f"solutions={chats}", "thinking=false"]

    job(f"records={records}", *words)

    (chat,) = map(json.loads, chats.read_text().splitlines())
    (task,) = TaskFile(tmp_path / "tasks.jsonl").tasks
    asked, answer = chat["messages"]
    assert (asked["content"], chat["thinking"]) == (task.prompt[0].content, False)
    reward = genrm_reward(answer["content"], helpfulness=(5, 1), ranking=1)
    assert reward.total == 0, "the best that a judge can earn"
    write_jsonl(records, [comparison()])
    with pytest.raises(ValueError, match="p has no score_2"):
        job(f"records={records}", *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["environment=chats"], "did you mean 'chat'"),
        ([], "environment=null: set it to the kind of tasks to make: chat, genrm, python_tool, terminal or gym-NAME"),
        (["environment=chat", "solutions=chats.jsonl"], "solutions=chats.jsonl applies only to generated tasks and"),
        (["environment=chat", "level=1"], "level=1 applies only to generated tasks"),
        (["environment=genrm"], "none of the 5 records can be made into a task"),
        (["environment=chat", "count=0"], "count"),
    ],
)
def test_errors_name_the_problem(words: list[str], said: str, tmp_path: Path) -> None:
    records = write_jsonl(tmp_path / "chats.jsonl", CHATS)

    with pytest.raises(ValueError, match=said):
        job(f"records={records}", f"output={tmp_path / 'out.jsonl'}", *words)
    assert not (tmp_path / "out.jsonl").exists()
