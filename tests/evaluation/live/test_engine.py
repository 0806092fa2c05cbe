"""The engine of a model in training, compared with the model's own forward pass on one rank."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

Live = Callable[..., Any]
MODELS = {
    "hybrid with experts": ("model=nemotron3_nano_tiny",),
    "multi-token prediction": ("model=nemotron3_super_tiny",),
    "dense": ("model=olmo3_tiny",),
    "pruned": ("model=llama_nemotron_tiny",),
}
PROMPTS = ([5, 6, 7, 8, 9], list(range(40, 80)), [1])


@pytest.fixture
def live(build: Callable[..., Any]) -> Callable[..., Any]:
    """Builds a model in fp32, as it would be in training."""
    import torch

    from nemo_ext.evaluation.live.engine import LiveModel

    def make(*overrides: str) -> Any:
        torch.manual_seed(0)
        model = build("precision=fp32", "megatron.seq_length=128", *overrides).eval()
        return LiveModel([model], vocabulary=257, length=128, tokens=256)

    return make


def direct(live: Any, tokens: Sequence[int]) -> Any:
    """Logits `[positions, vocabulary]` of the model itself, without padding or neighbours."""
    import torch

    ids = torch.tensor([tokens])
    with torch.no_grad():
        return live.chunks[0](ids, torch.arange(len(tokens))[None], None)[0, :, : live.vocabulary].float()


def asked(live: Any, *requests: tuple[Sequence[int], Any]) -> list[Any]:
    """Tokens of each answer, requested concurrently from another thread."""
    from nemo_ext.evaluation.live.engine import LiveEngine

    engine, answers = LiveEngine(live), []

    async def one(prompt: Sequence[int], sampling: Any) -> list[Any]:
        return [token async for token in engine.generate(prompt, sampling)]

    async def every() -> list[Any]:
        return await asyncio.gather(*(one(*request) for request in requests), return_exceptions=True)

    def ask() -> None:
        answers.extend(asyncio.run(every()))
        engine.close()

    asking = threading.Thread(target=ask)
    asking.start()
    engine.run()
    asking.join()
    return answers


@pytest.mark.parametrize("model", MODELS)
def test_neither_padding_nor_neighbours_change_answers(live: Live, model: str) -> None:
    import torch

    from nemo_ext.serving.engine import Sampling

    tried = live(*MODELS[model])
    greedy = Sampling(max_tokens=4, temperature=0, logprobs=3, echo=True)

    answers = asked(tried, *((prompt, greedy) for prompt in PROMPTS))

    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        made = [token.id for token in tokens if not token.prompt]
        expected = torch.log_softmax(direct(tried, [*prompt, *made]), -1)
        assert [token.id for token in tokens] == [*prompt, *made] and len(made) == 4 and tokens[-1].end == "length"
        assert tokens[0].logprob is None
        for place, token in enumerate(tokens[1:]):
            assert token.logprob == pytest.approx(float(expected[place, token.id]), abs=1e-4)
            best = expected[place].topk(3)
            assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert made == expected[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_one_seed_gives_one_answer(live: Live) -> None:
    from nemo_ext.serving.engine import Sampling

    tried = live(*MODELS["dense"])
    seeds = (1, 2, 1)

    answers = asked(tried, *((PROMPTS[0], Sampling(max_tokens=6, seed=seed)) for seed in seeds))

    first, other, again = ([token.id for token in tokens] for tokens in answers)
    assert first == again != other


def test_scoring_alone_makes_no_token(live: Live) -> None:
    from nemo_ext.serving.engine import Sampling

    (tokens,) = asked(live(*MODELS["dense"]), ([3, 4], Sampling(max_tokens=0, logprobs=0, echo=True)))

    assert [(token.id, token.prompt, token.end) for token in tokens] == [
        (3, True, None),
        (4, True, None),
        (-1, False, "stop"),
    ]
    assert tokens[1].logprob is not None and tokens[1].top == ()


def test_a_forward_pass_that_fails_ends_the_evaluation_alone(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_ext.serving.engine import Sampling

    tried = live(*MODELS["dense"])

    def fails(*_: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(type(tried), "__call__", fails)

    (answer,) = asked(tried, ([3, 4], Sampling(max_tokens=2)))

    assert isinstance(answer, RuntimeError) and "no more" in str(answer)


def test_a_signal_stops_the_engine_and_fails_its_requests(live: Live) -> None:
    from nemo_ext.evaluation.live.engine import LiveEngine
    from nemo_ext.serving.engine import Sampling

    engine = LiveEngine(live(*MODELS["dense"]), stopped=lambda: True)

    async def ask() -> None:
        async for _ in engine.generate([3], Sampling(max_tokens=2)):
            pass

    assert not engine.run()
    with pytest.raises(RuntimeError, match="training continues"):
        asyncio.run(ask())


def test_training_state_is_restored(live: Live) -> None:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from nemo_ext.evaluation.live.rank import untouched

    model = live(*MODELS["hybrid with experts"]).chunks[0].train()
    biases = [buffer for name, buffer in model.named_buffers() if "expert_bias" in name]
    frozen = next(iter(model.decoder.layers)).eval()

    def numbers() -> list[Any]:
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(2).tolist()
        return [torch.rand(2).tolist(), tracked, np.random.random(2).tolist(), random.random()]

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    states = get_cuda_rng_tracker().get_states()
    expected = numbers()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    get_cuda_rng_tracker().set_states(states)
    with untouched([model]):
        assert not model.training and not torch.is_grad_enabled()
        numbers()
        assert biases
        biases[0].add_(1)

    assert numbers() == expected
    assert torch.is_grad_enabled() and model.training and not frozen.training
    assert biases[0].abs().max() < 1
