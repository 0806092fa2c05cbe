"""The `nemo-ext gym` job: writes DIR/resources_servers/nemo_ext with server configs and example data for NeMo Gym.

Gym searches the directory it is started in before its own tree, so its tree need not be changed. Each config has a
server and its agent; the model server is Gym's own.
"""

import functools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from nemo_ext import __version__
from nemo_ext.job.files import write_text
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import checked, nearest
from nemo_ext.rl.environments import GYM, make
from nemo_ext.rl.gym.rows import SERVER, agent_of, to_gym
from nemo_ext.rl.gym_servers import check_reference, gym_row
from nemo_ext.rl.plan import TaskFile
from nemo_ext.rl.settings import GymSettings
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import generate

EXAMPLES = 5
"""Number of rows in example.jsonl, as required by `gym env test`."""
_JUDGE = {
    "endpoint": "${nemo_ext_judge_endpoint}",
    "model": "${nemo_ext_judge_model}",
    "attempt_seconds": 120,
    "total_seconds": 600,
}
_APP = """\
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint

from nemo_ext.rl.gym.{module} import {server}

if __name__ == "__main__":
    {server}.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = {server}.run_webserver()
"""


@dataclass(frozen=True)
class Served:
    """Gym server of an environment, and its agent.

    Attributes:
        domain: one of Gym's domains.
        agent: name of the agent; gymnasium_agent if a user speaks between the model's turns.
        max_steps: the agent's step limit; None for its default.
        entrypoint: file in the server's folder that starts it.
    """

    domain: str
    description: str
    generator: str
    config: Mapping[str, Any]
    _: KW_ONLY
    agent: str = "simple_agent"
    max_steps: int | None = None
    entrypoint: str = "app.py"


SERVERS: Mapping[str, Served] = {
    "math": Served("math", "Mathematics by math-verify, with a time limit", "arithmetic", {"environment": "math"}),
    "python_tool": Served(
        "math",
        "Mathematics with Python as a tool, in a sandbox",
        "python_tool",
        {"environment": "python_tool", "settings": {"max_calls": 16}},
        max_steps=17,
    ),
    "domyn_math": Served(
        "math",
        "Mathematics with Domyn-Small's reward: correctness, format and length",
        "arithmetic",
        {"environment": "math", "reward": {"name": "domyn_math", "max_tokens": 8192}},
    ),
    "multiple_choice": Served("knowledge", "Multiple choice", "tables", {"environment": "multiple_choice"}),
    "instructions": Served(
        "instruction_following",
        "Instructions that a program can check, without downloads",
        "instructions",
        {"environment": "instructions"},
    ),
    "structured_output": Served(
        "instruction_following", "JSON by a schema", "schemas", {"environment": "structured_output"}
    ),
    "code": Served("coding", "Python and C++ programs, each test in a sandbox", "programs", {"environment": "code"}),
    "workplace": Served(
        "agent", "A workplace of five databases with tools", "workplace", {"environment": "workplace"}, max_steps=6
    ),
    "bank": Served(
        "agent",
        "A bank's service desk: tools, and a customer to ask, in five turns",
        "bank",
        {"environment": "bank", "settings": {"max_turns": 5}},
        agent="gymnasium_agent",
        max_steps=5,
    ),
    "judge": Served(
        "knowledge",
        "Equivalence to a reference answer, by a judge with time limits",
        "arithmetic",
        {"environment": "judge", "settings": {"judge": _JUDGE}},
    ),
    "genrm": Served(
        "rlhf",
        "Groups compared by a generative reward model with time limits",
        "instructions",
        {"judge": _JUDGE, "group_size": 16, "wait_seconds": 3600, "show": "genrm"},
        entrypoint="comparison.py",
    ),
}


def run(config: Mapping[str, Any]) -> str:
    """Write the Gym server's folder and return its start command; ValueError if settings or tasks are invalid."""
    settings = checked(GymSettings, config)
    names = settings.servers or tuple(SERVERS)
    for name in names:
        if name not in SERVERS:
            raise ValueError(f"servers has an unknown server {name!r}: {nearest(str(name), SERVERS)}")
    files = _files(names, settings.seed, [Path(path).expanduser() for path in settings.tasks])
    folder = Path(str(settings.output)).expanduser() / "resources_servers" / SERVER
    for path, text in files.items():
        write_text(folder / path, text)
    notice(f"wrote {len(names)} servers to {folder}")
    start = f"gym env start --config resources_servers/{SERVER}/configs/{names[0]}.yaml --model-type vllm_model"
    return f"cd {shlex.quote(str(settings.output))} && {start} --model-url URL --model-api-key KEY --model NAME"


def server_config(name: str) -> dict[str, Any]:
    """Return Gym's config of a server and its agent, called nemo_ext_NAME and nemo_ext_NAME_agent."""
    served = SERVERS[name]
    data = {"name": "example", "type": "example", "jsonl_fpath": f"resources_servers/{SERVER}/{_example(name)}"}
    return _instance(name, served, SERVER, {"datasets": [data]})


def _instance(name: str, served: Served, folder: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server's config.

    `folder` is the server's folder in Gym's resources_servers, and `more` holds further keys of its agent.
    """
    instance = f"{SERVER}_{name}"
    agent: dict[str, Any] = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": instance},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        **({} if served.max_steps is None else {"max_steps": served.max_steps}),
        **more,
    }
    server = {
        "entrypoint": served.entrypoint,
        "domain": served.domain,
        "verified": False,
        "description": served.description,
        **served.config,
    }
    return {
        instance: {"resources_servers": {folder: server}},
        agent_of(name): {"responses_api_agents": {served.agent: agent}},
    }


def servers_of_run(folder: Path, environments: Mapping[str, Mapping[str, Any]]) -> dict[Path, str]:
    """Return the servers' files for a run's environments, as a mapping from path to contents.

    The configs (configs/NAME.yaml) have the folder's absolute path, because NeMo-RL starts Gym in another directory.

    Args:
        folder: folder of the servers, on all nodes.
        environments: mapping from our environments to their `settings` and `reward`.

    Raises:
        ValueError: a setting is invalid, or an environment compares the responses of a group.
    """
    files: dict[Path, str] = {}
    for name, use in environments.items():
        environment = make(name, use.get("settings"))
        if environment.judged_in_groups:
            raise ValueError(
                f"environment {name} compares the responses of a group, which NeMo Gym cannot do in a training run; "
                "remove it, or remove the environments gym-NAME"
            )
        turns = None if environment.begin is None else environment.max_turns
        agent = SERVERS[name].agent if name in SERVERS else "simple_agent"
        served = Served("other", f"Environment {name}", "", {"environment": name, **use}, agent=agent, max_steps=turns)
        config = _instance(name, served, str(folder.absolute()), {})
        files[folder / "configs" / f"{name}.yaml"] = yaml.safe_dump(config, sort_keys=False)
    if files:
        files[folder / "app.py"] = _APP.format(module="server", server="VerifierServer")
        files[folder / "requirements.txt"] = _requirement() + "\n"
    return files


def environment_config(name: str) -> dict[str, Any]:
    """Return the config of the environment server through which Gym 0.7 and later calls a server's agent."""
    agent = {"type": "responses_api_agents", "name": agent_of(name)}
    server = {"legacy_agent": {"entrypoint": "app.py", "agent_server": agent}}
    return {f"{SERVER}_{name}_environment": {"environment_servers": server}}


def examples(name: str, seed: int) -> list[dict[str, Any]]:
    """Generate example rows for trying out a server."""
    return [to_gym(_for_server(name, task)) for task in generate(SERVERS[name].generator, EXAMPLES, seed=seed)]


def _example(name: str) -> str:
    return f"data/{name}/example.jsonl"


def _for_server(name: str, task: Task) -> Task:
    """Return a generated task in the form that server `name` takes."""
    if name == "judge":
        reference = {"question": task.prompt[-1].content, "answer": str(task.reference["answer"])}
        return replace(task, environment="judge", domain="judge", reference=reference)
    if name == "genrm":  # compares responses, without a reference
        return replace(task, environment="genrm", domain="genrm", reference={})
    return task


def _files(names: Sequence[str], seed: int, tasks: list[Path]) -> dict[str, str]:
    """Return the files to write, by path in the servers' folder; `tasks` are task files to convert into rows."""
    files = {
        "app.py": _APP.format(module="server", server="VerifierServer"),
        "comparison.py": _APP.format(module="comparison", server="ComparisonServer"),
        "requirements.txt": _requirement() + "\n",
    }
    for name in names:
        files[f"configs/{name}.yaml"] = yaml.safe_dump(server_config(name), sort_keys=False)
        files[f"environments/{name}.yaml"] = yaml.safe_dump(environment_config(name), sort_keys=False)
        files[_example(name)] = _lines(examples(name, seed))
    by_environment: dict[str, list[dict[str, Any]]] = {}
    for path in tasks:
        for task in _tasks(path):
            row = gym_row(task) if task.environment.startswith(GYM) else to_gym(task)
            by_environment.setdefault(task.environment, []).append(row)
    for environment, rows in by_environment.items():
        files[f"data/{environment}/tasks.jsonl"] = _lines(rows)
    return files


def _tasks(path: Path) -> list[Task]:
    """Read a file's tasks and check their references, except for judge tasks, which their server checks."""
    file = TaskFile(path, repeats=True)
    check = functools.cache(lambda name: make(name).check)
    for task, place in zip(file.tasks, file.places, strict=True):
        try:
            if task.environment.startswith(GYM):
                check_reference(task)
            elif task.environment != "judge":
                check(task.environment)(task.reference)
        except ValueError as error:
            raise ValueError(f"{place}: task {task.id!r} cannot be verified: {error}") from None
    return file.tasks


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _requirement() -> str:
    """Return the requirement line for this package, which Gym installs into the server's environment."""
    root = Path(__file__).parents[3]
    return f"{SERVER}[gym] @ {root.as_uri()}" if (root / "pyproject.toml").exists() else f"{SERVER}[gym]=={__version__}"
