"""Reward-aware preference optimization (`nemo_ext.rl.rpo`) as a loss for NeMo-RL's `dpo_train`.

The class is pickled by reference, so workers import this module.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args
from unittest.mock import patch

import torch

from nemo_ext.job.settings import nearest
from nemo_ext.rl.nemo_rl import compat
from nemo_ext.rl.rpo import Distance, rpo_loss

REWARDS = "preference_rewards"
"""Key of the true rewards in a batch, `[2 x pairs]`, in the order chosen, rejected, chosen, ..."""


_DPOLoss: Any = compat.part(compat.algorithm("dpo"), "DPOLossFn")


class RPOLoss(_DPOLoss):
    """NeMo-RL's DPO loss with RPO's distance as the preference loss; SFT loss, weights and metrics are unchanged.

    Args:
        loss: NeMo-RL's loss from `dpo.setup`, whose `reference_policy_kl_penalty` is beta.
        eta: scale of the true rewards (Llama-Nemotron: 3.0 for Super).
        distance: distance between the two margins.

    Raises:
        ValueError: eta is not positive, or the distance is unknown.
    """

    def __init__(self, loss: Any, *, eta: float, distance: Distance = "backward_kl") -> None:
        if not isinstance(eta, int | float) or isinstance(eta, bool) or not eta > 0:
            raise ValueError(f"rpo.eta must be a number above 0, not {eta!r}")
        if distance not in get_args(Distance):
            raise ValueError(f"unknown rpo.distance={distance!r}: {nearest(str(distance), get_args(Distance))}")
        # Attributes are copied because the constructor's arguments differ between versions.
        self.__dict__.update(vars(loss))
        self.eta = float(eta)
        self.distance: Distance = distance
        self._true_rewards: torch.Tensor | None = None

    def _dpo_loss(self, inputs: torch.Tensor, data: Mapping[str, Any], *arguments: Any, **keywords: Any) -> Any:
        # A copy passes the rewards of this microbatch to `_preference_loss`.
        loss = copy.copy(self)
        loss._true_rewards = data[REWARDS]
        return super(RPOLoss, loss)._dpo_loss(inputs, data, *arguments, **keywords)

    def _preference_loss(
        self, rewards: torch.Tensor, sample_mask: torch.Tensor, global_valid_seqs: torch.Tensor, beta: float = 1.0
    ) -> Any:
        assert self._true_rewards is not None
        _, *metrics = super()._preference_loss(rewards, sample_mask, global_valid_seqs, beta)
        chosen, rejected = self.split_output_tensor(rewards)
        true_chosen, true_rejected = self.split_output_tensor(self._true_rewards.to(rewards))
        losses = rpo_loss(beta * (chosen - rejected), self.eta * (true_chosen - true_rejected), self.distance)
        mask = sample_mask[::2]
        # As NeMo-RL's masked_mean: a batch without a valid pair gives 0, not NaN.
        return (losses * mask).sum() / (global_valid_seqs / 2 + 1e-8), *metrics


class WithRewards:
    """Collate function that adds the pairs' true rewards to the batch."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> Any:
        batch = self._collate(pairs)
        rewards = [value for pair in pairs for value in pair["rewards"]]
        batch[REWARDS] = torch.tensor(rewards, dtype=torch.float32)
        return batch


@contextlib.contextmanager
def padded_rewards() -> Iterator[None]:
    """Context in which NeMo-RL also pads the true rewards when it pads the last validation batch."""
    module = compat.algorithm("dpo")
    pad = module.maybe_pad_last_batch

    def padded(batch: Any, *arguments: Any, **keywords: Any) -> Any:
        batch = pad(batch, *arguments, **keywords)
        rewards = batch[REWARDS]
        batch[REWARDS] = torch.cat([rewards, rewards.new_zeros(len(batch["sample_mask"]) - len(rewards))])
        return batch

    with patch.object(module, "maybe_pad_last_batch", padded):
        yield
