"""GRPO with NeMo-RL compared with GRPO with TRL: the same model, tasks and settings with `nemo-ext rl`, on a CPU.

    NEMO_RL_ROOT=nemo-rl python benchmarks/rl_engines.py --folder DIR run nemo_rl --name "NeMo-RL 0.7.0" --seed 1
    python benchmarks/rl_engines.py --folder DIR run trl --name TRL --seed 1      # and 2, 3, ...
    python benchmarks/rl_engines.py --folder DIR report --plot rewards.png

Model, tasks, settings and the stand-ins for NeMo-RL's workers and vLLM are those of `tests/rl/nemo_rl` (requires TRL
and the environment of docs/rl/nemo_rl.md): a Llama of two layers after a little SFT, sums and JSON by a schema, 8
prompts x 8 responses per step. Reported: mean rewards of the first and last steps, TRL's 95 % prediction interval for
one run, and whether NeMo-RL's runs end in it; with --plot, the rewards of all steps.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

TESTS = Path(__file__).parents[1] / "tests" / "rl" / "nemo_rl"
SMOOTH = 10
"""Window of the plot's moving mean, in steps."""


def loaded(name: str) -> ModuleType:
    """Load a module of the tests."""
    spec = importlib.util.spec_from_file_location(f"nemo_ext_{name}", TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepared(folder: Path, learning: ModuleType) -> tuple[Path, Path]:
    """Prepare model and tasks, which are the same for all runs."""
    model, tasks = folder / "model", folder / "tasks.jsonl"
    if not tasks.is_file():
        learning.make_model(model, 120)
        made = learning.tasks(learning.STEPS * learning.PROMPTS // 2, seed=2)
        learning.written(tasks, (task.record() for task in made))
    return model, tasks


def train(folder: Path, engine: str, seed: int, steps: int) -> list[float]:
    """Run one training; returns the mean reward of each step."""
    learning = loaded("test_learning")
    model, tasks = prepared(folder, learning)
    words = learning.grpo(tasks, seed=seed)
    runs, name = learning.Runs(None, folder / "runs"), f"{engine}-{seed}-{os.getpid()}"
    if engine == "trl":
        return list(map(float, runs.trl(name, model, "reward", *words, seed=seed, steps=steps)))
    with_cpu_workers(runs)
    logged = runs.nemo_rl(name, model, *words, seed=seed, steps=steps)
    return list(map(float, learning.of(logged, "reward")))


def with_cpu_workers(runs: Any) -> None:
    """Set up NeMo-RL with the tests' policy and generation, and an in-process Ray."""
    conftest = loaded("conftest")  # adds NEMO_RL_ROOT to the import path
    import ray
    import torch

    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry").ACTOR_ENVIRONMENT_REGISTRY
    registry |= dict.fromkeys(
        registry, importlib.import_module("nemo_rl.distributed.virtual_cluster").PY_EXECUTABLES.SYSTEM
    )
    ray.init(num_cpus=8, include_dashboard=False)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    runs.policy = loaded("cpu_policy")
    for module in (conftest, runs.policy):
        ray.cloudpickle.register_pickle_by_value(module)
    grpo = importlib.import_module("nemo_rl.algorithms.grpo")
    for name, kind in runs.policy.REPLACED.items():
        setattr(grpo, name, kind)
    patch.object(torch.Tensor, "cuda", lambda tensor, *arguments, **keywords: tensor).start()


def report(folder: Path, plot: Path | None) -> None:
    """Print the table, and draw the plot."""
    rewards_by_engine: dict[str, list[np.ndarray]] = {}
    for line in map(json.loads, (folder / "rewards.jsonl").read_text().splitlines()):
        rewards_by_engine.setdefault(line["name"], []).append(np.array(line["rewards"]))
    interval = loaded("test_learning").interval
    print("| engine | runs | steps | first 10 steps | last 20 steps | TRL's interval for these | in it |")
    print("|---" * 7 + "|")
    for name, runs in rewards_by_engine.items():
        steps = min(map(len, runs))
        first, last = ([rewards[begin:end].mean() for rewards in runs] for begin, end in ((0, 10), (steps - 20, steps)))
        low, high = interval([rewards[steps - 20 : steps].mean() for rewards in rewards_by_engine["TRL"]])
        inside = "" if name == "TRL" else ", ".join("yes" if low <= value <= high else "no" for value in last)
        cells = (", ".join(f"{value:.3f}" for value in values) for values in (first, last))
        print(f"| {name} | {len(runs)} | {steps} | {' | '.join(cells)} | {low:.3f} to {high:.3f} | {inside} |")
    if plot is not None:
        draw(rewards_by_engine, plot)


def draw(found: dict[str, list[np.ndarray]], plot: Path) -> None:
    """Draw moving means of the rewards; for TRL the mean and the prediction interval at each step."""
    from nemo_ext.job.report import new_figure, save_figure, tidy

    figure = new_figure(figsize=(6.5, 4))
    axes, interval = figure.subplots(), loaded("test_learning").interval
    curves = {
        name: [np.convolve(rewards, np.ones(SMOOTH) / SMOOTH, "valid") for rewards in runs]
        for name, runs in found.items()
    }
    trl = curves.pop("TRL")
    shortest = min(map(len, trl))
    columns = np.array([curve[:shortest] for curve in trl]).T
    steps = np.arange(shortest) + SMOOTH
    low, high = np.clip([interval(column) for column in columns], 0, 1).T
    axes.fill_between(steps, low, high, alpha=0.2, color="grey", label=f"TRL, 95 % for one more run ({len(trl)} seeds)")
    axes.plot(steps, columns, color="grey", linewidth=0.8, label=["TRL", *[None] * (len(trl) - 1)])
    for name, runs in curves.items():
        for number, curve in enumerate(runs):
            colour = f"C{list(curves).index(name)}"
            axes.plot(np.arange(len(curve)) + SMOOTH, curve, color=colour, label=None if number else name)
    axes.set_title(f"Reward while training, mean of {SMOOTH} steps", loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
    save_figure(figure, plot, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="model, tasks, runs and rewards.jsonl")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="one run, whose rewards are added to rewards.jsonl")
    one.add_argument("engine", choices=("trl", "nemo_rl"))
    one.add_argument("--name", required=True, help="name in the report; TRL's runs are named TRL")
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--steps", type=int, default=60)
    whole = commands.add_parser("report")
    whole.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.command == "report":
        report(arguments.folder, arguments.plot)
        return
    if arguments.engine == "nemo_rl" and not os.environ.get("NEMO_RL_ROOT"):
        parser.error("NEMO_RL_ROOT is not set: set it to a NeMo-RL checkout")
    began = time.process_time()
    rewards = train(arguments.folder.absolute(), arguments.engine, arguments.seed, arguments.steps)
    with (arguments.folder / "rewards.jsonl").open("a") as file:
        file.write(json.dumps({"name": arguments.name, "seed": arguments.seed, "rewards": rewards}) + "\n")
    print(f"{arguments.name}, seed {arguments.seed}: {time.process_time() - began:.0f} s of this process")


if __name__ == "__main__":
    main()
