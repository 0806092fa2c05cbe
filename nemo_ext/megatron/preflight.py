"""Checks of a training run before it is queued: memory, precision and packs on a site's GPUs. Does not import torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from nemo_ext.architecture.cost import GpuCost, per_gpu
from nemo_ext.architecture.gpus import GPUS
from nemo_ext.architecture.layout import Layout, NotEstimated
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.checkpoint.start import teacher_config
from nemo_ext.data.phases import plan_of
from nemo_ext.job.findings import Finding
from nemo_ext.megatron import packed_attention
from nemo_ext.megatron.fp8 import Precision, check_experts

GIB = 1 << 30
TIGHT = 0.9
"""Share of a GPU's memory above which there is a warning, as fragmentation and buffers may take up the rest."""

MEMORY = "memory: "
"""Prefix of findings on GPU memory."""
ADVICE = "raise tensor, pipeline or context parallelism, or set megatron.recompute_granularity"


def findings(
    config: Mapping[str, Any], settings: Any, *, paths: bool, here: bool, **others: object
) -> Iterator[Finding]:
    """Yield the findings on a training run.

    Args:
        config: composed config.
        settings: settings of site and queue.
        paths: whether to check files and the container.
        here: True for a run that starts on this machine instead of in a queue.
        others: facts for other jobs' checks; not used.
    """
    yield from _memory(config, settings.cluster)
    yield from precision(config, settings.cluster)
    if paths and not here:
        yield from _packs(config, settings.cluster)


def _memory(config: Mapping[str, Any], cluster: Any) -> Iterator[Finding]:
    launcher, node = config["launcher"], cluster.node
    world = int(launcher["nodes"]) * int(launcher["nproc_per_node"])
    try:
        most = max(_gpus(config, world), key=lambda gpu: gpu.total_bytes)
    except ValueError as error:
        yield Finding("note" if isinstance(error, NotEstimated) else "error", str(error))
        return
    if node is None or node.gpu_memory_gib is None:
        return
    kind = fits(most.total_bytes / (node.gpu_memory_gib * GIB))
    need = f"{MEMORY}about {most.total_bytes / GIB:.0f} GiB of the {node.gpu_memory_gib:g} of a {node.gpu}"
    teacher = (config.get("distillation") or {}).get("teacher")
    if teacher and not Path(str(teacher)).expanduser().is_dir():
        need += f", without distillation.teacher={teacher}, which does not exist yet"
    if kind == "error":
        need += (
            f" (weights, gradients and optimizer {(most.total_bytes - most.activation_bytes) / GIB:.0f}, "
            f"activations {most.activation_bytes / GIB:.0f}); {ADVICE}"
        )
    yield Finding(kind, need)


def fits(share: float) -> Literal["error", "warning", "note"]:
    """Return the kind of finding for a run that needs `share` of a GPU's memory, such as an error if it exceeds 1."""
    return "error" if share > 1 else "warning" if share > TIGHT else "note"


def _gpus(config: Mapping[str, Any], world: int) -> Sequence[GpuCost]:
    """Return the cost of one GPU on each pipeline rank, with the weights of a distillation teacher that exists."""
    from nemo_ext.megatron.arguments import pattern_with_cuts

    config = {**config, "model": {**config["model"], "pattern": pattern_with_cuts(config)}}
    architecture = Architecture.from_config(config)
    layout = Layout.from_config(config, world_size=world)
    plan = plan_of(config)
    # With phases, the longest sequences need the most memory.
    length = max(phase.seq_length for phase in plan.phases) if plan else int(config["megatron"]["seq_length"])
    gpus = per_gpu(replace(architecture, seq_length=length), layout, seq_length=length)
    teacher = (config.get("distillation") or {}).get("teacher")
    frozen = teacher_config(config) if teacher and Path(str(teacher)).expanduser().is_dir() else None
    if frozen is None:
        return gpus
    weights = (gpu.weight_bytes for gpu in _gpus({**frozen, "phases": None}, world))
    return [replace(gpu, weight_bytes=gpu.weight_bytes + more) for gpu, more in zip(gpus, weights, strict=True)]


def precision(config: Mapping[str, Any], cluster: Any) -> Iterator[Finding]:
    """Yield findings on a config's FP8 or FP4 settings that the GPUs of the site `cluster` do not support."""
    node, flags, section = cluster.node, config["megatron"], config.get("precision_plan")
    plan = None if section is None else Plan.from_config(section)
    if (
        node is None
        or (config.get("model") or {}).get("backend") == "local"
        or (config.get("train") or {}).get("quantization_aware")
    ):
        return  # simulated, on any GPU
    if plan is not None and (plan.uses_fp8 or plan.uses_nvfp4):
        key = "precision_plan"
        recipes = [*([plan.recipe] if plan.uses_fp8 else []), *(["nvfp4"] if plan.uses_nvfp4 else [])]
    elif names := [name for name in ("fp4", "fp4_format") if flags.get(name)]:
        key, recipes = f"megatron.{names[0]}", ["nvfp4"]
    elif names := [name for name in ("fp8", "fp8_format", "fp8_recipe") if flags.get(name)]:
        key, recipes = f"megatron.{names[0]}", [str(flags.get("fp8_recipe") or "delayed")]
    else:
        return
    if not node.fp8:
        yield Finding("error", f"{key}: {node.gpu} does not support FP8; train in bf16 (precision=bf16) there")
    elif plan is not None:
        try:
            check_experts(Precision(plan, Architecture.from_config(config)))
        except ValueError as error:
            yield Finding("error", str(error))
    for recipe in (each for each in recipes if node.fp8 and each not in node.fp8):
        yield Finding("error", f"{key}: {node.gpu} does not support {recipe} scaling; use one of {', '.join(node.fp8)}")


def _packs(config: Mapping[str, Any], cluster: Any) -> Iterator[Finding]:
    """Yield an error if the GPUs of the site `cluster` have no attention kernel for the config's packs.

    If the site uses a container, this is only a warning, as the packages in its image are unknown.
    """
    if cluster.node is None or config["model"].get("backend") == "local":
        return
    inside = cluster.container.used
    why = packed_attention.lack(
        config,
        cluster.node.gpu,
        capability=GPUS[cluster.node.gpu].capability if cluster.node.gpu in GPUS else None,
        flash=not inside and packed_attention.installed("flash-attn") is not None,
        version=None if inside else packed_attention.installed("transformer-engine"),
    )
    if why:
        yield Finding("warning", f"unless the image has flash-attn: {why}") if inside else Finding("error", why)
