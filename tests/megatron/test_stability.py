"""z-loss, an embedding without weight decay, and skipped steps, compared with torch and Megatron's optimizer."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_ext.job import run_directory
from nemo_ext.job.config import compose
from nemo_ext.megatron.stability import Outliers, Stability, squared_log_denominator


def test_z_loss_and_its_gradient_equal_autograd_and_survive_overwritten_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 2, 16, dtype=torch.float64).float().requires_grad_()
    expected = logits.logsumexp(-1).square()
    (wanted,) = torch.autograd.grad(expected.sum(), logits)

    value = squared_log_denominator(logits, None)
    with torch.no_grad():
        logits.data.zero_()  # as Megatron's cross entropy does
    (gradient,) = torch.autograd.grad(value.sum(), logits)

    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, wanted)


def test_an_outlier_is_compared_with_the_previous_steps() -> None:
    outliers = Outliers(6.0)
    for step in range(63):
        outliers.add(1.0 + 0.1 * (step % 2))
    assert outliers.bound() == math.inf, "fewer than half of the window"

    outliers.add(math.nan)
    assert outliers.bound() == math.inf, "what is not finite does not count"
    outliers.add(1.1)

    norms = torch.tensor([1.0 + 0.1 * (step % 2) for step in range(64)])
    assert outliers.bound() == pytest.approx(float(norms.mean() + 6 * norms.std()))
    for _ in range(200):
        outliers.add(2.0)
    assert outliers.bound() == pytest.approx(2.0), "the window moves on"


def optimizer_of(settings: Stability) -> tuple[Any, torch.nn.Module]:
    """Optimizer made like in Megatron's trainer, for a model with an embedding and a linear layer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.training import training

    from nemo_ext.megatron import stability

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Module()
            self.embedding.word_embeddings = torch.nn.Embedding(8, 4)
            self.linear = torch.nn.Linear(4, 8, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.linear(self.embedding.word_embeddings(ids))
            return made

    upstream = training.get_megatron_optimizer
    try:
        stability.use(settings)
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), Model())
        flags = OptimizerConfig(optimizer="adam", lr=0.1, weight_decay=0.5, clip_grad=1.0)
        return training.get_megatron_optimizer(flags, [model], {}), model
    finally:
        training.get_megatron_optimizer = upstream


def step(optimizer: Any, model: Any, scale: float) -> bool:
    model.zero_grad_buffer()
    (scale * model(torch.arange(8)).sum()).backward()
    model.finish_grad_sync()
    done, _, _ = optimizer.step()
    return bool(done)


@pytest.mark.parametrize("decay", [True, False])
def test_weight_decay_excludes_the_embedding(decay: bool) -> None:
    from nemo_ext.megatron.session import data_parallel

    with data_parallel():
        optimizer, model = optimizer_of(Stability(decay_embedding=decay))
        embedding = model.module.embedding.word_embeddings.weight
        decayed = {
            any(param is embedding for param in group["params"]): group["wd_mult"] for group in optimizer.param_groups
        }

    # One group holds both, or each has its own.
    assert decayed == ({True: 1.0} if decay else {True: 0.0, False: 1.0})


def test_a_step_with_an_outlying_gradient_changes_no_weight() -> None:
    from nemo_ext.megatron.session import data_parallel

    with data_parallel():
        optimizer, model = optimizer_of(Stability(skip_beyond=6.0))
        for number in range(64):
            assert step(optimizer, model, 1.0 + 0.01 * (number % 3))
        before = model.module.linear.weight.clone()
        assert not step(optimizer, model, 1000.0)
        assert torch.equal(model.module.linear.weight, before)
        assert step(optimizer, model, 1.0)
        assert not torch.equal(model.module.linear.weight, before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stability.z_loss=-1"], "stability.z_loss"),
        (["+stability.zloss=1"], "zloss"),
        (["stability.skip_beyond=6", "megatron.clip_grad=0.0"], "needs the gradient norm"),
    ],
)
def test_an_invalid_setting_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stability.from_config(compose("train", words))


@pytest.mark.usefixtures("megatron")
def test_z_loss_is_added_to_the_loss_and_logged_separately() -> None:
    from megatron.core import parallel_state

    from nemo_ext.megatron.forward_step import LOSS, loss_function
    from nemo_ext.megatron.stability import Z_LOSS, ZLoss

    class Last(torch.nn.Module):
        post_process = True

        def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return torch.ones(labels.shape)

    assert parallel_state.get_tensor_model_parallel_world_size() == 1
    last, z_loss = Last(), ZLoss(0.5)
    z_loss.attach([last])
    logits, labels = torch.zeros(3, 2, 8), torch.zeros(2, 3, dtype=torch.long)

    output = last.compute_language_model_loss(labels, logits)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    loss, tokens, report = loss_function(mask, output, z_loss=z_loss.take())

    z = 3 * 0.5 * math.log(8) ** 2
    assert float(loss) == pytest.approx(3 + z) and int(tokens) == 3
    assert report[LOSS].tolist() == [3.0, 3.0]
    assert report[Z_LOSS].tolist() == pytest.approx([z, 3.0])
    last.eval()
    last.compute_language_model_loss(labels, logits)
    assert z_loss.take() is None, "an evaluation's loss is the LM loss alone"


@pytest.mark.slow
def test_a_run_names_missing_settings_of_its_recipe_and_logs_its_z_loss(
    launched: Callable[..., str], tmp_path: Path
) -> None:
    words = ("recipe=olmo3/7b_pretrain", "model=olmo3_tiny", "data=mock", "scale=laptop", "megatron.eval_iters=0")

    told = launched("train", *words, "train.tokens=16384", f"run_dir={tmp_path / 'run'}")

    assert "not as in the source of olmo3/7b_pretrain: steps are skipped by" in told
    lines = run_directory.read_metrics(tmp_path / "run" / "metrics.jsonl")
    # Of an untrained model the denominator's log is about that of the vocabulary: 1e-5 x log(384)^2.
    assert lines[0]["z_loss"] == pytest.approx(1e-5 * math.log(384) ** 2, rel=0.1)
