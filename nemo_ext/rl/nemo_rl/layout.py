"""Layouts: which GPUs train, which generate, and with which parallel sizes.

Sizes stated by the user or in a file in `hydra_conf/rl/layout` are kept. The others are chosen so that one copy of the
model uses the fewest GPUs on which it fits, according to the cost model in `nemo_ext.architecture`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.architecture import cost
from nemo_ext.architecture.activations import activation_bytes
from nemo_ext.architecture.candidates import expert_sizes, parallel_sizes, powers
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pipeline import balance, parameter_counts
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.formats import read
from nemo_ext.job.progress import notice
from nemo_ext.job.registry import config_files
from nemo_ext.job.settings import STRICT, checked, nearest
from nemo_ext.rl.algorithms import Algorithm, PolicyGradient
from nemo_ext.rl.nemo_rl.draft import Draft

GIB = 1 << 30
TRAINING_SHARE = 0.85
"""Maximum fraction of a GPU's memory that the estimate for training may fill (choice). The estimate excludes buffers,
fragmentation and, if generation shares the GPU, the memory that vLLM holds while it sleeps."""
COLOCATED_SHARES, OWN_SHARE = (0.6, 0.8), 0.8
"""vLLM's `gpu_memory_utilization` (choice): on GPUs that also train, the second value only if the first is too small;
then on separate GPUs."""
SEQUENCES = 4
"""Minimum number of full-length sequences that must fit into vLLM's cache (choice)."""
MEGATRON, DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
PATHS = {
    "nodes": "cluster.num_nodes",
    "gpus_per_node": "cluster.gpus_per_node",
    "generation_nodes": "policy.generation.colocated.resources.num_nodes",
    "generation_gpus": "policy.generation.colocated.resources.gpus_per_node",
    "generation_tensor_parallel": "policy.generation.vllm_cfg.tensor_parallel_size",
    "colocated": "policy.generation.colocated.enabled",
    "micro_batch": "policy.train_micro_batch_size",
}
_PARALLEL = {
    "megatron": {
        "tensor_parallel": f"{MEGATRON}.tensor_model_parallel_size",
        "context_parallel": f"{MEGATRON}.context_parallel_size",
        "pipeline_parallel": f"{MEGATRON}.pipeline_model_parallel_size",
        "expert_parallel": f"{MEGATRON}.expert_model_parallel_size",
        "recompute": f"{MEGATRON}.activation_checkpointing",
    },
    "dtensor": {
        "tensor_parallel": f"{DTENSOR}.tensor_parallel_size",
        "context_parallel": f"{DTENSOR}.context_parallel_size",
        "recompute": f"{DTENSOR}.activation_checkpointing",
    },
}


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Stated:
    """Stated sizes of a layout; sizes that are None are computed.

    Attributes:
        source: paper and section.
        backend: training backend, megatron or dtensor.
        nodes: total number of nodes, including nodes for generation.
        gpus_per_node: number of GPUs per node.
        gpu_memory_gib: memory of each GPU in GiB.
        generation_nodes: number of nodes that only generate; on a single node, 1, although only `generation_gpus` of
            its GPUs generate.
        generation_gpus: number of GPUs on each of these nodes that only generate.
        generation_tensor_parallel: vLLM's tensor-parallel size.
        colocated: False if generation has separate GPUs, which asynchronous training requires.
        tensor_parallel, context_parallel, pipeline_parallel, expert_parallel: parallel sizes in training.
        micro_batch: number of responses or pairs per microbatch.
        recompute: True if activations are recomputed in the backward pass.
    """

    source: str | None = None
    backend: str | None = None
    nodes: PositiveInt | None = None
    gpus_per_node: PositiveInt | None = None
    gpu_memory_gib: PositiveFloat | None = None
    generation_nodes: PositiveInt | None = None
    generation_gpus: PositiveInt | None = None
    generation_tensor_parallel: PositiveInt | None = None
    colocated: bool | None = None
    tensor_parallel: PositiveInt | None = None
    context_parallel: PositiveInt | None = None
    pipeline_parallel: PositiveInt | None = None
    expert_parallel: PositiveInt | None = None
    micro_batch: PositiveInt | None = None
    recompute: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Division:
    """Layout of training; `bytes` is the estimated memory use of the fullest GPU, 0 if unknown."""

    layout: Layout
    micro_batch: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Layout of generation in vLLM; `nodes` and `gpus` (per node) are None if the training GPUs also generate.

    `share` is vLLM's `gpu_memory_utilization`.
    """

    nodes: int | None
    gpus: int | None
    tensor_parallel: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Layout of a run; `generation` is None for training on pairs."""

    nodes: int
    gpus_per_node: int
    training: Division
    generation: Generation | None

    def describe(self) -> str:
        """Format the layout as one line for the log."""
        how, generation = self.training.layout, self.generation
        line = f"layout: training {how.describe()} on {how.world_size} GPUs, micro-batch {self.training.micro_batch}"
        line += ", activations recomputed" if how.recompute == "full" else ""
        line += f", about {self.training.bytes / GIB:.0f} GiB per GPU" if self.training.bytes else ""
        if generation is None:
            return line
        where = f"{generation.nodes * (generation.gpus or 0)} others" if generation.nodes else "the same"
        return f"{line}; generation TP{generation.tensor_parallel} on {where}"


def names() -> tuple[str, ...]:
    """Return the names of the layouts stated in papers."""
    return tuple(config_files("rl/layout"))


def load(name: str) -> Stated:
    """Load a layout stated in a paper; raise ValueError if the name is unknown."""
    layouts = config_files("rl/layout")
    if name not in layouts:
        raise ValueError(f"unknown nemo_rl.layout={name}: {nearest(name, layouts)}, or null to compute a layout")
    text = layouts[name].read_text(encoding="utf-8")
    layout: Stated = checked(Stated, yaml.safe_load(text), where=f"nemo_rl.layout {name}")
    return layout


def stated(name: str | None, user_values: Mapping[str, Any], backend: str, gpu_memory_gib: float | None) -> Stated:
    """Combine the sizes stated in a named layout and by the user, who takes precedence.

    Args:
        name: name of the layout; None if only the user states sizes.
        user_values: mapping from NeMo-RL's dotted keys to the user's values.
        gpu_memory_gib: memory of each GPU in GiB; None if unknown.

    Raises:
        ValueError: the layout is for another backend or for other numbers of nodes or GPUs, or a size is invalid.
    """
    layout = load(name) if name is not None else Stated()
    if layout.backend not in (None, backend):
        raise ValueError(
            f"nemo_rl.layout={name} requires nemo_rl.backend={layout.backend}, not {backend}; set this backend, "
            "or nemo_rl.layout=null to compute a layout"
        )
    paths = {**PATHS, **_PARALLEL[backend]}
    changes = {key: user_values[path] for key, path in paths.items() if user_values.get(path) is not None}
    for key in ("nodes", "gpus_per_node"):
        expected, actual = getattr(layout, key), changes.get(key)
        if None not in (expected, actual) and expected != actual:
            raise ValueError(
                f"nemo_rl.layout={name} requires {key}={expected}, but nemo_rl.set.{PATHS[key]} is {actual}; set "
                "nemo_rl.layout=null to compute a layout"
            )
    if gpu_memory_gib is not None:
        changes["gpu_memory_gib"] = gpu_memory_gib
    changed: Stated = checked(Stated, changes, where="sizes of the layout in nemo_rl.set")
    return replace(layout, **{key: value for key, value in asdict(changed).items() if value is not None})


def description_of(policy: str) -> Description | None:
    """Read a model's description from its Hugging Face folder; if that fails, print a notice and return None."""
    file = Path(policy).expanduser() / "config.json"
    try:
        return read(json.loads(file.read_text(encoding="utf-8")))[1].without_prediction()
    except (OSError, ValueError) as error:
        reason = f"{file}: not found" if isinstance(error, OSError) else f"{file}: {error}"
        notice(
            f"the layout is not computed, because the model's sizes are unknown ({reason}); set the parallel sizes in "
            "nemo_rl.set"
        )
        return None


def plan(
    algorithm: Algorithm,
    model: Description | None,
    fixed: Stated,
    *,
    backend: str,
    micro_batch: int,
    generation_bytes: int = 2,
) -> Plan:
    """Plan a run's layout.

    Args:
        algorithm: algorithm, whose context length, batch and asynchrony matter.
        model: the model; None if unknown, in which case sizes that are not stated are 1.
        fixed: stated sizes; the default is one node with one GPU of 80 GiB.

    Raises:
        ValueError: no allowed layout fits; the message gives the reason and the memory that the best one needs.
    """
    nodes, gpus = fixed.nodes or 1, fixed.gpus_per_node or 1
    search = _Search(algorithm, model, fixed, backend, micro_batch, gpus)
    if not isinstance(algorithm, PolicyGradient):
        return Plan(nodes=nodes, gpus_per_node=gpus, training=search.training(nodes * gpus), generation=None)
    separate = fixed.colocated is False or fixed.generation_nodes or fixed.generation_gpus
    if algorithm.asynchronous is None and not separate:
        training = search.training(nodes * gpus)
        generation = search.generation(nodes * gpus, COLOCATED_SHARES, generation_bytes)
        return Plan(nodes=nodes, gpus_per_node=gpus, training=training, generation=generation)
    reasons = []
    for generation_nodes, generation_gpus in _splits(nodes, gpus, fixed):
        generating = generation_nodes * generation_gpus
        try:
            training = search.training(nodes * gpus - generating)
            generation = search.generation(generating, (OWN_SHARE,), generation_bytes)
        except ValueError as error:
            reasons.append(str(error))
            continue
        generation = replace(generation, nodes=generation_nodes, gpus=generation_gpus)
        return Plan(nodes=nodes, gpus_per_node=gpus, training=training, generation=generation)
    raise ValueError(reasons[0])


def _splits(nodes: int, gpus: int, fixed: Stated) -> list[tuple[int, int]]:
    """Return possible splits as (number of generating nodes, generating GPUs on each), the most even split first.

    Raises ValueError if there is none.
    """
    each = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    where = f"{nodes} nodes with {each}" if nodes > 1 else f"one node with {each}"
    if nodes == 1:
        generating, total = fixed.generation_gpus, gpus
        if fixed.generation_nodes not in (None, 1):
            raise ValueError(
                f"nemo_rl.set.{PATHS['generation_nodes']}={fixed.generation_nodes} must be 1 or null, because the "
                "cluster has one node"
            )
    else:
        generating, total = fixed.generation_nodes, nodes
        if fixed.generation_gpus not in (None, gpus):
            raise ValueError(
                f"nemo_rl.set.{PATHS['generation_gpus']}={fixed.generation_gpus} must be {gpus} or null, because with "
                "several nodes, whole nodes generate"
            )
    if total < 2 or (generating is not None and generating >= total):
        raise ValueError(
            f"no GPU is left for training, because the run has {where} and generation uses separate GPUs; add more "
            f"with nemo_rl.set.{PATHS['gpus_per_node' if nodes == 1 else 'nodes']}=N"
        )
    parts = [generating] if generating else sorted(range(1, total), key=lambda part: abs(2 * part - total))
    return [(1, part) if nodes == 1 else (part, gpus) for part in parts]


class _Search:
    """Searches for the layouts of one model and algorithm."""

    def __init__(
        self, algorithm: Algorithm, model: Description | None, fixed: Stated, backend: str, micro_batch: int, gpus: int
    ) -> None:
        self.algorithm, self.model, self.fixed, self.backend = algorithm, model, fixed, backend
        self.pairs = not isinstance(algorithm, PolicyGradient)
        self.max_micro_batch, self.gpus = micro_batch, gpus
        self.memory = (fixed.gpu_memory_gib or 80) * GIB
        self.length = algorithm.lengths.context or 1

    def training(self, world: int) -> Division:
        """Find the layout of training on `world` GPUs; raise ValueError if none fits."""
        smallest, reasons = None, dict[str, None]()
        for tensor, pipeline, context in self._sizes():
            parts = tensor * pipeline * context
            if world % parts:
                reasons[f"{world} GPUs are not a multiple of TP{tensor} x PP{pipeline} x CP{context}"] = None
                continue
            data = world // parts
            if self.algorithm.batch % data:
                problem = f"rl.batch={self.algorithm.batch} is not a multiple of data parallel {data} ({world} GPUs)"
                reasons[problem] = None
                continue
            for recompute in (False, True) if self.fixed.recompute is None else (self.fixed.recompute,):
                division = self._division(tensor, pipeline, context, data, recompute)
                if isinstance(division, str):
                    reasons[division] = None
                elif division.bytes <= TRAINING_SHARE * self.memory:
                    return self._with_larger_micro_batch(division)
                elif smallest is None or division.bytes < smallest.bytes:
                    smallest = division
        if smallest is not None:
            how = smallest.layout
            raise ValueError(
                f"training does not fit on {world} GPUs of {self.memory / GIB:g} GiB in any layout; the smallest, "
                f"TP{how.tensor_parallel} PP{how.pipeline_parallel} CP{how.context_parallel}, needs about "
                f"{smallest.bytes / GIB:.0f} GiB per GPU; use more nodes or shorter sequences (rl.lengths), or correct "
                "nemo_rl.gpu_memory_gib, the memory of a GPU"
            )
        why = "; ".join(list(reasons)[:2]) or "there are no sizes to try"
        raise ValueError(
            f"no layout of training on {world} GPUs is possible ({why}); change the number of nodes or the sizes in "
            "nemo_rl.set"
        )

    def generation(self, world: int, shares: tuple[float, ...], weight: int) -> Generation:
        """Find vLLM's layout on `world` GPUs, with the first of the memory shares `shares` that suffices.

        `weight` is the number of bytes per weight. Raises ValueError if no layout fits.
        """
        stated_size = self.fixed.generation_tensor_parallel
        sizes = [stated_size] if stated_size else [1 << power for power in range(7) if 1 << power <= 4 * self.gpus]
        if self.model is None:
            return Generation(nodes=None, gpus=None, tensor_parallel=stated_size or 1, share=shares[0])
        architecture, need = self.model.architecture, 0.0
        heads = [block.size("heads") for block in architecture.sizes if block.kind in "*M" and not block.is_linear]
        # Across nodes only if one node does not suffice.
        for inside, share in product((True, False), shares):
            for tensor in sizes:
                if world % tensor or any(count % tensor for count in heads) or (tensor <= self.gpus) != inside:
                    continue
                need = self._generation_bytes(architecture, tensor, weight)
                if need <= share * self.memory or stated_size:
                    return Generation(nodes=None, gpus=None, tensor_parallel=tensor, share=share)
        if not need:
            raise ValueError(
                f"nemo_rl.set.{PATHS['generation_tensor_parallel']}={sizes[0]} must divide the {world} GPUs that "
                f"generate and the model's numbers of heads, {sorted(set(heads))}"
            )
        raise ValueError(
            f"generation needs {need / GIB:.0f} GiB on each of {tensor} GPUs for the weights and {SEQUENCES} sequences "
            f"of {self.length} tokens, more than {max(shares):g} of {self.memory / GIB:g} GiB; use "
            "precision=fp8_blockwise or more GPUs"
        )

    def _generation_bytes(self, architecture: Architecture, tensor: int, weight: int) -> float:
        cached = cost.kv_cache_bytes(architecture, self.length) + cost.state_bytes_per_sequence(architecture)
        attention = (block for block in architecture.sizes if block.kind == "*" and not block.is_linear)
        shared = min([tensor, *(block.size("kv") for block in attention)])
        return cost.total_params(architecture) * weight / tensor + SEQUENCES * cached / shared

    def _sizes(self) -> list[tuple[int, int, int]]:
        """Return the (TP, PP, CP) sizes to try, ordered by number of GPUs, then by number of pipeline stages."""
        fixed, megatron = self.fixed, self.backend == "megatron"
        # DTensor shards weights over all GPUs anyway, and few model classes have a plan for tensor parallelism.
        tensors = powers(min(self.gpus, 16)) if megatron else [1]
        contexts = powers(16)
        # Megatron's context parallelism requires packed sequences, which pairs do not use; DTensor's supports no Mamba.
        if self.model is None or (self.pairs if megatron else "M" in self.model.kinds):
            contexts = [1]
        pipelines = powers(16) if megatron else [1]
        if self.model is None:
            tensors, pipelines = [1], [1]
        tensors = [fixed.tensor_parallel] if fixed.tensor_parallel else tensors
        contexts = [fixed.context_parallel] if fixed.context_parallel else contexts
        pipelines = [fixed.pipeline_parallel] if fixed.pipeline_parallel else pipelines
        return parallel_sizes(tensors, pipelines, contexts)

    def _division(self, tensor: int, pipeline: int, context: int, data: int, recompute: bool) -> Division | str:
        """Return the layout with these parallel sizes and the stated microbatch size (default 1), or why it is invalid.

        `data` is the data-parallel size; `recompute` says whether activations are recomputed.
        """
        micro = self.fixed.micro_batch or 1
        if self.algorithm.batch % (data * micro):
            return f"rl.batch={self.algorithm.batch} is not a multiple of data parallel {data} x micro-batch {micro}"
        try:
            layout = Layout(
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                context_parallel=context,
                data_parallel=data,
                expert_parallel=self._experts(tensor * context * data),
                expert_tensor_parallel=1,
                micro_batch_size=micro * (2 if self.pairs else 1),
                micro_batches=self.algorithm.batch // (data * micro),
                sequence_parallel=tensor > 1 and self.backend == "megatron",
                distributed_optimizer=True,
                fp32_gradients=False,  # `grad_reduce_in_fp32` of NeMo-RL's examples
                recompute="full" if recompute else "none",
            )
            return Division(layout=layout, micro_batch=micro, bytes=self._bytes(layout))
        except ValueError as error:
            return str(error)

    def _experts(self, ranks: int) -> int:
        if self.fixed.expert_parallel:
            return self.fixed.expert_parallel
        if self.model is None or self.backend == "dtensor":
            return 1
        return max(expert_sizes(self.model.blocks, ranks, self.gpus))

    def _bytes(self, layout: Layout) -> int:
        """Estimate the memory use of the fullest GPU, in bytes; 0 if the model is unknown.

        Each logit needs eight bytes, FP32 for the loss and for its gradient, of which `activation_bytes` counts six.
        DTensor shards weights, gradients and Adam's state, all in FP32, over all GPUs, and gathers one block and its
        gradient at a time.
        """
        if self.model is None:
            return 0
        architecture = _in_stages(self.model, layout.pipeline_parallel)
        rows = 128 * layout.tensor_parallel  # the bridges pad the vocabulary
        architecture = replace(architecture, vocab_size=-(-architecture.vocab_size // rows) * rows)
        tokens = self.length * layout.micro_batch_size / layout.context_parallel
        logits = round(tokens * 2 * architecture.vocab_size / layout.tensor_parallel)
        scan = [b.size("heads") for b in architecture.sizes if b.kind == "M" and not b.is_linear]
        if any(heads % (layout.tensor_parallel * layout.context_parallel) for heads in scan):
            raise ValueError(
                f"Mamba's {scan[0]} heads are not divisible by TP{layout.tensor_parallel} x CP{layout.context_parallel}"
            )
        if self.backend == "megatron":
            gpus = cost.per_gpu(architecture, layout, seq_length=self.length)
            return max(gpu.total_bytes + (logits if gpu is gpus[-1] else 0) for gpu in gpus)
        parts = [cost.block_parameters(architecture, n + 1).total for n in range(len(architecture.pattern.blocks))]
        parts.append(cost.embedding_parameters(architecture).total)
        state = 16 * cost.total_params(architecture) // layout.world_size
        gathered = 2 * 2 * max(parts) // layout.tensor_parallel
        return state + gathered + logits + activation_bytes(architecture, layout, seq_length=self.length)

    def _with_larger_micro_batch(self, division: Division) -> Division:
        """Return the same layout with the largest microbatch that fits, a power of two times the given one."""
        while not self.fixed.micro_batch and self.model is not None:
            micro, data = 2 * division.micro_batch, division.layout.data_parallel
            if micro > self.max_micro_batch or self.algorithm.batch % (data * micro):
                break
            layout = replace(
                division.layout,
                micro_batch_size=2 * division.layout.micro_batch_size,
                micro_batches=self.algorithm.batch // (data * micro),
            )
            needed = self._bytes(layout)
            if needed > TRAINING_SHARE * self.memory:
                break
            division = replace(division, layout=layout, micro_batch=micro, bytes=needed)
        return division


def is_paired(model: Description) -> bool:
    """Return whether every layer is an attention block followed by an MLP block, as in Megatron-Bridge's own models."""
    kinds = "".join("L" if block.is_linear else block.kind for block in model.blocks)
    return kinds == "*-" * (len(kinds) // 2)


def _in_stages(model: Description, stages: int) -> Architecture:
    """Return the model's architecture, split into pipeline stages as its bridge does; ValueError if that is impossible.

    Our bridges balance parameters; Megatron-Bridge's own give all stages the same number of layers.
    """
    architecture = model.architecture
    if stages == 1:
        return architecture
    if not is_paired(model) and "M" not in model.kinds:
        return architecture.with_pattern(balance(architecture, pipeline_parallel=stages, cost=parameter_counts))
    layers = len(architecture.pattern.blocks) // (2 if is_paired(model) else 1)
    if layers % stages:
        raise ValueError(f"the model's {layers} layers are not divisible by PP{stages}")
    return architecture


def put_layout(draft: Draft, run_plan: Plan, model: Description | None, algorithm: Algorithm, backend: str) -> None:
    """Write a planned layout (parallelism, nodes, packing, generation) into a draft of NeMo-RL's config.

    Args:
        model: the policy; None if its sizes are unknown, which rules out packing on DTensor.
        algorithm: the algorithm, which determines whether there are pairs or rollouts.
    """
    layout, pairs = run_plan.training.layout, not isinstance(algorithm, PolicyGradient)
    tensor, context = layout.tensor_parallel, layout.context_parallel
    ours = "nemo_rl.layout"
    draft.put(ours, PATHS["nodes"], run_plan.nodes)
    draft.put(ours, PATHS["gpus_per_node"], run_plan.gpus_per_node)
    draft.put(ours, PATHS["micro_batch"], run_plan.training.micro_batch)
    # Context parallelism splits every sequence into two pieces per rank.
    draft.put(ours, "policy.make_sequence_length_divisible_by", tensor * (2 * context if context > 1 else 1))
    # Packs on DTensor require a model that passes flash attention's arguments on and has no recurrent state.
    packs = backend == "megatron" or (context == 1 and model is not None and is_paired(model))
    draft.put(ours, "policy.sequence_packing.enabled", packs and not pairs)
    draft.put(ours, "policy.dynamic_batching.enabled", False)
    values: dict[str, Any] = {
        "tensor_parallel": tensor,
        "context_parallel": context,
        "pipeline_parallel": layout.pipeline_parallel,
        "expert_parallel": layout.expert_parallel,
        "recompute": layout.recompute == "full",
    }
    for key, path in _PARALLEL[backend].items():
        draft.put(ours, path, values[key])
    section = MEGATRON if backend == "megatron" else DTENSOR
    draft.put(ours, f"{section}.sequence_parallel", layout.sequence_parallel)
    if backend == "megatron":
        draft.put(ours, f"{MEGATRON}.expert_tensor_parallel_size", 1)
        if model is not None and model.activation != "silu":
            # Megatron fuses only SwiGLU and GELU.
            draft.put(ours, f"{MEGATRON}.bias_activation_fusion", False)
    if pairs:
        draft.put(ours, "dpo.val_global_batch_size", algorithm.batch)
        draft.put(ours, "dpo.val_micro_batch_size", run_plan.training.micro_batch)
    if run_plan.generation is not None:
        generation = run_plan.generation
        draft.put(ours, "policy.logprob_batch_size", run_plan.training.micro_batch)
        draft.put(ours, PATHS["colocated"], generation.nodes is None)
        draft.put(ours, PATHS["generation_nodes"], generation.nodes)
        draft.put(ours, PATHS["generation_gpus"], generation.gpus)
        draft.put(ours, PATHS["generation_tensor_parallel"], generation.tensor_parallel)
        draft.put(ours, "policy.generation.vllm_cfg.gpu_memory_utilization", generation.share)
