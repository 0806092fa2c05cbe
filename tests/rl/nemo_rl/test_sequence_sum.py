"""NeMo-RL's policy-gradient loss with our sum over a response's tokens, compared with the plain formula."""

import importlib
import pickle
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_ext.rl.nemo_rl.compat import setting
from nemo_ext.rl.nemo_rl.run import run

pytestmark = pytest.mark.nemo_rl

RESPONSES, TOKENS, KL = 12, 9, 0.05
REINFORCE = {"disable_ppo_ratio": True, "reference_policy_kl_penalty": 0}
CLIPPED = {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3, "ratio_clip_c": 3.0, "reference_policy_kl_penalty": KL}
GSPO = {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3, "sequence_level_importance_ratios": True}
GSPO |= {"reference_policy_kl_penalty": 0}


@pytest.fixture
def made(nemo_rl: ModuleType, grpo_config: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Our loss around the loss of `grpo.setup` for NeMo-RL's example config with changes."""
    compat = importlib.import_module("nemo_ext.rl.nemo_rl.compat")
    kind = importlib.import_module("nemo_ext.rl.nemo_rl.sequence_sum").SequenceSumLoss

    def make(**settings: Any) -> Any:
        config = grpo_config()
        config["loss_fn"] |= {"token_level_loss": False, **settings}
        return kind(nemo_rl.ClippedPGLossFn(setting(compat.master_config(nemo_rl, config), "loss_fn")))

    return make


def batch() -> tuple[Any, torch.Tensor]:
    """Responses of 1 to 8 tokens after prompts of 1, the last two masked, and their log-probabilities."""
    kind = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    generator = torch.Generator().manual_seed(1)

    def near(values: torch.Tensor, by: float) -> torch.Tensor:
        return values + by * torch.randn(values.shape, generator=generator)

    now = near(torch.full((RESPONSES, TOKENS), -2.0), 0.3)
    lengths = torch.randint(1, TOKENS, (RESPONSES, 1), generator=generator)
    at = torch.arange(TOKENS)
    data = {
        "token_mask": ((at > 0) & (at <= lengths)).float(),
        "sample_mask": torch.tensor([1.0] * (RESPONSES - 2) + [0.0] * 2),
        "advantages": near(torch.zeros(RESPONSES, 1), 1).expand(RESPONSES, TOKENS),
        "prev_logprobs": near(now, 0.3),
        "reference_policy_logprobs": near(now, 0.3),
    }
    data["generation_logprobs"] = data["prev_logprobs"]
    return kind(data), now[:, 1:]


def plain(data: Any, now: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Mean over responses of the sums over their tokens."""
    sums = []
    for row in torch.nonzero(data["sample_mask"])[:, 0].tolist():
        said = data["token_mask"][row, 1:].bool()
        new, old = now[row][said], data["prev_logprobs"][row, 1:][said]
        advantage = data["advantages"][row, 1:][said]
        if settings.get("disable_ppo_ratio"):
            losses = -advantage * new
        else:
            ratio = (new - old).exp()
            if settings.get("sequence_level_importance_ratios"):
                ratio = (new - old).mean().exp().expand(len(new))
            losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.3))
            if settings.get("ratio_clip_c"):
                losses = torch.where(advantage < 0, torch.minimum(losses, -advantage * 3.0), losses)
        if settings["reference_policy_kl_penalty"]:
            reference = data["reference_policy_logprobs"][row, 1:][said]
            # Its gradient has two parts, k3 and the score, because the samples come from the policy.
            kl = (reference - new).exp() - (reference - new) - 1
            losses = losses + KL * kl * (new - new.detach()).exp()
        sums.append(losses.sum())
    return torch.stack(sums).mean()


@pytest.mark.parametrize("settings", [REINFORCE, CLIPPED, GSPO], ids=["reinforce", "clipped", "gspo"])
@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 1, 6]], ids=["whole", "one by one", "uneven"])
def test_it_matches_the_plain_formula_for_any_division_of_the_batch(
    made: Callable[..., Any], settings: dict[str, Any], sizes: list[int]
) -> None:
    loss_fn = made(**settings)
    data, now = batch()
    now.requires_grad_()
    valid = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    of_all = {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": valid.sum()}

    # Ranks add up gradients as micro-batches do, and both have the whole batch's numbers.
    begin, total, metrics = 0, torch.tensor(0.0), []
    for size in sizes:
        part = data.slice(begin, begin + size)
        loss, found = loss_fn(next_token_logprobs=now[begin : begin + size], data=part, **of_all)
        total, begin = total + loss, begin + size
        metrics.append(found)

    wanted = plain(data, now, settings)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(each, now)[0] for each in (total, wanted)), rtol=1e-4, atol=1e-6)
    assert sum(found["loss"] for found in metrics) == pytest.approx(float(wanted.detach()), rel=1e-5, abs=1e-6)
    # Diagnostics stay means over tokens.
    assert sum(found["token_mult_prob_error"] for found in metrics) == pytest.approx(1)


def test_a_trainer_that_normalises_gradients_itself_divides_by_responses(made: Callable[..., Any]) -> None:
    """The split steps of main pass 1 for both numbers, and divide their sum by the number that the loss names."""
    loss_fn = made(**REINFORCE)
    data, now = batch()

    loss, _ = loss_fn(next_token_logprobs=now, data=data, global_valid_seqs=torch.ones(()), global_valid_toks=1)

    assert loss_fn.loss_type.value == "sequence_level"
    if normalised := getattr(loss_fn, "metric_normalizations", None):  # 0.7 has no such trainer
        assert {normalised[key].value for key in ("loss", "kl_penalty")} == {"sequences"}
    torch.testing.assert_close(loss / data["sample_mask"].sum(), plain(data, now, REINFORCE), rtol=1e-5, atol=1e-6)


def test_nothing_valid_is_no_loss(made: Callable[..., Any]) -> None:
    data, now = batch()
    data["sample_mask"] = torch.zeros(RESPONSES)
    none = {"global_valid_seqs": torch.zeros(()), "global_valid_toks": torch.zeros(())}

    assert float(made(**REINFORCE)(next_token_logprobs=now, data=data, **none)[0]) == 0


def test_it_is_pickled_by_reference(made: Callable[..., Any]) -> None:
    again = pickle.loads(pickle.dumps(made(**CLIPPED)))

    assert (again.ratio_clip_c, again.loss_type.value, again._by_token.loss_type.value) == (
        3.0,
        "sequence_level",
        "token_level",
    )


def test_terms_that_it_cannot_sum_are_refused(nemo_rl: ModuleType) -> None:
    kind = importlib.import_module("nemo_ext.rl.nemo_rl.sequence_sum").SequenceSumLoss

    with pytest.raises(ValueError, match="positive_example_nll_weight"):
        kind(SimpleNamespace(positive_example_nll_weight=0.1))


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        (
            {"level": "sequence"},
            (),
            "loss.level must be sequence_sum or group, not 'sequence'; for .* set loss_fn.token_level_loss",
        ),
        ({"level": "sequence_sum"}, ("loss_fn.token_level_loss=true",), "set loss_fn.token_level_loss=false"),
        ({"level": "group"}, ("loss_fn.token_level_loss=false",), "set loss_fn.token_level_loss=true"),
        (
            {"level": "group"},
            ("loss_fn.token_level_loss=true", "loss_fn.reference_policy_kl_penalty=0.01"),
            "set loss_fn.reference_policy_kl_penalty=0",
        ),
        ({"levl": "sequence_sum"}, (), "did you mean 'level'"),
    ],
)
def test_wrong_settings(
    ray_cluster: None,
    grpo_config: Callable[..., dict[str, Any]],
    loss: dict[str, Any],
    settings: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        run({"algorithm": "rloo", "nemo_rl": grpo_config(*settings), "tasks": {"train": {}}, "loss": loss})
