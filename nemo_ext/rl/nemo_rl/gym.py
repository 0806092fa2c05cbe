"""Runs on NeMo Gym's own environments. Gym's agents then play all tasks, so Gym serves our environments too.

NeMo-RL starts Gym in an actor, with `env.nemo_gym` as Gym's config, and Gym asks the policy through vLLM's HTTP server.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.chat.template import Template
from nemo_ext.rl.algorithms import PolicyGradient
from nemo_ext.rl.environments import GYM, with_turns
from nemo_ext.rl.gym.install import servers_of_run
from nemo_ext.rl.gym.rows import PARAMETERS, SERVER
from nemo_ext.rl.gym_servers import check_reference, gym_row, gym_server
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.draft import Draft
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.task import Task
from nemo_ext.serving.vllm import parsers

_CHAT = "http_server_serving_chat_kwargs"
_MODEL = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"


def plays_in_gym(algorithm: PolicyGradient) -> bool:
    """Return whether an algorithm uses an environment of NeMo Gym, so that Gym's agents play all tasks."""
    return any(name.startswith(GYM) for name in algorithm.environments)


def put_gym(draft: Draft, algorithm: PolicyGradient, checkout: Checkout, config: Mapping[str, Any]) -> None:
    """Set the keys with which NeMo-RL starts Gym's servers and ours.

    Args:
        algorithm: algorithm that uses at least one environment `gym-NAME`.

    Raises:
        ValueError: an environment is unknown, or a setting of the algorithm cannot be combined with Gym.
    """
    if not checkout.plays_gym:
        raise ValueError(
            "environments gym-NAME: this version of NeMo-RL does not start NeMo Gym itself; use 0.7 or later"
        )
    asynchronous = algorithm.asynchronous is not None
    for key, used in {
        "rl.group": algorithm.group is not None,
        "rl.distillation": algorithm.distillation is not None,
        "rl.sampling.drop_zero_variance with rl.asynchronous": algorithm.sampling.drop_zero_variance and asynchronous,
    }.items():
        if used:
            raise ValueError(
                f"{key} cannot be combined with environments gym-NAME, in which NeMo Gym's agents generate the "
                "responses; remove one of the two"
            )
    paths = [_MODEL]
    for name, use in algorithm.environments.items():
        if name.startswith(GYM):
            if use.settings or use.reward != "outcome" or use.concurrency:
                raise ValueError(
                    f"environments.{name} is NeMo Gym's own and has no settings, reward or concurrency here; set Gym's "
                    "keys as nemo_rl.set.env.nemo_gym.KEY=VALUE"
                )
            paths.append(gym_server(name, checkout.root).config)
    paths += [str(path.absolute()) for path in own_servers(algorithm, config) if path.parent.name == "configs"]
    draft.put("environments", "env.should_use_nemo_gym", True)
    found = parsers(config["template"] or config["policy"])
    model = {"responses_api_models": {"vllm_model": {"uses_reasoning_parser": "reasoning_parser" in found}}}
    draft.put_all("environments", "env.nemo_gym", {"config_paths": paths, "policy_model": model})
    chat = {"tool_parser": found.get("tool_call_parser"), "reasoning_parser": found.get("reasoning_parser")}
    if config["template"] is not None:
        chat["chat_template"] = Template.load(config["template"]).source
    vllm = {
        "async_engine": True,
        "expose_http_server": True,
        _CHAT: {key: value for key, value in chat.items() if value is not None},
    }
    draft.put_all("environments", "policy.generation.vllm_cfg", vllm)


def own_servers(algorithm: PolicyGradient, config: Mapping[str, Any]) -> dict[Path, str]:
    """Return the servers' files for the environments that are not Gym's own: contents by path in the run directory."""
    uses = {}
    for name, use in algorithm.environments.items():
        if not name.startswith(GYM):
            settings = with_turns(name, use.settings, algorithm.turns)
            uses[name] = use.episodes() | ({"settings": settings} if settings else {})
    return servers_of_run(Path(config["run_dir"]) / "gym" / "resources_servers" / SERVER, uses)


def check_played(task: Task, master: Mapping[str, Any]) -> None:
    """Raise ValueError if Gym cannot play a task: it has no Gym row, or has tools but vLLM has no parser for calls.

    `master` is NeMo-RL's master config.
    """
    if task.environment.startswith(GYM):
        check_reference(task)
    declares = gym_row(task)[PARAMETERS].get("tools")
    if declares and not master["policy"]["generation"]["vllm_cfg"][_CHAT].get("tool_parser"):
        raise ValueError(
            "the task has tools, but vLLM has no parser for tool calls in this chat template; set template=NAME to a "
            f"template with a parser, or nemo_rl.set.policy.generation.vllm_cfg.{_CHAT}.tool_parser=NAME"
        )


@dataclass(frozen=True)
class RowProcessor:
    """NeMo-RL task processor that passes each task on as a row for NeMo Gym, which makes the prompt itself."""

    prompts: Prompts

    def __call__(
        self, record: Mapping[str, Any], spec: Any, tokenizer: Any, max_length: int | None, number: int
    ) -> Any:
        """Return a sample for NeMo-RL's rollouts, as a dict; `data.TaskProcessor` describes the arguments."""
        task: Task = record["task"]
        if not task.environment.startswith(GYM):
            task = self.prompts.in_mode(task)
        process = importlib.import_module("nemo_rl.data.processors").nemo_gym_data_processor
        row = {"extra_env_info": json.dumps(gym_row(task)), "task_name": record["task_name"]}
        return process(row, None, tokenizer, max_length, number)
