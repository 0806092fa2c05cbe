"""NeMo Gym's rollout collection with its own agents and model server, against a stand-in for vLLM."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.rl.gym.install import environment_config, run, server_config
from nemo_ext.rl.gym.rows import to_gym
from nemo_ext.rl.tasks import generate
from tests.json_lines import read_jsonl, write_jsonl

pytestmark = pytest.mark.gym

MODEL = {
    "policy_model": {
        "responses_api_models": {
            "vllm_model": {
                "entrypoint": "app.py",
                "base_url": None,
                "api_key": "none",
                "model": "stand-in",
                "return_token_id_information": False,
                "uses_reasoning_parser": True,
            }
        }
    }
}


class Teller:
    """Model that asks the bank's customer for all details, solves the task, and says so.

    Attributes:
        tasks: by their first message.
        lazy: tasks in which it does nothing.
    """

    def __init__(self, reply: Any, tasks: list[Any], lazy: set[str]) -> None:
        self.tasks = {task.prompt[-1].content: task for task in tasks}
        self.lazy = lazy
        self._reply = reply

    def __call__(self, payload: dict[str, Any]) -> Any:
        said = payload["messages"]
        users = [message["content"] for message in said if message["role"] == "user"]
        task = self.tasks[users[0]]
        called = any(message.get("tool_calls") for message in said)
        if task.id in self.lazy or called:
            return self._message({"content": str(task.reference.get("answer") or "Done.")})
        if len(users) - 1 < len(task.reference.get("user", ())):
            return self._message({"content": "Could you tell me more?"})
        calls = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for number, call in enumerate(task.reference["calls"])
        ]
        return self._message({"content": None, "tool_calls": calls})

    def _message(self, message: dict[str, Any]) -> Any:
        completion = {
            "id": "chat",
            "object": "chat.completion",
            "created": 0,
            "model": "stand-in",
            "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
        }
        return self._reply(body=json.dumps(completion).encode())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


class TestInThisProcess:
    """Gym's agents, its model server and its collection in one event loop."""

    @pytest.fixture
    def collect(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: Any) -> Any:
        pytest.importorskip("nemo_gym", reason="needs nemo-gym")
        import uvicorn
        from nemo_gym import rollout_collection, server_utils
        from omegaconf import OmegaConf
        from responses_api_agents.gymnasium_agent.app import GymnasiumAgent, GymnasiumAgentConfig
        from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig
        from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

        from nemo_ext.rl.gym.server import VerifierConfig, VerifierServer

        kinds: dict[str, tuple[Any, Any]] = {
            "nemo_ext": (VerifierServer, VerifierConfig),
            "simple_agent": (SimpleAgent, SimpleAgentConfig),
            "gymnasium_agent": (GymnasiumAgent, GymnasiumAgentConfig),
            "vllm_model": (VLLMModel, VLLMModelConfig),
        }

        if find_spec("environment_servers") is not None:
            from environment_servers.legacy_agent.app import (
                LegacyAgentEnvironmentServer,
                LegacyAgentEnvironmentServerConfig,
            )

            kinds["legacy_agent"] = (LegacyAgentEnvironmentServer, LegacyAgentEnvironmentServerConfig)

        async def collected(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            config = json.loads(json.dumps({**server_config(name), **MODEL}))
            config["policy_model"]["responses_api_models"]["vllm_model"]["base_url"] = endpoint.url
            if "legacy_agent" in kinds:
                config |= environment_config(name)
            inner = {one: next(iter(next(iter(kind.values())).items())) for one, kind in config.items()}
            sockets = {one: socket.create_server(("127.0.0.1", 0)) for one in inner}
            for one, (_, settings) in inner.items():
                settings |= {"host": "127.0.0.1", "port": sockets[one].getsockname()[1]}
            client = server_utils.ServerClient(
                head_server_config={"host": "127.0.0.1", "port": 1}, global_config_dict=OmegaConf.create(config)
            )
            monkeypatch.setattr(
                rollout_collection.RolloutCollectionHelper, "setup_server_client", lambda self, head=None: client
            )
            monkeypatch.setattr(rollout_collection, "get_wandb_run", lambda: None, raising=False)  # before 0.7
            monkeypatch.setattr(
                rollout_collection, "get_global_config_dict", lambda: client.global_config_dict, raising=False
            )
            server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
            running = []
            for one, (kind, settings) in inner.items():
                server, made = kinds[kind]
                app = server(config=made(name=one, **settings), server_client=client).setup_webserver()
                running.append(uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")))
                # pytest handles signals.
                running[-1].capture_signals = nullcontext  # type: ignore[method-assign]
            pairs = zip(running, sockets.values(), strict=True)
            tasks = [asyncio.create_task(server.serve(sockets=[opened])) for server, opened in pairs]
            while not all(server.started for server in running):
                await asyncio.sleep(0.01)
            source = write_jsonl(tmp_path / "rows.jsonl", rows)
            asked = rollout_collection.RolloutCollectionConfig(
                agent_name=f"nemo_ext_{name}_agent",
                input_jsonl_fpath=str(source),
                output_jsonl_fpath=str(tmp_path / "rollouts.jsonl"),
            )
            try:
                return list(await rollout_collection.RolloutCollectionHelper().run_from_config(asked))
            finally:
                for server in running:
                    server.should_exit = True
                await asyncio.gather(*tasks)
                await server_utils.get_global_aiohttp_client().close()
                server_utils._GLOBAL_AIOHTTP_CLIENT = None

        return lambda name, rows: asyncio.run(collected(name, rows))

    def test_the_bank_with_a_customer(self, collect: Any, endpoint: Any, reply: Any, tmp_path: Path) -> None:
        tasks = list(generate("bank", 6, seed=8))
        lazy = {tasks[1].id, tasks[3].id}
        endpoint.reply = Teller(reply, tasks, lazy)

        made = collect("bank", [to_gym(task) for task in tasks])

        assert [one["reward"] for one in made] == [0.0 if task.id in lazy else 1.0 for task in tasks]
        kinds = [item.get("type") for item in made[2]["response"]["output"]]
        assert "function_call" in kinds and "function_call_output" in kinds
        told = [item for item in made[2]["response"]["output"] if item.get("role") == "user"]
        assert len(told) == len(tasks[2].reference["user"])
        assert len(read_jsonl(tmp_path / "rollouts.jsonl")) == 6
        (metrics,) = json.loads((tmp_path / "rollouts_aggregate_metrics.json").read_text())
        assert metrics["agent_metrics"]["mean/reward"] == pytest.approx(4 / 6)

    def test_the_workplace_with_single_calls(self, collect: Any, endpoint: Any, reply: Any) -> None:
        tasks = list(generate("workplace", 4, seed=8))
        endpoint.reply = Teller(reply, tasks, lazy={tasks[0].id})

        made = collect("workplace", [to_gym(task) for task in tasks])

        assert [one["reward"] for one in made] == [0.0, 1.0, 1.0, 1.0]
        assert made[1]["tool_outputs"] >= 1 and made[0]["tool_outputs"] == 0


@pytest.mark.slow
class TestCommands:
    """`gym env start` and `gym eval run` from a folder that is not Gym's."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Folder with servers; the packages of this environment replace those that Gym installs per server."""
        pytest.importorskip("nemo_gym", reason="needs nemo-gym")
        run({"output": str(tmp_path), "servers": ["bank"], "tasks": [], "seed": 8})
        for server in (
            "resources_servers/nemo_ext",
            "responses_api_agents/gymnasium_agent",
            "responses_api_models/vllm_model",
            "environment_servers/legacy_agent",
        ):
            (venv := tmp_path / "venvs" / server).mkdir(parents=True)
            (venv / ".venv").symlink_to(sys.prefix, target_is_directory=True)
        return tmp_path

    @pytest.fixture
    def gym(self, folder: Path, endpoint: Any) -> Iterator[Any]:
        """The command `gym` with running servers."""
        command = [sys.executable, "-c", "import sys; from nemo_gym.cli.main import main; sys.exit(main())"]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        head = ["++head_server.host=127.0.0.1", f"++head_server.port={free_port()}"]
        folders = (
            ["configs"] if find_spec("environment_servers") is None else ["configs", "environments"]
        )  # from 0.7 on
        configs = [word for each in folders for word in ("--config", f"resources_servers/nemo_ext/{each}/bank.yaml")]
        started = [
            *("env", "start", *configs, "--model-type", "vllm_model"),
            *("--model-url", endpoint.url, "--model-api-key", "none", "--model", "stand-in", *head),
            *("+skip_venv_if_present=true", f"+uv_venv_dir={folder / 'venvs'}"),
        ]
        log = folder / "start.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *started],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while "servers ready!" not in log.read_text():
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.5)
            yield lambda *words: subprocess.run(
                [*command, *words, *head], cwd=folder, env=environment, check=True, timeout=300
            )
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def test_collect_rollouts(self, gym: Any, folder: Path, endpoint: Any, reply: Any) -> None:
        tasks = list(generate("bank", 5, seed=8))
        endpoint.reply = Teller(reply, tasks, lazy={tasks[4].id})
        rows = folder / "resources_servers/nemo_ext/data/bank/example.jsonl"
        assert read_jsonl(rows) == [json.loads(json.dumps(to_gym(task))) for task in tasks]

        gym("eval", "run", "--no-serve", "-a", "nemo_ext_bank_agent", "-i", str(rows), "-o", str(folder / "made.jsonl"))

        made = sorted(read_jsonl(folder / "made.jsonl"), key=lambda one: one["_ng_task_index"])
        assert [one["reward"] for one in made] == [1.0, 1.0, 1.0, 1.0, 0.0]
