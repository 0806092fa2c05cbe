"""All classes that `nemo-ext convert` writes, in the engine of `nemo-ext serve`, against a full forward pass."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_ext.serving.engine import Engine, Sampling

FAMILIES = (
    *("NemotronForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "LlamaForCausalLM"),
    *("DeciLMForCausalLM", "OlmoForCausalLM", "Olmo3ForCausalLM", "NemoExtBlocksForCausalLM"),
    "NemoExtBlocksForCausalLM dense",
)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_whole_sequence(
    random_sections: Callable[..., Any], hf_folder: Callable[..., Any], family: str, seed: int
) -> None:
    _, model = hf_folder(random_sections(family, seed))
    draws = random.Random(seed)
    prompts = [[draws.randrange(96) for _ in range(draws.randrange(1, 30))] for _ in range(6)]
    engine = Engine(model, max_batch=4)

    async def answer(number: int) -> list[tuple[int, float]]:
        await asyncio.sleep(number * 0.005)
        sampling = Sampling(max_tokens=12, temperature=0, logprobs=0)
        return [(token.id, token.logprob or 0.0) async for token in engine.generate(prompts[number], sampling)]

    async def ask() -> list[list[tuple[int, float]]]:
        return await asyncio.gather(*map(answer, range(len(prompts))))

    found = asyncio.run(ask())
    engine.close()

    for prompt, tokens in zip(prompts, found, strict=True):
        whole = torch.tensor([[*prompt, *(token for token, _ in tokens)]])
        with torch.no_grad():
            measured = torch.log_softmax(model(whole, use_cache=False).logits[0].float(), -1)
        for place, (token, logprob) in enumerate(tokens, len(prompt) - 1):
            assert logprob == pytest.approx(float(measured[place, token]), abs=1e-3)
            assert logprob == pytest.approx(float(measured[place].max()), abs=1e-3)
