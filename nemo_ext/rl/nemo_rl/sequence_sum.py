"""A policy-gradient loss that sums over a response's tokens and averages over responses, for NeMo-RL's `grpo_train`.

NeMo-RL averages over all tokens of a batch, or over responses each the mean of its tokens. The class is pickled by
reference: workers import it.
"""

import copy
import inspect
from typing import Any

from nemo_ext.rl.nemo_rl import compat

_PolicyLoss: Any = compat.part(compat.grpo(), "ClippedPGLossFn")
_CALL = inspect.signature(_PolicyLoss.__call__)
_SCALED = ("loss", "kl_penalty")
"""Metrics that NeMo-RL normalises as it does the loss."""


class SequenceSumLoss(_PolicyLoss):
    """NeMo-RL's policy-gradient loss at level `sequence_sum`.

    NeMo-RL gives every micro-batch the numbers of tokens and responses of the whole batch over all ranks, and divides
    by one of them. A token mean times tokens / responses is therefore the sum over tokens by the number of responses,
    however the batch is divided.

    Args:
        loss: NeMo-RL's loss from `grpo.setup`, made with `token_level_loss=false`: that is what trainers see, and those
            that normalise gradients themselves then divide by the number of responses.

    Raises:
        ValueError: the loss has a part that NeMo-RL normalises by each micro-batch's own tokens.
    """

    def __init__(self, loss: Any) -> None:
        if getattr(loss, "positive_example_nll_weight", 0):
            raise ValueError(
                "loss_fn.positive_example_nll_weight: NeMo-RL averages it over the tokens of a micro-batch, which "
                "loss.level=sequence_sum cannot undo: set it to 0, or choose another level"
            )
        # The arguments of its constructor differ between versions.
        self.__dict__.update(vars(loss))
        self._by_token = copy.copy(loss)
        self._by_token.loss_type = type(loss.loss_type).TOKEN_LEVEL

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        given = _CALL.bind(self, *arguments, **keywords).arguments
        loss, metrics = self._by_token(*arguments, **keywords)
        # As NeMo-RL's masked_mean: a batch without a valid response gives 0, not NaN.
        scale = given["global_valid_toks"] / (given["global_valid_seqs"] + 1e-8)
        return loss * scale, metrics | {key: metrics[key] * float(scale) for key in _SCALED if key in metrics}
