"""A run on NeMo Gym's own environments and ours: NeMo-RL's config, its rows, and Gym's real servers."""

import asyncio
import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from nemo_ext.job.config import compose
from nemo_ext.job.files import write_text
from nemo_ext.rl.job import checked_algorithm
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.gym import RowProcessor, check_played, own_servers
from nemo_ext.rl.nemo_rl.job import settings_of
from nemo_ext.rl.nemo_rl.rehearsal import rehearse
from nemo_ext.rl.nemo_rl.run import _environment_settings
from nemo_ext.rl.plan import plan_tasks
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.tasks.job import run as make_tasks

pytestmark = [pytest.mark.nemo_rl, pytest.mark.gym]
THEIRS = "gym-workplace_assistant"


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path) -> Any:
    """Function that composes a run on arithmetic and on Gym's workplace, with more keys."""
    pytest.importorskip("nemo_gym", reason="needs nemo-gym")
    for words in (
        (f"environment={THEIRS}", f"output={tmp_path}/{THEIRS}.jsonl"),
        ("generator=arithmetic", "count=4", f"output={tmp_path}/math.jsonl"),
    ):
        make_tasks(compose("rl_tasks", words))
    return lambda *words, environments=f"{{math: {{}}, {THEIRS}: {{}}}}": compose(
        "rl",
        (
            *("preset=domyn_math_grpo", "engine=nemo_rl", "nemo_rl.backend=dtensor", "on_inexpressible=warn"),
            *(f"model={tiny_llama}", f"run_dir={tmp_path}/run", f"tasks.train.directory={tmp_path}"),
            *("rl.prompts_per_step=2", "rl.generations_per_prompt=2", "rl.batch=4", "rl.schedule.steps=3"),
            *("rl.lengths={prompt: 1500, response: 400}", f"environments={environments}"),
            *words,
        ),
    )


def rendered(config: Mapping[str, Any], root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return settings_of(config, checked_algorithm(config), Checkout(root))


class TestConfig:
    def test_setup_accepts_it(self, config: Any, nemo_rl: ModuleType) -> None:
        root = Path(nemo_rl.__file__).parents[2]

        _, master = rendered(config("template=nemotron3_nano"), root)

        rehearse(master, "grpo")
        assert master["env"]["nemo_gym"]["config_paths"][1:] == [
            "resources_servers/workplace_assistant/configs/workplace_assistant.yaml",
            f"{Path(config()['run_dir'])}/gym/resources_servers/nemo_ext/configs/math.yaml",
        ]
        assert (
            master["policy"]["generation"]["vllm_cfg"]["http_server_serving_chat_kwargs"]["tool_parser"]
            == "qwen3_coder"
        )

    @pytest.mark.parametrize(
        ("environments", "words", "reason"),
        [
            ("{gym-mcqq: {}}", (), "did you mean 'gym-mcqa'"),
            ("{gym-mcqa: {reward: score}}", (), "nemo_rl.set.env.nemo_gym.KEY"),
            ("{gym-mcqa: {}, chat: {}}", (), "compares the responses of a group"),
            ("{gym-mcqa: {}}", ("rl.group={length_control: {answer: 0.1}}",), "rl.group cannot be combined"),
        ],
    )
    def test_what_gym_cannot_do(
        self, config: Any, nemo_rl: ModuleType, environments: str, words: tuple[str, ...], reason: str
    ) -> None:
        with pytest.raises(ValueError, match=reason):
            rendered(config(*words, environments=environments), Path(nemo_rl.__file__).parents[2])

    def test_servers_have_the_turns_of_the_algorithm(self, config: Any) -> None:
        composed = config("rl.turns=7", environments="{workplace: {}, gym-mcqa: {}}")

        (written,) = [
            yaml.safe_load(text)
            for path, text in own_servers(checked_algorithm(composed), composed).items()
            if path.suffix == ".yaml"
        ]

        (server,) = written["nemo_ext_workplace"]["resources_servers"].values()
        assert server["settings"] == {"max_turns": 7}
        assert written["nemo_ext_workplace_agent"]["responses_api_agents"]["simple_agent"]["max_steps"] == 7

    def test_tasks_with_tools_need_a_parser(self, config: Any) -> None:
        task = plan_tasks({"path": f"{config()['tasks']['train']['directory']}/{THEIRS}.jsonl"}, steps=1, prompts=1)[0]
        served = {"reasoning_parser": "qwen3"}
        master = {"policy": {"generation": {"vllm_cfg": {"http_server_serving_chat_kwargs": served}}}}

        with pytest.raises(ValueError, match="no parser for tool calls in this chat template"):
            check_played(task, master)
        served["tool_parser"] = "llama3_json"
        check_played(task, master)

    def test_all_environments_of_the_tasks_are_served(self, config: Any, tokenizer: Any) -> None:
        tasks = plan_tasks(
            config()["tasks"]["train"] | {"streams": [{"name": THEIRS, "weight": 1}]}, steps=1, prompts=2
        )

        with pytest.raises(ValueError, match=f"environments does not contain {THEIRS}"):
            _environment_settings({"environments": {"math": {}}}, {}, tokenizer, [tasks], 1)


@pytest.mark.slow
def test_gym_plays_rows_of_both(
    config: Any, nemo_rl: ModuleType, ray_cluster: None, endpoint: Any, reply: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Gym starts its servers and ours with the config of a run; a scripted model solves every other task."""
    for server in (
        *("resources_servers/nemo_ext", "resources_servers/workplace_assistant"),
        *("responses_api_agents/simple_agent", "responses_api_models/vllm_model"),
    ):
        (venv := tmp_path / "venvs" / server).mkdir(parents=True)
        (venv / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    composed = config(
        f"nemo_rl.set.env.nemo_gym={{uv_venv_dir: {tmp_path}/venvs, skip_venv_if_present: true}}",
        environments=f"{{math: {{}}, {THEIRS}: {{weight: 3}}}}",
    )
    _, master = rendered(composed, Path(nemo_rl.__file__).parents[2])
    for path, text in own_servers(checked_algorithm(composed), composed).items():
        write_text(path, text)
    shares = {"streams": [{"name": name, "weight": weight} for name, weight in (("math", 1), (THEIRS, 3))]}
    tasks = plan_tasks(composed["tasks"]["train"] | shares, steps=2, prompts=4)
    process = RowProcessor(Prompts.from_tokenizer(tokenizer))
    drawn = [tasks[number] for number in range(len(tasks))]
    rows = [process({"task": task, "task_name": "x"}, None, tokenizer, None, 0)["extra_env_info"] for task in drawn]
    assert [row["agent_ref"]["name"] for row in rows].count("workplace_assistant_simple_agent") == 6
    answers = {json.dumps(row["responses_create_params"]["input"][-1]["content"]): row for row in rows[::2]}

    def model(payload: dict[str, Any]) -> Any:
        (asked,) = [said["content"] for said in payload["messages"] if said["role"] == "user"]
        row, message = answers.get(json.dumps(asked)), {"content": "I do not know."}
        if row and "ground_truth" in row and payload["messages"][-1]["role"] == "user":
            calls = [
                {"id": f"call_{at}", "type": "function", "function": call}
                for at, call in enumerate(row["ground_truth"])
            ]
            message = {"content": None, "tool_calls": calls}
        elif row and "ground_truth" not in row:
            message = {"content": f"\\boxed{{{row['verifier_metadata']['reference']['answer']}}}"}
        tokens = {"prompt_token_ids": [5, 6], "generation_token_ids": [7], "generation_log_probs": [-0.5]}
        choice = {"index": 0, "message": {"role": "assistant", **message, **tokens}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        completion = {"id": "chat", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return reply(body=json.dumps({**completion, "usage": usage}).encode())

    endpoint.reply = model
    results = asyncio.run(played(started(master["env"]["nemo_gym"], endpoint.url), rows))

    # A task that is drawn twice is solved twice.
    solved = [json.dumps(row["responses_create_params"]["input"][-1]["content"]) in answers for row in rows]
    assert [result["reward"] for result in results] == [float(each) for each in solved] and len(set(solved)) == 2
    assert all(any(item.get("generation_token_ids") for item in result["response"]["output"]) for result in results)


def started(config: dict[str, Any], url: str) -> Any:
    """Gym's helper with running servers, started as NeMo-RL's actor starts them."""
    import ray
    from nemo_gym.cli.env import RunHelper
    from nemo_gym.global_config import GlobalConfigDictParserConfig
    from omegaconf import DictConfig

    with socket.create_server(("127.0.0.1", 0)) as opened:
        head = {"host": "127.0.0.1", "port": opened.getsockname()[1]}
    policy = {"policy_model_name": "m", "policy_api_key": "none", "policy_base_url": [url]}
    where = {"default_host": "127.0.0.1", "ray_head_node_address": ray.get_runtime_context().gcs_address}
    parsed = GlobalConfigDictParserConfig(
        initial_global_config_dict=DictConfig({**config, **policy, **where, "head_server": head}),
        skip_load_from_cli=True,
    )
    (helper := RunHelper()).start(global_config_dict_parser_config=parsed)
    return helper, head


async def played(running: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results in the rows' order; the servers are shut down at the end."""
    from nemo_gym.rollout_collection import RolloutCollectionHelper
    from nemo_gym.server_utils import BaseServerConfig

    helper, head = running
    for at, row in enumerate(rows):
        row["_rowidx"] = at
    try:
        collection = RolloutCollectionHelper().run_examples(examples=rows, head_server_config=BaseServerConfig(**head))
        results = {row["_rowidx"]: result for row, result in [await task for task in collection]}
    finally:
        helper.shutdown()
    return [results[at] for at in range(len(rows))]
