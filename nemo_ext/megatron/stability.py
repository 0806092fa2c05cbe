"""Stability measures from OLMo's trainer that Megatron's does not have, set in the config's `stability` section.

They are a z-loss on the output layer's logits, an embedding without weight decay, and skipping steps whose gradient
norm is an outlier (OLMo 3, arXiv 2512.13961, table 33; OLMo-core's SkipStepOptimizer).
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from nemo_ext.job.settings import STRICT, checked
from nemo_ext.megatron.divergence import logsumexp
from nemo_ext.megatron.versions import TooOld

Z_LOSS = "z loss"
"""Name of the weighted z-loss in Megatron's log and in TensorBoard; metrics.jsonl calls it `z_loss`."""

WINDOW = 128
"""Number of preceding steps with which a step is compared; at least half as many are required (OLMo-core)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Stability:
    """The `stability` section of a training config.

    Attributes:
        z_loss: weight of the mean squared logarithm of the softmax's denominator; 0 for no z-loss.
        decay_embedding: whether weight decay applies to the input embedding.
        skip_beyond: number of standard deviations above the mean gradient norm of the last `WINDOW` steps beyond which
            a step is skipped; None to skip no steps.
    """

    z_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    decay_embedding: bool = True
    skip_beyond: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Stability":
        """Read the settings from a composed config; return the defaults if it has no such section.

        Raises:
            ValueError: a key is unknown, a value is invalid, or outliers are to be skipped without gradient clipping.
        """
        settings = checked(cls, config.get("stability") or {}, "stability", strict=True)
        if settings.skip_beyond is not None and not config["megatron"].get("clip_grad", 1.0):
            raise ValueError(
                "stability.skip_beyond needs the gradient norm, which Megatron computes for clipping: set "
                "megatron.clip_grad, or stability.skip_beyond=null"
            )
        return settings


class ZLoss:
    """Z-loss with a given weight, computed where the last stage computes its LM loss, only during training."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self._value: Tensor | None = None

    def attach(self, model: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Make the last stage compute the z-loss whenever it computes its LM loss; return the model's stages."""
        from megatron.core import parallel_state
        from megatron.core.utils import unwrap_model

        last: Any = unwrap_model(model)[-1]
        if not last.post_process:
            return model
        language_model_loss = last.compute_language_model_loss

        def with_z_loss(labels: Tensor, logits: Tensor) -> Tensor:
            if last.training:
                group = parallel_state.get_tensor_model_parallel_group()
                self._value = self.weight * squared_log_denominator(logits, group).transpose(0, 1)
            return language_model_loss(labels, logits)

        last.compute_language_model_loss = with_z_loss
        return model

    def take(self) -> Tensor | None:
        """Return and forget the last forward pass's weighted z-loss `[batch, seq]`; None if none was computed."""
        value, self._value = self._value, None
        return value


def squared_log_denominator(logits: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
    """Compute the squared log of the softmax's denominator, `[...]` in float32, the same on every rank of the group.

    Args:
        logits: `[..., vocabulary / ranks]`; may be overwritten afterwards.
        group: ranks that share the vocabulary; None if it is not split.
    """
    return _SquaredLogDenominator.apply(logits, group)


class _SquaredLogDenominator(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
        # In the logits' own dtype, like their gradient: see `divergence`.
        slope, logs = torch.empty_like(logits), []
        for part, slope_part in zip(_parts(logits), _parts(slope), strict=True):
            wide = part.float()
            logs.append(log := logsumexp(wide, group))
            slope_part.copy_((wide - log).exp_().mul_(2 * log))
        ctx.save_for_backward(slope)
        return torch.cat(logs).squeeze(-1).square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        result = torch.empty_like(slope)
        for part, result_part, gradient in zip(_parts(slope), _parts(result), _parts(gradients[0]), strict=True):
            result_part.copy_(part * gradient.unsqueeze(-1))
        return result, None


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor into views along its first axis, so that float32 copies of logits stay small."""
    return tensor.split(-(-len(tensor) // 16)) if len(tensor) else (tensor,)


class Outliers:
    """Norms (or losses) of the last `WINDOW` steps, and the outlier bound that they imply for the next step."""

    def __init__(self, deviations: float) -> None:
        self.deviations = deviations
        self.norms: deque[float] = deque(maxlen=WINDOW)

    def bound(self) -> float:
        """Return the mean plus `deviations` standard deviations; infinite while the window is less than half full."""
        if len(self.norms) < WINDOW // 2:
            return math.inf
        return statistics.fmean(self.norms) + self.deviations * statistics.stdev(self.norms)

    def add(self, norm: float) -> None:
        """Add the norm of a step, taken or skipped, unless it is not finite."""
        if math.isfinite(norm):
            self.norms.append(norm)


def use(settings: Stability) -> None:
    """Patch Megatron to build optimizers with these settings, for the rest of this process.

    Megatron's `pretrain()` has no hook for per-parameter settings, and its bound on the gradient norm is a constant
    without a flag, which is set here before every step.
    """
    if settings.decay_embedding and settings.skip_beyond is None:
        return
    from megatron.core.optimizer import ParamGroupOverride, ParamKey
    from megatron.training import training

    upstream = training.get_megatron_optimizer

    def with_settings(config: Any, model: Any, config_overrides: Any = None, **others: Any) -> Any:
        overrides = dict(config_overrides or {})
        if not settings.decay_embedding:
            overrides[ParamKey(name="*embedding.word_embeddings.weight")] = ParamGroupOverride(wd_mult=0.0)
        optimizer = upstream(config, model, config_overrides=overrides, **others)
        if settings.skip_beyond is not None:
            skip_outliers(optimizer, Outliers(settings.skip_beyond))
        return optimizer

    training.get_megatron_optimizer = with_settings


def skip_outliers(optimizer: Any, outliers: Outliers) -> None:
    """Make an optimizer skip steps whose gradient norm exceeds the bound; every rank sees the same norms.

    Raises:
        TooOld: the installed Megatron-Core does not support a bound on the norm.
    """
    parts = getattr(optimizer, "chained_optimizers", None)
    if parts is None or not all(hasattr(part.config, "grad_norm_skip_threshold") for part in parts):
        raise TooOld("stability.skip_beyond is not supported by this Megatron-Core; set it to null")
    step = optimizer.step

    def bounded() -> Any:
        for part in parts:
            part.config.grad_norm_skip_threshold = outliers.bound()
        done, norm, zeros = step()
        if norm is not None:
            outliers.add(float(norm))
        return done, norm, zeros

    optimizer.step = bounded
