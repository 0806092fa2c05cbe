"""Training with NeMo-RL's algorithms, policies and training loops on our environments and data.

`run` corresponds to NeMo-RL's `examples/run_grpo.py`, `run_distillation.py` and `run_dpo.py`, but uses our datasets and
environments. Using several environments would require this in any case, because NeMo-RL's `setup_response_data` in 0.6
and 0.7 fails if `data.train` is a list.
"""

import contextlib
import copy
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.chat.template import end_tokens
from nemo_ext.chat.tool_calls import Style
from nemo_ext.job.progress import notice
from nemo_ext.job.records import json_line
from nemo_ext.job.run_directory import truncate_metrics
from nemo_ext.job.settings import check_keys, checked, nearest
from nemo_ext.rl.algorithms import Distillation
from nemo_ext.rl.environments import GYM, known_environments, with_turns
from nemo_ext.rl.episodes import Episodes
from nemo_ext.rl.groups import check_judges
from nemo_ext.rl.job import READS_AHEAD
from nemo_ext.rl.nemo_rl import compat, guards, workers
from nemo_ext.rl.nemo_rl.compat import PREFIX
from nemo_ext.rl.nemo_rl.data import AdaptiveTasks, PairDataset, Records, TaskProcessor
from nemo_ext.rl.nemo_rl.export import saved_in
from nemo_ext.rl.nemo_rl.group_rewards import by_group, groups_of, scored
from nemo_ext.rl.nemo_rl.gym import RowProcessor, check_played
from nemo_ext.rl.pairs import read_pairs, with_short_prompts
from nemo_ext.rl.plan import PlannedTasks, check_references, plan_tasks, validation_tasks
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.settings import Tasks
from nemo_ext.rl.task import Task

ALGORITHMS = ("grpo", "rloo", "dpo", "rpo")
_COMMON = ("algorithm", "nemo_rl", "template")
_GROUP = (
    *("tasks", "environments", "tool_style", "advantage", "distillation", "group", "loss", "penalties"),
    "thinking_share",
)
_PAIRS = ("pairs", "rpo", "max_prompt_tokens")


@dataclass(frozen=True)
class End:
    """How training ended.

    Attributes:
        stopped: True if `checkpointing.checkpoint_must_save_by` ended it before the last step of the plan.
    """

    step: int
    stopped: bool


def run(config: Mapping[str, Any], *, metrics: Path | None = None) -> End:
    """Train to the end of the run, or resume it if its checkpoint directory has a checkpoint.

    Args:
        config: `algorithm`, one of ALGORITHMS; `nemo_rl`, a complete master config of the installed NeMo-RL (for GRPO,
            distillation or DPO, as plain mappings); `template`, a chat template (see `Template.load`; the tokenizer's
            own if None).

            GRPO and RLOO: `tasks` with `train` (see `nemo_ext.rl.plan.plan_tasks`) and `validation` (`path`);
            `environments`, a mapping from names to settings of `environment.TaskEnvironment`; `tool_style`; `advantage`
            and `group`, see `group_rewards.groups_of`; `distillation`, whose `by` (environment, domain) selects
            a task's teacher among its `teachers` (also in `on_policy_distillation`), and with whose `logits` NeMo-RL's
            distillation trains instead of GRPO (the teacher is in `teacher` of `nemo_rl`); `loss`, whose `level`
            sequence_sum or group replaces NeMo-RL's means (see `sequence_sum` and `group_rewards.by_group`);
            `penalties`, see `Penalties`; `thinking_share`, as in `plan_tasks`.

            DPO and RPO: `pairs` with `train` and optionally `validation` (paths) and `rendered` (True if the pairs are
            already rendered); `max_prompt_tokens`, above which pairs are excluded; for RPO also `rpo` with `eta` and
            `distance`.
        metrics: file to which the metrics in FIGURES are appended; if None, they are not written.

    Returns:
        How training ended.

    Raises:
        ValueError: a key is unknown or inconsistent, a file is invalid, or NeMo-RL cannot be imported.
    """
    algorithm = config.get("algorithm")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: {nearest(str(algorithm), ALGORITHMS)}")
    groups = algorithm in ("grpo", "rloo")
    source = "tasks" if groups else "pairs"
    check_keys(config, _COMMON + (_GROUP if groups else _PAIRS), required=("nemo_rl", source), where="rl")
    master = copy.deepcopy(dict(config["nemo_rl"]))
    _start_ray()
    tokenizer = compat.tokenizer_of(master)
    if groups:
        return _responses(config, master, tokenizer, metrics)
    return _dpo(config, master, tokenizer, metrics, with_rewards=algorithm == "rpo")


def _responses(config: Mapping[str, Any], master: dict[str, Any], tokenizer: Any, metrics: Path | None) -> End:
    section = config.get("distillation")
    distils = None if section is None else checked(Distillation, section, "distillation")
    kind = "grpo" if distils is None or distils.logits is None else "distillation"
    loop = master[kind]
    if (master.get("data_plane") or {}).get("enabled"):
        raise ValueError(
            "data_plane.enabled must be false, because the data plane does not support rewards over groups"
        )
    compat.register()
    tasks = checked(Tasks, config["tasks"], "tasks")
    groups = groups_of(
        generations=loop["num_generations_per_prompt"],
        advantage=config.get("advantage"),
        group=config.get("group"),
        least=2 if distils is None else 1,
    )
    level = _level(config.get("loss") or {}, master)
    dynamic = bool(loop.get("use_dynamic_sampling"))
    if dynamic and groups.reward is not None:
        raise ValueError(
            "grpo.use_dynamic_sampling cannot be combined with group.length_control or group.judge, which make rewards "
            "differ in every group, so that none would be dropped; choose one of the two"
        )
    asynchronous = compat.is_async(master)
    if dynamic and asynchronous and not compat.refills():
        raise ValueError(
            "grpo.use_dynamic_sampling cannot be combined with grpo.async_grpo.enabled, because this NeMo-RL does not "
            "replace dropped groups (0.7 does); set one of them to false"
        )
    steps, spare = loop["max_num_steps"], 0
    if dynamic:
        spare = steps * loop["dynamic_sampling_max_gen_batches"]
    if asynchronous:
        # Without spare data, the collector loses unfinished batches at the end and training waits for them forever.
        spare += loop["async_grpo"]["max_trajectory_age_steps"] + 2
    prompts = int(loop["num_prompts_per_step"] * (loop.get("batch_multiplier") or 1))
    template = Prompts.from_tokenizer(tokenizer, config.get("template"))
    train = plan_tasks(
        tasks.train or {},
        steps=steps,
        prompts=prompts,
        spare=spare,
        thinking_share=template.thinking_share(config.get("thinking_share")),
    )
    validation = validation_tasks(tasks.validation["path"]) if tasks.validation else None
    # The dataset is already ordered; shuffling would break quotas and curricula.
    master["data"]["shuffle"] = False
    shares = train.adaptive()
    if shares is not None and asynchronous:
        raise ValueError(
            f"tasks.train.adapt cannot be combined with grpo.async_grpo.enabled, because {READS_AHEAD}; remove one of "
            "the two"
        )
    if shares is not None:
        # Workers would read ahead, before the rewards that choose the next batch are known.
        master["data"]["num_workers"] = 0
    if validation is None and (loop["val_period"] > 0 or loop["val_at_start"]):
        raise ValueError(
            f"{kind}.val_period and {kind}.val_at_start require validation tasks; set tasks.validation.path, or set "
            "them to 0 and false"
        )

    planned = [tasks for tasks in (train, validation) if tasks is not None]
    settings = _environment_settings(config, master, tokenizer, planned, loop["max_rollout_turns"])
    local = {name: Episodes(episode_settings, template) for name, episode_settings in settings.items()}
    check_judges((episodes.environment for episodes in local.values()), config.get("group") or {})
    # Rollouts that end before their environment's last response have no reward.
    turns = [episodes.environment.max_turns for episodes in local.values()]
    loop["max_rollout_turns"] = max(loop["max_rollout_turns"], *turns, 1)
    gym = bool(master["env"].get("should_use_nemo_gym"))

    def check(task: Task) -> None:
        if task.environment in local:
            local[task.environment].check(task)
        if gym:
            check_played(task, master)

    check_references(planned, check)
    if distils is not None:
        check_references([train], distils.teacher)
    processor = RowProcessor(template) if gym else TaskProcessor(template)
    max_length = master["data"].get("max_input_seq_length")
    names = {name for tasks in planned for name in tasks.environments()}
    process = functools.partial(_processed, names=names, tokenizer=tokenizer, processor=processor, length=max_length)
    adaptive = None if shares is None else AdaptiveTasks(train, shares, process)
    datasets = (process(train) if adaptive is None else adaptive, None if validation is None else process(validation))
    compat.with_generation(master, tokenizer)
    if gym:
        compat.with_gym(master, tokenizer, 0 if validation is None else len(validation))
        settings = {}  # NeMo-RL's `setup` starts Gym, which serves all environments
    environments = {PREFIX + name: compat.create_environment(PREFIX + name, settings[name]) for name in settings}
    # Validation has separate actors, to keep its metrics apart from the training metrics.
    validated = [name for name in ([] if validation is None else validation.environments()) if name in settings]
    validators = {PREFIX + name: compat.create_environment(PREFIX + name, settings[name]) for name in validated}
    try:
        module = compat.algorithm(kind)
        ready = compat.set_up(kind, compat.master_config(module, master), tokenizer, *datasets)
        if level == "group":
            ready.policy.train = by_group(ready.policy.train, groups.generations)
        elif level is not None:
            # Imported late, because its class derives from NeMo-RL's.
            ready.loss_fn = importlib.import_module("nemo_ext.rl.nemo_rl.sequence_sum").SequenceSumLoss(ready.loss_fn)
        limits = loop.get("seq_logprob_error_threshold") is not None
        watched = WithEnvironments(ready.logger.log_metrics, environments, validators, metrics=metrics, limits=limits)
        ready.logger.log_metrics = watched
        with contextlib.ExitStack() as stack:
            learn = None
            if adaptive is not None:
                # NeMo-RL first logs a step before it scales the rewards from which the shares learn.
                learn, watched.of_step["adaptive"] = adaptive.learn, lambda step: adaptive.metrics()
            if kind == "grpo":
                stack.enter_context(scored(groups, tokenizer, asynchronous=asynchronous, learn=learn))
            if dynamic and asynchronous:
                # Imported late, because its classes derive from NeMo-RL's.
                dropping = importlib.import_module("nemo_ext.rl.nemo_rl.dropping")
                batches = loop["dynamic_sampling_max_gen_batches"]
                counts = dropping.dropping(prompts=loop["num_prompts_per_step"], batches=batches)
                watched.of_step[dropping.PREFIX] = stack.enter_context(counts)
            if distils is not None and kind == "grpo":
                # Imported late, because its class derives from NeMo-RL's.
                distillation = importlib.import_module("nemo_ext.rl.nemo_rl.distillation")
                stack.enter_context(distillation.routed(distils.by))
            if config.get("penalties"):
                style: Style = config.get("tool_style") or "any"
                ends = end_tokens(tokenizer, template.template)
                stack.enter_context(guards.penalised(config["penalties"], tokenizer, ends, style))
            if compat.setting(master, "policy", "router_replay", "enabled"):
                routes = stack.enter_context(guards.replayed())
                watched.of_step["guards"] = lambda step: routes
            clocks = stack.enter_context(compat.clocks(module))
            if gym:
                environments = validators = {"nemo_gym": ready.nemo_gym}
            train_loop = compat.train_grpo if kind == "grpo" else compat.train_distillation
            train_loop(ready, tokenizer, environments, validators or None)
        return _end(ready, watched.last_step, steps, clocks)
    finally:
        _shut_down([*environments.values(), *validators.values()])


def _level(loss: Mapping[str, Any], master: Mapping[str, Any]) -> str | None:
    """Return the loss level if NeMo-RL itself does not have it, else None; ValueError if it contradicts `loss_fn`."""
    check_keys(loss, ("level",), required=(), where="loss")
    level: str | None = loss.get("level")
    if level not in (None, "sequence_sum", "group"):
        raise ValueError(
            f"loss.level must be sequence_sum or group, not {level!r}; for NeMo-RL's token or sample level, remove "
            "loss.level and set loss_fn.token_level_loss to true or false"
        )
    by_token = bool(master["loss_fn"].get("token_level_loss", True))
    if level is not None and by_token != (level == "group"):
        raise ValueError(
            f"loss.level={level} cannot be combined with loss_fn.token_level_loss={str(by_token).lower()}; set "
            f"loss_fn.token_level_loss={str(not by_token).lower()}"
        )
    if level == "group" and master["loss_fn"].get("reference_policy_kl_penalty"):
        raise ValueError(
            "loss.level=group cannot be combined with a KL penalty, which has no advantage to scale; set "
            "loss_fn.reference_policy_kl_penalty=0, or another loss.level"
        )
    return level


def _dpo(
    config: Mapping[str, Any], master: dict[str, Any], tokenizer: Any, metrics: Path | None, *, with_rewards: bool
) -> End:
    pairs = config["pairs"]
    check_keys(pairs, ("train", "validation", "rendered"), required=("train",), where="pairs")
    if with_rewards != (config.get("rpo") is not None):
        raise ValueError(
            f"algorithm={config['algorithm']} "
            + (
                "requires the section rpo with eta and distance; add it"
                if with_rewards
                else "does not use the section rpo; remove it"
            )
        )
    template = None if pairs.get("rendered") else Prompts.from_tokenizer(tokenizer, config.get("template"))
    max_length = master["data"].get("max_input_seq_length")
    train, *validation = (
        PairDataset(
            with_short_prompts(
                read_pairs(pairs[key], template, with_rewards=with_rewards), tokenizer, config.get("max_prompt_tokens")
            ),
            tokenizer,
            max_length,
        )
        for key in ("train", "validation")
        if pairs.get(key) is not None
    )
    named = {"default": validation[0]} if validation else {}
    module = compat.algorithm("dpo")
    ready = compat.set_up("dpo", compat.master_config(module, master), tokenizer, train, named)
    watched = WithEnvironments(ready.logger.log_metrics, {}, {}, metrics=metrics)
    ready.logger.log_metrics = watched
    dpo = master["dpo"]
    steps = min(dpo["max_num_steps"], dpo["max_num_epochs"] * len(ready.dataloader))
    with compat.clocks(module) as clocks, _as_rpo(config, ready) if with_rewards else contextlib.nullcontext():
        compat.train_dpo(ready, tokenizer)
    return _end(ready, watched.last_step, steps, clocks)


@contextlib.contextmanager
def _as_rpo(config: Mapping[str, Any], ready: compat.Ready) -> Iterator[None]:
    """Context in which DPO training uses RPO's loss and the pairs' true rewards.

    `ready` holds the results of `dpo.setup`; its loss and dataloaders are changed in place.
    """
    # Imported late, because its class derives from NeMo-RL's.
    rpo = importlib.import_module("nemo_ext.rl.nemo_rl.rpo")
    check_keys(config["rpo"], ("eta", "distance"), required=("eta",), where="rpo")
    ready.loss_fn = rpo.RPOLoss(ready.loss_fn, **config["rpo"])
    for loader in (ready.dataloader, *ready.val_dataloader.values()):
        loader.collate_fn = rpo.WithRewards(loader.collate_fn)
    with rpo.padded_rewards():
        yield


FIGURES = {
    "train": {
        "loss": "loss",
        "reward": "reward",
        "accuracy": "rewards/accuracies",
        "mean_gen_tokens_per_sample": "completions/mean_length",
        "truncation_rate": "completions/clipped_ratio",
        "approx_entropy": "entropy",
        "grad_norm": "grad_norm",
        "token_mult_prob_error": "guards/mismatch",
        "is_oob_ratio": "guards/outside_bounds",
        "invalid_tool_call_rate": "guards/malformed_tool_calls",
        "malformed_thinking_rate": "guards/malformed_thinking",
    },
    "validation": {"accuracy": "eval_reward"},
    "validation-default": {"accuracy": "eval_rewards/accuracies"},
}
"""Mapping from NeMo-RL's logging prefix and metric name to TRL's name, which is used in metrics.jsonl."""


class WithEnvironments:
    """Wrapper of a logger's `log_metrics` that also logs the environments' metrics, once per step.

    NeMo-RL never requests these metrics; they are logged under `train/` and `validation/`. They and key figures are
    also written to metrics.jsonl under the names that TRL's runs use, for reports, `status` and pipelines.

    Args:
        metrics: path of metrics.jsonl; None to write none.
        limits: True if responses with a large mismatch are excluded (`grpo.seq_logprob_error_threshold`).

    Attributes:
        of_step: mapping from prefixes to functions that return more metrics of a training step.
        last_step: last training step that was logged.
    """

    def __init__(
        self,
        log: Any,
        environments: Mapping[str, Any],
        validators: Mapping[str, Any],
        *,
        metrics: Path | None = None,
        limits: bool = False,
    ) -> None:
        self._log, self._metrics, self._limits, self._first = log, metrics, limits, True
        self._actors = {"train": environments, "validation": validators}
        self._logged: dict[str, int] = {}
        self.of_step: dict[str, Callable[[int], Mapping[str, float]]] = {}
        self.last_step = 0

    def __call__(self, metrics: Mapping[str, Any], step: int, prefix: str | None = "", **others: Any) -> None:
        self._log(metrics, step, prefix=prefix, **others)
        self._note(metrics, step, prefix or "")
        if prefix == "train":
            self.last_step = step
        actors = self._actors.get(prefix or "")
        if not actors or self._logged.get(prefix or "") == step:
            return
        self._logged[prefix or ""] = step
        ray = importlib.import_module("ray")
        taken = ray.get([actor.take_metrics.remote() for actor in actors.values()])
        named = {
            f"{name.removeprefix(PREFIX)}/{key}": value
            for name, values in zip(actors, taken, strict=True)
            for key, value in values.items()
        }
        if named:
            self._log(named, step, prefix=f"{prefix}/environments")
            self._write({"eval_" * (prefix == "validation") + key: value for key, value in named.items()}, step)
        if prefix == "train":
            for name, metrics_of in self.of_step.items():
                values = metrics_of(step)
                self._log(values, step, prefix=name)
                self._write({f"{name}/{key}": value for key, value in values.items()}, step)

    def _note(self, metrics: Mapping[str, Any], step: int, prefix: str) -> None:
        names = FIGURES.get(prefix, {})
        values = {name: metrics[key] for key, name in names.items() if metrics.get(key) is not None}
        excluded, trained = metrics.get("num_masked_seqs_by_logprob_error"), metrics.get("num_valid_samples")
        if prefix == "train" and self._limits and excluded is not None and trained is not None:
            values["guards/masked_responses"] = float(excluded) / max(1.0, float(excluded) + float(trained))
        self._write(values, step)

    def _write(self, values: Mapping[str, Any], step: int) -> None:
        if self._metrics is None or not values:
            return
        if self._first:  # a resumed run repeats the steps after its checkpoint
            truncate_metrics(self._metrics, step - 1)
            self._first = False
        with self._metrics.open("ab") as stream:
            stream.write(json_line({"step": step} | {name: float(value) for name, value in values.items()}))


def _environment_settings(
    config: Mapping[str, Any], master: Mapping[str, Any], tokenizer: Any, planned: list[PlannedTasks], turns: int
) -> dict[str, dict[str, Any]]:
    """Return a mapping from each of our environments that the tasks in `planned` use to its actor's settings."""
    section = config.get("environments") or {}
    used = sorted({name for tasks in planned for name in tasks.environments()})
    theirs = [name for name in section if name.startswith(GYM)]
    check_keys(section, [*known_environments(), *theirs], required=(), where="environments")
    if missing := [name for name in used if name not in section and (theirs or name.startswith(GYM))]:
        raise ValueError(
            f"environments does not contain {', '.join(missing)}, which tasks use, so NeMo Gym would not serve it; add "
            f"{', '.join(missing)} to environments"
        )
    if unused := [name for name in section if name not in used]:
        notice(f"environments.{', environments.'.join(unused)}: ignored, because no task has this environment")
    source = str(tokenizer.name_or_path)
    common = {
        "template": config.get("template") or (source if Path(source).is_dir() else None),
        "eos": tokenizer.eos_token,
        "tool_style": config.get("tool_style"),
        "tokenizer": source,
        "max_tokens": (master["policy"]["generation"] or {}).get("max_new_tokens"),
    }
    settings = {}
    for name in used:
        if not name.startswith(GYM):
            use = section.get(name) or {}
            of_turns = with_turns(name, use.get("settings") or {}, turns)
            settings[name] = {"name": name, **common, **use, "settings": of_turns}
    return settings


def _processed(
    tasks: PlannedTasks | Mapping[int, Task], *, names: Iterable[str], tokenizer: Any, processor: Any, length: Any
) -> Any:
    datasets = importlib.import_module("nemo_rl.data.datasets")
    spec = importlib.import_module("nemo_rl.data.interfaces").TaskDataSpec
    processors = {PREFIX + name: (spec(task_name=PREFIX + name), processor) for name in names}
    # 0.5 copies the settings of the default to all tasks; later versions do not need it.
    default = spec(task_name="nemo_ext")
    return datasets.AllTaskProcessedDataset(
        Records(tasks, PREFIX), tokenizer, default, processors, max_seq_length=length
    )


def _start_ray() -> None:
    # Required by Megatron's policies, but set only in NVIDIA's containers.
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0 9.0 10.0")
    if not importlib.import_module("ray").is_initialized():
        workers.use()
        importlib.import_module("nemo_rl.distributed.virtual_cluster").init_ray()


def _end(ready: compat.Ready, logged: int, steps: int, clocks: Sequence[Any]) -> End:
    """Determine how a run ended; `logged` is its last logged step, for runs without checkpoints.

    Raises RuntimeError if an asynchronous run ended early; NeMo-RL prints the error and returns normally in this case.
    """
    config, step = ready.config, logged
    if compat.setting(config, "checkpointing", "enabled"):
        # The loop saves its last step in every case.
        saved = saved_in(Path(compat.setting(config, "checkpointing", "checkpoint_dir")))
        step = saved[-1].step if saved else 0
    timed_out = any(clock.last_saved for clock in clocks)
    # The main branch's loop may also end at a threshold of the validation.
    threshold = compat.setting(config, "grpo", "stop_at_validation_threshold")
    if compat.is_async(config) and step < steps and not timed_out and threshold is None:
        raise RuntimeError(
            f"NeMo-RL's asynchronous training ended early, after step {step} of {steps}; see NeMo-RL's output above "
            "for the reason, then rerun the command to resume"
        )
    return End(step, stopped=timed_out and step < steps)


def _shut_down(actors: list[Any]) -> None:
    ray = importlib.import_module("ray")
    for actor in actors:
        # Later versions have already shut it down.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(actor.shutdown.remote(), timeout=10)
        ray.kill(actor)
