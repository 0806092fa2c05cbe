"""Layouts: which GPUs train and which generate, and how each divides the model.

What is stated (a file of `hydra_conf/rl/layout`, or the user's settings) is kept. The rest is the division with the
fewest GPUs to one copy of the model that fits, by the cost model of `nemo_ext.architecture`.
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
"""Share of a GPU's memory that training may fill by the estimate (choice): buffers, fragments and, where generation
shares the GPU, what vLLM keeps while it sleeps are not in it."""
COLOCATED_SHARES, OWN_SHARE = (0.6, 0.8), 0.8
"""`gpu_memory_utilization` of vLLM (choice): on GPUs that train as well, more only if less does not do; on its own."""
SEQUENCES = 4
"""Whole sequences that vLLM's cache must at least hold (choice)."""
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
    """What is stated of a layout; None for what is computed.

    Attributes:
        source: paper and section.
        backend: back end that trains, megatron or dtensor.
        nodes: number of nodes, those for generation included.
        gpus_per_node: number of GPUs of each.
        gpu_memory_gib: memory of each GPU in GiB.
        generation_nodes: nodes that only generate; with one node, 1 and `generation_gpus` of it.
        generation_gpus: GPUs that only generate, of each node that does.
        generation_tensor_parallel: GPUs that hold one copy of the model in vLLM.
        colocated: False if generation has GPUs of its own, which asynchronous training requires.
        tensor_parallel: tensor parallel size in training; the others alike.
        micro_batch: responses or pairs on a device at once.
        recompute: True if activations are computed again in the backward pass.
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
    """How the GPUs that train divide the model; `bytes` is the estimate for the fullest of them, 0 if unknown."""

    layout: Layout
    micro_batch: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How vLLM divides the model; nodes and GPUs of each are None where the GPUs that train generate as well."""

    nodes: int | None
    gpus: int | None
    tensor_parallel: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole layout; `generation` is None for training on pairs."""

    nodes: int
    gpus_per_node: int
    training: Division
    generation: Generation | None

    def told(self) -> str:
        """The layout in one line."""
        how, generation = self.training.layout, self.generation
        line = f"layout: training {how.describe()} on {how.world_size} GPUs, micro-batch {self.training.micro_batch}"
        line += ", activations recomputed" if how.recompute == "full" else ""
        line += f", about {self.training.bytes / GIB:.0f} GiB a GPU" if self.training.bytes else ""
        if generation is None:
            return line
        own = f"{generation.nodes * (generation.gpus or 0)} others" if generation.nodes else "the same"
        return f"{line}; generation TP{generation.tensor_parallel} on {own}"


def names() -> tuple[str, ...]:
    """Names of the layouts that papers state."""
    return tuple(config_files("rl/layout"))


def load(name: str) -> Stated:
    """A layout that a paper states.

    Raises:
        ValueError: there is none of that name.
    """
    layouts = config_files("rl/layout")
    if name not in layouts:
        raise ValueError(f"nemo_rl.layout={name}: {nearest(name, layouts)}; null computes one")
    text = layouts[name].read_text(encoding="utf-8")
    made: Stated = checked(Stated, yaml.safe_load(text), where=f"nemo_rl.layout {name}")
    return made


def stated(name: str | None, given: Mapping[str, Any], backend: str, gpu_memory_gib: float | None) -> Stated:
    """What the layout of this name and the user's settings (NeMo-RL's, dotted) say; the latter win.

    Raises:
        ValueError: the layout is for another back end, number of nodes or GPUs, or a setting is no size.
    """
    found = load(name) if name is not None else Stated()
    if found.backend not in (None, backend):
        raise ValueError(f"nemo_rl.layout={name} is for nemo_rl.backend={found.backend}: set it")
    paths = {**PATHS, **_PARALLEL[backend]}
    changes = {key: given[path] for key, path in paths.items() if given.get(path) is not None}
    for key in ("nodes", "gpus_per_node"):
        wanted, is_ = getattr(found, key), changes.get(key)
        if None not in (wanted, is_) and wanted != is_:
            raise ValueError(
                f"nemo_rl.layout={name} has {key} {wanted}, nemo_rl.set.{PATHS[key]} is {is_}: nemo_rl.layout=null "
                "computes one"
            )
    if gpu_memory_gib is not None:
        changes["gpu_memory_gib"] = gpu_memory_gib
    of_user: Stated = checked(Stated, changes, where="nemo_rl.set, of the layout")
    return replace(found, **{key: value for key, value in asdict(of_user).items() if value is not None})


def description_of(policy: str) -> Description | None:
    """The model of a Hugging Face folder; None, with a notice, if its memory cannot be known."""
    file = Path(policy).expanduser() / "config.json"
    try:
        return read(json.loads(file.read_text(encoding="utf-8")))[1]
    except (OSError, ValueError) as error:
        reason = f"{file}: not there" if isinstance(error, OSError) else f"{file}: {error}"
        notice(f"the layout is not computed, as the model's sizes are not known ({reason}): set it with nemo_rl.set")
        return None


def plan(
    algorithm: Algorithm,
    model: Description | None,
    wanted: Stated,
    *,
    backend: str,
    micro_batch: int,
    generation_bytes: int = 2,
) -> Plan:
    """The layout of a run.

    Args:
        algorithm: algorithm; its context length, batch and asynchrony matter.
        model: model; None if unknown, then nothing is divided that is not stated.
        wanted: what is stated; one node with one GPU of 80 GiB if nothing is.
        backend: megatron or dtensor.
        micro_batch: largest micro-batch.
        generation_bytes: bytes of a weight in vLLM.

    Raises:
        ValueError: nothing that is allowed fits; says why, and how much memory the best would need.
    """
    nodes, gpus = wanted.nodes or 1, wanted.gpus_per_node or 1
    search = _Search(algorithm, model, wanted, backend, micro_batch, gpus)
    if not isinstance(algorithm, PolicyGradient):
        return Plan(nodes=nodes, gpus_per_node=gpus, training=search.training(nodes * gpus), generation=None)
    own = wanted.colocated is False or wanted.generation_nodes or wanted.generation_gpus
    if algorithm.asynchronous is None and not own:
        training = search.training(nodes * gpus)
        generation = search.generation(nodes * gpus, COLOCATED_SHARES, generation_bytes)
        return Plan(nodes=nodes, gpus_per_node=gpus, training=training, generation=generation)
    reasons = []
    for own_nodes, own_gpus in _splits(nodes, gpus, wanted):
        try:
            training = search.training(nodes * gpus - own_nodes * own_gpus)
            found = search.generation(own_nodes * own_gpus, (OWN_SHARE,), generation_bytes)
        except ValueError as error:
            reasons.append(str(error))
            continue
        generation = replace(found, nodes=own_nodes, gpus=own_gpus)
        return Plan(nodes=nodes, gpus_per_node=gpus, training=training, generation=generation)
    raise ValueError(reasons[0])


def _splits(nodes: int, gpus: int, wanted: Stated) -> list[tuple[int, int]]:
    """Nodes for generation and GPUs of each, the most even division of the cluster first.

    Raises:
        ValueError: nothing is left to train, or a part of several nodes is to generate.
    """
    where = f"{nodes} nodes with {gpus} GPUs" if nodes > 1 else f"one node with {gpus} GPUs"
    if nodes == 1:
        stated_gpus, most = wanted.generation_gpus, gpus
        if wanted.generation_nodes not in (None, 1):
            raise ValueError(f"{PATHS['generation_nodes']}={wanted.generation_nodes}: the cluster has one node")
    else:
        stated_gpus, most = wanted.generation_nodes, nodes
        if wanted.generation_gpus not in (None, gpus):
            raise ValueError(
                f"{PATHS['generation_gpus']}={wanted.generation_gpus}: with several nodes whole ones generate: {gpus}"
            )
    if most < 2 or (stated_gpus is not None and stated_gpus >= most):
        raise ValueError(
            f"nothing is left to train on: {where}, and generation takes its own; give more with "
            f"nemo_rl.set.{PATHS['gpus_per_node' if nodes == 1 else 'nodes']}=N"
        )
    parts = [stated_gpus] if stated_gpus else sorted(range(1, most), key=lambda part: abs(2 * part - most))
    return [(1, part) if nodes == 1 else (part, gpus) for part in parts]


class _Search:
    """Divisions of one model, for one algorithm."""

    def __init__(
        self, algorithm: Algorithm, model: Description | None, wanted: Stated, backend: str, most: int, gpus: int
    ) -> None:
        self.algorithm, self.model, self.wanted, self.backend = algorithm, model, wanted, backend
        self.pairs = not isinstance(algorithm, PolicyGradient)
        self.most, self.gpus = most, gpus
        self.memory = (wanted.gpu_memory_gib or 80) * GIB
        self.length = algorithm.lengths.context or 1

    def training(self, world: int) -> Division:
        """The division of the policy over so many GPUs.

        Raises:
            ValueError: as `plan`.
        """
        least, reasons = None, dict[str, None]()
        for tensor, pipeline, context in self._sizes():
            parts = tensor * pipeline * context
            if world % parts:
                reasons[f"{world} GPUs are no multiple of TP{tensor} x PP{pipeline} x CP{context}"] = None
                continue
            data = world // parts
            if self.algorithm.batch % data:
                reasons[f"batch={self.algorithm.batch} is no multiple of data parallel {data} ({world} GPUs)"] = None
                continue
            for recompute in (False, True) if self.wanted.recompute is None else (self.wanted.recompute,):
                found = self._division(tensor, pipeline, context, data, recompute)
                if isinstance(found, str):
                    reasons[found] = None
                elif found.bytes <= TRAINING_SHARE * self.memory:
                    return self._with_larger_micro_batch(found)
                elif least is None or found.bytes < least.bytes:
                    least = found
        if least is not None:
            how = least.layout
            raise ValueError(
                f"training: no layout on {world} GPUs of {self.memory / GIB:g} GiB fits; the least, "
                f"TP{how.tensor_parallel} PP{how.pipeline_parallel} CP{how.context_parallel}, needs about "
                f"{least.bytes / GIB:.0f} GiB: give more nodes or shorter sequences (rl.lengths); "
                "nemo_rl.gpu_memory_gib is what a GPU is taken to have"
            )
        raise ValueError(f"training: {'; '.join(list(reasons)[:2]) or 'no layout'}: change nodes or sizes")

    def generation(self, world: int, shares: tuple[float, ...], weight: int) -> Generation:
        """The division of vLLM over so many GPUs.

        Raises:
            ValueError: as `plan`.
        """
        own = self.wanted.generation_tensor_parallel
        sizes = [own] if own else [1 << power for power in range(7) if 1 << power <= 4 * self.gpus]
        if self.model is None:
            return Generation(nodes=None, gpus=None, tensor_parallel=own or 1, share=shares[0])
        architecture, need = self.model.architecture, 0.0
        heads = [block.size("heads") for block in architecture.sizes if block.kind in "*M" and not block.is_linear]
        # Beyond a node only where a node does not do.
        for inside, share in product((True, False), shares):
            for tensor in sizes:
                if world % tensor or any(count % tensor for count in heads) or (tensor <= self.gpus) != inside:
                    continue
                need = self._generation_bytes(architecture, tensor, weight)
                if need <= share * self.memory or own:
                    return Generation(nodes=None, gpus=None, tensor_parallel=tensor, share=share)
        if not need:
            raise ValueError(f"generation: {world} GPUs and {min(heads)} heads are no multiples of {sizes[0]}")
        raise ValueError(
            f"generation: {need / GIB:.0f} GiB on each of {tensor} GPUs, with {SEQUENCES} sequences of {self.length} "
            f"tokens, do not fit {max(shares):g} of {self.memory / GIB:g}: precision=fp8_blockwise, or more GPUs"
        )

    def _generation_bytes(self, architecture: Architecture, tensor: int, weight: int) -> float:
        cached = cost.kv_cache_bytes(architecture, self.length) + cost.state_bytes_per_sequence(architecture)
        shared = min([tensor, *(block.size("kv") for block in architecture.sizes if _attends(block))])
        return cost.total_params(architecture) * weight / tensor + SEQUENCES * cached / shared

    def _sizes(self) -> list[tuple[int, int, int]]:
        """TP, PP and CP; the fewest GPUs first, then the fewest stages."""
        wanted, megatron = self.wanted, self.backend == "megatron"
        # DTensor divides weights over all GPUs anyway, and few classes have a plan for tensor parallelism.
        tensors = powers(min(self.gpus, 16)) if megatron else [1]
        contexts = powers(16)
        if self.model is None or self._context_is_one():
            contexts = [1]
        pipelines = powers(16) if megatron else [1]
        if self.model is None:
            tensors, pipelines = [1], [1]
        tensors = [wanted.tensor_parallel] if wanted.tensor_parallel else tensors
        contexts = [wanted.context_parallel] if wanted.context_parallel else contexts
        pipelines = [wanted.pipeline_parallel] if wanted.pipeline_parallel else pipelines
        return parallel_sizes(tensors, pipelines, contexts)

    def _context_is_one(self) -> bool:
        """True if sequences cannot be divided: Megatron needs packing for it, which pairs lack; DTensor's Mamba."""
        assert self.model is not None
        return self.pairs if self.backend == "megatron" else "M" in self.model.kinds

    def _division(self, tensor: int, pipeline: int, context: int, data: int, recompute: bool) -> Division | str:
        """The division with one response or pair at once, or why there is none."""
        micro = self.wanted.micro_batch or 1
        if self.algorithm.batch % (data * micro):
            return f"batch={self.algorithm.batch} is no multiple of data parallel {data} x micro-batch {micro}"
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
                recompute="full" if recompute else "none",
            )
            return Division(layout=layout, micro_batch=micro, bytes=self._bytes(layout))
        except ValueError as error:
            return str(error)

    def _experts(self, ranks: int) -> int:
        if self.wanted.expert_parallel:
            return self.wanted.expert_parallel
        if self.model is None or self.backend == "dtensor":
            return 1
        return max(expert_sizes(self.model.blocks, ranks, self.gpus))

    def _bytes(self, layout: Layout) -> int:
        """Estimate for the fullest GPU.

        The logits count twice in FP32, for the loss and its gradient; `activation_bytes` has six of these eight bytes.
        DTensor divides weights, gradients and Adam's state, all in FP32, over all GPUs, and gathers a block at a time,
        and its gradient.

        Raises:
            ValueError: the blocks cannot be divided so.
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
            raise ValueError(f"Mamba's {scan[0]} heads are no multiple of tensor x context parallel")
        if self.backend == "megatron":
            gpus = cost.per_gpu(architecture, layout, seq_length=self.length)
            return max(gpu.total_bytes + (logits if gpu is gpus[-1] else 0) for gpu in gpus)
        parts = [cost.block_parameters(architecture, n + 1).total for n in range(len(architecture.pattern.blocks))]
        parts.append(cost.embedding_parameters(architecture).total)
        state = 16 * cost.total_params(architecture) // layout.world_size
        gathered = 2 * 2 * max(parts) // layout.tensor_parallel
        return state + gathered + logits + activation_bytes(architecture, layout, seq_length=self.length)

    def _with_larger_micro_batch(self, found: Division) -> Division:
        """The same division with the largest micro-batch that fits, a power of two times the first."""
        while not self.wanted.micro_batch and self.model is not None:
            micro, data = 2 * found.micro_batch, found.layout.data_parallel
            if micro > self.most or self.algorithm.batch % (data * micro):
                break
            layout = replace(
                found.layout,
                micro_batch_size=2 * found.layout.micro_batch_size,
                micro_batches=self.algorithm.batch // (data * micro),
            )
            needed = self._bytes(layout)
            if needed > TRAINING_SHARE * self.memory:
                break
            found = replace(found, layout=layout, micro_batch=micro, bytes=needed)
        return found


def _attends(block: Any) -> bool:
    return block.kind == "*" and not block.is_linear


def is_paired(model: Description) -> bool:
    """True if every layer is an attention and an MLP block: Megatron-Bridge's own models divide by such layers."""
    kinds = "".join("L" if block.is_linear else block.kind for block in model.blocks)
    return kinds == "*-" * (len(kinds) // 2)


def _in_stages(model: Description, stages: int) -> Architecture:
    """The architecture as the bridges divide it: ours by weights, Megatron-Bridge's own by whole layers.

    Raises:
        ValueError: its layers cannot be divided evenly.
    """
    architecture = model.architecture
    if stages == 1:
        return architecture
    if not is_paired(model) and "M" not in model.kinds:
        return architecture.with_pattern(balance(architecture, pipeline_parallel=stages, cost=parameter_counts))
    layers = len(architecture.pattern.blocks) // (2 if is_paired(model) else 1)
    if layers % stages:
        raise ValueError(f"{layers} layers cannot be split evenly over PP{stages}")
    return architecture


def put_layout(draft: Draft, found: Plan, model: Description | None, algorithm: Algorithm, backend: str) -> None:
    """Write a layout into a draft of NeMo-RL's config."""
    layout, pairs = found.training.layout, not isinstance(algorithm, PolicyGradient)
    tensor, context = layout.tensor_parallel, layout.context_parallel
    ours = "nemo_rl.layout"
    draft.put(ours, PATHS["nodes"], found.nodes)
    draft.put(ours, PATHS["gpus_per_node"], found.gpus_per_node)
    draft.put(ours, PATHS["micro_batch"], found.training.micro_batch)
    # Context parallelism takes every sequence apart into two pieces a rank.
    draft.put(ours, "policy.make_sequence_length_divisible_by", tensor * (2 * context if context > 1 else 1))
    # Packs on DTensor need a model that passes flash attention's arguments on, and no state over tokens.
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
            # Megatron fuses SwiGLU and GELU alone.
            draft.put(ours, f"{MEGATRON}.bias_activation_fusion", False)
    if pairs:
        draft.put(ours, "dpo.val_global_batch_size", algorithm.batch)
        draft.put(ours, "dpo.val_micro_batch_size", found.training.micro_batch)
    if found.generation is not None:
        generation = found.generation
        draft.put(ours, "policy.logprob_batch_size", found.training.micro_batch)
        draft.put(ours, PATHS["colocated"], generation.nodes is None)
        draft.put(ours, PATHS["generation_nodes"], generation.nodes)
        draft.put(ours, PATHS["generation_gpus"], generation.gpus)
        draft.put(ours, PATHS["generation_tensor_parallel"], generation.tensor_parallel)
        draft.put(ours, "policy.generation.vllm_cfg.gpu_memory_utilization", generation.share)
