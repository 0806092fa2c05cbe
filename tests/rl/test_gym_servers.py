"""NeMo Gym's own environments, from the files of the installed package."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_ext.job.config import compose
from nemo_ext.rl import gym_servers
from nemo_ext.rl.environments import make
from nemo_ext.rl.gym.install import run as write_gym
from nemo_ext.rl.gym_servers import gym_row, gym_server, gym_task
from nemo_ext.rl.job import checked_algorithm
from nemo_ext.rl.plan import TaskFile, plan_tasks
from nemo_ext.rl.tasks.job import run as make_tasks

pytestmark = pytest.mark.gym


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("nemo_gym", reason="needs nemo-gym")


def tasks(folder: Path, name: str, *words: str) -> Path:
    make_tasks(compose("rl_tasks", [f"environment=gym-{name}", f"output={folder}/gym-{name}.jsonl", *words]))
    return folder / f"gym-{name}.jsonl"


@pytest.mark.parametrize("name", ["mcqa", "workplace_assistant", "swe_pivot", "swebench_openhands_training"])
def test_tasks_keep_rows_unchanged(name: str, tmp_path: Path) -> None:
    server = gym_server(f"gym-{name}")
    assert server.examples is not None
    rows = [json.loads(line) for line in server.examples.read_text().splitlines()]

    made = TaskFile(tasks(tmp_path, name)).tasks

    sent = [gym_row(task) for task in made]
    agents = [row.pop("agent_ref")["name"] for row in sent]
    assert sent == [{key: value for key, value in row.items() if key != "agent_ref"} for row in rows]
    assert set(agents) <= set(server.agents) and all(task.prompt[-1].content for task in made)


def test_a_row_sets_the_mode_and_keeps_its_other_template_arguments() -> None:
    set_by_row = {"metadata": {"chat_template_kwargs": '{"enable_thinking": false, "low_effort": true}', "user": "a"}}
    row = {"responses_create_params": {"input": "?", **set_by_row}}

    task = gym_task(row, gym_server("gym-mcqa"), "rows.jsonl:1")

    assert task.thinking is False and gym_row(task)["responses_create_params"] == row["responses_create_params"]
    sent = gym_row(replace(task, thinking=True))["responses_create_params"]["metadata"]
    assert sent["user"] == "a"
    assert json.loads(sent["chat_template_kwargs"]) == {"enable_thinking": True, "low_effort": True}


def test_rows_without_an_id_in_files_of_equal_names_are_kept(tmp_path: Path) -> None:
    rows = [{"responses_create_params": {"input": text}} for text in ("1 + 1?", "2 + 2?")]
    files = [tmp_path / folder / "train.jsonl" for folder in "ab"]
    for file, row in zip(files, rows, strict=True):
        file.parent.mkdir()
        file.write_text(json.dumps(row) + "\n")

    made = TaskFile(tasks(tmp_path, "mcqa", f"records=[{files[0]}, {files[1]}]")).tasks

    assert [task.prompt[0].content for task in made] == ["1 + 1?", "2 + 2?"]


def test_the_gym_of_a_checkout_precedes_the_installed_package(tmp_path: Path) -> None:
    config = tmp_path / "3rdparty/Gym-workspace/Gym/resources_servers/added/configs/added.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("{player: {responses_api_agents: {simple_agent: {}}}}")

    assert gym_server("gym-added", tmp_path).agents == ("player",)


def test_shares_count_both_kinds(tmp_path: Path) -> None:
    tasks(tmp_path, "mcqa")
    make_tasks(compose("rl_tasks", ["generator=arithmetic", "count=5", f"output={tmp_path}/math.jsonl"]))
    streams = [{"name": "math", "weight": 1}, {"name": "gym-mcqa", "weight": 3}]

    planned = plan_tasks({"directory": str(tmp_path), "streams": streams}, steps=2, prompts=4)

    assert [planned[number].environment for number in range(8)].count("gym-mcqa") == 6
    written = {
        "output": str(tmp_path / "servers"),
        "servers": ["math"],
        "tasks": [str(tmp_path / "gym-mcqa.jsonl")],
    }
    write_gym({**written, "seed": 1})
    rows = (tmp_path / "servers/resources_servers/nemo_ext/data/gym-mcqa/tasks.jsonl").read_text().splitlines()
    assert len(rows) == 5 and json.loads(rows[0])["agent_ref"]["name"] == "mcqa_simple_agent"


def test_what_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="did you mean 'gym-mcqa'"):
        gym_server("gym-mcqq")
    with pytest.raises(ValueError, match=r"physics_judge/configs/judge_openai\.yaml has no agent"):
        gym_server("gym-judge_openai")
    with pytest.raises(ValueError, match="but has question, answer"):
        gym_task({"question": "?", "answer": 1}, gym_server("gym-mcqa"), "rows.jsonl:1")
    row = {"responses_create_params": {"input": "Fix it."}}
    kwargs = {"responses_create_params": {"input": "?", "metadata": {"chat_template_kwargs": "[1]"}}}
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*chat_template_kwargs: expected a JSON object"):
        gym_task(kwargs, gym_server("gym-mcqa"), "rows.jsonl:1")
    with pytest.raises(ValueError, match=r"reasoning_gym/configs/rewoo_agent\.yaml and responses_api_agents/langgraph"):
        gym_server("gym-rewoo_agent")
    with pytest.raises(ValueError, match="must be swe_agents_train or swe_agents_val"):
        gym_task(row, gym_server("gym-swebench_openhands_training"), "rows.jsonl:1")
    with pytest.raises(ValueError, match="engine=nemo_rl` supports"):
        make("gym-mcqa")
    words = ["preset=rl_zero", "model=m", "tasks.train.path=t", "environments={gym-mcqa: {}}"]
    with pytest.raises(ValueError, match="requires engine=nemo_rl"):
        checked_algorithm(compose("rl", words))
    monkeypatch.setattr(gym_servers, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'nemo_ext\[gym\]'"):
        gym_server("gym-mcqa", tmp_path)
