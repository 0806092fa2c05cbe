"""LatentMoE on the local back end: its parameters, and the layer against plain torch."""

from typing import Any

import torch

from nemo_ext.architecture.cost import total_params
from nemo_ext.architecture.model import Architecture
from nemo_ext.job.config import compose

WORDS = ["run_dir=unused", "data=mock", "model=nemotron3_nano_tiny", "++megatron.moe_latent_size=48"]


def test_a_block_computes_what_plain_torch_does(megatron: None) -> None:
    """Experts see the projected input, the router and the shared expert the whole one."""
    from nemo_ext.megatron.session import build_model

    config = compose("train", WORDS)
    model, _ = build_model(config)
    moe: Any = model.decoder.layers[1].mlp
    hidden = torch.randn(6, 2, 192, generator=torch.Generator().manual_seed(1))

    output, _ = moe(hidden)

    assert sum(p.numel() for p in model.parameters()) == total_params(Architecture.from_config(config))
    flat = hidden.flatten(0, 1)
    scores = torch.sigmoid(flat.double() @ moe.router.weight.double().T)
    weights, chosen = scores.topk(2, dim=-1)
    weights = 2.5 * weights / weights.sum(-1, keepdim=True)
    latent = flat @ moe.fc1_latent_proj.weight.T
    routed = torch.zeros_like(latent)
    for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights.float(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            mlp = moe.experts.local_experts[expert]
            inner = torch.relu(latent[token] @ mlp.linear_fc1.weight.T).square()
            routed[token] += share * (inner @ mlp.linear_fc2.weight.T)
    shared = torch.relu(flat @ moe.shared_experts.linear_fc1.weight.T).square() @ moe.shared_experts.linear_fc2.weight.T
    expected = routed @ moe.fc2_latent_proj.weight.T + shared
    torch.testing.assert_close(output.flatten(0, 1), expected, rtol=1e-4, atol=1e-6)
