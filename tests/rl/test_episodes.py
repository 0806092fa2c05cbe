"""Verification of responses and turns of conversations, without an engine."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.chat.template import Template
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.episodes import Episode, Episodes
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.task import Task
from nemo_ext.rl.verdict import Verdict

Make = Callable[..., Episodes]


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Episodes of a test's environment."""

    def make(environment: Environment, prompts: Prompts | None = None, **config: Any) -> Episodes:
        monkeypatch.setattr("nemo_ext.rl.episodes.make", lambda name, settings: environment)
        return Episodes({"name": "test", **config}, prompts)

    return make


@dataclass
class Echo:
    """Conversation that repeats every response until one has a full stop."""

    heard: list[str] = field(default_factory=list)
    broken: bool = False

    def step(self, response: Response) -> Sequence[Message]:
        self.heard.append(response.answer)
        return () if response.answer == "." else (Message(role="user", content=f"heard {response.answer}"),)

    def verdict(self) -> Verdict:
        if self.broken:
            raise RuntimeError("out of order")
        return Verdict.correct("/".join(self.heard))


def echoing(**more: Any) -> Environment:
    return Environment(name="test", check=dict, begin=lambda reference: Echo(**more), max_turns=3)


def episode(answer: str = "1") -> Episode:
    return Episode(
        task=Task(id="1", environment="test", prompt=(), reference={"answer": answer}), thinking_opened=False
    )


def said(text: str, *calls: ToolCall) -> Response:
    return Response(text=text, answer=text, tool_calls=calls)


def test_a_malformed_call_is_wrong_in_a_single_turn(around: Make) -> None:
    made = around(Environment(name="test", check=dict, verify=lambda response, reference: Verdict.correct()))

    right = asyncio.run(made.turn(episode(), said("1")))
    wrong = asyncio.run(made.turn(episode(), said("1"), {"c0": "no JSON"}))

    assert right.reward is not None and right.reward.total == 1
    assert wrong.verdict == Verdict.wrong("a call cannot be read: no JSON")
    assert made.take_metrics()["correct"] == 0.5


def test_pairs_of_a_verdict_are_metrics_of_each_response(around: Make) -> None:
    verdict = Verdict(outcome="wrong", score=0.5, more={"cells": (1, 2), "none": (0, 0), "calls": 3})
    made = around(Environment(name="test", check=dict, verify=lambda response, reference: verdict))

    asyncio.run(made.turn(episode(), said("1")))

    assert {"cells": 0.5, "none": 0, "calls": 3}.items() <= made.take_metrics().items()


def test_a_conversation_continues_without_a_template(around: Make) -> None:
    made = around(echoing())

    first = asyncio.run(made.turn(episode(), said("a")))
    assert first.following is not None
    last = asyncio.run(made.turn(first.following, said(".")))

    assert [message.content for message in first.answers] == ["heard a"] and not first.observation
    assert (first.following.turn, first.reward) == (1, None)
    assert last.verdict == Verdict.correct("a/.") and last.following is None


def test_a_conversation_has_no_more_turns_than_its_environment_allows(around: Make) -> None:
    made, at = around(echoing()), episode()
    for text in "ab":
        at = asyncio.run(made.turn(at, said(text))).following or episode()

    last = asyncio.run(made.turn(at, said("c")))

    assert last.verdict == Verdict.correct("a/b/c") and last.following is None and not last.answers


def test_text_next_to_a_malformed_call_is_not_passed_on(around: Make) -> None:
    made, begun = around(echoing()), around(echoing()).begun(episode())
    call = ToolCall(name="f", arguments={})

    broken = asyncio.run(made.turn(begun, said("a"), {"c0": "no JSON"}))
    both = asyncio.run(made.turn(begun, said("b", call), {"c0": "no JSON"}))

    assert broken.answers == (Message(role="tool", content="Error: no JSON", tool_call_id="c0"),)
    assert [message.content for message in both.answers] == ["Error: no JSON", "heard b"]
    assert isinstance(begun.conversation, Echo) and begun.conversation.heard == ["b"]


def test_closing_a_conversation_verifies_its_present_state(around: Make) -> None:
    made = around(echoing())

    turn = asyncio.run(made.close(asyncio.run(made.turn(episode(), said("a")))))

    assert turn.verdict == Verdict.correct("a") and turn.following is None and not turn.observation


def test_a_failing_environment_is_an_error_verdict(around: Make) -> None:
    made = around(echoing(broken=True))

    turn = asyncio.run(made.close(asyncio.run(made.turn(episode(), said("a")))))

    assert turn.verdict == Verdict.error("RuntimeError: out of order")
    assert turn.reward is not None and turn.reward.total == 0


def test_verifications_run_concurrently_up_to_the_limit(around: Make) -> None:
    now = most = 0
    lock = threading.Lock()

    def count(change: int) -> None:
        nonlocal now, most
        with lock:
            now, most = now + change, max(most, now + change)

    def in_thread(response: Response, reference: Any) -> Verdict:
        count(1)
        time.sleep(0.01)
        count(-1)
        return Verdict.correct()

    async def as_coroutine(response: Response, reference: Any) -> Verdict:
        count(1)
        await asyncio.sleep(0.01)
        count(-1)
        return Verdict.correct()

    for verify in (in_thread, as_coroutine):
        most = 0
        made = around(Environment(name="test", check=dict, verify=verify), concurrency=4)
        turns = asyncio.run(made.turns([episode()] * 12, ["x"] * 12))
        assert [turn.reward.total for turn in turns if turn.reward] == [1] * 12
        assert 1 < most <= 4


def test_invalid_settings_are_reported(around: Make) -> None:
    for config, message in (
        ({"reward": {"name": "domyn_math", "max_token": 1}}, "did you mean 'max_tokens'"),
        ({"tool_style": "xml"}, "tool_style='xml': input should be 'any'"),
        ({"concurrency": 0}, "concurrency=0: input should be greater than or equal to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            around(echoing(), **config)


def test_references_are_not_distinguished_by_id_alone(around: Make) -> None:
    parsed: list[Any] = []
    made = around(
        Environment(
            name="test",
            check=lambda given: parsed.append(given) or given["answer"],
            verify=lambda response, reference: Verdict.correct() if response.answer == reference else Verdict.wrong(""),
        )
    )

    turns = [asyncio.run(made.turn(episode(answer), said("1"))) for answer in ("1", "1", "2", "1")]

    assert [turn.verdict.outcome for turn in turns if turn.verdict] == ["correct", "correct", "wrong", "correct"]
    assert len(parsed) == 3


@pytest.mark.parametrize("template", ["nemotron3_nano", "olmo3", "llama_nemotron", "domyn"])
def test_the_end_token_is_not_written_twice_between_turns(around: Make, template: str) -> None:
    class Tokenizer:
        eos_token = "<|im_end|>"

    prompts = Prompts.from_tokenizer(Tokenizer(), template)

    turn = asyncio.run(around(echoing(), prompts).turn(episode(), said("a")))

    assert "heard a" in turn.observation and not turn.observation.startswith(Tokenizer.eos_token)


def test_a_template_that_omits_the_tools_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    task = Task(id="t", environment="math", prompt=(Message(role="user", content="q"),), tools=(tool,))
    source = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

    assert Prompts.load("olmo3").prompt(task)[0].count('"name": "f"') == 1
    with pytest.raises(ValueError, match="sample t: chat template plain omits the declared tools"):
        Prompts(Template("plain", source)).prompt(task)


def test_a_template_that_omits_tool_messages_after_calls_as_text_is_refused() -> None:
    source = (
        "{% for m in messages %}{% if m.role != 'tool' or messages[loop.index0 - 1].tool_calls %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    answers = [Message(role="tool", content="12")]

    assert "12" in Prompts.load("olmo3").continuation(answers, tools=(), thinking=None)[0]
    with pytest.raises(ValueError, match="chat template plain omits the tool's answer"):
        Prompts(Template("plain", source)).continuation(answers, tools=(), thinking=None)
