"""Search for the fastest layout that fits: candidates are ranked by predicted time, the best are rehearsed.

Does not import torch.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from nemo_ext.architecture.candidates import expert_sizes, parallel_sizes, powers
from nemo_ext.architecture.cost import per_gpu, six_n, total_params, train_flops_per_token
from nemo_ext.architecture.gpus import GPUS, Gpu, gpu_file
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.layout import check_layout as check_blocks
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern, parse
from nemo_ext.architecture.pattern import format as format_pattern
from nemo_ext.architecture.pipeline import balance, forward_flops
from nemo_ext.architecture.precision_plan import Plan, low_shares
from nemo_ext.architecture.step_time import ERROR, EXPERTS_ERROR, StepTime, TimeModel
from nemo_ext.checkpoint.start import teacher_config
from nemo_ext.job.settings import nearest
from nemo_ext.megatron.arguments import pattern_with_cuts, world_size

GIB = 1 << 30
FILL = 0.9
"""Fraction of a GPU's memory that a layout may use (choice); the rest is for the CUDA context, NCCL's buffers and
allocator fragmentation, which neither the cost model nor the rehearsal counts."""
COMPARED = ((8, 0), (9, 0))
"""Compute capabilities of the GPUs whose predictions were compared with published runs: A100, and H100 or H200."""
SMALLEST = 6e9
"""Parameters of a model below which small kernels, which the predictions neglect, matter (choice)."""
MOST_PIPELINE, MOST_EXPERT, MOST_CONTEXT, MOST_MICRO, MOST_VIRTUAL = 32, 64, 16, 16, 6
"""Largest parallel sizes, micro-batch and number of virtual stages that are tried."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its estimated time and memory.

    Attributes:
        layout: the layout.
        pattern: the model's blocks with pipeline cuts.
        time: predicted step time.
        bytes: bytes on the fullest GPU by the cost model; 0 until `Search.fitting` sets it.
    """

    layout: Layout
    pattern: Pattern
    time: StepTime
    bytes: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """TP, PP, virtual stages, CP, EP and micro-batch size, without settings that only save memory."""
        how = self.layout
        parallel = (how.tensor_parallel, how.pipeline_parallel, how.virtual_stages, how.context_parallel)
        return (*parallel, how.expert_parallel, how.micro_batch_size)

    def describe(self) -> str:
        """Describe the layout in a short string."""
        how = self.layout
        words = [how.describe()]
        words += [f"{how.virtual_stages} virtual"] if how.virtual_stages > 1 else []
        words += ["SP"] if how.sequence_parallel else []
        words.append(f"micro-batch {how.micro_batch_size}")
        words += [] if how.recompute == "none" else [f"recompute {how.recompute}"]
        return " ".join(words)


def has_rates(name: str) -> bool:
    """Return whether `name` is a known GPU or the path of a file with a GPU's figures."""
    return name in GPUS or name.endswith((".yaml", ".yml"))


def gpu_of(name: str | None, memory_gib: float | None, *, key: str = "rehearse.gpu") -> tuple[str, Gpu]:
    """Return the name and figures of a GPU: the named one, or the first in the table with at least `memory_gib`.

    A given memory replaces the one in the table; messages name the setting `key`.

    Raises:
        ValueError: neither is given, or no GPU in the table matches.
    """
    if name is None and memory_gib is None:
        raise ValueError(
            f"rehearse.search needs a GPU: set rehearse.gpu=NAME ({', '.join(GPUS)}), cluster=leonardo, or "
            "rehearse.gpu_memory_gib=64"
        )
    if name is None:
        assert memory_gib is not None
        largest = max(gpu.memory_gib for gpu in GPUS.values())
        if memory_gib > largest:
            raise ValueError(
                f"rehearse.gpu_memory_gib={memory_gib:g}: no known GPU has that much memory; set rehearse.gpu"
            )
        name = next(known for known, gpu in GPUS.items() if gpu.memory_gib >= memory_gib)
    if not has_rates(name):
        raise ValueError(f"{key}={name}: unknown GPU: {nearest(name, GPUS)}; or give a path to a .yaml file")
    gpu = GPUS[name] if name in GPUS else gpu_file(name)
    return name, replace(gpu, memory_gib=memory_gib or gpu.memory_gib)


class Search:
    """Candidate layouts for a training config on its launcher's GPUs, at its global batch size.

    Args:
        config: composed training config.
        gpu: figures of one GPU.

    Raises:
        ValueError: a size in the config is not a number, or the model of a distillation teacher cannot be read.
    """

    def __init__(self, config: Mapping[str, Any], gpu: Gpu) -> None:
        self.config, self.gpu = config, gpu
        self.megatron: Mapping[str, Any] = config["megatron"]
        self.world, self.per_node = world_size(config), int(config["launcher"]["nproc_per_node"])
        self.batch, self.length = (int(self.megatron[name]) for name in ("global_batch_size", "seq_length"))
        written = parse(config["model"]["pattern"])
        bare = {**config, "model": {**config["model"], "pattern": format_pattern(replace(written, cuts=()))}}
        self.architecture = Architecture.from_config(bare)
        self.own = Layout.from_config(bare)
        self.kinds = {block.kind for block in self.architecture.sizes if not block.is_linear}
        plan = config.get("precision_plan")
        self.plan = None if plan is None else Plan.from_config(plan)
        self.times = TimeModel(
            self.architecture,
            gpu,
            gpus_per_node=self.per_node,
            low=None if self.plan is None else low_shares(self.plan, self.architecture),
            flex=self.megatron.get("moe_token_dispatcher_type") == "flex",
        )
        self.flops = forward_flops(self.architecture)
        self.stage_patterns = cache(self._pattern)
        self.fits_blocks = cache(self._fits_blocks)
        teacher = teacher_config(config)
        self.teacher = None if teacher is None else Search(teacher, gpu)

    def ranked(self) -> list[Candidate]:
        """List all candidates regardless of memory, the fastest by predicted time first."""
        return sorted(self._all(), key=lambda one: one.time.total)

    def timed(self, layout: Layout, pattern: Pattern, *, gathers_experts: bool = False) -> Candidate:
        """Estimate a layout's step time, with a teacher's forward passes; for `gathers_experts`, see `TimeModel.step`.

        Raises:
            ValueError: the pattern's cuts do not fit the layout.
        """
        flags = self.megatron
        time = self.times.step(
            layout,
            pattern,
            batch=self.batch,
            overlap_reduce=bool(flags.get("overlap_grad_reduce")),
            overlap_gather=bool(flags.get("overlap_param_gather")),
            overlap_tensor=bool(flags.get("tp_comm_overlap")),
            gathers_experts=gathers_experts,
        )
        if self.teacher is not None:
            stages, frozen = layout.pipeline_parallel, replace(layout, frozen=True, mtp_only=False)
            time += self.teacher.timed(frozen, self.teacher.cut(stages), gathers_experts=gathers_experts).time
        return Candidate(layout=layout, pattern=pattern, time=time)

    def cut(self, pipeline: int, virtual: int = 1) -> Pattern:
        """Return the model's pattern, cut for `pipeline` pipeline ranks with `virtual` stages each."""
        if pipeline == 1:
            return self.architecture.pattern
        return balance(self.architecture, pipeline_parallel=pipeline, virtual_stages=virtual, cost=self.flops)

    def fitting(self, ranked: list[Candidate], refused: Counter[str]) -> Iterator[Candidate]:
        """Yield the candidates, in order, that fit by the cost model and pass the training checks.

        Args:
            ranked: candidates.
            refused: counter of excluded candidates, keyed by reason, to be filled.
        """
        from nemo_ext.megatron.check import check_layout

        for candidate in ranked:
            layout = replace(candidate.layout, micro_batches=self._micro_batches(candidate.layout))
            needed = self.bytes(layout, candidate.pattern)
            if needed > FILL * self.gpu.memory_gib * GIB:
                refused["too much memory by the cost model"] += 1
                continue
            try:
                check_layout(self.changed(candidate))
            except ValueError as error:
                refused[str(error)] += 1
                continue
            yield replace(candidate, layout=layout, bytes=needed)

    def bytes(self, layout: Layout, pattern: Pattern) -> int:
        """Estimate the bytes on the fullest GPU by the cost model."""
        needed = [gpu.total_bytes for gpu in per_gpu(self.architecture.with_pattern(pattern), layout)]
        if self.teacher is not None:
            teacher = self.teacher.architecture.with_pattern(self.teacher.cut(layout.pipeline_parallel))
            weights = per_gpu(teacher, replace(layout, frozen=True, mtp_only=False))
            needed = [rank + gpu.weight_bytes for rank, gpu in zip(needed, weights, strict=True)]
        return max(needed)

    def changes(self, candidate: Candidate) -> dict[str, Any]:
        """Map the config keys that a candidate changes to their new values."""
        layout = candidate.layout
        flags: dict[str, Any] = {
            "tensor_model_parallel_size": layout.tensor_parallel,
            "pipeline_model_parallel_size": layout.pipeline_parallel,
            "context_parallel_size": layout.context_parallel,
            "sequence_parallel": layout.sequence_parallel,
            "micro_batch_size": layout.micro_batch_size,
            "recompute_granularity": None if layout.recompute == "none" else layout.recompute,
            "recompute_modules": list(layout.recompute_modules) if layout.recompute == "selective" else None,
            "recompute_method": "uniform" if layout.recompute == "full" else None,
            "recompute_num_layers": 1 if layout.recompute == "full" else None,
            "recompute_activations": None,
        }
        if "E" in self.kinds:
            flags["expert_model_parallel_size"] = layout.expert_parallel
            if layout.expert_tensor != (self.megatron.get("expert_tensor_parallel_size") or layout.tensor_parallel):
                flags["expert_tensor_parallel_size"] = layout.expert_tensor
            if layout.expert_parallel > 1 and not self._to_experts_alone():
                flags["moe_token_dispatcher_type"] = "alltoall"
        if not layout.sequence_parallel:
            flags["tp_comm_overlap"] = None
        changes = {
            f"megatron.{name}": value
            for name, value in flags.items()
            if (self.megatron.get(name) or None) != (value or None)
        }
        written = parse(self.config["model"]["pattern"])
        if written.cuts and written.cuts != candidate.pattern.cuts:
            # Training places cuts as the search does.
            changes["model.pattern"] = format_pattern(replace(written, cuts=()))
        if layout.virtual_stages != (self.config["model"].get("virtual_pipeline_stages") or 1):
            changes["model.virtual_pipeline_stages"] = layout.virtual_stages
        return changes

    def changed(self, candidate: Candidate) -> dict[str, Any]:
        """Return the config with a candidate's layout applied."""
        changed = {**self.config, "megatron": dict(self.megatron), "model": dict(self.config["model"])}
        for key, value in self.changes(candidate).items():
            section, _, name = key.partition(".")
            changed[section][name] = value
        return changed

    def words(self, candidate: Candidate) -> list[str]:
        """Return a candidate's changes as command-line arguments, without shell quoting."""
        return [f"{key}={_spelled(value)}" for key, value in self.changes(candidate).items()]

    def own_record(self) -> dict[str, Any] | None:
        """Return the record of the config's own layout, or None if it is invalid."""
        from nemo_ext.megatron.check import check_layout

        try:
            check_layout({**self.config, "model": {**self.config["model"], "pattern": pattern_with_cuts(self.config)}})
            candidate = self.own_layout()
            return record(self, replace(candidate, bytes=self.bytes(candidate.layout, candidate.pattern)))
        except ValueError:
            return None

    def own_layout(self) -> Candidate:
        """Predict the step time of the config's own layout.

        Raises:
            ValueError: the layout is invalid.
        """
        pattern = parse(pattern_with_cuts(self.config))
        cut = {**self.config, "model": {**self.config["model"], "pattern": format_pattern(pattern)}}
        layout = Layout.from_config(cut, world_size=self.world)
        return self.timed(layout, pattern, gathers_experts=not self._to_experts_alone())

    def throughput(self, time: StepTime) -> dict[str, float]:
        """Return tokens per second and GPU at a step time, and the MFU by exact FLOPs and by 6N."""
        model, frozen, mtp_only = self.architecture, self.own.frozen, self.own.mtp_only
        rate = self.batch * self.length / time.total / self.world
        exact = train_flops_per_token(model, seq_length=self.length, frozen=frozen, mtp_only=mtp_only)
        counts = {"mfu": exact, "mfu_6n": six_n(model, frozen=frozen)}
        return {"tokens_per_second": rate, **{name: rate * flops / self.gpu.flops for name, flops in counts.items()}}

    def _to_experts_alone(self) -> bool:
        """Return whether the config's token dispatcher sends tokens only to the ranks of their experts."""
        return self.megatron.get("moe_token_dispatcher_type") in ("alltoall", "flex")

    def _micro_batches(self, layout: Layout) -> int:
        return self.batch // (layout.micro_batch_size * layout.data_parallel)

    def _all(self) -> Iterator[Candidate]:
        blocks = len(self.architecture.pattern.blocks)
        tensors = [size for size in range(1, self.per_node + 1) if not self.per_node % size]
        teacher = (self.config.get("distillation") or {}).get("teacher") or self.megatron.get("logits_load_dir")
        interleaved = 1 if teacher else MOST_VIRTUAL
        pipelines = [size for size in range(1, min(blocks, MOST_PIPELINE) + 1) if not self.world % size]
        contexts = [size for size in powers(MOST_CONTEXT) if size == 1 or self._divides_sequence(size)]
        for tensor, pipeline, context in parallel_sizes(tensors, pipelines, contexts):
            if self.world % (tensor * pipeline * context):
                continue
            data = self.world // (tensor * pipeline * context)
            for expert in expert_sizes(self.architecture.sizes, tensor * context * data, MOST_EXPERT):
                if not self.fits_blocks(tensor, context, expert):
                    continue
                for virtual in range(1, min(interleaved, blocks // pipeline) + 1 if pipeline > 1 else 2):
                    if (pattern := self.stage_patterns(pipeline, virtual)) is None:
                        continue
                    yield from self._fine(tensor, pipeline, context, data, expert, virtual, pattern)

    def _fine(
        self, tensor: int, pipeline: int, context: int, data: int, expert: int, virtual: int, pattern: Pattern
    ) -> Iterator[Candidate]:
        """Yield the candidates for given parallel sizes: all micro-batch sizes, sequence parallelism and recomputation.

        The sizes are TP, PP, CP, DP, EP and virtual stages; `pattern` has the cuts that they require.
        """
        sequence_parallel = [True] if "E" in self.kinds else [False, True]
        sequence_parallel = sequence_parallel if tensor > 1 and not self.length % (2 * context * tensor) else [False]
        if tensor > 1 and "E" in self.kinds and sequence_parallel == [False]:
            return
        for micro in powers(MOST_MICRO):
            count, rest = divmod(self.batch, data * micro)
            if rest or (virtual > 1 and count % pipeline):
                continue
            for sequence in sequence_parallel:
                for recompute, modules in self._recomputations():
                    layout = replace(
                        self.own,
                        tensor_parallel=tensor,
                        pipeline_parallel=pipeline,
                        virtual_stages=virtual,
                        context_parallel=context,
                        data_parallel=data,
                        expert_parallel=expert,
                        expert_tensor_parallel=1 if "E" in self.kinds else None,
                        micro_batch_size=micro,
                        micro_batches=None,
                        sequence_parallel=sequence,
                        recompute=recompute,
                        recompute_modules=modules,
                        recompute_num_layers=1,
                    )
                    yield self.timed(layout, pattern)

    def _recomputations(self) -> list[tuple[str, tuple[str, ...]]]:
        own = self.own.recompute_modules if self.own.recompute == "selective" else ()
        modules = own or tuple(name for kind, name in (("-", "mlp"), ("E", "moe")) if kind in self.kinds)
        selective = [("selective", modules)] if modules else []
        return [("none", ("core_attn",)), *selective, ("full", ("core_attn",))]

    def _divides_sequence(self, context: int) -> bool:
        """Return whether training can use a context-parallel size.

        The sequence length must be a multiple of twice the size, and a model with sliding windows must have
        `cp_comm_type` set.
        """
        windows = any(
            block.kind == "*" and not block.is_linear and block.size("window") for block in self.architecture.sizes
        )
        return not self.length % (2 * context) and (not windows or bool(self.megatron.get("cp_comm_type")))

    def _fits_blocks(self, tensor: int, context: int, expert: int) -> bool:
        if self.teacher is not None and not self.teacher.fits_blocks(tensor, context, expert):
            return False
        scans = [block for block in self.architecture.sizes if block.kind == "M" and not block.is_linear]
        if any(block.size("heads") % (tensor * context) or block.size("groups") % tensor for block in scans):
            return False
        layout = Layout(
            tensor_parallel=tensor,
            expert_parallel=expert,
            expert_tensor_parallel=1 if "E" in self.kinds else None,
            data_parallel=expert,
        )
        return _passes(lambda: check_blocks(self.architecture, layout))

    def _pattern(self, pipeline: int, virtual: int) -> Pattern | None:
        """Return the pattern of `cut`.

        None if the cuts of a MoE model would leave a rank without a MoE block, which Megatron does not support.
        """
        from nemo_ext.megatron.check import check_experts_on_every_rank

        pattern = self.cut(pipeline, virtual)
        if pipeline > 1 and "E" in self.kinds and not _passes(lambda: check_experts_on_every_rank(pattern, pipeline)):
            return None
        return pattern


def search(
    config: Mapping[str, Any],
    name: str,
    gpu: Gpu,
    best: int,
    rehearse: Callable[[list[str], int], Mapping[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Find the fastest layouts that fit, by predicted time and rehearsal.

    Args:
        config: composed training config.
        name: name of the GPU.
        gpu: the GPU's figures.
        best: number of layouts to find; at most three times as many are rehearsed.
        rehearse: function that rehearses the config with additional arguments, given with a number from 1; it raises
            ValueError on failure.

    Returns:
        A summary for the report and the list of the rehearsals' results. The summary holds `gpu` (name and figures),
        `gpus` (number of GPUs), `fill` (share of the memory that a layout may use), `candidates` (their number),
        `refused` (number of candidates per reason for exclusion), `own` (record of the config's own layout) and
        `tried` (records of the rehearsed layouts).

    Raises:
        ValueError: no layout fits by the cost model.
    """
    layouts = Search(config, gpu)
    ranked, refused = layouts.ranked(), Counter[str]()
    limit = FILL * gpu.memory_gib * GIB
    tried: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    seen: set[tuple[int, ...]] = set()
    for candidate in layouts.fitting(ranked, refused):
        if candidate.sizes in seen:
            continue  # same sizes with less memory but slower; the faster one fits
        words = layouts.words(candidate)
        line = {**record(layouts, candidate), "number": len(tried) + 1}
        tried.append(line)
        try:
            result = dict(rehearse(words, len(tried)))
        except ValueError as error:
            line["error"] = str(error)
        else:
            line["peak_bytes"] = max(rank["peak_bytes"] for rank in result["ranks"])
            line["fits"] = line["peak_bytes"] <= limit
            results.append({"change": shlex.join(words) or "unchanged", "number": len(tried), **result})
            if line["fits"]:
                seen.add(candidate.sizes)
        if sum(bool(line.get("fits")) for line in tried) == best or len(tried) == 3 * best:
            break
    if not tried:
        why = "; ".join(f"{count:,}: {reason}" for reason, count in refused.most_common(3)) or "no size divides"
        raise ValueError(f"no layout of {layouts.world} GPUs with {gpu.memory_gib:g} GiB fits ({why}); use more GPUs")
    summary = {
        "gpu": {"name": name, **asdict(gpu)},
        "gpus": layouts.world,
        "fill": FILL,
        "candidates": len(ranked),
        "refused": dict(refused.most_common()),
        "own": layouts.own_record(),
        "tried": tried,
    }
    return summary, results


def predict(config: Mapping[str, Any], name: str, gpu: Gpu) -> dict[str, Any]:
    """Predict the throughput of a training config's own layout.

    Args:
        config: composed training config; its phases are ignored.
        name: name of the GPU.
        gpu: the GPU's rates.

    Returns:
        Dictionary with `gpu` (name), `gpus` (number), `seconds` (total and terms of a step), `tokens_per_second` per
        GPU, `mfu` by exact FLOPs, `mfu_6n`, `peak` (FLOP/s that both refer to), `error` (relative; None if no similar
        run was compared), `estimates` (rates without a source) and `teacher` (whether a teacher runs in each step).

    Raises:
        ValueError: the layout is invalid, or the GPU has no rates for the precision.
    """
    search = Search(config, gpu)
    if search.plan is not None and search.plan.uses_nvfp4:
        raise ValueError(
            "precision_plan has NVFP4, for which GPUs' files have no rates; use a plan in FP8 or BF16 to predict"
        )
    low = [name for name in ("fp8", "fp8_format", "fp4", "fp4_format") if search.megatron.get(name)]
    if low and search.plan is None:
        raise ValueError(f"megatron.{low[0]} is not supported by predictions; set precision=fp8_current instead")
    time = search.own_layout().time
    return {
        "gpu": name,
        "gpus": search.world,
        "seconds": _seconds(time),
        **search.throughput(time),
        "peak": gpu.flops,
        "error": _error(search.architecture, gpu),
        "estimates": list(gpu.estimates),
        "teacher": search.teacher is not None,
    }


def _error(model: Architecture, gpu: Gpu) -> float | None:
    """Return the relative error stated for a prediction; None if no similar run was compared (docs/throughput.md)."""
    experts = any(block.kind == "E" for block in model.sizes)
    if gpu.capability not in COMPARED or total_params(model) < SMALLEST:
        return None
    if not experts:
        return ERROR
    return EXPERTS_ERROR if model.family.startswith("nemotron3_") else None


def prediction_text(predicted: Mapping[str, Any]) -> str:
    """Describe the result of `predict` in one sentence, with its error."""
    seconds = dict(predicted["seconds"])
    total = seconds.pop("total")
    parts = ", ".join(f"{name} {part / total:.0%}" for name, part in seconds.items() if part >= 0.005 * total)
    error = predicted["error"]
    within = "without a known error, as no similar run was compared" if error is None else f"within {error:.0%}"
    counted = " without the teacher's FLOPs" if predicted["teacher"] else ""
    return (
        f"Predicted on {predicted['gpus']:,} {predicted['gpu']}: {total:.3g} s per step, "
        f"{predicted['tokens_per_second']:,.0f} tokens/s per GPU {within}, MFU "
        f"{predicted['mfu']:.1%} by exact FLOPs and {predicted['mfu_6n']:.1%} by 6N{counted}, of "
        f"{predicted['peak'] / 1e12:,.0f} TFLOP/s ({parts})."
    )


def _seconds(time: StepTime) -> dict[str, float]:
    return {name: round(value, 6) for name, value in {"total": time.total, **asdict(time)}.items()}


def record(search: Search, candidate: Candidate) -> dict[str, Any]:
    """Describe a candidate as JSON: layout, command-line arguments, predicted seconds and throughput, and bytes."""
    return {
        "layout": candidate.describe(),
        "words": shlex.join(search.words(candidate)),
        "seconds": _seconds(candidate.time),
        **search.throughput(candidate.time),
        "bytes": candidate.bytes,
    }


def _passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except ValueError:
        return False
    return True


def _spelled(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
