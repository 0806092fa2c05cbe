"""Loss of reward-aware preference optimization (RPO).

DPO maximises the margin of the policy's implicit rewards without a target. RPO fits it to the margin of the true
rewards r* (Sun et al. 2025, arXiv 2502.00203; Llama-Nemotron, section 6.2). Let
d = beta (sum log pi/pi_ref of the chosen - of the rejected), g = eta (r*(chosen) - r*(rejected)), p = sigmoid(g) and
q = sigmoid(d). The distances are as follows, with NeMo-Aligner's names (megatron_gpt_dpo_model.py) in brackets:

backward_kl (rpo_bwd_kl)   p log p/q + (1 - p) log (1 - p)/(1 - q)
forward_kl  (rpo_fwd_kl)   q log q/p + (1 - q) log (1 - q)/(1 - p)
squared     (rpo_sq)       (d - g)^2

For a positive true margin, backward_kl approaches DPO's loss as eta grows.
"""

from typing import Literal

import torch
from torch.nn.functional import logsigmoid

Distance = Literal["backward_kl", "forward_kl", "squared"]


def rpo_loss(margin: torch.Tensor, true_margin: torch.Tensor, distance: Distance) -> torch.Tensor:
    """Return the distance between the scaled margins d and g of each pair, `[pairs]`; see the module's docstring.

    Args:
        margin: margins d of the policy's implicit rewards, `[pairs]`.
        true_margin: margins g of the true rewards, `[pairs]`.
    """
    if distance == "squared":
        return (margin - true_margin) ** 2
    fitted, target = (margin, true_margin) if distance == "backward_kl" else (true_margin, margin)
    # KL(target || fitted) of two Bernoulli distributions from their logits: exact where a sigmoid rounds to 0 or 1.
    won = target.sigmoid() * (logsigmoid(target) - logsigmoid(fitted))
    lost = (-target).sigmoid() * (logsigmoid(-target) - logsigmoid(-fitted))
    return won + lost
