"""Differences between the Megatron-Core versions that nemo_ext supports (docs/installs.md). Does not import torch."""

import inspect
import runpy
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class TooOld(ValueError):
    """Raised if a setting needs a newer Megatron-Core than the installed one."""


class Feature(NamedTuple):
    """Feature that Megatron-Core has from some version on.

    Attributes:
        name: name to show to the user.
        since: first version that has the feature.
        flags: Megatron's flags for the feature; `flag=value` if older versions have the flag but not that value.
    """

    name: str
    since: tuple[int, int]
    flags: tuple[str, ...]


FEATURES = (
    Feature(
        "a teacher's log-probabilities in files",
        (0, 19),
        (
            *("logits_save_dir", "logits_save_dtype", "logits_save_top_k", "logits_save_top_p", "freeze_all_layers"),
            *("logits_save_top_p_min_k", "logits_load_dir", "logits_load_ignore_errors", "logits_load_kd_loss_alpha"),
            *("logits_load_decode_threads", "logits_load_msc_prefetch_depth", "logits_load_prefetch_factor"),
        ),
    ),
    Feature("attention that stops at the end of a document", (0, 19), ("dataloader_inter_document_masking",)),
    Feature(
        "YaRN in hybrid models",
        (0, 19),
        (
            *("position_embedding_type=yarn", "yarn_original_max_position_embeddings", "yarn_beta_fast"),
            *("yarn_beta_slow", "yarn_correction_range_round_to_int", "no_yarn_correction_range_round_to_int"),
        ),
    ),
    Feature("upcycling of our models", (0, 19), ("moe_use_upcycling",)),
    Feature("Megatron's own RL with our models", (0, 19), ("perform_rl_step",)),
)
"""Features that nemo_ext uses itself and that a supported version may lack. Other flags that an older version does not
know are rejected as unknown."""


@cache
def installed() -> tuple[int, int, int]:
    """Return the version of the installed Megatron-Core, read from its source without importing it.

    Its `__version__` would include the commit of any git repository that contains the Python environment.
    """
    spec = find_spec("megatron.core")
    assert spec is not None
    folder = Path(next(iter(spec.submodule_search_locations or ()), ""))
    try:
        major, minor, patch = runpy.run_path(str(folder / "package_info.py"))["VERSION"][:3]
    except (OSError, KeyError) as error:
        raise ValueError(
            f"{folder} is not a complete Megatron-Core (no VERSION in package_info.py): reinstall megatron-core"
        ) from error
    return major, minor, patch


def spelled(version: Iterable[int]) -> str:
    """Join a version's numbers with dots, as in `0.19.0`."""
    return ".".join(map(str, version))


def missing(feature: Feature) -> bool:
    """Return whether the installed Megatron-Core is too old to have a feature."""
    return installed() < feature.since


def lack(flags: Iterable[str]) -> str | None:
    """Explain why the installed Megatron-Core is too old for any of the flags (or `flag=value`); None if it is not."""
    names = set(flags)
    for feature in FEATURES:
        if names & set(feature.flags) and missing(feature):
            since, here = spelled(feature.since), spelled(installed())
            return f"{feature.name} came with Megatron-Core {since}, but {here} is installed"
    return None


def model_of_container(container: Any) -> dict[str, Any]:
    """Return keyword arguments that make `pretrain` build its config container's model; empty from version 0.19 on.

    Megatron-Core 0.18 takes a function that builds one stage, and wraps the stages in `get_model`. This replaces
    `get_model`, so that the container's builder builds and wraps the stages, with the hooks of its config.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import training

    if inspect.signature(training.pretrain).parameters["model_provider"].default is None:
        return {}

    def get_model(*_: Any, wrap_with_ddp: bool = True, **others: Any) -> list[Any]:
        if names := [name for name in ("config", "pg_collection") if others.get(name) is not None]:
            raise TooOld(f"get_model with {' and '.join(names)} needs megatron-core 0.19 or later: upgrade it")
        return container.model.get_builder_cls()(container.model).build_distributed_models(
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            ddp_config=container.ddp,
            overlap_param_gather_with_optimizer_step=container.optimizer.overlap_param_gather_with_optimizer_step,
            use_megatron_fsdp=container.dist.use_megatron_fsdp,
            use_torch_fsdp2=container.dist.use_torch_fsdp2,
            wrap_with_ddp=wrap_with_ddp,
            data_parallel_random_init=container.rng.data_parallel_random_init,
        )

    training.get_model = get_model
    return {"model_provider": None}
