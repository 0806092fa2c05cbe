"""Hides the differences between NeMo-RL 0.5, 0.7 and later, so that no other module depends on the version.

Versions are recognised by their features, because the main branch calls itself 0.6.0 but has more features than 0.7.0.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from nemo_ext.rl.environments import known_environments
from nemo_ext.rl.job import SAVE_BY

FITS = "0.5 to 0.7, and main of 2026-08-22 (7ea279a)"
"""Supported versions of NeMo-RL."""
_SETUP = {
    "grpo": (
        f"10 (0.5, 0.6) or 13 (0.7 and later); use a supported version of NeMo-RL, {FITS}",
        "policy policy_generation cluster dataloader val_dataloader loss_fn logger checkpointer save_state config",
        "policy policy_generation nemo_gym cluster dataloader val_dataloader loss_fn logger checkpointer save_state "
        "config teacher_worker_groups alias_to_group_alias",
    ),
    "distillation": (
        "11; use NeMo-RL 0.7, or its main branch of 2026-08-22",
        "policy teacher policy_generation nemo_gym dataloader val_dataloader loss_fn logger checkpointer save_state "
        "config",
    ),
    "dpo": (
        f"9; use a supported version of NeMo-RL, {FITS}",
        "policy cluster dataloader val_dataloader loss_fn logger checkpointer save_state config",
    ),
}
"""By algorithm: the expected number of results of its `setup` with a remedy, and their names in order by version."""
_PASSED_ON = ("teacher_worker_groups", "alias_to_group_alias")
"""Items of `grpo.setup` that only some versions return and pass on to the asynchronous loop."""
PREFIX = "nemo_ext_"
"""Prefix that our environments' names have in NeMo-RL."""
ACTOR = "nemo_ext.rl.nemo_rl.environment.TaskEnvironmentActor"
_MEGATRON_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"


Ready = SimpleNamespace
"""Results of the `setup` of an algorithm as attributes; `config` is a dict in 0.5 and a pydantic model later."""


def algorithm(name: str) -> ModuleType:
    """Import a module of NeMo-RL's `algorithms`; raise ValueError with a remedy if NeMo-RL cannot be imported."""
    return _module(f"nemo_rl.algorithms.{name}")


def refills() -> bool:
    """Return whether the asynchronous collector replaces missing groups of a step (since 0.7)."""
    return hasattr(plain_class(part(algorithm("async_utils"), "ReplayBuffer")), "get_trajectories_needed")


def part(module: ModuleType, name: str) -> Any:
    """Return a module's class or function; if it is missing, raise ValueError with the supported versions."""
    found = getattr(module, name, None)
    if found is None:
        raise ValueError(f"this NeMo-RL has no {module.__name__}.{name}; use a supported version, {FITS}")
    return found


def plain_class(actor: Any) -> Any:
    """Return the original class of a Ray actor class, which can be subclassed."""
    return actor.__ray_metadata__.modified_class


def master_config(module: ModuleType, config: Mapping[str, Any]) -> Any:
    """Convert a config to the type that a module's `setup` takes."""
    kind = part(module, "MasterConfig")
    return kind(**config) if hasattr(kind, "model_fields") else dict(config)


def setting(config: Any, *path: str) -> Any:
    """Return a value in a master config, as in `setting(config, "grpo", "num_prompts_per_step")`; None if missing."""
    for key in path:
        config = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
        if config is None:
            return None
    return config


def tokenizer_of(config: Mapping[str, Any]) -> Any:
    """Load the tokenizer named in a master config, which must be a plain mapping."""
    return _module("nemo_rl.algorithms.utils").get_tokenizer(config["policy"]["tokenizer"])


def with_generation(config: dict[str, Any], tokenizer: Any) -> None:
    """Complete `policy.generation` from the tokenizer, in place, as NeMo-RL's own scripts do before `setup`."""
    configure = _module("nemo_rl.models.generation").configure_generation_config
    policy = config["policy"]
    more = {
        "has_refit_draft_weights": bool((policy.get("draft") or {}).get("enabled")),
        "trains_mtp": bool((policy.get("megatron_cfg") or {}).get("mtp_num_layers")),
    }
    policy["generation"] = configure(policy["generation"], tokenizer, **_known(configure, more))


def with_gym(config: dict[str, Any], tokenizer: Any, validation: int) -> None:
    """Complete a master config for a run in NeMo Gym, in place, as NeMo-RL's own script does before `setup`.

    `validation` is the number of validation tasks, which Gym plays all at once.
    """
    sections = SimpleNamespace(policy=config["policy"], env=config["env"])
    _module("nemo_rl.environments.nemo_gym").setup_nemo_gym_config(sections, tokenizer)
    config["grpo"] |= {"max_val_samples": validation, "val_batch_size": validation}


def set_up(name: str, config: Any, tokenizer: Any, *data: Any) -> Ready:
    """Call an algorithm's `setup` and return its results by name; raise ValueError if their number is unexpected.

    Args:
        data: dataset, and validation dataset or datasets.
    """
    items = algorithm(name).setup(config, tokenizer, *data)
    expected, *versions = _SETUP[name]
    for names in map(str.split, versions):
        if len(names) == len(items):
            return Ready(**dict(zip(names, items, strict=True)))
    raise ValueError(f"NeMo-RL's {name}.setup returned {len(items)} items instead of {expected}")


def train_grpo(ready: Ready, tokenizer: Any, environments: Mapping[str, Any], val_environments: Any) -> None:
    """Run GRPO to its end: `async_grpo_train` if `grpo.async_grpo.enabled`, else `grpo_train`.

    Args:
        environments: mapping from the tasks' names in NeMo-RL to environment actors.
        val_environments: the same for validation; None if there is none.
    """
    module = algorithm("grpo")
    first = (ready.policy, ready.policy_generation, ready.dataloader, ready.val_dataloader, tokenizer, ready.loss_fn)
    then = (dict(environments), val_environments, ready.logger, ready.checkpointer, ready.save_state, ready.config)
    if is_async(ready.config):
        age = setting(ready.config, "grpo", "async_grpo", "max_trajectory_age_steps")
        train = part(module, "async_grpo_train")
        more = {key: vars(ready)[key] for key in _PASSED_ON if key in vars(ready)}
        train(*first, *then, max_trajectory_age_steps=age, **_known(train, more))
    else:
        part(module, "grpo_train")(*first, *then)


def train_distillation(ready: Ready, tokenizer: Any, environments: Mapping[str, Any], val_environments: Any) -> None:
    """Run distillation to its end; `ready` are the results of `set_up`, and the rest is as in `train_grpo`."""
    first = (ready.policy, ready.teacher, ready.policy_generation, ready.dataloader, ready.val_dataloader, tokenizer)
    then = (ready.logger, ready.checkpointer, ready.save_state, ready.config)
    algorithm("distillation").distillation_train(*first, ready.loss_fn, dict(environments), val_environments, *then)


def train_dpo(ready: Ready, tokenizer: Any) -> None:
    """Run DPO to its end; `ready` are the results of `set_up`, whose `loss_fn` may have been replaced."""
    first = (ready.policy, ready.dataloader, ready.val_dataloader, tokenizer, ready.loss_fn)
    algorithm("dpo").dpo_train(*first, ready.config, ready.logger, ready.checkpointer, ready.save_state)


@contextlib.contextmanager
def clocks(module: ModuleType) -> Iterator[list[Any]]:
    """Context that collects the training loop's timeout checkers (`checkpointing.checkpoint_must_save_by`).

    If a checker made the loop save a checkpoint and stop, its `last_saved` is true; the loop then returns as it does
    after its last step. The checkers also obey the time limit in NEMO_EXT_SAVE_BY.

    Yields:
        List to which each checker is added when the loop creates it.
    """
    checkers: list[Any] = []
    kind = part(module, "TimeoutChecker")

    def make(*arguments: Any, **keywords: Any) -> Any:
        checker = kind(*arguments, **keywords)
        if SAVE_BY in os.environ:
            checker.last_save_time = min(checker.last_save_time, float(os.environ[SAVE_BY]) - checker.start_time)
        checkers.append(checker)
        return checker

    with patch.object(module, "TimeoutChecker", make):
        yield checkers


def convert_dcp(weights: Path, to: Path, model: str, tokenizer: str, overrides: Mapping[str, Any]) -> None:
    """Convert a DTensor checkpoint to a Hugging Face folder with one pickled weights file.

    Args:
        weights: folder `step_N/policy/weights`; 0.5 only reads the format of DTensor's first version.
        to: output folder, which must not exist.
        model: name or folder of the model whose config is used, with `overrides`.
        tokenizer: name or folder of the tokenizer.
        overrides: changes to the model's config.
    """
    _module("nemo_rl.utils.native_checkpoint").convert_dcp_to_hf(
        dcp_ckpt_path=str(weights),
        hf_ckpt_path=str(to),
        model_name_or_path=model,
        tokenizer_name_or_path=tokenizer,
        hf_overrides=dict(overrides),
    )


def convert_megatron(root: Path, config: Path, weights: Path, to: Path, log: Path) -> None:
    """Run the checkout's convert_megatron_to_hf.py with its Megatron workers' Python, which has Megatron-Bridge.

    Args:
        config: path of `step_N/config.yaml`.
        weights: folder `step_N/policy/weights/iter_N`.
        to: output folder, which must not exist.
        log: file for the script's output.

    Raises:
        ValueError: the script failed; the message quotes its last line of output.
        subprocess.CalledProcessError: the workers' environment could not be created.
    """
    python = Path(_megatron_python())
    paths = {"--config": config, "--megatron-ckpt-path": weights, "--hf-ckpt-path": to}
    options = [word for option, path in paths.items() for word in (option, str(path.absolute()))]
    environment = {**os.environ}
    if python != Path(sys.executable):
        environment |= dict.fromkeys(("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"), str(python.parent.parent))
    script = ["examples/converters/convert_megatron_to_hf.py", *options]
    with log.open("w") as output:
        process = subprocess.run(
            [str(python), *script], cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if process.returncode:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise ValueError(
            f"convert_megatron_to_hf.py failed with exit code {process.returncode}: {lines[-1]}; see {log}"
        )


def _megatron_python() -> str:
    """Return the Python executable of NeMo-RL's Megatron workers, creating their environment if it is missing."""
    executable: str = _module("nemo_rl.distributed.ray_actor_environment_registry").get_actor_python_env(
        _MEGATRON_WORKER
    )
    if not executable.startswith("uv"):
        return executable
    venvs = _module("nemo_rl.utils.venvs")
    folder = Path(os.environ.get("NEMO_RL_VENV_DIR", venvs.DEFAULT_VENV_DIR)) / _MEGATRON_WORKER
    python = folder / "bin" / "python"
    return str(python) if python.exists() else str(venvs.create_local_venv(executable, _MEGATRON_WORKER))


def is_async(config: Any) -> bool:
    """Return whether a master config enables asynchronous GRPO."""
    return bool(setting(config, "grpo", "async_grpo", "enabled"))


def register() -> list[str]:
    """Register all environments with NeMo-RL, and their actor class in its registry of Python executables.

    Without the latter, the actor cannot be created. The function may be called more than once and in any process.

    Returns:
        The environments' names in NeMo-RL, such as `nemo_ext_math`.

    Raises:
        ValueError: another environment already has one of the names.
    """
    environments = _module("nemo_rl.environments.utils")
    actors = _module("nemo_rl.distributed.ray_actor_environment_registry").ACTOR_ENVIRONMENT_REGISTRY
    actors.setdefault(ACTOR, _module("nemo_rl.distributed.virtual_cluster").PY_EXECUTABLES.SYSTEM)
    names = [PREFIX + name for name in known_environments()]
    for name in names:
        entry = environments.ENV_REGISTRY.get(name)
        if entry is None:
            environments.register_env(name, ACTOR)
        elif entry["actor_class_fqn"] != ACTOR:
            raise ValueError(
                f"environment name {name!r} is already registered in NeMo-RL for {entry['actor_class_fqn']}; register "
                "that class under another name"
            )
    return names


def create_environment(name: str, config: Mapping[str, Any]) -> Any:
    """Start and return the actor of a registered environment; `config` are its settings."""
    create = _module("nemo_rl.environments.utils").create_env
    all_of_them = "env_configs" in inspect.signature(create).parameters
    return create(name, {name: dict(config)} if all_of_them else dict(config))


def baseline_modules() -> list[ModuleType]:
    """Return the modules that import `calculate_baseline_and_std_per_prompt` into their own namespace."""
    modules = [algorithm("grpo")]
    # 0.6 and later compute advantages in a separate module.
    if importlib.util.find_spec("nemo_rl.algorithms.advantage_estimator") is not None:
        modules.append(_module("nemo_rl.algorithms.advantage_estimator"))
    return modules


def has_estimator() -> bool:
    """Return whether NeMo-RL has estimator objects, which compute advantages from the batch (0.6 and later)."""
    return hasattr(algorithm("grpo"), "_create_advantage_estimator")


def _known(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments in `keywords` that the function has parameters for."""
    accepted = inspect.signature(function).parameters
    return {key: value for key, value in keywords.items() if key in accepted}


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, AssertionError) as error:
        # PyPI's `nemo_rl` is empty: there `nemo_rl.algorithms` itself is missing, not one of its modules.
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if name.startswith(missing) and missing.count(".") > 1:
            raise ValueError(f"this NeMo-RL has no {name}; use a supported version, {FITS}") from error
        raise ValueError(
            f"NeMo-RL cannot be imported ({error}); put its checkout on PYTHONPATH and install its packages "
            "(docs/rl/nemo_rl.md)"
        ) from error
