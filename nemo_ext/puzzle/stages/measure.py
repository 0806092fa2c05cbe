"""Measured costs of blocks: seconds for prefill and for a decoding step, bytes of weights, cache and activations.

Every distinct block is built once as Megatron's own layer, run in Megatron's static inference (a KV cache for
attention, convolution and scan states for Mamba-2) in the serving scenario, timed with `torch.utils.benchmark`, and
freed. Seconds are medians over repetitions, and spreads are interquartile ranges. Weights and hidden states are
arbitrary: they affect time only through MoE routing, where the router sees random hidden states.

This times eager Megatron, not a serving engine: small blocks wait for kernel launches, a windowed block's cache is as
long as the context, keys are rotated again at every step, and weights may stay in the device's cache between
repetitions. Results are lines of JSON after a first line with the machine, the model and the scenario. A file measured
under other conditions is rejected, as a search needs comparable numbers for all blocks.
"""

import importlib.util
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_ext.architecture.blocks import Block
from nemo_ext.blockwise.parent import Parent
from nemo_ext.checkpoint.description import Description
from nemo_ext.job.files import write_text
from nemo_ext.job.made_of import check_same
from nemo_ext.job.records import read_records
from nemo_ext.puzzle.cost import OUTSIDE, Serving
from nemo_ext.puzzle.latencies import Latency
from nemo_ext.puzzle.stages.inference import Inference, open_inference
from nemo_ext.puzzle.stages.initialise import initial_weights
from nemo_ext.puzzle.variants import KEEP, NO_OP, Variant

ROUNDS = 5
"""Minimum number of repetitions; the spread of fewer is meaningless."""

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

MODEL_WIDE = (
    *("hidden_size", "transformer_impl", "normalization", "gated_linear_unit", "add_bias_linear", "add_qkv_bias"),
    *("qk_layernorm", "attention_output_gate", "fp32_residual_connection", "flash_decode", "apply_rope_fusion"),
    *("bias_activation_fusion", "bias_dropout_fusion", "moe_latent_size", "moe_grouped_gemm", "moe_permute_fusion"),
    *("moe_token_dispatcher_type", "moe_router_score_function", "moe_router_num_groups", "moe_shared_expert_gate"),
)
"""Fields of Megatron's config that affect a block's time but are not, or were not always, in its notation."""

STACK_WIDE = (
    *("norm_affine", "norm_placement", "qk_norm_scope", "position_embedding_type"),
    "rotary_percent",
)


@dataclass(frozen=True)
class Measured:
    """Measurements of one block.

    Attributes:
        block: the block's notation with all values, or `outside`, or `no_op`.
        prefill_seconds: median seconds for a whole batch of prompts.
        prefill_spread: interquartile range of prefill seconds.
        decode_seconds: median seconds for one token of every sequence of the batch at full context.
        decode_spread: interquartile range of decode seconds.
        weight_bytes: bytes of the layer's parameters.
        cache_bytes: cache bytes that Megatron allocates for the batch: for the full context even for windows, in the
            model's precision.
        activation_bytes: peak bytes in prefill beyond weights, cache and input; None without a GPU.
    """

    block: str
    prefill_seconds: float
    prefill_spread: float
    decode_seconds: float
    decode_spread: float
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int | None


NOTHING = Measured(NO_OP, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)
"""Measurement of a no-op."""


def block_key(block: Block | None) -> str:
    """Return a block's key in results: its notation, or `no_op` for None."""
    return NO_OP if block is None else str(block)


def distinct_blocks(by_block: Sequence[Sequence[Variant]]) -> dict[str, Variant]:
    """Return a mapping from the `block_key` of each distinct block to its first variant, without no-ops.

    Equal blocks at different depths count once, as depth does not affect time.
    """
    distinct: dict[str, Variant] = {}
    for variant in (variant for each in by_block for variant in each):
        if variant.block is not None:
            distinct.setdefault(block_key(variant.block), variant)
    return distinct


def measure_blocks(
    parent: Parent,
    by_block: Sequence[Sequence[Variant]],
    layer_of: Callable[[Variant], torch.nn.Module | None],
    serving: Serving,
    file: Path,
    *,
    min_seconds: float = 0.2,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Measured]:
    """Measure every distinct block, and the part outside the blocks, that `file` does not have yet.

    Args:
        parent: the model, in the precision to measure in.
        by_block: variants of each block, from `variants`.
        layer_of: function that returns a variant's layer (`Library.layer`, or `initial_layer` without a library).
        serving: batch, prompt, context and precision; `cache_precision`, `flops` and `bandwidth` are not used.
        min_seconds: minimum total seconds of the repetitions behind each number; there are at least `ROUNDS`.
        advance: called with 1 for every distinct block and for `outside`.

    Returns:
        Measurements keyed by `block_key`, including `no_op` and `outside`.

    Raises:
        ValueError: the precision is not the parent's or not available here, a line of `file` is not a measurement, or
            `file` is from another machine, model or scenario.
    """
    taken_under = conditions(parent, serving)
    known = read_measured(file, taken_under)

    def measure_once(key: str, measure: Callable[[], Measured]) -> None:
        if key not in known:
            known[key] = measure()
            _write(file, taken_under, known)
        advance(1)

    distinct = distinct_blocks(by_block)
    for key, variant in distinct.items():
        measure_once(key, partial(_measure_variant, parent, layer_of, variant, serving, min_seconds))
    measure_once(OUTSIDE, partial(_measure_outside, parent, serving, min_seconds))
    return {key: known[key] for key in [*distinct, OUTSIDE]} | {NO_OP: NOTHING}


def measured_costs(analytic: Mapping[str, float], measured: Measured | Latency) -> dict[str, float]:
    """Return costs with the roofline's seconds replaced by measured ones.

    Bytes stay those of the cost model: in a serving engine, a windowed block's cache ends at the window, but Megatron
    allocates it for the whole context.

    Args:
        analytic: costs from `cost.block_costs` or `cost.outside_costs`.
        measured: measured seconds of the same block, or of the part outside the blocks.
    """
    seconds = {"prefill_seconds": measured.prefill_seconds, "decode_seconds": measured.decode_seconds}
    return {**analytic, **seconds}


def initial_layer(parent: Parent, description: Description, variant: Variant) -> torch.nn.Module | None:
    """Build a variant's layer from the parent's weights, without a library; return None for a no-op."""
    if variant.block is None:
        return None
    if parent.shared:  # one rank measures and cannot gather a sharded parent; the values of weights do not matter
        return parent.fresh(variant.number, variant.block)
    if variant.name == KEEP:
        return parent.layers[variant.number]
    block, tensors = description.blocks[variant.number], parent.tensors(variant.number)
    weights = initial_weights(block, variant.block, tensors, description.architecture)
    return parent.layer(variant.number, variant.block, weights)


def _measure_variant(
    parent: Parent,
    layer_of: Callable[[Variant], torch.nn.Module | None],
    variant: Variant,
    serving: Serving,
    min_seconds: float,
) -> Measured:
    layer = layer_of(variant)
    assert layer is not None
    config = parent.model_config.transformer
    dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype
    device = next(parent.model.parameters()).device
    prompt = torch.randn(serving.prompt, serving.batch, config.hidden_size, dtype=dtype, device=device)
    with open_inference(parent, layer, batch=serving.batch, length=serving.context) as inference:
        return _measure(
            block_key(variant.block),
            inference,
            lambda: inference(prompt, start=0),
            lambda: inference(prompt[:1], start=serving.context - 1),
            weights=layer,
            min_seconds=min_seconds,
        )


def _measure_outside(parent: Parent, serving: Serving, min_seconds: float) -> Measured:
    """Measure a model without its blocks: token embedding, final norm, and logits of each sequence's last token."""
    model = parent.model
    device = next(model.parameters()).device
    tokens = torch.randint(model.vocab_size, (serving.batch, serving.prompt), device=device)
    positions = torch.arange(serving.prompt, device=device).expand_as(tokens)
    with open_inference(parent, None, batch=serving.batch, length=serving.context) as inference:

        def run(count: int, start: int) -> Tensor:
            inference.at(start)
            these = tokens[:, :count], positions[:, :count]
            return model(*these, None, inference_context=inference.context, runtime_gather_output=True)

        return _measure(
            OUTSIDE,
            inference,
            lambda: run(serving.prompt, 0),
            lambda: run(1, serving.context - 1),
            weights=model,
            min_seconds=min_seconds,
        )


def _measure(
    key: str,
    inference: Inference,
    prefill: Callable[[], Tensor],
    decode: Callable[[], Tensor],
    *,
    weights: torch.nn.Module,
    min_seconds: float,
) -> Measured:
    # Megatron compiles its fused functions, and torch stops compiling after a number of shapes: without the reset a
    # block's time would depend on the blocks before it.
    torch.compiler.reset()
    prefill()
    inference.fill()
    decode()
    activation = _peak_bytes(prefill)
    prefill_seconds, prefill_spread = median_seconds(prefill, min_seconds)
    inference.fill()
    decode_seconds, decode_spread = median_seconds(decode, min_seconds)
    return Measured(
        block=key,
        prefill_seconds=prefill_seconds,
        prefill_spread=prefill_spread,
        decode_seconds=decode_seconds,
        decode_spread=decode_spread,
        weight_bytes=sum(parameter.nbytes for parameter in weights.parameters()),
        cache_bytes=sum(tensor.nbytes for tensor in inference.cache),
        activation_bytes=activation,
    )


def median_seconds(run: Callable[[], Tensor], min_seconds: float) -> tuple[float, float]:
    """Call a function repeatedly, and return the median and interquartile range of seconds per call.

    Args:
        run: function to call; the timer synchronises the device.
        min_seconds: minimum total duration of the calls.
    """
    from torch.utils.benchmark import Measurement, Timer

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    rounds = [timer.blocked_autorange(min_run_time=min_seconds / ROUNDS) for _ in range(ROUNDS)]
    (merged,) = Measurement.merge(rounds)
    return merged.median, merged.iqr


def _peak_bytes(run: Callable[[], Tensor]) -> int | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def conditions(parent: Parent, serving: Serving) -> dict[str, Any]:
    """Describe the conditions of measurements besides the block: machine, versions, serving scenario and model.

    Raises:
        ValueError: the precision is not the parent's or not available here, or the context is too short to decode.
    """
    config = parent.model_config.transformer
    precision = "fp8" if config.fp8 else PRECISIONS[config.params_dtype]
    if serving.precision == "fp8" and importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "puzzle.serving.precision=fp8 needs Transformer Engine, which is not installed: measure in bf16, or "
            "on a machine with CUDA and Transformer Engine"
        )
    if serving.precision != precision:
        raise ValueError(
            f"puzzle.serving.precision={serving.precision}, but the parent is in {precision}: set it to {precision}, "
            "as blocks are measured in the parent's precision"
        )
    if serving.context < 2:
        raise ValueError(
            f"puzzle.serving.context={serving.context} must be at least 2, as decoding needs an earlier token"
        )
    model = {name: getattr(config, name, None) for name in MODEL_WIDE}
    model |= {name: getattr(parent.model_config, name, None) for name in STACK_WIDE}
    model |= {
        "activation": getattr(config.activation_func, "__name__", str(config.activation_func)),
        "vocab_size": parent.model.vocab_size,
        "tied_embeddings": parent.model.share_embeddings_and_output_weights,
    }
    return {
        **_machine(),
        **{name: getattr(serving, name) for name in ("batch", "prompt", "context", "precision")},
        "model": {name: value for name, value in model.items() if value is not None},
    }


def _machine() -> dict[str, Any]:
    import megatron.core

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        # Times on a GPU do not depend on the host's number of threads.
        "threads": None if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "megatron_core": megatron.core.__version__,
    }


def _processor() -> str:
    """Name of the CPU, which is read from /proc on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{named or platform.processor() or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def read_measured(file: Path, taken_under: Mapping[str, Any]) -> dict[str, Measured]:
    """Read a file's measurements, keyed by `block_key`; an incomplete last line is skipped.

    Raises:
        ValueError: they were not taken under the conditions `taken_under`, or a line is not a measurement.
    """
    if not file.is_file():
        return {}
    with file.open() as opened:
        line = opened.readline()
    try:
        recorded = {**json.loads(line)["conditions"]}
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(
            f"{file}:1: expected the conditions of the measurements; remove the file to measure again"
        ) from None
    changed = f"{file} was measured under other conditions"
    check_same(recorded, taken_under, changed, "choose another file, or remove it to measure again")
    measured = read_records(file, lambda record: Measured(**record), what="a measurement", first=2)
    return {each.block: each for each in measured}


def _write(file: Path, taken_under: Mapping[str, Any], known: Mapping[str, Measured]) -> None:
    lines = [{"conditions": taken_under}, *(asdict(measured) for measured in known.values())]
    write_text(file, "".join(json.dumps(line) + "\n" for line in lines))
