"""The `nemo-ext` commands `rl`, `rl_tasks` and `gym`, and helpers shared by all commands that use an RL preset."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.job.figures import Figures
from nemo_ext.job.job import Config, Grammar, Input, Job, Model, inputs

ENVIRONMENTS = {"*": {"settings": {"judge": "nemo_ext.rl.judge:JudgeSettings"}}}
"""Settings classes of the keys in an `environments` section."""
_RL = "nemo_ext.rl.algorithms:PolicyGradient"
RL = {"rl": (_RL, {"environments": ENVIRONMENTS, "group": ENVIRONMENTS["*"]["settings"]})}
"""Settings classes of the keys in section `rl`, in addition to those in `nemo_ext.rl.settings`."""
_REWARDS = {
    "reward": "reward",
    "eval_reward": "validation reward",
    "rewards/accuracies": "accuracy",
    "eval_rewards/accuracies": "validation accuracy",
}
"""Mapping from metrics in TRL's log to their printed names."""


def training_inputs(config: Config, model: str) -> list[Input]:
    """Return the model, tasks and pairs that a training job reads; `model` is the config key of its model."""
    read = [("model", config[model], "`nemo-ext convert` writes one")]
    for split in ("train", "validation"):
        section = config["tasks"].get(split) or {}
        for key in ("path", "curriculum", "directory") if isinstance(section, Mapping) else ():
            read.append((f"tasks.{split}.{key}", section.get(key), "`nemo-ext rl_tasks` writes tasks"))
        pairs = (config.get("pairs") or {}).get(split)
        read.append((f"pairs.{split}", pairs, "`nemo-ext preference_data` writes pairs"))
    for name, place in (((config.get("rl") or {}).get("distillation") or {}).get("teachers") or {}).items():
        if place is not None and "://" not in str(place):
            advice = "name a Hugging Face folder, or a run directory of `nemo-ext serve`"
            read.append((f"rl.distillation.teachers.{name}", place, advice))
    return inputs(*read, model=("model",))


def _size(config: Config, settings: Any) -> tuple[int, int]:
    if config["engine"] == "trl":
        return 1, int(config["launcher"]["nproc_per_node"])
    node = settings.cluster.node
    if node is None:
        raise ValueError(
            f"cluster={settings.cluster.name}: engine=nemo_rl uses whole nodes, but this site does not describe its "
            "nodes; set 'cluster.node={gpus: 8, gpu: NAME, gpu_memory_gib: 80, fp8: [], cpus: 112}', or write your own "
            "site (docs/clusters.md)"
        )
    return settings.slurm.nodes, node.gpus


def saved_step(run_dir: Path) -> int:
    """Return the newest checkpoint's step (TRL's `checkpoint-N`, NeMo-RL's `step_N`); 0 if there is no checkpoint."""
    from nemo_ext.job.run_directory import CHECKPOINTS

    folders = [*(run_dir / CHECKPOINTS).glob("checkpoint-*"), *(run_dir / CHECKPOINTS).glob("step_*")]
    steps = [path.name.replace("_", "-").rpartition("-")[2] for path in folders]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def figures(run_dir: Path) -> Figures:
    """Return a run's key figures: each reward's first value and the mean of its last tenth, as in the run's report."""
    from nemo_ext.job.records import read_records
    from nemo_ext.job.run_directory import METRICS, target_of
    from nemo_ext.rl.monitor import recent_mean

    if not (run_dir / METRICS).is_file():
        return Figures()
    logs = read_records(run_dir / METRICS, dict[str, Any], what="a line of metrics")
    shown = []
    for key, name in _REWARDS.items():
        values = [float(log[key]) for log in logs if log.get(key) is not None]
        if values:
            shown.append(f"{name} {values[0]:.3f} -> {recent_mean(values):.3f}")
    steps = [int(log["step"]) for log in logs if "step" in log]
    tokens = [int(log["num_tokens"]) for log in logs if log.get("num_tokens") is not None]
    return Figures(
        text=", ".join(shown),
        tokens=max(tokens, default=None),
        step=max(steps, default=None),
        target=target_of(run_dir),
    )


RL_JOB = Job(
    name="rl",
    group="reinforcement learning",
    help="train by GRPO, RLOO, DPO or RPO with the papers' presets, on TRL or NeMo-RL",
    run="nemo_ext.rl.job:run",
    extras=lambda config: () if config["engine"] != "trl" else ("lora",) if config["lora"] else ("trl",),
    resumable=True,
    findings="nemo_ext.rl.preflight:findings",
    inputs=lambda config: training_inputs(config, "policy"),
    model=Model(
        key="model",
        takes="hugging_face",
        leaves="any",
        place=lambda folder, words: folder / "model",
        trained=True,
        same_sizes=True,
    ),
    script="rl",
    size=_size,
    own_folder=True,
    ray=lambda config: config["engine"] == "nemo_rl",
    saved_step=saved_step,
    figures=figures,
    grammar=Grammar(
        settings=("nemo_ext.rl.settings:Settings", RL, {"environments": ENVIRONMENTS}),
        aliases={"model": "policy"},
        groups={"preset": "rl"},
        replaces={"environments": "rl.environments"},
    ),
)
RL_TASKS = Job(
    name="rl_tasks",
    group="reinforcement learning",
    help="generate RL tasks: mathematics, code, instructions, tools and more",
    run="nemo_ext.rl.tasks.job:run",
    script="task",
    grammar=Grammar(settings="nemo_ext.rl.settings:TaskSettings"),
)


def _gym(config: Config) -> None:
    from nemo_ext.rl.gym.install import run

    print(run(config))


GYM = Job(
    name="gym",
    group="reinforcement learning",
    help="write NeMo Gym servers for the RL environments",
    run=_gym,
    grammar=Grammar(settings="nemo_ext.rl.settings:GymSettings"),
)
