"""KL divergence between a teacher's and a student's next-token distributions, with the vocabulary split among ranks."""

from typing import Any

import torch
from torch import Tensor


def kl_divergence(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """Compute KL(teacher || student) per token in nats, times the squared temperature (Hinton et al., 2015).

    With `top_k`, all but the teacher's `top_k` most probable tokens count as one event, so that only their total
    probabilities are compared.

    Args:
        student: logits `[..., vocabulary / ranks]`; receives the gradient.
        teacher: logits of the same shape.
        temperature: divisor of both models' logits.
        top_k: number of tokens in the whole vocabulary that are distinguished; None for all.
        group: ranks over which the vocabulary is split; None if it is not split.

    Returns:
        Divergence `[...]` in float32, the same on every rank of the group.
    """
    return _KLDivergence.apply(student, teacher, temperature, top_k, group)


_AT_ONCE = 2**26
"""Number of logits that are computed at once. More need more memory; with fewer, there are more collectives."""
_IN_CACHE = 2**18
"""Number of logits that are computed at once on a CPU, where they then stay in its cache."""


class _KLDivergence(torch.autograd.Function):
    """KL divergence with a closed-form gradient; the logits may be overwritten after the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        temperature: float,
        top_k: int | None,
        group: torch.distributed.ProcessGroup | None,
    ) -> Tensor:
        if group is not None and group.size() == 1:
            group = None
        width = student.shape[-1]
        kl = student.new_empty(student.shape[:-1], dtype=torch.float32)
        # In the logits' own dtype, like their gradient: for a large vocabulary in bf16 this halves the memory.
        slope = torch.empty_like(student, memory_format=torch.contiguous_format)
        rows = max(1, (_IN_CACHE if student.is_cpu and group is None else _AT_ONCE) // width)
        parts = (values.reshape(-1, width).split(rows) for values in (student, teacher, slope))
        for ours, theirs, part, result in zip(*parts, kl.view(-1).split(rows), strict=True):
            output = _log_softmax(ours.float() / temperature, group)
            target = _log_softmax(theirs.float() / temperature, group)
            if top_k is not None:
                # The rest gets the teacher's mass in the student's proportions, so only the two masses are compared.
                top = _among_top(theirs, top_k, group)
                rest, output_rest = (
                    logsumexp(logs.masked_fill(top, float("-inf")), group) for logs in (target, output)
                )
                target = torch.where(top, target, output + (rest - output_rest))
            probabilities = target.exp()
            torch.sum(probabilities * (target - output), -1, out=result)
            part.copy_((output.exp_() - probabilities) * temperature)
        if group is not None:
            torch.distributed.all_reduce(kl, group=group)
        ctx.save_for_backward(slope)
        return kl * temperature**2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (slope * gradients[0].unsqueeze(-1)).to(slope.dtype), None, None, None, None


def _log_softmax(logits: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
    return logits - logsumexp(logits, group)


def logsumexp(logits: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
    """Compute the log-sum-exp `[..., 1]` over the last axis on all ranks of the group; -inf if all logits are -inf."""
    if group is None:
        return logits.logsumexp(-1, keepdim=True)
    largest = logits.amax(-1, keepdim=True)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    largest = largest.nan_to_num(neginf=0.0)
    total = (logits - largest).exp().sum(-1, keepdim=True)
    torch.distributed.all_reduce(total, group=group)
    return total.log() + largest


def _among_top(logits: Tensor, k: int, group: torch.distributed.ProcessGroup | None) -> Tensor:
    """Return a mask, shaped like the logits, of this rank's logits that are among the `k` largest in the group."""
    ranks = 1 if group is None else group.size()
    k = min(k, logits.shape[-1] * ranks)
    values, places = logits.topk(min(k, logits.shape[-1]), dim=-1)
    chosen = torch.ones_like(values, dtype=torch.bool)
    if group is not None and ranks > 1:
        by_rank = [torch.empty_like(values) for _ in range(ranks)]
        torch.distributed.all_gather(by_rank, values.contiguous(), group=group)
        together = torch.cat(by_rank, dim=-1)
        best = torch.zeros_like(together, dtype=torch.bool).scatter_(-1, together.topk(k, dim=-1).indices, True)
        chosen = best.chunk(ranks, dim=-1)[group.rank()]
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, places, chosen)
