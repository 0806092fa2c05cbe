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
        output = _log_softmax(student.float() / temperature, group)
        target = _log_softmax(teacher.float() / temperature, group)
        if top_k is not None:
            # The rest gets the teacher's mass in the student's proportions, so only the two masses are compared.
            top = _among_top(teacher, top_k, group)
            rest, output_rest = (logsumexp(logs.masked_fill(top, float("-inf")), group) for logs in (target, output))
            target = torch.where(top, target, output + (rest - output_rest))
        probabilities = target.exp()
        kl = (probabilities * (target - output)).sum(-1)
        if group is not None:
            torch.distributed.all_reduce(kl, group=group)
        # In the logits' own dtype, like their gradient: for a large vocabulary in bf16 this halves the memory.
        ctx.save_for_backward((temperature * (output.exp() - probabilities)).to(student.dtype))
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
