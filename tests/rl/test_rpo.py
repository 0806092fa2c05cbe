"""RPO's loss."""

import math

import pytest
import torch

from nemo_ext.rl.rpo import rpo_loss


def kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("margin", [-3.0, 0.0, 0.7])
@pytest.mark.parametrize("wanted", [-1.0, 0.0, 2.5])
def test_distances_match_the_formulas_of_the_paper(margin: float, wanted: float) -> None:
    d, g = torch.tensor(margin, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)

    backward, forward, squared = (rpo_loss(d, g, name) for name in ("backward_kl", "forward_kl", "squared"))

    assert float(backward) == pytest.approx(kl(sigmoid(wanted), sigmoid(margin)), abs=1e-12)
    assert float(forward) == pytest.approx(kl(sigmoid(margin), sigmoid(wanted)), abs=1e-12)
    assert float(squared) == (margin - wanted) ** 2


def test_a_large_true_margin_makes_it_dpo() -> None:
    margin = torch.tensor([-2.0, 0.3, 5.0])

    loss = rpo_loss(margin, torch.full((3,), 200.0), "backward_kl")

    torch.testing.assert_close(loss, -torch.nn.functional.logsigmoid(margin))


def test_the_loss_is_minimal_where_margins_agree() -> None:
    for distance in ("backward_kl", "forward_kl", "squared"):
        margin = torch.tensor([1.5], requires_grad=True)
        loss = rpo_loss(margin, torch.tensor([1.5]), distance)
        (gradient,) = torch.autograd.grad(loss.sum(), margin)
        assert float(loss.detach()) == pytest.approx(0, abs=1e-7) and gradient.abs() < 1e-6
