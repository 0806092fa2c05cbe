"""LatentMoE on the local back end: its parameters, and layers of different latent widths against plain torch."""

from typing import Any

import pytest
import torch

from nemo_ext.architecture.cost import total_params
from nemo_ext.architecture.model import Architecture
from nemo_ext.job.config import compose
from nemo_ext.megatron.check import check

WORDS = ["run_dir=unused", "data=mock", "model=nemotron3_nano_tiny"]
PATTERN = "model.pattern='ME*E{latent=32,ffn=64}-E{latent=none}/*E{latent=24}'"


def test_blocks_compute_what_plain_torch_does(megatron: None) -> None:
    """Experts see the projected input, the router and the shared expert the whole one."""
    from nemo_ext.megatron.session import build_model

    config = compose("train", [*WORDS, "++megatron.moe_latent_size=48", PATTERN])
    model, _ = build_model(config)
    hidden = torch.randn(6, 2, 192, generator=torch.Generator().manual_seed(1))

    assert sum(p.numel() for p in model.parameters()) == total_params(Architecture.from_config(config))
    layers: Any = [model.decoder.layers[index].mlp for index in (1, 3, 5)]
    layers.append(model.mtp.layers[0].mtp_model_layer.layers[1].mlp)
    for moe, width in zip(layers, (48, 32, None, 24), strict=True):
        assert moe.experts.local_experts[0].linear_fc1.weight.shape[1] == (width or 192)
        output, _ = moe(hidden)
        torch.testing.assert_close(output.flatten(0, 1), expected(moe, hidden.flatten(0, 1)), rtol=1e-4, atol=1e-6)


def expected(moe: Any, flat: torch.Tensor) -> torch.Tensor:
    """Output of a MoE layer for tokens `[tokens, hidden]`, computed token by token."""
    scores = torch.sigmoid(flat.double() @ moe.router.weight.double().T)
    weights, chosen = scores.topk(2, dim=-1)
    weights = 2.5 * weights / weights.sum(-1, keepdim=True)
    projected = hasattr(moe, "fc1_latent_proj")
    latent = flat @ moe.fc1_latent_proj.weight.T if projected else flat
    routed = torch.zeros_like(latent)
    for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights.float(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            mlp = moe.experts.local_experts[expert]
            inner = torch.relu(latent[token] @ mlp.linear_fc1.weight.T).square()
            routed[token] += share * (inner @ mlp.linear_fc2.weight.T)
    shared = torch.relu(flat @ moe.shared_experts.linear_fc1.weight.T).square() @ moe.shared_experts.linear_fc2.weight.T
    return (routed @ moe.fc2_latent_proj.weight.T if projected else routed) + shared


@pytest.mark.parametrize(
    ("pattern", "where"),
    [("ME*-E{latent=32}", "block 5"), ("ME*-/*E{latent=32}", "multi-token prediction: block 2")],
)
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("megatron.moe_shared_expert_overlap=true", "moe_shared_expert_overlap=false"),
        ("megatron.disable_bias_linear=false", "disable_bias_linear=true"),
    ],
)
def test_a_latent_width_of_one_block_has_the_limits_of_the_models(
    megatron: None, pattern: str, where: str, word: str, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{where} \(E\{{.*latent=32\}}\): latent experts .*{message}"):
        check(compose("train", [*WORDS, f"model.pattern='{pattern}'", word]))
