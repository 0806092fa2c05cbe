"""Checks of a composed config before any rank starts: first our own, with readable messages, then Megatron's."""

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from nemo_ext.architecture.layout import RECOMPUTED_BY_ENGINE, Layout
from nemo_ext.architecture.layout import check_layout as check_blocks
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern, parse
from nemo_ext.job import run_directory
from nemo_ext.job.settings import checked
from nemo_ext.megatron import fp8, packed_attention, versions
from nemo_ext.megatron.arguments import (
    backend_of,
    command_line,
    parse_arguments,
    pattern_with_cuts,
    quiet_imports,
    without_unused_packages,
    world_size,
)
from nemo_ext.megatron.cpu import mamba_modules, patches
from nemo_ext.megatron.settings import SECTIONS
from nemo_ext.megatron.stability import Stability

RESILIENCY = "nvidia-resiliency-ext"
OLDEST_RESILIENCY = Version("0.6.0")
"""Oldest version with which Megatron-Core 0.18 and 0.19 can be imported (their `NVRX_MIN_VERSION`)."""


def check(config: Mapping[str, Any]) -> argparse.Namespace:
    """Validate a config, and return Megatron's arguments for it.

    Raises:
        ValueError: the layout does not fit the model or the number of ranks, an argument is unknown or contradicts
            another, or the pattern does not parse.
    """
    check_keys(config)
    check_layout(config)
    check_version(config)
    resiliency()
    with quiet_imports(), without_unused_packages(config["megatron"]):
        mamba_modules.install()
        with patches.applied():
            check_prediction(config, parse(config["model"]["pattern"]))
            check_frozen(config, parse(config["model"]["pattern"]))
            check_latent(config)
            arguments = parse_arguments(command_line(config), world_size=world_size(config))
            check_resiliency(arguments)
            check_distillation(config, arguments)
    return arguments


def check_keys(config: Mapping[str, Any]) -> None:
    """Reject invalid `model`, `train`, `launcher` and `stability` sections, and contradictory values.

    Raises:
        ValueError: the message names the key, and the nearest known one if it is unknown; or see
            `Stability.from_config`.
    """
    for name, kind in SECTIONS.items():
        checked(kind, config.get(name) or {}, name, strict=True)
    ids, rows = config["model"].get("vocab_size"), config["megatron"].get("padded_vocab_size")
    if ids and rows and int(ids) > int(rows):
        raise ValueError(
            f"model.vocab_size={ids} is above megatron.padded_vocab_size={rows}, so the model could not be converted: "
            "set model.vocab_size to the tokenizer's number of ids, or to null (++model.vocab_size=null) if every row "
            "is an id"
        )
    Stability.from_config(config)
    if config["train"].get("validate_at_start") and config["megatron"].get("pretrained_checkpoint"):
        raise ValueError(
            "train.validate_at_start measures the model before megatron.pretrained_checkpoint is loaded: "
            "set train.validate_at_start=false"
        )


def check_version(config: Mapping[str, Any]) -> None:
    """Reject settings that need a newer Megatron-Core than the installed one.

    Raises:
        TooOld: the message names the setting and the required version.
    """
    mixed = (config.get("data") or {}).get("mixed_lengths") or {}
    if mixed.get("document_boundaries") and (why := versions.lack(["dataloader_inter_document_masking"])):
        raise versions.TooOld(f"data.mixed_lengths.document_boundaries is not supported: {why}; set it to false")
    for name, value in config["megatron"].items():
        if value not in (None, False) and (why := versions.lack([name, f"{name}={value}"])):
            raise versions.TooOld(
                f"megatron.{name}={value} is not supported: {why}; remove it, or upgrade megatron-core"
            )


def resiliency() -> str | None:
    """Return the installed version of nvidia-resiliency-ext, or None if it is not installed.

    Raises:
        ValueError: the version is so old that importing Megatron-Core would fail.
    """
    try:
        version = importlib.metadata.version(RESILIENCY)
    except importlib.metadata.PackageNotFoundError:
        return None
    if Version(version) < OLDEST_RESILIENCY:
        raise ValueError(
            f"{RESILIENCY} {version} is installed, but Megatron-Core cannot be imported with a version before "
            f"{OLDEST_RESILIENCY}: uninstall it, or pip install '{RESILIENCY}>={OLDEST_RESILIENCY}' (glibc 2.39 or "
            "later)"
        )
    return version


def check_resiliency(arguments: argparse.Namespace) -> None:
    """Reject Megatron's validated arguments if they need nvidia-resiliency-ext, but it is not installed.

    Raises:
        ValueError: the message names the setting, and what to set instead if there is an alternative.
    """
    if resiliency() is not None:
        return
    if arguments.async_save and arguments.async_strategy == "nvrx":
        raise ValueError(
            f"megatron.async_strategy=nvrx, Megatron's default, writes with {RESILIENCY}, which is not installed; "
            "set megatron.async_strategy=mcore"
        )
    if arguments.enable_ft_package:
        raise ValueError(
            f"megatron.enable_ft_package requires {RESILIENCY}, which is not installed: install it, or set "
            "megatron.enable_ft_package=false"
        )


def check_launcher(config: Mapping[str, Any]) -> None:
    """Reject settings that work only if the user starts the ranks, not if nemo-ext does.

    Raises:
        ValueError: the message names the setting.
    """
    if config["megatron"].get("enable_ft_package"):
        raise ValueError(
            "megatron.enable_ft_package requires ft_launcher, but nemo-ext starts ranks with torchrun or srun: start "
            "them by hand (docs/operation.md), or set guard.minutes instead, which does not need ft_launcher"
        )


def check_distillation(config: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Reject a teacher, online or cached, that this run cannot use.

    Args:
        config: the composed config.
        arguments: Megatron's validated arguments for it.

    Raises:
        ValueError: the message names the key, and Megatron's reason if it rejects the teacher in this run's layout.
    """
    from nemo_ext.megatron import distillation

    settings = distillation.Settings.from_config(config)
    # Not in every version (`versions.FEATURES`).
    saved, loaded = (getattr(arguments, name, None) for name in ("logits_save_dir", "logits_load_dir"))
    chosen = {
        "distillation.teacher": settings.teacher,
        "megatron.logits_load_dir": loaded,
        "megatron.logits_save_dir": saved,
    }
    both = [name for name, value in chosen.items() if value is not None]
    if len(both) > 1:
        raise ValueError(
            f"{' and '.join(both)} cannot be combined, as a run either has one teacher or saves the log-probabilities "
            "of one: keep one of these keys, and set the rest to null"
        )
    if saved is not None:
        check_saving(config, arguments)
    if loaded is not None:
        check_cached_teacher(config, arguments)
    if saved is not None and Architecture.from_config(config).pattern.mtp:
        raise ValueError(
            "megatron.logits_save_dir and multi-token prediction (/ in model.pattern) cannot be combined, as Megatron-"
            "Core would save every depth's logits: remove the depths from the teacher's pattern"
        )
    if settings.teacher is None:
        return
    distillation.one_stage_a_rank(config)
    merged, _ = distillation.teacher_config(config)
    distillation.check_same_tokens(config)
    residuals = [bool(each["megatron"].get("fp32_residual_connection")) for each in (config, merged)]
    if arguments.pipeline_model_parallel_size > 1 and residuals[0] != residuals[1]:
        raise ValueError(
            "distillation.teacher with pipeline stages, which send the activations of both models as one tensor, "
            f"requires the same megatron.fp32_residual_connection for both: it is {residuals[0]} here, but "
            f"{residuals[1]} in the teacher's config; set the teacher's value here"
        )
    try:
        check_layout(merged, trained=False)
        parse_arguments(command_line(merged), world_size=world_size(merged))
    except ValueError as error:
        raise ValueError(f"distillation.teacher={settings.teacher} does not fit this run's layout: {error}") from error


def check_saving(config: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Reject saving a model's log-probabilities while it is trained, or if Megatron cannot save them.

    Args:
        config: the composed config.
        arguments: Megatron's validated arguments for it.

    Raises:
        ValueError: the message says what to set instead.
    """
    from nemo_ext.megatron.distillation import CACHED_VOCABULARY

    if not arguments.freeze_all_layers:
        raise ValueError(
            "megatron.logits_save_dir: the teacher would be trained while its log-probabilities are saved; set "
            "megatron.freeze_all_layers=true"
        )
    if arguments.pipeline_model_parallel_size > 1:
        raise ValueError(
            "megatron.logits_save_dir requires pipeline_model_parallel_size=1, as Megatron-Core looks for the output "
            "layer on every stage; use tensor or expert parallelism"
        )
    if arguments.eval_iters:
        raise ValueError(
            "megatron.logits_save_dir makes Megatron-Core compute no loss, so there is nothing to evaluate; set "
            "megatron.eval_iters=0"
        )
    rows = Architecture.from_config(config).vocab_size
    if rows > CACHED_VOCABULARY:
        raise ValueError(
            f"megatron.logits_save_dir: the vocabulary has {rows} rows, but Megatron-Core saves at most "
            f"{CACHED_VOCABULARY}; run the teacher together with the student (distillation.teacher)"
        )


def check_cached_teacher(config: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Reject a teacher's saved log-probabilities that are missing or come from a different data order.

    Args:
        config: the composed config.
        arguments: Megatron's validated arguments for it.

    Raises:
        ValueError: the message names what is missing, invalid or different.
    """
    from nemo_ext.megatron.distillation import saved_by

    folder, alpha = arguments.logits_load_dir, arguments.logits_load_kd_loss_alpha
    if arguments.logits_load_ignore_errors:
        raise ValueError(
            "megatron.logits_load_ignore_errors would have no effect, as a missing teacher ends the run; remove it"
        )
    if not 0 < alpha <= 1:
        raise ValueError(f"megatron.logits_load_kd_loss_alpha must be a share above 0 and at most 1, not {alpha}")
    if "://" in folder:
        return  # object storage, which only ranks open
    if not Path(folder).is_dir():
        raise ValueError(f"megatron.logits_load_dir={folder}: no such directory; save log-probabilities there first")
    saved = saved_by(Path(folder))
    samples = arguments.train_samples or arguments.train_iters * arguments.global_batch_size
    for name, flag, expected in (
        ("seed", "megatron.seed", arguments.seed),
        ("sequence_length", "megatron.seq_length", arguments.seq_length),
        ("train_samples", "train.tokens / megatron.seq_length in whole steps", samples),
    ):
        if saved.get(name) != expected:
            raise ValueError(
                f"megatron.logits_load_dir={folder} was saved from a different data order: {flag} was "
                f"{saved.get(name)} in the run that saved it, but is {expected} here; set it to the earlier "
                "value, or save the log-probabilities again"
            )


def check_objects(config: Mapping[str, Any]) -> None:
    """Reject checkpoints whose pickles hold objects other than data, before Megatron loads them.

    This imports Megatron, which registers its data classes with torch.
    """
    from megatron.core.safe_globals import register_safe_globals

    from nemo_ext.checkpoint import pickles
    from nemo_ext.checkpoint.torch_dist import CheckpointError, checkpoint_folder, whole_files

    register_safe_globals()  # again: transformers' Trainer unregisters NumPy's classes when it has resumed

    run_dir = Path(config["run_dir"]) / run_directory.CHECKPOINTS
    start, teacher = config["megatron"].get("pretrained_checkpoint"), (config.get("distillation") or {}).get("teacher")
    for path in filter(None, (run_dir, start, teacher)):
        try:
            folder = checkpoint_folder(Path(str(path)))
        except CheckpointError:
            continue  # no checkpoint: Megatron reports it
        pickles.check_objects(folder, whole_files(folder))


def check_machine(config: Mapping[str, Any]) -> None:
    """Reject a config that this machine cannot train; `check` accepts it, so that any machine can check any config.

    Raises:
        ValueError: the message names the missing package or the setting, and the remedy.
    """
    from nemo_ext.megatron.cpu.runtime import check_gpu
    from nemo_ext.megatron.specs import backend, check_pattern, hybrid_stack

    check_gpu()
    megatron = config["megatron"]
    chosen = backend_of(config)
    backend(chosen, setting="model.backend")
    options = hybrid_stack(norm_placement=config["model"].get("norm_placement", "input")).params["options"]
    check_pattern(options, [block.kind for block in parse(config["model"]["pattern"]).blocks], 0)
    fp8.check_backend(config, chosen)
    fp8.check_gpu(config)
    if chosen == "local" and int(megatron.get("context_parallel_size") or 1) > 1:
        raise ValueError("megatron.context_parallel_size above 1 requires model.backend=transformer_engine")
    modules = megatron.get("recompute_modules") if megatron.get("recompute_granularity") == "selective" else None
    by_engine = sorted(RECOMPUTED_BY_ENGINE & set(modules or ()))
    if by_engine and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            f"megatron.recompute_modules: {', '.join(by_engine)} requires Transformer Engine, which is not installed; "
            "remove it"
        )
    if chosen == "transformer_engine":
        check_packs(config)
    for name in ("train_iters", "lr"):
        if not megatron.get(name):
            raise ValueError(f"megatron.{name}={megatron.get(name)}: there is nothing to train; set it above zero")
    warmup = megatron.get("lr_warmup_iters") or 0
    if int(warmup) >= int(megatron["train_iters"]):
        raise ValueError(
            f"megatron.lr_warmup_iters={warmup} of {megatron['train_iters']} steps: the warm-up must be shorter than "
            "the run; lower train.warmup_tokens or raise train.tokens"
        )
    start = megatron.get("pretrained_checkpoint")
    if start is not None and not Path(start).exists():
        raise ValueError(
            f"megatron.pretrained_checkpoint={start}: no such directory; first train the stage that "
            "writes it, or set it to null"
        )
    if start is not None and run_directory.last_checkpoint(Path(start)) is not None:
        raise ValueError(f"megatron.pretrained_checkpoint={start} is a run directory; set it to {start}/checkpoints")


def check_prediction(config: Mapping[str, Any], pattern: Pattern) -> None:
    """Reject settings of multi-token prediction that would fail in a rank or have no effect.

    `pattern` is the parsed `model.pattern`, which may contain depths of multi-token prediction.

    Raises:
        ValueError: the message names the setting.
    """
    from nemo_ext.megatron.specs import check_pattern, hybrid_stack

    if not pattern.mtp:
        if config["megatron"].get("mtp_use_repeated_layer"):
            raise ValueError(
                "megatron.mtp_use_repeated_layer=true requires multi-token prediction: write its depths after / in "
                "model.pattern, such as ME*-/*E/*E"
            )
        return
    full = config["megatron"].get("recompute_granularity") == "full"
    if full and config["megatron"].get("recompute_method") == "uniform":
        together = config["megatron"].get("recompute_num_layers") or 1
        if together != 1:
            raise ValueError(
                f"megatron.recompute_num_layers={together}: Megatron-Core recomputes depths of multi-token prediction "
                "(/ in model.pattern) only with 1; set it to 1"
            )
    options = hybrid_stack(norm_placement=config["model"].get("norm_placement") or "input").params["options"]
    try:
        check_pattern(options, [block.kind for block in pattern.mtp], 0)
    except ValueError as error:
        raise ValueError(f"multi-token prediction: {error}") from error


def check_frozen(config: Mapping[str, Any], pattern: Pattern) -> None:
    """Reject settings under which `train.mtp_only` or `train.new_mtp` would have no effect or lose weights.

    Raises:
        ValueError: the message names the setting.
    """
    from nemo_ext.checkpoint.torch_dist import TorchDistReader, checkpoint_folder

    new, start = config["train"].get("new_mtp"), config["megatron"].get("pretrained_checkpoint")
    if config["train"].get("mtp_only"):
        if not pattern.mtp:
            raise ValueError(
                "train.mtp_only=true requires multi-token prediction: write its depths after / in model.pattern, such "
                "as ME*-/*E, or add new ones with train.new_mtp=/*E"
            )
        if start is None:
            raise ValueError(
                "train.mtp_only=true does not train the main model: set megatron.pretrained_checkpoint to a trained one"
            )
        flags = ("megatron.logits_load_dir", "megatron.freeze_all_layers")
        for key in ("distillation.teacher", "stability.z_loss", *flags):
            section, name = key.split(".")
            if value := (config.get(section) or {}).get(name):
                raise ValueError(f"{key}={value} cannot be combined with train.mtp_only=true: remove one of them")
    if new and start is not None and Path(str(start)).exists():
        tensors = TorchDistReader(checkpoint_folder(Path(str(start)))).tensors
        if depths := [name for name in tensors if name.startswith("mtp.")]:
            raise ValueError(
                f"train.new_mtp={new} would replace the multi-token prediction of megatron.pretrained_checkpoint="
                f"{start} ({len(depths)} tensors, such as {depths[0]}): remove train.new_mtp, and write the "
                "checkpoint's depths in model.pattern"
            )


def check_latent(config: Mapping[str, Any]) -> None:
    """Reject flags that Megatron-Core's latent experts do not support in training.

    Raises:
        ValueError: the message names the flag.
    """
    megatron, model = config["megatron"], Architecture.from_config(config)
    places = [("block", model.sizes), ("multi-token prediction: block", model.depth.sizes if model.pattern.mtp else ())]
    numbered = [(f"{name} {n} ({b})", b) for name, blocks in places for n, b in enumerate(blocks, start=1)]
    where = next((where for where, block in numbered if block.get("latent")), None)
    if where is None:
        return
    if megatron.get("moe_shared_expert_overlap"):
        raise ValueError(f"{where}: latent experts require megatron.moe_shared_expert_overlap=false in training")
    if backend_of(config) == "local" and not megatron.get("disable_bias_linear"):
        raise ValueError(f"{where}: latent experts with model.backend=local require megatron.disable_bias_linear=true")


def check_packs(config: Mapping[str, Any]) -> None:
    """Reject packs for which Transformer Engine has no attention kernel on this machine.

    Raises:
        ValueError: see `nemo_ext.megatron.packed_attention.lack`.
    """
    import torch

    if not torch.cuda.is_available():
        return
    why = packed_attention.lack(
        config,
        torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
        flash=packed_attention.installed("flash-attn") is not None,
        version=packed_attention.installed("transformer-engine"),
    )
    if why:
        raise ValueError(f"packs cannot be trained on this machine: {why}")


def check_layout(config: Mapping[str, Any], *, trained: bool = True) -> None:
    """Reject a parallel layout or batch size that does not fit the model.

    Args:
        config: composed config.
        trained: False for a model without a loss, such as a teacher.

    Raises:
        ValueError: the message names the sizes that do not fit together.
    """
    megatron = config["megatron"]
    layout = Layout.from_config(config, world_size=world_size(config))
    architecture = Architecture.from_config(config)
    check_blocks(architecture, layout)
    check_sequence(config, architecture, layout)
    pattern, pipeline = parse(pattern_with_cuts(config)), layout.pipeline_parallel
    stages = len(pattern.stages)
    if stages % pipeline:
        raise ValueError(
            f"model.pattern has {stages} stages, not a multiple of pipeline_model_parallel_size={pipeline}: write "
            f"{pipeline - 1} cuts `|` (or enough for a multiple of {pipeline} stages), or none to have them computed"
        )
    for place, (first, last) in enumerate(pattern.stages[1:-1], start=1):
        if first == last:
            raise ValueError(
                f"stage {place} (of 0 to {stages - 1}) of model.pattern has no block, and Megatron-Core's gradients "
                "become NaN after an empty stage: move a cut `|`"
            )
    experts = any(block.kind == "E" for block in (*pattern.blocks, *pattern.mtp))
    if experts and pipeline > 1 and trained:
        check_experts_on_every_rank(pattern, pipeline)
    if experts and layout.tensor_parallel > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size={layout.tensor_parallel} with MoE blocks (E): Megatron supports this only "
            "with megatron.sequence_parallel=true"
        )
    batch, micro = int(megatron["global_batch_size"]), layout.micro_batch_size
    if batch % (micro * layout.data_parallel):
        raise ValueError(
            f"megatron.global_batch_size={batch} must be a multiple of {micro * layout.data_parallel} "
            f"(micro_batch_size {micro} x {layout.data_parallel} data-parallel ranks)"
        )
    count = batch // (micro * layout.data_parallel)
    if stages > pipeline and count % pipeline and megatron.get("microbatch_group_size_per_vp_stage") is None:
        raise ValueError(
            f"megatron.global_batch_size={batch} makes {count} micro-batches, but {stages} interleaved stages on "
            f"{pipeline} pipeline ranks require a multiple of {pipeline}; change the batch size"
        )


def check_sequence(config: Mapping[str, Any], architecture: Architecture, layout: Layout) -> None:
    """Reject a sequence length that ranks cannot split, or attention that context parallelism does not support.

    Transformer Engine reports unsupported attention only in the first forward pass (`attn_forward_func_with_cp` in
    context_parallel.py).

    Raises:
        ValueError: the message names the sizes, and the 1-based number of the block.
    """
    megatron, parts, tensor = config["megatron"], layout.context_parallel, layout.tensor_parallel
    length, pieces, names = int(megatron.get("seq_length") or 0), 1, []
    if parts > 1:
        pieces, names = 2 * parts, [f"2 x context_parallel_size {parts}"]
    if layout.sequence_parallel:
        pieces *= tensor
        names.append(f"tensor_model_parallel_size {tensor} (sequence_parallel)")
    if length % pieces:
        nearest = length // pieces * pieces
        raise ValueError(
            f"megatron.seq_length={length} is not a multiple of {' x '.join(names)} = {pieces}: set "
            f"{nearest or pieces} or {nearest + pieces}"
        )
    communication = megatron.get("cp_comm_type") or "p2p"
    kinds = [communication] if isinstance(communication, str) else list(communication)
    depth = [(f"multi-token prediction: block {n}", n, block) for n, block in enumerate(architecture.depth.sizes, 1)]
    for where, number, block in [*((f"block {n}", n, block) for n, block in enumerate(architecture.sizes, 1)), *depth]:
        if parts == 1 or block.kind != "*" or block.is_linear:
            continue
        where, kind = f"{where} ({block.kind})", kinds[(number - 1) % len(kinds)]
        if block.get("window") and kind not in ("a2a", "all_gather"):
            raise ValueError(
                f"{where}: a window of {block.size('window')} with context_parallel_size={parts} requires "
                f"megatron.cp_comm_type=all_gather or a2a, not {kind}"
            )
        for name in ("heads", "kv"):
            size = max(1, block.size(name) // tensor)
            if kind == "a2a" and size % parts:
                raise ValueError(
                    f"{where} has {size} {name} per tensor-parallel rank, but cp_comm_type=a2a requires a multiple of "
                    f"context_parallel_size={parts}: set megatron.cp_comm_type=p2p or all_gather"
                )


def check_experts_on_every_rank(pattern: Pattern, pipeline: int) -> None:
    """Reject a pattern with MoE blocks that is cut so that one of the `pipeline` ranks has none.

    Megatron sums the MoE losses over the pipeline, and a rank without routers contributes a tensor of another length
    (training/training.py, `training_log`), so gloo aborts and NCCL hangs.

    Raises:
        ValueError: the message names the rank.
    """
    for rank in range(pipeline):
        stages = pattern.stages[rank::pipeline]
        blocks = [block for first, last in stages for block in pattern.blocks[first:last]]
        blocks += pattern.mtp if rank == pipeline - 1 else ()
        if not any(block.kind == "E" for block in blocks):
            raise ValueError(
                f"pipeline rank {rank} has no MoE block (E), so Megatron-Core cannot log MoE losses: write the cuts "
                "`|` in model.pattern so that every rank has one, or use fewer stages"
            )
