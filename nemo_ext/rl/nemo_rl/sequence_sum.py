"""Policy-gradient loss for NeMo-RL's `grpo_train` that sums over a response's tokens and averages over responses.

NeMo-RL's own losses average over all tokens in a batch, or over the responses' token means. The class is pickled by
reference, so workers import this module.
"""

import copy
import inspect
from typing import Any

from nemo_ext.rl.nemo_rl import compat

_PolicyLoss: Any = compat.part(compat.algorithm("grpo"), "ClippedPGLossFn")
_CALL = inspect.signature(_PolicyLoss.__call__)
_SCALED = ("loss", "kl_penalty")
"""Metrics that NeMo-RL normalises in the same way as the loss."""


class SequenceSumLoss(_PolicyLoss):
    """NeMo-RL's policy-gradient loss at level `sequence_sum`.

    NeMo-RL divides every microbatch's loss by the number of tokens or responses in the whole batch over all ranks. The
    token mean times tokens / responses is therefore the sum over tokens divided by the number of responses, however the
    batch is divided.

    Args:
        loss: NeMo-RL's loss from `grpo.setup` with `token_level_loss=false`, so that trainers that normalise gradients
            themselves divide by the number of responses.

    Raises:
        ValueError: the loss has a term that NeMo-RL normalises by each microbatch's tokens.
    """

    def __init__(self, loss: Any) -> None:
        if getattr(loss, "positive_example_nll_weight", 0):
            raise ValueError(
                "loss_fn.positive_example_nll_weight cannot be combined with loss.level=sequence_sum, because NeMo-RL "
                "averages that term over the tokens of a microbatch; set it to 0, or choose another level"
            )
        # Attributes are copied because the constructor's arguments differ between versions.
        self.__dict__.update(vars(loss))
        self._by_token = copy.copy(loss)
        self._by_token.loss_type = type(loss.loss_type).TOKEN_LEVEL

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        bound = _CALL.bind(self, *arguments, **keywords).arguments
        loss, metrics = self._by_token(*arguments, **keywords)
        # As NeMo-RL's masked_mean: a batch without a valid response gives 0, not NaN.
        scale = bound["global_valid_toks"] / (bound["global_valid_seqs"] + 1e-8)
        return loss * scale, metrics | {key: metrics[key] * float(scale) for key in _SCALED if key in metrics}
