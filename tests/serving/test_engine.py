"""The engine against transformers' own `generate`: sequences that join and leave each other change nothing."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from nemo_ext.serving.engine import Engine, Sampling, Token, draw

ModelOf = Callable[[str], Any]


@pytest.fixture(params=["llama", "olmo3", "nemotron_h"])
def engine(request: pytest.FixtureRequest, model_of: ModelOf) -> Iterator[Engine]:
    started = Engine(model_of(request.param), max_batch=5)
    yield started
    started.close()


@pytest.fixture
def llama(model_of: ModelOf) -> Iterator[Engine]:
    started = Engine(model_of("llama"))
    yield started
    started.close()


async def whole(engine: Engine, prompt: Sequence[int], sampling: Sampling, *, after: float = 0.0) -> list[Token]:
    await asyncio.sleep(after)
    return [token async for token in engine.generate(prompt, sampling)]


def together(engine: Engine, asked: Sequence[tuple[Sequence[int], Sampling]]) -> list[list[Token]]:
    """Answers to requests that come one after the other, while those before are worked on."""

    async def ask() -> list[list[Token]]:
        return await asyncio.gather(*(whole(engine, *each, after=n * 0.004) for n, each in enumerate(asked)))

    return asyncio.run(ask())


def test_answers_do_not_depend_on_the_others(engine: Engine) -> None:
    import torch

    draws = random.Random(1)
    prompts = [[draws.randrange(8, 512) for _ in range(draws.randrange(1, 40))] for _ in range(12)]
    lengths = [draws.randrange(1, 24) for _ in prompts]

    found = together(
        engine, [(p, Sampling(max_tokens=n, temperature=0)) for p, n in zip(prompts, lengths, strict=True)]
    )

    for prompt, length, tokens in zip(prompts, lengths, found, strict=True):
        alone = engine.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
        )
        assert [token.id for token in tokens] == alone[0, len(prompt) :].tolist()
        assert [token.end for token in tokens] == [None] * (length - 1) + ["length"]


def test_what_prompts_begin_with_in_common_is_read_once_and_changes_no_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    draws = random.Random(3)
    common = [draws.randrange(8, 512) for _ in range(40)]
    tails = [[draws.randrange(8, 512) for _ in range(size)] for size in (1, 1, 2, 5, 9, 9, 14, 3)]
    prompts = [*(common + tail for tail in tails), common, [*common[:30], 7], [9, 10]]
    read: list[int] = []
    forward = engine._forward

    def counted(ids: Any, *given: Any, **named: Any) -> Any:
        read.append(ids.numel() if ids.shape[1] > 1 else 0)
        return forward(ids, *given, **named)

    monkeypatch.setattr(engine, "_forward", counted)
    found = together(engine, [(prompt, Sampling(max_tokens=6, temperature=0)) for prompt in prompts])

    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        alone = engine.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None
        )
        assert [token.id for token in tokens] == alone[0, len(prompt) :].tolist()
    assert sum(read) < 476 or not engine._splits  # tokens of all prompts; how many are saved depends on when they come


def test_each_of_several_prompts_is_read_once_for_its_answers(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(4)
    common = [draws.randrange(8, 512) for _ in range(18)]  # as a system message
    prompts = [[*common, *(draws.randrange(8, 512) for _ in range(size))] for size in (30, 32, 35)]
    alone = [together(llama, [(prompt, Sampling(max_tokens=4, temperature=0))])[0] for prompt in prompts]
    asked = [*prompts * 4, [9, 10], [*common, 11]]
    joining, forward, read = llama._joining, llama._forward, []

    def when_all_have_come() -> Any:
        while not llama._rows and len(llama._waiting) < len(asked):
            llama._arrive()
        return joining()

    def counted(ids: Any, *given: Any, **named: Any) -> Any:
        read.append(ids.numel() if ids.shape[1] > 1 else 0)
        return forward(ids, *given, **named)

    llama._prefix = ([], None)
    monkeypatch.setattr(llama, "_joining", when_all_have_come)
    monkeypatch.setattr(llama, "_forward", counted)

    found = together(llama, [(prompt, Sampling(max_tokens=4, temperature=0)) for prompt in asked])

    assert [[token.id for token in tokens] for tokens in found[:12]] == [[t.id for t in tokens] for tokens in alone] * 4
    assert sum(read) < 18 + 30 + 32 + 35 + 2 * 19  # each prompt but its last token, and two others side by side


def test_log_probabilities_of_prompts_are_those_of_one_forward_pass(engine: Engine) -> None:
    import torch

    draws = random.Random(2)
    prompts = [[draws.randrange(8, 512) for _ in range(size)] for size in (1, 2, 9, 30)]
    sampling = Sampling(max_tokens=0, temperature=0, logprobs=3, echo=True)

    found = together(engine, [(prompt, sampling) for prompt in prompts])

    for prompt, tokens in zip(prompts, found, strict=True):
        *echoed, last = tokens
        assert ([token.id for token in echoed], last.end) == (prompt, "stop")
        measured = torch.log_softmax(engine.model(torch.tensor([prompt])).logits[0], -1)
        assert echoed[0].logprob is None
        for place, token in enumerate(echoed[1:]):
            assert token.logprob == pytest.approx(float(measured[place, token.id]), abs=1e-4)
            assert token.top[0][0] == int(measured[place].argmax())
            assert len(token.top) == 3


def test_a_seed_decides_an_answer_whoever_else_asks(llama: Engine) -> None:
    mine = ([9, 10, 11], Sampling(max_tokens=12, temperature=1.0, top_p=0.9, seed=7))
    others = [([n + 20], Sampling(max_tokens=9, temperature=2.0, seed=n)) for n in range(6)]

    (alone,) = together(llama, [mine])
    first, *_ = together(llama, [mine, *others])

    assert [token.id for token in alone] == [token.id for token in first]
    assert len({tuple(t.id for t in each) for each in together(llama, others)}) == 6


def test_an_end_token_ends_an_answer(llama: Engine) -> None:
    (free,) = together(llama, [([9], Sampling(max_tokens=8, temperature=0))])
    ends = frozenset({free[3].id})

    (ended,) = together(llama, [([9], Sampling(max_tokens=8, temperature=0, stop=ends))])

    first = next(n for n, token in enumerate(free) if token.id in ends)
    assert [token.id for token in ended] == [token.id for token in free[: first + 1]]
    assert ended[-1].end == "stop"


def test_who_leaves_makes_room(llama: Engine) -> None:
    async def leave() -> list[Token]:
        long = Sampling(max_tokens=200, temperature=0)
        async for _ in llama.generate([9], long):
            break
        tokens = await whole(llama, [10], Sampling(max_tokens=2, temperature=0))
        while llama.running:  # within a step of 200
            await asyncio.sleep(0.01)
        return tokens

    assert len(asyncio.run(asyncio.wait_for(leave(), 60))) == 2


def test_a_model_that_fails_says_so_to_everybody(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise FloatingPointError("out of luck")

    monkeypatch.setattr(llama.model, "forward", fail)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            asyncio.run(whole(llama, [9], Sampling(max_tokens=2)))


def test_draws_keep_to_top_p_and_top_k() -> None:
    import torch

    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    generator = torch.Generator().manual_seed(0)

    def drawn(**given: Any) -> set[int]:
        return {draw(logits, Sampling(max_tokens=1, **given), generator) for _ in range(300)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_p=0.5) == {0}
    assert drawn(top_p=0.6) == drawn(top_k=2) == {0, 1}


@pytest.mark.parametrize("steep", [0.0, 0.01])
def test_a_large_vocabulary_is_sampled_by_its_probabilities(steep: float) -> None:
    import torch

    logits = -steep * torch.arange(4000.0).flip(0)  # with 0, the most likely 1024 tokens have a quarter of the mass
    probabilities = torch.softmax(logits, -1)
    generator = torch.Generator().manual_seed(0)
    kept = probabilities.sort(descending=True).values.cumsum(-1) < 0.9
    least = probabilities.sort(descending=True).values[kept.sum()]

    every, likely = (
        [draw(logits, Sampling(max_tokens=1, top_p=share), generator) for _ in range(2000)] for share in (1.0, 0.9)
    )

    assert abs(sum(token < 3900 for token in every) / 2000 - float(probabilities[:3900].sum())) < 0.04
    assert min(probabilities[token] for token in likely) >= least
    assert (len(set(likely)) > 1024) == (not steep)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_an_error(number: float) -> None:
    import torch

    for share in (1.0, 0.9):
        with pytest.raises(ValueError, match="the model's logits are not finite"):
            draw(torch.full((8,), number), Sampling(max_tokens=1, top_p=share), None)
