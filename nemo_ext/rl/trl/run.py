"""Training with TRL's GRPO, RLOO and DPO trainers, using our tasks, verifiers and rewards."""

import gc
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.chat.template import Template
from nemo_ext.checkpoint.foreign_code import may_run_code
from nemo_ext.checkpoint.rounding import undone_by_bfloat16
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.job import bf16
from nemo_ext.job.config import INTERRUPTED
from nemo_ext.job.progress import notice
from nemo_ext.job.rank import start
from nemo_ext.job.run_directory import CHECKPOINTS, CONFIG, METRICS, truncate_metrics, write_config, write_versions
from nemo_ext.job.seeds import digest
from nemo_ext.job.settings import checked, nearest
from nemo_ext.memory import sampler
from nemo_ext.rl.algorithms import Algorithm, EnvironmentUse, PolicyGradient
from nemo_ext.rl.environments import with_turns
from nemo_ext.rl.episodes import Episodes
from nemo_ext.rl.groups import check_judges, group_reward
from nemo_ext.rl.lora import adapters as adapters_of
from nemo_ext.rl.plan import PlannedTasks, check_references, plan_tasks, validation_tasks
from nemo_ext.rl.precision import Precision
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.rendering import Rendered
from nemo_ext.rl.report import write_report
from nemo_ext.rl.reprofile import Change, Curricula
from nemo_ext.rl.settings import Lora
from nemo_ext.rl.task import Task
from nemo_ext.rl.trl.render import render
from nemo_ext.rl.trl.rollouts import Rollouts

if TYPE_CHECKING:
    from nemo_ext.rl.trl.teachers import Teachers

MODEL, ROLLOUTS = "model", "rollouts.jsonl"
RANKS = "ranks"
"""Folder in the run directory with the ranks' config and logs."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
BY_ADAPTER = ("lengths.prompt",)
"""Algorithm keys that TRL cannot express but that this module handles."""


def run(config: Mapping[str, Any], algorithm: Algorithm) -> bool:
    """Train to the end of the schedule, starting from the run directory's last checkpoint if there is one.

    Several processes are started as ranks; a single one trains here.

    Returns:
        True if a signal arrived during the last step, although the run is finished.

    Raises:
        ValueError: TRL is not installed, or a setting, the model, the tasks or the pairs are invalid.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # set by torchrun and accelerate
        raise ValueError(
            "start `nemo-ext rl` without torchrun and accelerate; launcher.nproc_per_node=N trains with N processes"
        )
    processes = int(config["launcher"]["nproc_per_node"])
    if processes == 1:
        with _one_gpu():
            return train(config, algorithm, sys.argv)
    run_dir = Path(config["run_dir"])
    before, folder = _model_time(run_dir), run_dir / RANKS
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # A step and its checkpoint may take long; a second signal ends the ranks at once.
        start("nemo_ext.rl.trl.rank", folder / CONFIG, *sys.argv, ranks=processes, seconds_to_stop=float("inf"))
    except KeyboardInterrupt:
        if _model_time(run_dir) == before:
            sys.exit(INTERRUPTED)
        return True
    return False


def _model_time(run_dir: Path) -> int | None:
    """Return when the trained model was written, in nanoseconds; None if there is none."""
    model = run_dir / MODEL
    return model.stat().st_mtime_ns if model.is_dir() else None


@contextmanager
def _one_gpu() -> Iterator[None]:
    """Make only the first visible GPU visible, because TRL rejects several in one process."""
    before = os.environ.get(VISIBLE)
    first, *others = (before or "0").split(",")
    if before is None or others:
        os.environ[VISIBLE] = first
    if others:
        count = len(others) + 1
        notice(f"using the first of {count} visible GPUs; launcher.nproc_per_node={count} trains on all of them")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = before


def train(config: Mapping[str, Any], algorithm: Algorithm, command: Sequence[str]) -> bool:
    """Train in this process, which may be one of several ranks, and record the user's command; see `run`."""
    main = int(os.environ.get("RANK", 0)) == 0
    seconds, folder = sampler.interval(config) if main else None, Path(config["run_dir"]) / sampler.FOLDER
    with sampler.sampled(folder, seconds):
        phases = sampler.Phases(None if seconds is None else folder)
        phases.begin("setup")
        try:
            ready = _ready(config, algorithm)
            run_dir = Path(config["run_dir"])
            if main:
                write_config(run_dir, config)
                write_versions(run_dir, list(command))
            # To measure pass rates again, training ends with a checkpoint and resumes from it, as after a kill.
            while (trained := _train(config, algorithm, phases, ready)) is None:
                _free_memory()
        finally:
            phases.begin(None)
    if trained and main:
        curricula = _curricula(config, algorithm) if isinstance(algorithm, PolicyGradient) else None
        write_report(run_dir, algorithm, curricula, remark=_rounding(ready.model, run_dir / MODEL))
    return bool(ready.stop.asked)


def _rounding(start: Path, trained: Path) -> str | None:
    """Return how much of the training is lost if the model is rounded to bfloat16; None if nothing is known."""
    try:
        share = undone_by_bfloat16(start, trained)
    except CheckpointError:  # a model in another format, such as pytorch_model.bin
        return None
    if share is None:
        return None
    remark = f"Rounding the weights to bfloat16 undoes {share:.1%} of their changes"
    if share < 0.5:
        return f"{remark}."
    remark += "; evaluate, convert and serve in float32, or train longer or at a higher rate."
    notice(f"{trained}: {remark[0].lower()}{remark[1:].removesuffix('.')}")
    return remark


@dataclass(frozen=True)
class _Ready:
    """Objects that a run needs for training; `trusted` is True if Python files in the model's folder may be run."""

    model: Path
    tokenizer: Any
    rendered: Rendered
    trusted: bool
    adapters: Any
    stop: Any
    trainers: Any


def _ready(config: Mapping[str, Any], algorithm: Algorithm) -> _Ready:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # handled as Ctrl-C
    notice("loading torch, transformers and TRL")
    try:
        transformers, trainers = import_module("transformers"), import_module("nemo_ext.rl.trl.trainers")
    except ImportError as error:
        raise ValueError(
            f"engine=trl cannot be imported ({error}); install it with pip install 'nemo_ext[trl]'"
        ) from None
    # Users cannot fix deprecation warnings between TRL and transformers.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|trl")
    transformers.utils.logging.disable_progress_bar()
    folder = Path(config["policy"]).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model={folder} has no config.json; name a Hugging Face folder, as `nemo-ext convert "
            "to_format=huggingface` writes"
        )
    trusted = may_run_code(str(folder), config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in model={folder} has no eos_token, which ends responses; set it in tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config["template"] is not None:
        # The exported model gets the chat template that it was trained with.
        tokenizer.chat_template = Template.load(config["template"]).source
    processes = int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun and accelerate
    micro_batch = gcd(algorithm.batch // processes, config["micro_batch"])
    rendered = render(algorithm, micro_batch=micro_batch, processes=processes, by_adapter=BY_ADAPTER)
    settings = config["trl"] or {}
    if Precision.from_config(config) is not None:
        reason = "TRL trains and generates in the data type of the model; engine=nemo_rl supports FP8"
        rendered.cannot("precision_plan", reason)
    batching = "use_transformers_continuous_batching"
    if isinstance(algorithm, PolicyGradient) and algorithm.loss.mismatch is not None and settings.get(batching):
        raise ValueError(
            f"rl.loss.mismatch requires log-probabilities of generation, which trl.{batching}=true does not return; "
            "remove one of them"
        )
    rendered.settled(config["on_inexpressible"])
    stop = trainers.Stop(algorithm.updates_per_step)
    lora = None if config.get("lora") is None else checked(Lora, config["lora"], "lora")
    adapters = None if lora is None else adapters_of(lora)
    return _Ready(folder, tokenizer, rendered, trusted, adapters, stop, trainers)


def _train(config: Mapping[str, Any], algorithm: Algorithm, phases: sampler.Phases, ready: _Ready) -> bool | None:
    """Train from the last checkpoint to the end of the run, or until pass rates must be measured again.

    Returns whether there was anything left to do; None if training stopped at a checkpoint to measure pass rates.
    """
    run_dir, trainers, tokenizer = Path(config["run_dir"]), ready.trainers, ready.tokenizer
    checkpoint = _last_checkpoint(run_dir / CHECKPOINTS)
    done = _step_of(checkpoint) if checkpoint else 0
    run_settings = _run_settings(config, algorithm, resumed=checkpoint is not None)
    settings = {**ready.rendered.settings, **run_settings, **(config["trl"] or {})}
    if settings["bf16"] not in (True, False, None, "auto"):
        raise ValueError(f"trl.bf16={settings['bf16']}: choose true, false or auto")
    if settings["bf16"] == "auto":
        settings["bf16"] = bf16.is_fast()
    if slow := bf16.remark("trl.bf16=false", used=bool(settings["bf16"])):
        notice(slow)
    if ready.trusted:
        settings["model_init_kwargs"] = {"trust_remote_code": True, **(settings.get("model_init_kwargs") or {})}
    due: Any = None
    if isinstance(algorithm, PolicyGradient):
        notice("reading the tasks")
        rollouts, train, validation, curricula = _tasks(config, algorithm, settings, tokenizer, done)
        drawn, teachers = _drawn(checkpoint, algorithm), _teachers(config, algorithm, tokenizer, train)

        def make(model: Path, settings: Mapping[str, Any], *, validated: bool = True) -> Any:
            notice(f"loading the model {model}")
            used = validation if validated else None
            return trainers.policy_gradient(
                *(algorithm, str(model), settings, tokenizer, rollouts, train, used),
                drawn=drawn,
                teachers=teachers,
                adapters=ready.adapters,
            )

        if curricula is not None:
            _measure(config, algorithm, curricula, checkpoint, make, settings, ready, phases)
            curricula.follow(train)
            due = trainers.Due(curricula, algorithm.updates_per_step)
        trainer = make(ready.model, settings)
    else:
        notice(f"loading the model {ready.model} and the pairs")
        prompts = Prompts.from_tokenizer(tokenizer, config["template"]) if tokenizer.chat_template else None
        pairs, rpo = config["pairs"], ready.rendered.adapter.get("rpo")
        trainer = trainers.preference(
            algorithm, str(ready.model), settings, tokenizer, prompts, pairs, rpo, adapters=ready.adapters
        )
    model_config = trainer.model.config
    if getattr(model_config, "num_nextn_predict_layers", 0):
        notice(
            f"model={ready.model}: TRL trains without multi-token prediction; {run_dir / MODEL} will have no mtp.* "
            "tensors, because the original ones would not match the trained weights"
        )
        model_config.num_nextn_predict_layers = 0
    if (run_dir / MODEL).is_dir() and done >= trainer.args.max_steps:
        notice(
            f"{run_dir / MODEL}: this run is finished; add steps to continue, or set another run_dir=... to start over"
        )
        return False
    if checkpoint is not None:
        notice(f"resuming from step {done // algorithm.updates_per_step}")
    main = trainer.accelerator.is_main_process
    for name in (METRICS, ROLLOUTS) if main else ():
        truncate_metrics(run_dir / name, done)
    trainer.remove_callback(import_module("transformers").PrinterCallback)
    trainer.add_callback(trainers.Log(run_dir / METRICS, rollouts if isinstance(algorithm, PolicyGradient) else None))
    trainer.phases = phases
    phases.begin("training")
    stop = ready.stop
    for callback in (stop, due):
        if callback is not None:
            trainer.add_callback(callback)
    with stop.on_signals():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.accelerator.wait_for_everyone()  # until the main process has written the last checkpoint
    if isinstance(algorithm, PolicyGradient):
        rollouts.shutdown()
    if stop.asked and trainer.state.global_step < trainer.state.max_steps:
        step = trainer.state.global_step // algorithm.updates_per_step
        notice(f"interrupted: the last checkpoint is at step {step}; the same command resumes")
        sys.exit(INTERRUPTED)
    if due is not None and due.now:
        return None
    unfinished = run_dir / f".{MODEL}"
    for folder in (unfinished, run_dir / MODEL) if main else ():
        shutil.rmtree(folder, ignore_errors=True)
    with phases.during("checkpoint"):
        if ready.adapters is not None:
            trainer.model = trainer.model.merge_and_unload()
        trainer.save_model(str(unfinished))  # by the main process
        if main:
            tokenizer.save_pretrained(unfinished)
            unfinished.rename(run_dir / MODEL)
    trainer.accelerator.wait_for_everyone()
    return True


def _measure(
    config: Mapping[str, Any],
    algorithm: PolicyGradient,
    curricula: Curricula,
    checkpoint: Path | None,
    make: Callable[..., Any],
    settings: Mapping[str, Any],
    ready: _Ready,
    phases: sampler.Phases,
) -> None:
    """Measure pass rates and make the curricula that are due at a checkpoint, or finish interrupted ones."""
    updates = algorithm.updates_per_step
    if checkpoint is not None:
        step = _step_of(checkpoint) // updates
        logs = json.loads((checkpoint / "trainer_state.json").read_bytes())["log_history"]
        validated = ready.trainers.validations(logs, updates)
        if why := curricula.due(step, validated):
            drawn = _drawn(checkpoint, algorithm)
            assert drawn is not None
            recent = [(step, reward) for step, reward in validated if step >= curricula.since()]
            best = _best(checkpoint, recent, updates)
            curricula.begin(Change(step=step, drawn=drawn["number"], why=why, checkpoint=best.name))
    for number, change in enumerate(curricula.changes(), start=1):
        if curricula.result(number) is not None:
            continue
        folder = Path(config["run_dir"]) / CHECKPOINTS / change.checkpoint
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"checkpoint {folder} no longer exists, but curriculum {number} needs its rollouts; remove "
                f"{curricula.folder}/{number} to continue without that curriculum"
            )
        samples = curricula.settings.samples
        notice(
            f"step {change.step} ({change.why}): measuring pass rates of {change.checkpoint} on "
            f"{len(curricula.tasks):,} tasks with {samples} responses each"
        )
        with phases.during("generation"):
            # No reference model, which only training needs.
            trainer = make(
                folder, {**settings, "beta": 0.0, "eval_strategy": "no", "eval_on_start": False}, validated=False
            )
            ready.trainers.answer(
                trainer,
                curricula.tasks,
                curricula.of_number(number) / ROLLOUTS,
                samples=samples,
                at_once=max(1, algorithm.responses_per_step // samples),
                seed=digest(config["seed"], "reprofile", number),
            )
        del trainer
        curricula.make(number)
        _free_memory()


def _free_memory() -> None:
    gc.collect()
    import_module("torch").cuda.empty_cache()


def _best(checkpoint: Path, validated: Sequence[tuple[int, float]], updates: int) -> Path:
    """Return the validated checkpoint with the best reward, the latest among equals; `checkpoint` if none exists."""
    for _, step in sorted(((reward, step) for step, reward in validated), reverse=True):
        candidate = checkpoint.with_name(f"checkpoint-{step * updates}")
        if (candidate / "trainer_state.json").is_file():
            return candidate
    return checkpoint


def _run_settings(config: Mapping[str, Any], algorithm: Algorithm, *, resumed: bool) -> dict[str, Any]:
    """Return the arguments for TRL's config that come from the run rather than the algorithm."""
    updates = algorithm.updates_per_step  # TRL counts updates, but a run can only resume at the start of a step
    on_gpu = import_module("torch").cuda.is_available()
    settings = {
        "output_dir": str(Path(config["run_dir"]) / CHECKPOINTS),
        "save_strategy": "steps",
        "save_steps": config["save_every"] * updates,
        "logging_steps": 1,
        "report_to": "none",
        "seed": config["seed"],
        "disable_tqdm": True,
        "use_cpu": not on_gpu,  # otherwise transformers refuses trl.bf16=true on CPUs
        "bf16": on_gpu,
        "gradient_checkpointing": on_gpu,
        "dataloader_pin_memory": on_gpu,
    }
    section = "tasks" if isinstance(algorithm, PolicyGradient) else "pairs"
    if not config[section].get("validation"):
        return settings
    every = algorithm.validation.every or config["save_every"]
    at_start = algorithm.validation.at_start and not resumed
    return {**settings, "eval_strategy": "steps", "eval_steps": every * updates, "eval_on_start": at_start}


def _tasks(
    config: Mapping[str, Any], algorithm: PolicyGradient, settings: Mapping[str, Any], tokenizer: Any, done: int
) -> tuple[Rollouts, PlannedTasks, PlannedTasks | None, Curricula | None]:
    """Return rollouts, planned training tasks, validation tasks, and the curricula to be made during training.

    The last two are None if the config has none. `done` is the number of optimizer updates before a resumed run.
    """
    prompts = Prompts.from_tokenizer(tokenizer, config["template"])
    if not algorithm.steps:
        raise ValueError("rl.schedule.steps=null: set it to the number of training steps")
    rounds = algorithm.sampling.max_batches if algorithm.algorithm == "grpo" else None
    spare = algorithm.steps * ((rounds or 1) - 1)
    train = plan_tasks(
        config["tasks"]["train"],
        steps=algorithm.steps,
        prompts=algorithm.prompts_per_step,
        spare=spare,
        thinking_share=prompts.thinking_share(algorithm.thinking_share),
    )
    section = config["tasks"].get("validation")
    validation = validation_tasks(section["path"]) if section else None
    planned = [tasks for tasks in (train, validation) if tasks is not None]
    curricula = _curricula(config, algorithm)
    measured = None
    if curricula is not None:
        curricula.forget_after(done // algorithm.updates_per_step)
        measured = curricula.read_tasks(train)
        planned.append(validation_tasks(measured.path))
    names = sorted({name for tasks in planned for name in tasks.environments()})
    uses = algorithm.environments or {name: EnvironmentUse() for name in names}
    for name in names:
        if name not in uses:
            raise ValueError(
                f"rl.environments does not contain {name!r}, the environment of some tasks; add it, or remove these "
                f"tasks ({nearest(name, uses)})"
            )
    environments = {}
    for name in names:
        of_turns = with_turns(name, uses[name].settings, algorithm.turns)
        environments[name] = Episodes({"name": name, **uses[name].episodes(), "settings": of_turns}, prompts)
    group = algorithm.group.settings() if algorithm.group else {}
    over_groups = group_reward(group, "rl.group")
    check_judges((episodes.environment for episodes in environments.values()), group)
    check_references(planned, lambda task: environments[task.environment].check(task))
    rollouts = Rollouts(
        tokenizer=tokenizer,
        prompts=prompts,
        environments=environments,
        generations=algorithm.generations_per_prompt,
        record=Path(config["run_dir"]) / ROLLOUTS,
        tokens=int(settings["max_completion_length"]),
        group=over_groups,
    )
    if (limit := algorithm.lengths.prompt) is not None:
        because = f"their prompts have more than rl.lengths.prompt={limit} tokens; raise rl.lengths.prompt"

        def is_longer(task: Task) -> bool:
            return len(rollouts.encoded([prompts.prompt(task)[0]])[0]) > limit

        excluded = train.exclude(is_longer, because)
        if excluded and config["tasks"]["train"].get("curriculum"):
            raise ValueError(
                f"tasks.train.curriculum has {len(excluded):,} prompts with more than rl.lengths.prompt={limit} tokens "
                f"(first: {excluded[0]}); make it again without them, or raise rl.lengths.prompt"
            )
        if excluded:
            count = len(excluded)
            notice(f"excluded {count:,} tasks with prompts over rl.lengths.prompt={limit} tokens: {excluded[0]} ...")
        if measured is not None:
            measured.exclude(is_longer, because)
    if curricula is not None and measured is not None:
        curricula.tasks = measured.tasks
    return rollouts, train, validation, curricula


def _teachers(
    config: Mapping[str, Any], algorithm: PolicyGradient, tokenizer: Any, train: PlannedTasks
) -> "Teachers | None":
    """Load the teachers of on-policy distillation, if there are any, after checking that each task has one."""
    if algorithm.distillation is None:
        return None
    check_references((train,), algorithm.distillation.teacher)
    module = import_module("nemo_ext.rl.trl.teachers")
    teachers: Teachers = module.Teachers(algorithm.distillation, tokenizer, lambda name: may_run_code(name, config))
    return teachers


def _curricula(config: Mapping[str, Any], algorithm: PolicyGradient) -> Curricula | None:
    train, run_dir = config["tasks"]["train"], Path(config["run_dir"])
    return Curricula.from_config(train, run_dir, prompts=algorithm.prompts_per_step, steps=algorithm.steps or 0)


def _last_checkpoint(folder: Path) -> Path | None:
    return max(filter(_is_whole, folder.glob("checkpoint-*")), key=_step_of, default=None)


def _is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint's last-written file is complete; a kill may have truncated it."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_bytes())
    except (OSError, ValueError):
        return False
    return True


def _drawn(checkpoint: Path | None, algorithm: PolicyGradient) -> dict[str, Any] | None:
    """Return the state of `nemo_ext.rl.trl.trainers.Drawn` from a checkpoint; None if there is no checkpoint."""
    if checkpoint is None:
        return None
    state = json.loads((checkpoint / "trainer_state.json").read_bytes())["stateful_callbacks"].get("Drawn")
    if state is None:  # a run of an earlier version, or a run whose tasks depend on the step alone
        return {"number": _step_of(checkpoint) // algorithm.updates_per_step * algorithm.prompts_per_step}
    return dict(state["args"])


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
