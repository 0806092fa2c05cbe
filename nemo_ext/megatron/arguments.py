"""Conversion of the composed config to Megatron's own, validated arguments.

The config's `megatron:` section holds Megatron's own command-line flags, with dashes written as underscores
(`--moe-router-topk 6` is `moe_router_topk: 6`, `--swiglu` is `swiglu: true`). Nothing is redeclared: the installed
parser defines which flags exist, their types and their meaning, so every option of every version is available.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import compile as compile_pattern
from nemo_ext.architecture.pattern import format as format_pattern
from nemo_ext.architecture.pattern import parse
from nemo_ext.architecture.pipeline import balance
from nemo_ext.job import run_directory
from nemo_ext.job.words import did_you_mean
from nemo_ext.megatron import versions

MANAGED = {
    "hybrid_layer_pattern": "set model.pattern instead, from which it is compiled",
    "mtp_num_layers": "write each depth of multi-token prediction as / with its blocks in model.pattern: ME*-/*E/*E",
    "mtp_hybrid_override_pattern": "write the blocks of each prediction depth after / in model.pattern: ME*-/*E/*E",
    "num_layers": "set model.pattern instead, whose blocks are the layers",
    "spec": "remove it, as model.pattern determines the layer spec (for Megatron's own trainer see docs/megatron.md)",
    "transformer_impl": "set model.backend instead (auto, local or transformer_engine)",
    "save": "set run_dir instead, as checkpoints are kept in run_dir/checkpoints",
    "load": "a run resumes from run_dir/checkpoints; set megatron.pretrained_checkpoint to start from other weights",
    "tensorboard_dir": "set run_dir instead, as TensorBoard files are kept in run_dir/tensorboard",
}
"""Mapping from Megatron flags that the trainer sets itself to advice on what to set instead."""

WITHOUT_EFFECT = {
    "reset_attention_mask": "this trainer does not mask attention across documents yet",
    "rampup_batch_size": "Megatron-Core 0.19 itself ignores it",
    "full_validation": "megatron.eval_iters sets the length of a validation",
    "inprocess_restart": "Megatron-Core 0.19 loses its arguments at the first in-process restart (docs/upstream.md)",
}
"""Mapping from Megatron flags that would be accepted but have no effect to the reason."""

LOCAL_BACKEND = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "no_masked_softmax_fusion": True,
    "no_bias_swiglu_fusion": True,
    "no_bias_gelu_fusion": True,
    "no_bias_dropout_fusion": True,
    "no_rope_fusion": True,
    "no_gradient_accumulation_fusion": True,
}
"""Flags for runs without Transformer Engine and Apex, which turn off the kernels that need them."""

CPU = {"distributed_backend": "gloo", "use_cpu_initialization": True, "disable_jit_fuser": True}
"""Flags for runs without CUDA, where compiling Megatron's small fused functions costs more time than it saves."""

_USED_WITH = {"boto3": ("object_storage_cache_path", "s3_cache_path"), "wandb": ("wandb_project",)}
"""Mapping from optional packages to the Megatron flags that use them; TensorBoard imports boto3 as well, for S3."""


def backend_of(config: Mapping[str, Any]) -> str:
    """Return the config's `model.backend`; `auto` becomes `transformer_engine` if that is usable, otherwise `local`.

    Raises:
        ValueError: the name is unknown.
    """
    import torch

    requested = config["model"].get("backend") or "auto"
    if requested == "auto":
        return "transformer_engine" if _engine_installed() and torch.cuda.is_available() else "local"
    if requested not in ("local", "transformer_engine"):
        raise ValueError(f"model.backend={requested!r}: choose auto, local or transformer_engine")
    return requested


def _engine_installed() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def pattern_with_cuts(config: Mapping[str, Any]) -> str:
    """Return `model.pattern`; if it has no `|` but the config has several stages, cut it into stages of equal cost.

    Raises:
        PatternError: the pattern does not parse.
        ValueError: the pattern cannot be cut, or the number of virtual stages is not a positive whole number.
    """
    pattern = parse(config["model"]["pattern"])
    stages = int(config["megatron"].get("pipeline_model_parallel_size") or 1)
    virtual = config["model"].get("virtual_pipeline_stages")
    virtual = 1 if virtual is None else _positive("model.virtual_pipeline_stages", virtual)
    if stages > 1 and not pattern.cuts:
        pattern = balance(Architecture.from_config(config), pipeline_parallel=stages, virtual_stages=virtual)
    return format_pattern(pattern)


def world_size(config: Mapping[str, Any]) -> int:
    """Return the number of ranks that the config's launcher starts.

    Raises:
        ValueError: the number of nodes, or of ranks per node, is not a positive whole number.
    """
    nodes, ranks = (_positive(f"launcher.{name}", config["launcher"].get(name)) for name in ("nodes", "nproc_per_node"))
    return nodes * ranks


def _positive(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a whole number of at least 1, not {value!r}")
    return value


def command_line(config: Mapping[str, Any]) -> list[str]:
    """Build Megatron's command line for a composed config on this machine.

    Args:
        config: the resolved config as plain containers, with `model`, `megatron`, `run_dir` and, for real data, `data`.

    Raises:
        ValueError: the installed Megatron does not have a flag (the message suggests the nearest), the trainer sets it
            itself (the message says what to set instead), or its value is invalid.
    """
    megatron: Mapping[str, Any] = config["megatron"]
    for name, advice in MANAGED.items():
        if megatron.get(name) is not None:
            raise ValueError(f"megatron.{name} is set by the trainer itself: {advice}")
    for name, reason in WITHOUT_EFFECT.items():
        if megatron.get(name):
            raise ValueError(f"megatron.{name} would have no effect: {reason}; remove it")
    if megatron.get("defer_embedding_wgrad_compute"):  # its last step also imports apex's kernel
        raise ValueError("megatron.defer_embedding_wgrad_compute is not supported by Megatron's HybridModel; remove it")
    if megatron.get("cross_entropy_loss_fusion") and not megatron.get("bf16"):
        raise ValueError(
            "megatron.cross_entropy_loss_fusion needs megatron.bf16=true, as it rounds the gradient to BF16; remove "
            "it, or train in BF16"
        )
    if megatron.get("use_rope_scaling") and megatron.get("position_embedding_type") != "rope":
        raise ValueError(
            "megatron.use_rope_scaling needs megatron.position_embedding_type=rope; set that, or remove it"
        )
    parser = megatron_parser()
    flags = {
        option.removeprefix("--").replace("-", "_"): (option, action)
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    line: list[str] = []
    set_by_user = {name: value for name, value in megatron.items() if value is not None}
    for name, value in (_own_flags(config) | set_by_user).items():
        if name not in flags:
            raise ValueError(f"megatron.{name} {_unknown(name, flags)}")
        option, action = flags[name]
        if isinstance(action, argparse.BooleanOptionalAction) and isinstance(value, bool):
            line.append(option if value else f"--no-{option.removeprefix('--')}")
        elif action.nargs == 0:
            if not isinstance(value, bool):
                raise ValueError(f"megatron.{name}={value!r}: {option} is a switch; set it to true or false")
            line += [option] if value else []
        else:
            words = [str(item) for item in (value if isinstance(value, list | tuple) else [value])]
            if action.nargs is None and not words:
                raise ValueError(f"megatron.{name}=[]: {option} requires a value; null omits it")
            if action.nargs is None and len(words) > 1:
                words = [",".join(words)]  # such as window_size, one word with commas
            kinds = "A" if action.nargs is None else "".join("O" if parser._parse_optional(w) else "A" for w in words)
            try:  # checked as Megatron will parse it: `O` marks a word that looks like an option
                if rest := words[parser._match_argument(action, kinds) :]:
                    raise argparse.ArgumentError(None, f"{option} does not take the values {' '.join(rest)}")
                parser._get_values(action, [*words])
            except argparse.ArgumentError as error:
                raise ValueError(f"Megatron's parser rejected megatron.{name}={value!r}: {error}") from error
            # With `=`, so that a pattern that begins with an MLP (`-*-`) does not look like an option.
            line += [f"{option}={words[0]}"] if action.nargs is None else [option, *words]
    return line


def _own_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """Derive flags from this machine and from settings outside `megatron:`; the user's own flags override them."""
    import torch

    megatron, run_dir = config["megatron"], Path(config["run_dir"])
    values = LOCAL_BACKEND
    if backend_of(config) != "local":
        values = {"transformer_impl": "transformer_engine"}
        if megatron.get("num_experts") and _engine_installed():  # kernels that compute the same (docs/throughput.md)
            values |= {
                "moe_permute_fusion": True,
                "use_fused_weighted_squared_relu": bool(megatron.get("squared_relu")),
            }
        if megatron.get("bf16") and not megatron.get("deterministic_mode"):  # Megatron rejects both together
            values["cross_entropy_loss_fusion"] = True
    pattern = compile_pattern(parse(pattern_with_cuts(config))).hybrid_layer_pattern
    return {
        **values,
        **({} if torch.cuda.is_available() else CPU),
        # argparse before Python 3.13 drops `--` (two MLP blocks) even after `=`; Megatron reads `--/` as the same.
        "hybrid_layer_pattern": "--/" if pattern == "--" else pattern,
        "save": str(run_dir / run_directory.CHECKPOINTS),
        "load": str(run_dir / run_directory.CHECKPOINTS),
        "tensorboard_dir": str(run_dir / run_directory.TENSORBOARD),
    }


def parse_arguments(argv: list[str], *, world_size: int) -> argparse.Namespace:
    """Parse and validate the command line `argv` with Megatron, as rank 0 of `world_size` ranks.

    Raises:
        ValueError: Megatron rejects the command line; the message gives its reason.
    """
    from megatron.training.arguments import parse_args, validate_args

    printed = io.StringIO()
    place = {"WORLD_SIZE": str(world_size), "RANK": "0", "LOCAL_RANK": "0"}
    place["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    process = patch.object(sys, "argv", ["megatron", *argv])
    with process, patch.dict(os.environ, place), one_parser(), contextlib.redirect_stdout(printed):
        try:
            arguments = deepcopy(parse_args())  # Megatron writes into lists, and may into the parser's defaults
            validate_args(arguments)
        except SystemExit as exit_:
            printout = printed.getvalue().strip()[-500:]
            raise ValueError(
                f"Megatron cannot parse the megatron section; correct the flag that it names: {printout}"
            ) from exit_
        except (AssertionError, ValueError, RuntimeError, ImportError, TypeError) as error:
            raise ValueError(
                f"Megatron rejected the megatron section; correct the flags that it names: {_reason(error)}"
            ) from error
    return arguments


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """Return the installed Megatron's argument parser; errors raise ValueError instead of ending the process."""
    from megatron.training.arguments import add_megatron_arguments

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(
                f"Megatron's parser rejected the megatron section; correct the flag that it names: {message}"
            )

    return add_megatron_arguments(Parser(allow_abbrev=False))


@contextlib.contextmanager
def one_parser() -> Iterator[None]:
    """Make Megatron reuse `megatron_parser` in the context, because building a parser takes a tenth of a second."""
    from megatron.training import arguments

    parser = megatron_parser()
    with patch.object(arguments, "add_megatron_arguments", lambda _: parser):
        yield


def _unknown(name: str, flags: Mapping[str, tuple[str, argparse.Action]]) -> str:
    by_destination = [known for known, (_, action) in flags.items() if action.dest == name and known != name]
    if by_destination:
        return f"is not a flag of Megatron's command line; set megatron.{by_destination[0]} instead"
    if why := versions.lack([name]):
        return f"is not supported: {why}; remove it, or upgrade megatron-core"
    hint = did_you_mean(name, flags)
    here = versions.spelled(versions.installed())
    return f"is not an argument of Megatron-Core {here}; {hint or 'remove it'}"


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress warnings about optional kernels in the context, as they do not matter for a check."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def without_unused_packages(megatron: Mapping[str, Any], *, transformers: bool = True) -> Iterator[None]:
    """Hide packages in the context that Megatron imports if they are installed, but that a run does not use.

    ModelOpt takes longer to import than everything else, and Megatron uses it only together with
    megatron.post_training, which its wheels do not contain. Megatron stays without these packages in this process.

    Args:
        megatron: the config's section.
        transformers: whether this process may use transformers through Megatron or a kernel's package.
    """
    unused = {name for name, flags in _USED_WITH.items() if not any(megatron.get(flag) for flag in flags)}
    if importlib.util.find_spec("megatron.post_training") is None:
        unused |= {"modelopt"} if transformers else {"modelopt", "transformers"}
    unused -= sys.modules.keys()
    sys.modules.update(dict.fromkeys(unused))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in unused:
            sys.modules.pop(name, None)


def _reason(error: BaseException) -> str:
    """Return the message of the error that a check raised, or the check's source line if the error has no message."""
    if str(error):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.line} ({Path(frame.filename).name}:{frame.lineno})"
