"""Costs of a variant, computed from its sizes: the resources that a search may limit. Does not import torch.

Latencies are roofline estimates: the maximum of compute time and read time. They rank variants well but do not predict
absolute times; measured latencies replace them where available.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.architecture import cost
from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.architecture.precision import bytes_per_number
from nemo_ext.job.settings import STRICT
from nemo_ext.puzzle.choice.problem import Limit, Problem, add_resource, seconds_at_throughput

REQUEST_SECONDS = "request_seconds"
"""Name of the resource that a throughput limits: seconds for a batch of requests, from prompt to last token."""

OUTSIDE = "outside"
"""Label of everything outside the blocks in cost tables."""

RESOURCES = (
    "parameters",
    "active_parameters",
    "weight_bytes",
    "cache_bytes",
    "memory_bytes",
    "prefill_seconds",
    "decode_seconds",
    "attention_blocks",
)
"""Names of the resources that a search may limit."""


Precision = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Serving:
    """Serving scenario for which costs are computed, `puzzle.serving`, described in hydra_conf/compression.yaml."""

    batch: PositiveInt = 32
    prompt: PositiveInt = 2048
    context: PositiveInt = 4096
    precision: Precision = "bf16"
    cache_precision: Precision = "bf16"
    flops: PositiveFloat = 989e12 * 0.5
    bandwidth: PositiveFloat = 3.35e12 * 0.7

    def __post_init__(self) -> None:
        if self.context < self.prompt:
            raise ValueError(
                f"puzzle.serving.context={self.context} must not be below puzzle.serving.prompt={self.prompt}"
            )


def block_costs(parent: Architecture, block: Block | None, serving: Serving) -> dict[str, float]:
    """Compute all resources of one block; a no-op costs nothing.

    Args:
        block: the block with all values filled in; None for a no-op.

    Returns:
        Mapping from each of `RESOURCES` to its amount: a count, bytes, or seconds for the whole batch's prompts
        (prefill) or for one token of each sequence at full context (decode).
    """
    if block is None:
        return dict.fromkeys(RESOURCES, 0.0)
    alone = parent.with_pattern(Pattern((block,)))
    counted = cost.block_parameters(alone, 1)
    width = bytes_per_number(serving.precision)
    per_sequence = cost.kv_cache_bytes(alone, serving.context, precision=serving.cache_precision)
    per_sequence += cost.state_bytes_per_sequence(alone)
    cache = serving.batch * per_sequence
    prompt_flops = (
        serving.batch * serving.prompt * cost.block_forward_flops_per_token(alone, 1, seq_length=serving.prompt)
    )
    # A query at the end of the context attends to all of it: twice the mean over a sequence.
    token_flops = serving.batch * cost.block_forward_flops_per_token(alone, 1, seq_length=2 * serving.context)
    prompt_read = width * read_parameters(alone, block, serving.batch * serving.prompt)
    token_read = width * read_parameters(alone, block, serving.batch) + cache
    weights = width * counted.total
    return {
        "parameters": counted.total,
        "active_parameters": counted.active,
        "weight_bytes": weights,
        "cache_bytes": cache,
        "memory_bytes": weights + cache,
        "prefill_seconds": max(prompt_flops / serving.flops, prompt_read / serving.bandwidth),
        "decode_seconds": max(token_flops / serving.flops, token_read / serving.bandwidth),
        "attention_blocks": float(block.kind == "*" and not block.is_linear),
    }


def read_parameters(architecture: Architecture, block: Block, tokens: int) -> float:
    """Number of parameters read by a forward pass over `tokens` tokens; in a MoE block, only chosen experts count."""
    counted = cost.block_parameters(architecture, 1)
    if block.kind != "E" or block.is_linear:
        return counted.total
    return counted.dense + counted.expert * expected_experts(block, tokens) / block.size("experts")


def expected_experts(block: Block, tokens: int) -> float:
    """Expected number of distinct experts chosen by independent, uniformly routed tokens.

    With k of E experts chosen per token, it is E (1 - (1 - k / E)^tokens).
    """
    experts, chosen = block.size("experts"), block.size("topk")
    return experts * (1.0 - (1.0 - chosen / experts) ** tokens)


def outside_costs(parent: Architecture, serving: Serving) -> dict[str, float]:
    """Compute all resources of everything outside the blocks: embedding, final norm and output layer."""
    embedding, head = cost.embedding_parameters(parent), cost.head_parameters(parent)
    width = bytes_per_number(serving.precision)
    weights = width * (embedding.total + head.total)
    head_flops = serving.batch * cost.head_forward_flops_per_token(parent)
    table = width * parent.hidden_size * parent.vocab_size
    # Only the last token of a prompt needs logits.
    logits = max(head_flops / serving.flops, table / serving.bandwidth)
    return {
        "parameters": embedding.total + head.total,
        "active_parameters": head.active + (parent.hidden_size * parent.vocab_size if parent.tied_embeddings else 0),
        "weight_bytes": weights,
        "cache_bytes": 0.0,
        "memory_bytes": weights,
        "prefill_seconds": logits,
        "decode_seconds": logits,
        "attention_blocks": 0.0,
    }


def with_request_seconds(problem: Problem, *, new_tokens: int) -> Problem:
    """Return the problem with an additional resource `request_seconds`: prefill_seconds + new_tokens x decode_seconds.

    Every new token is counted at full context, so a limit on it is conservative.

    Raises:
        ValueError: `new_tokens` is not positive, candidates already have the resource, or do not have one that it
            is computed from.
    """
    return add_resource(problem, REQUEST_SECONDS, weights=_request_weights(new_tokens))


def throughput_limit(
    tokens_per_second: float, *, serving: Serving, new_tokens: int, outside: Mapping[str, float]
) -> Limit:
    """Return the limit on `request_seconds` that guarantees a throughput.

    Args:
        tokens_per_second: tokens generated per second by the whole batch, including prefill time.
        serving: serving scenario; its batch, prompt and context are used.
        new_tokens: tokens generated per sequence of the batch.
        outside: costs outside the blocks, from `outside_costs` or measured.

    Raises:
        ValueError: a number is not positive, prompt and new tokens exceed the context, or the part outside the blocks
            alone is too slow for the throughput.
    """
    if serving.prompt + new_tokens > serving.context:
        raise ValueError(
            f"a prompt of {serving.prompt} and {new_tokens} new tokens exceed "
            f"puzzle.serving.context={serving.context}; increase it"
        )
    constant = request_seconds(outside, new_tokens=new_tokens)
    upper = seconds_at_throughput(tokens_per_second, batch=serving.batch, tokens=new_tokens)
    if constant > upper:
        raise ValueError(
            f"a throughput of {tokens_per_second} tokens/s allows {upper:.3g} s per batch, but embedding and output "
            f"layer alone take {constant:.3g} s; lower puzzle.search.limits.throughput, or raise puzzle.serving.batch"
        )
    return Limit(upper=upper)


def request_seconds(costs: Mapping[str, float], *, new_tokens: int) -> float:
    """Return the seconds in which a batch of requests is answered: the prefill and `new_tokens` decoding steps.

    `costs` are totals keyed by resource, including `prefill_seconds` and `decode_seconds`.
    """
    return sum(weight * costs[name] for name, weight in _request_weights(new_tokens).items())


def _request_weights(new_tokens: int) -> dict[str, float]:
    if new_tokens < 1:
        raise ValueError(
            f"new_tokens={new_tokens} must be positive: make puzzle.serving.context longer than the prompt"
        )
    return {"prefill_seconds": 1.0, "decode_seconds": float(new_tokens)}
