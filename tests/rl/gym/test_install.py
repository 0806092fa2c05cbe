"""The folder with servers for NeMo Gym."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_ext.rl.environments import make
from nemo_ext.rl.gym.install import SERVERS, examples, run, server_config
from nemo_ext.rl.gym.rows import of_gym
from nemo_ext.rl.tasks import generate
from tests.json_lines import write_jsonl


def config(folder: Path, **given: Any) -> dict[str, Any]:
    return {"output": str(folder), "servers": None, "tasks": [], "seed": 1, **given}


def test_all_files_that_gym_reads_exist(tmp_path: Path) -> None:
    assert run(config(tmp_path)).startswith(
        f"cd {tmp_path} && gym env start --config resources_servers/nemo_ext/configs/"
    )

    folder = tmp_path / "resources_servers" / "nemo_ext"
    assert {path.stem for path in (folder / "configs").iterdir()} == set(SERVERS)
    requirement = (folder / "requirements.txt").read_text()
    assert requirement.startswith("nemo_ext[gym]") and "../.." not in requirement  # Gym leaves out lines with that
    for name in SERVERS:
        made = yaml.safe_load((folder / "configs" / f"{name}.yaml").read_text())
        reached = yaml.safe_load((folder / "environments" / f"{name}.yaml").read_text())[f"nemo_ext_{name}_environment"]
        assert reached["environment_servers"]["legacy_agent"]["agent_server"]["name"] in made
        agent = next(iter(made[f"nemo_ext_{name}_agent"]["responses_api_agents"].values()))
        (data,) = agent["datasets"]
        assert len((tmp_path / data["jsonl_fpath"]).read_text().splitlines()) == 5
        entrypoint = made[f"nemo_ext_{name}"]["resources_servers"]["nemo_ext"]["entrypoint"]
        assert (folder / entrypoint).exists()


def test_repeating_the_command_writes_the_same_files(tmp_path: Path) -> None:
    run(config(tmp_path, servers=["bank"]))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    run(config(tmp_path, servers=["bank"]))

    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [name for name in SERVERS if name != "genrm"])
def test_the_examples_are_valid_tasks_of_the_server(name: str) -> None:
    settings = dict(SERVERS[name].config.get("settings", {}))
    if name == "judge":
        settings["judge"] = {"endpoint": "http://localhost:1/v1", "model": "judge"}
    environment = make(SERVERS[name].config["environment"], settings)

    for row in examples(name, seed=1):
        environment.check(of_gym(row, environment.name).reference)


def test_the_agent_allows_every_turn_of_the_bank(tmp_path: Path) -> None:
    # If the agent stopped first, the conversation would have no verdict.
    made = server_config("bank")

    agent = made["nemo_ext_bank_agent"]["responses_api_agents"]["gymnasium_agent"]
    assert agent["max_steps"] == made["nemo_ext_bank"]["resources_servers"]["nemo_ext"]["settings"]["max_turns"] == 5


def test_task_files_become_rows(tmp_path: Path) -> None:
    tasks = [*generate("bank", 3, seed=2), *generate("arithmetic", 2, seed=2)]
    path = write_jsonl(tmp_path / "tasks.jsonl", (task.record() for task in tasks))

    run(config(tmp_path, servers=["bank"], tasks=[str(path)]))

    folder = tmp_path / "resources_servers" / "nemo_ext" / "data"
    rows = {name: (folder / name / "tasks.jsonl").read_text().splitlines() for name in ("bank", "math")}
    assert [of_gym(json.loads(line), "bank").id for line in rows["bank"]] == [task.id for task in tasks[:3]]
    assert len(rows["math"]) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output": None}, "output=null"),
        ({"servers": ["banks"]}, "did you mean 'bank'"),
        ({"seed": "x"}, "seed=.x.: input should be"),
        ({"tasks": ["{folder}/broken.jsonl"]}, r"broken.jsonl:1: .* \(not JSON"),
        ({"tasks": ["{folder}/wrong.jsonl"]}, "wrong.jsonl:1: task '1' cannot be verified: .*did you mean 'answer'"),
        ({"tasks": ["{folder}/none.jsonl"]}, "none.jsonl"),
    ],
)
def test_invalid_settings_and_tasks_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    (tmp_path / "broken.jsonl").write_text("{\n")
    wrong = {"id": "1", "environment": "math", "prompt": "?", "reference": {"anwser": "1"}}
    (tmp_path / "wrong.jsonl").write_text(json.dumps(wrong) + "\n")
    if "tasks" in given:
        given = {"tasks": [path.format(folder=tmp_path) for path in given["tasks"]]}

    with pytest.raises(ValueError, match=message):
        run(config(tmp_path / "made", **given))

    assert not (tmp_path / "made").exists()


@pytest.mark.gym
@pytest.mark.parametrize("name", SERVERS)
def test_gym_accepts_the_configs(name: str) -> None:
    pytest.importorskip("nemo_gym", reason="needs nemo-gym")
    from nemo_gym.config_types import maybe_get_server_instance_config
    from omegaconf import OmegaConf

    given = OmegaConf.create(
        server_config(name) | {"nemo_ext_judge_endpoint": "http://x/v1", "nemo_ext_judge_model": "m"}
    )
    for instance in (f"nemo_ext_{name}", f"nemo_ext_{name}_agent"):
        made, error = maybe_get_server_instance_config(instance, given[instance])

        assert error is None and made is not None and made.name == instance


@pytest.mark.gym
@pytest.mark.parametrize("name", SERVERS)
def test_the_servers_accept_their_configs(name: str, serve: Any, tmp_path: Path) -> None:
    given = server_config(name)[f"nemo_ext_{name}"]["resources_servers"]["nemo_ext"]
    text = json.dumps(given).replace("${nemo_ext_judge_endpoint}", "http://localhost:1/v1")

    serve(**json.loads(text))

    run(config(tmp_path, servers=[name]))
    app = runpy.run_path(str(tmp_path / "resources_servers" / "nemo_ext" / given["entrypoint"]), run_name="app")
    assert ("ComparisonServer" if name == "genrm" else "VerifierServer") in app


def test_writing_the_folder_does_not_need_gym(tmp_path: Path) -> None:
    code = f"""
import sys
from nemo_ext.rl.gym.install import run
run({config(tmp_path)!r})
assert not {{"nemo_gym", "ray", "torch", "fastapi"}} & set(sys.modules), sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
