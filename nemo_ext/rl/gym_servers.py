"""NeMo Gym's own environments, by name, and their rows as tasks. Gym is not imported, only its config files are read.

The environment `gym-NAME` consists of the servers in Gym's file `resources_servers/*/configs/NAME.yaml` or
`responses_api_agents/*/configs/NAME.yaml`. The reference of its tasks is Gym's row, unchanged except for `agent_ref`,
the agent that plays it, which `gym dataset collate` also adds.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from nemo_ext.chat.formats import thinking_mode
from nemo_ext.chat.sample import Message
from nemo_ext.job.seeds import digest
from nemo_ext.job.settings import nearest
from nemo_ext.rl.environments import GYM
from nemo_ext.rl.gym.rows import ARGUMENTS, PARAMETERS, THINKING, agent_of, messages, to_gym
from nemo_ext.rl.task import Task

AGENT = "agent_ref"
_IDS = ("uuid", "id", "task_id", "instance_id")
_AGENTS = "responses_api_agents"


@dataclass(frozen=True, kw_only=True)
class GymServer:
    """One of NeMo Gym's own environments.

    Attributes:
        name: name of the environment, with the prefix `gym-`.
        config: path of its config file in Gym's folder.
        agents: names of the agents in this file; at least one.
        examples: file of example rows; None if there is none.
    """

    name: str
    config: str
    agents: tuple[str, ...]
    examples: Path | None


def gym_folder(checkout: Path | None = None) -> Path:
    """Return the folder with Gym's servers, in the submodule of NeMo-RL's checkout or else in the installed package.

    Raises:
        ValueError: there is neither.
    """
    spec = find_spec("nemo_gym")
    places = [] if checkout is None else [checkout / "3rdparty" / "Gym-workspace" / "Gym"]
    places += [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
    for place in places:
        if (place / "resources_servers").is_dir():
            return place
    raise ValueError(
        "environments gym-NAME require NeMo Gym, which is not installed; install it with "
        "pip install 'nemo_ext[gym]', or clone NeMo-RL with --recursive"
    )


def gym_server(environment: str, checkout: Path | None = None) -> GymServer:
    """Return one of Gym's environments by its name, such as `gym-mcqa`.

    Args:
        environment: name with the prefix `gym-`.
        checkout: NeMo-RL's checkout, which starts its own Gym; None for the installed Gym.

    Raises:
        ValueError: Gym is not installed, the name is unknown or ambiguous, or the file has no agent.
    """
    folder, name = gym_folder(checkout), environment.removeprefix(GYM)
    files: dict[str, list[str]] = {}
    for kind in ("resources_servers", _AGENTS):
        for file in sorted(folder.glob(f"{kind}/*/configs/*.yaml")):
            files.setdefault(file.stem, []).append(file.relative_to(folder).as_posix())
    if name not in files:
        near = get_close_matches(name, files, n=8, cutoff=0.5)
        known = nearest(environment, [GYM + each for each in near]) if near else "its configs/*.yaml have the names"
        raise ValueError(f"unknown environment {environment!r} of NeMo Gym in {folder}: {known}")
    if len(files[name]) > 1:
        raise ValueError(
            f"environment {environment!r} is ambiguous: NeMo Gym in {folder} has {' and '.join(files[name])}; copy one "
            "of them to a new name in its folder, and use this name"
        )
    (config,) = files[name]
    sections = yaml.safe_load((folder / config).read_text(encoding="utf-8")) or {}
    agents = {
        key: next(iter(section[_AGENTS].values()))
        for key, section in sections.items()
        if isinstance(section, Mapping) and section.get(_AGENTS)
    }
    if not agents:
        raise ValueError(
            f"environment {environment!r}: NeMo Gym's {config} has no agent; add one to the file, or use another "
            "environment"
        )
    data = [part for agent in agents.values() for part in agent.get("datasets") or () if part.get("type") == "example"]
    examples = next((folder / part["jsonl_fpath"] for part in data if (folder / part["jsonl_fpath"]).is_file()), None)
    return GymServer(name=environment, config=config, agents=tuple(agents), examples=examples)


def gym_task(row: Mapping[str, Any], server: GymServer, where: str) -> Task:
    """Convert a row of one of Gym's own environments into a task.

    The prompt, for reports and filters, is the row's input; for agents that make it themselves, the row's metadata. A
    row without an id gets a digest of its content as id.

    Raises:
        ValueError: the row is not Gym's, is for another environment, has an input other than text, or has invalid
            arguments for the chat template.
    """
    parameters = row.get(PARAMETERS)
    if not isinstance(parameters, Mapping) or "input" not in parameters:
        raise ValueError(
            f"{where}: the row must have the column {PARAMETERS} with the key input, but has "
            f"{', '.join(map(str, row)) or 'no columns'}; convert the file with the server's dataset_preprocess.py"
        )
    agent = (row.get(AGENT) or {}).get("name")
    if agent is None and len(server.agents) == 1:
        agent = server.agents[0]
    if agent not in server.agents:
        raise ValueError(
            f"{where}: {AGENT}.name must be {' or '.join(server.agents)}, the agents of {server.name}, not {agent!r}"
        )
    try:
        prompt = messages(parameters["input"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}; only text is supported") from None
    try:
        thinking = thinking_mode(_template_arguments(parameters).get(THINKING), THINKING)
    except ValueError as error:
        raise ValueError(f"{where}: {PARAMETERS}.metadata.{ARGUMENTS}: {error}; set it to a JSON object") from None
    if not prompt:
        prompt = (Message(role="user", content=json.dumps(parameters.get("metadata"), ensure_ascii=False)),)
    content = f"{digest(0, GYM, json.dumps(row, sort_keys=True)):016x}"
    return Task(
        id=str(next((row[key] for key in _IDS if row.get(key) is not None), content)),
        environment=server.name,
        prompt=prompt,
        reference={**row, AGENT: {"type": _AGENTS, "name": agent}},
        domain=server.name.removeprefix(GYM),
        thinking=thinking,
    )


def _template_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's arguments for the chat template; raise ValueError if they are not a JSON object."""
    text = (parameters.get("metadata") or {}).get(ARGUMENTS, "{}")
    arguments = json.loads(text) if isinstance(text, str) else None
    if not isinstance(arguments, dict):
        raise ValueError(f"expected a JSON object, not {text!r:.200}")
    return arguments


def check_reference(task: Task) -> None:
    """Raise ValueError if a task of one of Gym's own environments has no row with an agent."""
    if not isinstance(task.reference.get(PARAMETERS), Mapping) or not (task.reference.get(AGENT) or {}).get("name"):
        raise ValueError(
            f"reference is not a row of NeMo Gym with {PARAMETERS} and {AGENT}.name; make the task with "
            f"`nemo-ext rl_tasks environment={task.environment}`"
        )


def gym_row(task: Task) -> dict[str, Any]:
    """Return a task's row, including its agent, for a run in which Gym runs the rollouts of all tasks."""
    if not task.environment.startswith(GYM):
        return {**to_gym(task), AGENT: {"type": _AGENTS, "name": agent_of(task.environment)}}
    row = dict(task.reference)
    arguments = _template_arguments(row[PARAMETERS])
    if task.thinking is not None and arguments.get(THINKING) is not task.thinking:
        changed = {ARGUMENTS: json.dumps({**arguments, THINKING: task.thinking})}
        row[PARAMETERS] = {**row[PARAMETERS], "metadata": {**(row[PARAMETERS].get("metadata") or {}), **changed}}
    return row
