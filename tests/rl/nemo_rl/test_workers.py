"""Registration of bridges in real Ray workers, with a stand-in for Megatron-Bridge."""

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import FORMATS, choose, read
from nemo_ext.job.config import compose
from nemo_ext.rl.nemo_rl.job import _check_replay
from nemo_ext.rl.nemo_rl.workers import HOOK, VARIABLE, moe_layers, use, with_bridges

DRIVER = """
import sys, ray
given = {"env_vars": {"PYTHONPATH": sys.argv[1]}}
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=given)

@ray.remote
def registered():
    import sys
    before = "nemo_ext" in sys.modules
    import megatron.bridge
    return before, getattr(sys.modules.get("nemo_ext"), "CALLS", None)

print(ray.get(registered.remote()))
"""


def driven(folder: Path, *path: Path) -> str:
    """Output of a worker whose `megatron.bridge` is an empty package."""
    (folder / "megatron" / "bridge").mkdir(parents=True)
    (folder / "megatron" / "bridge" / "__init__.py").touch()
    # In a separate cluster, regardless of the one this process is connected to.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, os.pathsep.join(map(str, (folder, *path)))],
        cwd=folder,
        env={**environment, VARIABLE: "nemo_ext.rl.nemo_rl.workers.with_bridges", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_worker_registers_when_it_imports_megatron_bridge(tmp_path: Path) -> None:
    (tmp_path / "own" / "nemo_ext").mkdir(parents=True)
    (tmp_path / "own" / "nemo_ext" / "__init__.py").write_text(
        "CALLS = 0\ndef register():\n    global CALLS\n    CALLS += 1\n"
    )

    assert driven(tmp_path / "bridge", tmp_path / "own") == "(False, 1)"


@pytest.mark.slow
def test_a_worker_without_nemo_ext_starts(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "nemo_ext.py").write_text("raise ImportError('not here')\n")

    assert driven(tmp_path / "bridge", tmp_path / "none") == "(False, None)"


def test_the_users_setup_hook_is_kept() -> None:
    assert with_bridges({HOOK: "theirs", "env_vars": {}}) == {HOOK: "theirs", "env_vars": {}}


@pytest.mark.parametrize("before", ["", "hook()", "importlib.util.find_spec('megatron.bridge')"])
def test_a_probe_does_not_use_the_hook_up(tmp_path: Path, before: str) -> None:
    bridge = tmp_path / "megatron" / "bridge"
    bridge.mkdir(parents=True)
    (bridge / "__init__.py").touch()
    code = f"""
import importlib.util, sys
import nemo_ext
from nemo_ext.rl.nemo_rl.workers import _register_with_bridge as hook
sys.path.insert(0, {str(tmp_path)!r})
nemo_ext.register = lambda: print("registered")
hook()
{before}
import megatron.bridge
import megatron.bridge
"""

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (0, "registered\n"), ended.stderr


def test_moe_layers_of_hybrid_models_are_those_of_the_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "nemo_rl" / "models" / "megatron"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (folder / "router_replay.py").write_text("def _global_moe_layer_numbers(config): return config.frequency")
    code = f"""
import sys
from types import SimpleNamespace as Config
from nemo_ext.rl.nemo_rl.workers import _register_with_bridge as hook
sys.path.insert(0, {str(tmp_path)!r})
hook()
from nemo_rl.models.megatron.router_replay import _global_moe_layer_numbers as layers
print(layers(Config(hybrid_layer_pattern="MEM*|E-/*E")), layers(Config(hybrid_layer_pattern=None, frequency=[1, 2])))
"""

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (0, "[2, 5] [1, 2]\n"), ended.stderr


@pytest.mark.nemo_rl
def test_routes_go_to_the_moe_layers_of_a_real_hybrid_model(nemo_rl: object, build: Callable[..., Any]) -> None:
    """Routes of all layers, as vLLM returns them, and of the MoE layers alone; each is its layer's number."""
    import torch

    replay = importlib.import_module("nemo_rl.models.megatron.router_replay")
    model = build("model=nemotron3_nano_tiny", "model.pattern=MEM*E-", "+megatron.moe_enable_routing_replay=true")
    model.config.hybrid_layer_pattern = "MEM*E-"
    every = torch.arange(1, 7)[None, :, None].expand(5, 6, 2)
    with patch.object(replay, "_global_moe_layer_numbers", moe_layers(replay._global_moe_layer_numbers)):
        for routes in (every, every[:, [1, 4]]):
            found = replay.build_router_replay_tensors(model, routes)
            assert [int(tensor.unique()) for tensor in found] == [2, 5]
    with pytest.raises(ValueError, match="layer axis does not match"):
        replay.build_router_replay_tensors(model, every[:, [1, 4]])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("M*-", "no MoE blocks"),
        ("E{topk=2}*E{topk=4}", r"different numbers of experts per token \(2, 4\)"),
        ("E*E", ""),
    ],
)
def test_models_without_routes_to_replay_are_refused(pattern: str, message: str) -> None:
    config = compose("train", ["model=nemotron3_nano_tiny", f"model.pattern='{pattern}'"])
    model = from_config(config)

    with pytest.raises(ValueError, match=message) if message else nullcontext():
        _check_replay(model)


def test_the_users_hook_is_kept_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "theirs.hook")

    use()

    assert os.environ[VARIABLE] == "theirs.hook"
    assert "does not register nemo_ext's bridges" in capsys.readouterr().err


WORKER = """
import json, sys
import ray

@ray.remote
class Worker:
    # As in NeMo-RL's Megatron worker, which only uses AutoBridge and does not know nemo_ext.
    def built(self, folders):
        from nemo_ext.megatron.cpu import runtime
        runtime.enable()
        assert "nemo_ext.megatron.bridge" not in sys.modules
        from megatron.bridge import AutoBridge
        import torch
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        return {name: self.sizes(AutoBridge, folder) for name, folder in folders.items()}

    def sizes(self, AutoBridge, folder):
        auto = AutoBridge.from_hf_pretrained(folder, trust_remote_code=True)
        provider = auto.to_megatron_provider(load_weights=False)
        settings = {"transformer_impl": "local", "apply_rope_fusion": False, "bias_dropout_fusion": False}
        settings |= {"gradient_accumulation_fusion": False, "masked_softmax_fusion": False}
        settings |= {"persist_layer_norm": False, "use_cpu_initialization": True, "attention_backend": "auto"}
        for key, value in settings.items():
            setattr(provider, key, value)
        provider.finalize()
        model = provider.provide(pre_process=True, post_process=True)
        return {name: weight.numel() for name, weight in model.named_parameters()}
"""
STARTED = """
import json, os, sys
from nemo_ext.rl.nemo_rl import run
run._start_ray()
import ray
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES, RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

ACTOR_ENVIRONMENT_REGISTRY["bridged.Worker"] = PY_EXECUTABLES.SYSTEM
cluster = RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=1)
group = RayWorkerGroup(cluster, RayWorkerBuilder("bridged.Worker"))
found = ray.get(group.run_single_worker_single_data("built", 0, folders=json.loads(sys.argv[1])))
print("FOUND", json.dumps(found), flush=True)
group.shutdown(force=True)
cluster.shutdown()
"""
BRIDGED = {
    "Olmo3ForCausalLM": ("model=olmo3_tiny",),
    "DeciLMForCausalLM": (
        "model=llama_nemotron_tiny",
        "model.pattern=*{kv=1}-*{linear}-{ffn=96}-{linear}--*{window=8}",
    ),
    "NemoExtBlocksForCausalLM": (
        "model=nemotron3_nano_tiny",
        "model.pattern=M{heads=4}M{linear}*{kv=1}-{ffn=96}E{ffn=64}E{linear}*{linear}M*-{linear}E",
        *("megatron.moe_router_score_function=sigmoid", "megatron.moe_router_enable_expert_bias=true"),
    ),
}


@pytest.mark.slow
@pytest.mark.nemo_rl
def test_a_worker_of_nemo_rl_builds_our_models_with_megatron_bridge(ray_cluster: None, tmp_path: Path) -> None:
    """Started by NeMo-RL's own classes, in a process that never calls nemo_ext."""
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("Megatron-Bridge is not installed: pip install --no-deps megatron-bridge")
    own = tmp_path / "own"
    own.mkdir()
    (own / "bridged.py").write_text(WORKER)
    descriptions, folders = {}, {}
    for name, words in BRIDGED.items():
        config = choose(from_config(compose("train", ["run_dir=unused", "data=mock", *words])))[1]
        found, descriptions[name] = read(config)
        assert found.architecture == name
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for code in found.code:
            shutil.copyfile(str(files("nemo_ext.checkpoint.remote_code") / code), folder / code)
        folders[name] = str(folder)
    engine = str(Path(__file__).parents[2] / "megatron" / "engine")
    needed = () if importlib.util.find_spec("transformer_engine") else (engine,)
    path = os.pathsep.join(filter(None, (str(own), *needed, os.environ.get("PYTHONPATH"))))

    ended = subprocess.run(
        [sys.executable, "-c", STARTED, json.dumps(folders)],
        cwd=tmp_path,
        env={
            **os.environ,
            **{"PYTHONPATH": path, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "HF_MODULES_CACHE": str(tmp_path / "hf")},
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    lines = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, ended.stdout[-3000:] + ended.stderr[-6000:]
    built = json.loads(lines[0].removeprefix("FOUND "))
    bridge = importlib.import_module("nemo_ext.megatron.bridge")
    for name, description in descriptions.items():
        wanted: Counter[str] = Counter()
        for piece in (piece for entry in FORMATS[name].entries(description) for piece in entry.pieces):
            if ".experts.experts." not in piece.key and not piece.key.endswith("expert_bias"):
                wanted[bridge.parameter_names(piece)[0]] += prod(piece.shape)
        assert wanted == {key: size for key, size in built[name].items() if ".experts.local_experts." not in key}
    # Blocks of the same kind have different sizes.
    assert len({size for key, size in built["DeciLMForCausalLM"].items() if key.endswith("linear_fc1.weight")}) > 1
