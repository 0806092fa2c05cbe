"""Effect of quantisation, measured on the same samples with the model's quantizers off and on."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from nemo_ext.job.progress import progress_of
from nemo_ext.quantization.calibration import Ids

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_ROWS = 512
"""Number of positions whose log-probabilities are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of a model before and after quantisation, averaged over the predicted tokens.

    Attributes:
        tokens: number of predicted tokens.
        loss_before: cross-entropy in nats without quantisation.
        loss_after: cross-entropy in nats with quantisation.
        divergence: KL(original model || quantised model), in nats.
        agreement: fraction of tokens for which both models have the same most likely token.
    """

    tokens: int
    loss_before: float
    loss_after: float
    divergence: float
    agreement: float

    @property
    def perplexities(self) -> tuple[float, float]:
        """Perplexity before and after quantisation."""
        return exp(self.loss_before), exp(self.loss_after)


def compare(model: "PreTrainedModel", batches: Iterable[Ids], *, samples: int) -> Comparison:
    """Compare a calibrated model with its quantizers off and on, on the same samples.

    Args:
        model: the model after `mtq.quantize`.
        batches: token ids `[batch, seq]`.
        samples: number of samples in all batches.
    """
    import torch
    from modelopt.torch.quantization.conversion import set_quantizer_by_cfg_context

    sums, tokens = torch.zeros(4, dtype=torch.float64), 0
    with torch.inference_mode(), progress_of("comparing", samples, unit="samples") as advance:
        for batch in batches:
            ids = torch.from_numpy(batch).to(model.device)
            with set_quantizer_by_cfg_context(model, [{"quantizer_name": "*", "enable": False}]):
                before = model(ids, use_cache=False).logits
            after = model(ids, use_cache=False).logits
            sums += _sums(before[:, :-1].flatten(0, 1), after[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            tokens += batch[:, 1:].size
            advance(len(batch))
    loss_before, loss_after, divergence, agreement = (sums / tokens).tolist()
    return Comparison(
        tokens=tokens,
        loss_before=loss_before,
        loss_after=loss_after,
        divergence=divergence,
        agreement=agreement,
    )


def _sums(before: "Tensor", after: "Tensor", labels: "Tensor") -> "Tensor":
    """Sum over tokens, as `[4]`: the losses before and after quantisation, the KL divergence, and the agreement.

    Args:
        before: the original model's logits `[tokens, vocabulary]`.
        after: the quantised model's logits, in the same shape.
        labels: token ids to predict, `[tokens]`.
    """
    import torch
    from torch.nn import functional

    sums = torch.zeros(4, dtype=torch.float64)
    for old, new, label in zip(before.split(_ROWS), after.split(_ROWS), labels.split(_ROWS), strict=True):
        old, new = old.float().log_softmax(-1), new.float().log_softmax(-1)
        same = (old.argmax(-1) == new.argmax(-1)).sum()
        losses = [functional.nll_loss(scores, label, reduction="sum") for scores in (old, new)]
        divergence = functional.kl_div(new, old, log_target=True, reduction="sum")
        sums += torch.stack([*losses, divergence, same]).double().cpu()
    return sums
