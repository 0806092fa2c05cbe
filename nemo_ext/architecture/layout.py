"""Parallel layout of a model on GPUs, in Megatron's terms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from nemo_ext.architecture.model import Architecture, Flags, section
from nemo_ext.architecture.pattern import Pattern, parse
from nemo_ext.architecture.precision import bytes_per_parameter

RECOMPUTE_MODULES = frozenset(
    {"core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "gdn_norm_out"}
)
"""Megatron's names for the modules that `selective` recomputation can recompute."""
RECOMPUTED_BY_ENGINE = frozenset({"gdn_norm_out", "layernorm", "mla_up_proj", "moe_act"})
"""Modules that Megatron recomputes only with Transformer Engine installed (core/tensor_parallel/random.py)."""

_PARALLEL = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "expert_model_parallel")


class NotEstimated(ValueError):
    """A layout is valid, but its memory and time are not known."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel layout of a model, and the training settings that its memory depends on.

    Attributes:
        tensor_parallel: Tensor parallel size (TP).
        pipeline_parallel: Pipeline parallel size (PP).
        virtual_stages: Number of model chunks on each pipeline rank; stage s is on rank s % PP.
        context_parallel: Context parallel size (CP).
        expert_parallel: Expert parallel size (EP).
        expert_tensor_parallel: Expert tensor parallel size (ETP); None means TP, Megatron's default.
        data_parallel: Data parallel size (DP): number of model replicas that process different batches.
        micro_batch_size: Number of sequences in a micro-batch.
        micro_batches: Number of micro-batches per step, an upper bound on those in flight; None for no bound.
        sequence_parallel: Whether norms and residuals are also split over TP.
        distributed_optimizer: Whether optimizer state is split over data-parallel ranks.
        precision: Training precision: `bf16` or `fp16` (fp32 master weights and Adam moments), or `fp32`.
        fp32_gradients: Whether gradients are accumulated and reduced in fp32 rather than in the training precision.
        fsdp: Megatron's flag that shards weights and gradients over data-parallel ranks; empty if it is off.
        recompute: Recomputation: `none`, `selective` (of `recompute_modules`) or `full` (of whole blocks).
        recompute_modules: Megatron's names of the modules to recompute, for `selective`.
        recompute_num_layers: Number of blocks recomputed together, for `full`.
        frozen: Whether no weight is trained (forward passes only), as when a teacher saves its log-probabilities.
        mtp_only: Whether only multi-token prediction is trained.
        fused_attention: Whether attention never stores its score matrix (flash attention, torch SDPA).
        fused_rope: Whether RoPE is one kernel, which does not store cosines and sines; never for YaRN in Megatron.
        z_loss: Whether training uses a z-loss, which keeps its gradient with respect to the logits.

    Raises:
        ValueError: A size is not positive, a name is unknown, or expert parallelism does not divide the number of
            ranks.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    data_parallel: int = 1
    micro_batch_size: int = 1
    micro_batches: int | None = None
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    precision: str = "bf16"
    fp32_gradients: bool = True
    fsdp: str = ""
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_num_layers: int = 1
    frozen: bool = False
    mtp_only: bool = False
    fused_attention: bool = True
    fused_rope: bool = True
    z_loss: bool = False

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"layout: {part.name} must be at least 1, got {value}")
        if self.precision not in ("bf16", "fp16", "fp32"):
            raise ValueError(f"layout: precision must be bf16, fp16 or fp32 for training, not {self.precision!r}")
        if self.recompute not in ("none", "selective", "full"):
            raise ValueError(
                f"megatron.recompute_granularity: expected selective, full or none, got {self.recompute!r}"
            )
        if unknown := set(self.recompute_modules) - RECOMPUTE_MODULES:
            raise ValueError(
                f"megatron.recompute_modules: unknown modules {', '.join(sorted(unknown))}; known: "
                f"{', '.join(sorted(RECOMPUTE_MODULES))}"
            )
        ranks = self.tensor_parallel * self.context_parallel * self.data_parallel
        if ranks % (self.expert_parallel * self.expert_tensor):
            raise ValueError(
                f"expert parallel x expert tensor parallel = {self.expert_parallel} x {self.expert_tensor} "
                f"must divide tensor x context x data parallel = {ranks}: change one of these sizes"
            )

    @property
    def expert_tensor(self) -> int:
        """Expert tensor parallel size, which is TP by default, as in Megatron."""
        return self.expert_tensor_parallel or self.tensor_parallel

    def describe(self) -> str:
        """Write the parallel sizes, omitting sizes of 1 except DP: `TP2 PP4 DP8`."""
        sizes = {"TP": self.tensor_parallel, "PP": self.pipeline_parallel, "CP": self.context_parallel}
        sizes |= {"EP": self.expert_parallel, "DP": self.data_parallel}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "DP")

    @property
    def world_size(self) -> int:
        """Total number of GPUs."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def optimizer_shards(self) -> tuple[int, int]:
        """Numbers of ranks that share the optimizer state of dense parameters and of expert parameters."""
        if not self.distributed_optimizer:
            return 1, 1
        dense = self.data_parallel * self.context_parallel
        return dense, dense * self.tensor_parallel // (self.expert_parallel * self.expert_tensor)

    @property
    def bytes_per_parameter(self) -> tuple[int, int, int]:
        """Bytes per parameter of weight, gradient and optimizer state, the last before it is split over ranks.

        Raises:
            NotEstimated: Weights or gradients are split too.
        """
        if self.fsdp:
            raise NotEstimated(
                f"megatron.{self.fsdp}=true: memory and step time are not estimated with FSDP; set it to false, with "
                "megatron.use_distributed_optimizer=true"
            )
        weight, gradient, optimizer = bytes_per_parameter(self.precision)
        return weight, gradient if self.fp32_gradients else weight, optimizer

    @classmethod
    def from_config(cls, config: Mapping[str, object], *, world_size: int | None = None) -> "Layout":
        """Read Megatron's parallel, batch and recompute flags; virtual stages come from the pattern's cuts.

        Args:
            config: Config with the sections `model` and `megatron`, as for `Architecture.from_config`.
            world_size: Number of GPUs, from which DP is computed; if None, DP is the smallest that expert
                parallelism allows.

        Raises:
            ValueError: The parallel sizes are inconsistent with each other or with the number of GPUs.
        """
        flags = Flags(section(config, "megatron"))
        size = {name: flags.integer(f"{name}_size") or 1 for name in _PARALLEL}
        tensor, pipeline, context = (size[name] for name in _PARALLEL[:3])
        model_size = tensor * pipeline * context
        if world_size is not None and world_size % model_size:
            raise ValueError(
                f"{world_size} GPUs are not divisible by TP x PP x CP = {model_size}: change the number of GPUs or "
                "these sizes"
            )
        expert_tensor = flags.integer("expert_tensor_parallel_size") or tensor
        # Without a number of GPUs, DP is the smallest that expert parallelism allows.
        experts = size["expert_model_parallel"] * expert_tensor
        smallest = experts // math.gcd(experts, tensor * context)
        data = smallest if world_size is None else world_size // model_size
        micro = flags.integer("micro_batch_size") or 1
        batch = flags.integer("global_batch_size")
        pattern = section(config, "model").get("pattern")
        pattern = parse(pattern) if isinstance(pattern, str) else pattern
        stages = len(pattern.stages) if isinstance(pattern, Pattern) else 1
        recompute = flags.text("recompute_granularity", "none")
        if flags.flag("recompute_activations"):  # Megatron's short form
            recompute = "selective"
        modules = flags.values.get("recompute_modules") or ("core_attn",)
        if not isinstance(modules, list | tuple):
            raise ValueError(f"megatron.recompute_modules: expected a list of module names, got {modules!r}")
        precision = next((name for name in ("bf16", "fp16") if flags.flag(name)), "fp32")
        # Megatron turns this on for BF16 by default, but not for FP16.
        fp32_gradients = flags.flag("accumulate_allreduce_grads_in_fp32") or (
            precision != "fp16" and flags.text("main_grads_dtype", "fp32") == "fp32"
        )
        return cls(
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            virtual_stages=max(1, stages // pipeline),
            context_parallel=context,
            expert_parallel=size["expert_model_parallel"],
            expert_tensor_parallel=expert_tensor,
            data_parallel=data,
            micro_batch_size=micro,
            micro_batches=None if batch is None else max(1, batch // (micro * data)),
            sequence_parallel=flags.flag("sequence_parallel"),
            distributed_optimizer=flags.flag("use_distributed_optimizer"),
            precision=precision,
            fp32_gradients=fp32_gradients and not (precision == "bf16" and flags.flag("grad_reduce_in_bf16")),
            fsdp=next((name for name in ("use_megatron_fsdp", "use_torch_fsdp2") if flags.flag(name)), ""),
            recompute=recompute,
            recompute_modules=tuple(map(str, modules)),
            recompute_num_layers=flags.integer("recompute_num_layers") or 1,
            frozen=flags.flag("freeze_all_layers"),
            mtp_only=bool(section(config, "train").get("mtp_only")) if "train" in config else False,
            fused_rope=section(config, "model").get("backend") != "local"
            and flags.text("position_embedding_type", "rope") != "yarn"
            and not flags.flag("no_rope_fusion"),
            z_loss=bool(section(config, "stability").get("z_loss")) if "stability" in config else False,
        )


def stage_ranges(pattern: Pattern, layout: Layout) -> tuple[range, ...]:
    """Return the 1-based block numbers of each stage: those between cuts or, in a pattern without cuts, equal parts.

    Raises:
        ValueError: The number of stages is not PP x virtual stages, or the blocks cannot be split evenly.
    """
    count, blocks = layout.pipeline_parallel * layout.virtual_stages, len(pattern.blocks)
    if pattern.cuts or count == 1:
        stages = tuple(range(first + 1, last + 1) for first, last in pattern.stages)
        if len(stages) != count:
            raise ValueError(
                f"the pattern has {len(stages)} stages, but the layout needs {count} (PP {layout.pipeline_parallel} x "
                f"{layout.virtual_stages} virtual): write {count - 1} cuts `|` into the pattern"
            )
        return stages
    if layout.virtual_stages > 1 or blocks % count:
        raise ValueError(
            f"{blocks} blocks without cuts cannot be split evenly over {count} stages (PP {layout.pipeline_parallel} x "
            f"{layout.virtual_stages} virtual): write {count - 1} cuts `|` into the pattern"
        )
    length = blocks // count
    return tuple(range(stage * length + 1, (stage + 1) * length + 1) for stage in range(count))


def check_layout(architecture: Architecture, layout: Layout) -> None:
    """Reject a layout that Megatron does not support for a model's blocks.

    Raises:
        ValueError: A parallel size does not divide a size of the model or of a block; the message gives the block's
            1-based number.
    """
    tensor, experts = layout.tensor_parallel, layout.expert_parallel
    if architecture.vocab_size % tensor:
        raise ValueError(
            f"vocab_size={architecture.vocab_size} must be a multiple of tensor_parallel={tensor}: change one of them"
        )
    if architecture.hidden_size % tensor:
        raise ValueError(
            f"hidden_size={architecture.hidden_size} must be a multiple of tensor_parallel={tensor}: change one of them"
        )
    divided = {"*": ("heads",), "-": ("ffn",), "M": ("heads", "groups"), "E": ("shared",)}
    written = architecture.pattern.blocks
    for number, block in enumerate(architecture.sizes, start=1):
        if block.is_linear:
            continue
        checks = [(name, block.size(name), tensor, "tensor_parallel") for name in divided.get(block.kind, ())]
        if block.kind == "*" and (block.size("kv") % tensor and tensor % block.size("kv")):
            checks.append(("kv", block.size("kv"), tensor, "tensor_parallel"))
        if block.kind == "E":
            checks.append(("experts", block.size("experts"), experts, "expert_parallel"))
            checks.append(("ffn", block.size("ffn"), layout.expert_tensor, "expert_tensor_parallel"))
        where = f"block {number} ({written[number - 1]})"
        for name, size, divisor, axis in checks:
            if size % divisor:
                raise ValueError(f"{where}: {name}={size} must be a multiple of {axis}={divisor}: change one of them")
        if block.kind == "M":
            _check_mamba_parts(block.size("heads"), block.size("groups"), layout, where)
    if architecture.pattern.mtp:
        try:
            check_layout(architecture.depth, layout)
        except ValueError as error:
            raise ValueError(f"multi-token prediction: {error}") from None


def _check_mamba_parts(heads: int, groups: int, layout: Layout, where: str) -> None:
    """Reject Mamba-2 sizes that context-parallel ranks cannot divide (Megatron-Core's ssm/mamba_context_parallel.py).

    Raises:
        ValueError: The message begins with `where`.
    """
    tensor, context = layout.tensor_parallel, layout.context_parallel
    if (heads // tensor) % context:
        raise ValueError(
            f"{where}: heads={heads} must be a multiple of tensor_parallel x context_parallel = {tensor} x {context}: "
            "change one of these sizes"
        )
    if (groups // tensor) % context and context % (groups // tensor):
        raise ValueError(
            f"{where}: context_parallel={context} must divide groups / tensor_parallel = {groups} / {tensor}, or be a "
            "multiple of it: change one of these sizes"
        )
