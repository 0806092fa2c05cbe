"""The environment without Ray."""

import asyncio
import importlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message
from nemo_ext.rl.environments import Environment, known_environments
from nemo_ext.rl.episodes import Episode
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import generate, python_tool
from nemo_ext.rl.verdict import Verdict

pytestmark = pytest.mark.nemo_rl

Step = Callable[..., Any]


@pytest.fixture
def module(nemo_rl: ModuleType) -> ModuleType:
    return importlib.import_module("nemo_ext.rl.nemo_rl.environment")


@pytest.fixture
def made(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Environment of an actor, around a test's environment."""

    def make(environment: Environment, **config: Any) -> Any:
        monkeypatch.setattr("nemo_ext.rl.episodes.make", lambda name, settings: environment)
        return module.TaskEnvironment({"name": "test", **config})

    return make


def info(number: int = 0) -> dict[str, Any]:
    task = Task(id=str(number), environment="test", prompt=(), reference={"answer": number})
    return {"episode": Episode(task=task, thinking_opened=False)}


def closed(returned: Any) -> dict[str, Any]:
    """Episode of the next response with a closed trace, which the template opens in reasoning mode."""
    return {"episode": replace(returned.metadata[0]["episode"], thinking_opened=False)}


def step(environment: Any, texts: Sequence[str], infos: Sequence[dict[str, Any]] | None = None) -> Any:
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in texts]
    return asyncio.run(environment.step(logs, infos or [info(n) for n in range(len(texts))]))


def is_equal(response: Response, reference: Any) -> Verdict:
    right = response.answer == str(reference["answer"])
    return Verdict.correct(response.answer) if right else Verdict.wrong("another")


def test_a_batch_is_verified_in_order(made: Step) -> None:
    environment = made(Environment(name="test", check=dict, verify=is_equal))

    returned = step(environment, ["0", "<think>2</think>1", "1", ""])

    assert returned.rewards.tolist() == [1, 1, 0, 0] and returned.terminateds.tolist() == [True] * 4
    assert [one["content"] for one in returned.observations] == ["correct", "correct", "wrong", "wrong"]
    assert returned.answers[:2] == ["0", "1"]
    assert environment.take_metrics()["correct"] == 0.5
    assert environment.take_metrics() == {}


@dataclass
class Counting:
    """Conversation that ends after the third response or at a full stop."""

    said: list[str] = field(default_factory=list)

    def step(self, response: Response) -> Sequence[Message]:
        self.said.append(response.answer)
        return () if response.answer == "." else (Message(role="tool", content=f"heard {response.answer}"),)

    def verdict(self) -> Verdict:
        return Verdict.correct() if self.said == ["a", "b", "."] else Verdict.wrong("/".join(self.said))


@pytest.mark.parametrize("template", ["nemotron3_nano", "olmo3", "llama_nemotron", "domyn"])
def test_the_metadata_hold_the_conversation(made: Step, template: str) -> None:
    environment = made(
        Environment(name="test", check=dict, begin=lambda reference: Counting(), max_turns=4), template=template
    )
    state, observed = info(), []
    for text in ("a", "b"):
        returned = step(environment, [text], [pickle.loads(pickle.dumps(state))])
        assert not returned.terminateds[0] and returned.rewards[0] == 0
        observed.append(returned.observations[0]["content"])
        state = closed(returned)

    last = step(environment, ["."], [state])

    assert last.terminateds[0] and last.rewards[0] == 1
    assert all(f"heard {text}" in content for text, content in zip("ab", observed, strict=True))
    assert all("\ue000" not in content for content in observed)
    assert environment.take_metrics()["turns"] == 3


def test_python_continues_in_the_metadata(module: ModuleType) -> None:
    environment = module.TaskEnvironment({"name": "python_tool", "template": "nemotron3_nano"})
    (task,) = generate("python_tool", 1, seed=3)
    state: dict[str, Any] = {"episode": Episode(task=task, thinking_opened=False)}
    for call in python_tool.solution(task):
        code = call.arguments["code"]
        text = f"<tool_call>\n<function={call.name}>\n<parameter=code>\n{code}\n</parameter>\n</function>\n</tool_call>"
        returned = step(environment, [text], [pickle.loads(pickle.dumps(state))])
        state = closed(returned)

    assert f"<tool_response>\n{task.reference['answer']}\n</tool_response>" in returned.observations[0]["content"]
    last = step(environment, [f"\\boxed{{{task.reference['answer']}}}"], [state])
    assert last.terminateds[0] and last.rewards[0] == 1
    assert environment.take_metrics()["calls"] == 2


def test_a_conversation_requires_a_template(made: Step) -> None:
    with pytest.raises(ValueError, match="set template=NAME"):
        made(Environment(name="test", check=dict, begin=lambda reference: Counting()))


@pytest.mark.parametrize(
    ("config", "message"),
    [({"rewards": "outcome"}, "did you mean 'reward'"), ({"reward": "domyn_math"}, "reward counts tokens; set")],
)
def test_invalid_settings_are_reported(made: Step, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(Environment(name="test", check=dict, verify=is_equal), **config)


def test_tokens_are_counted_and_a_cut_response_is_not_finished(
    made: Step, module: ModuleType, tokenizer_folder: Path
) -> None:
    seen: list[Response] = []

    def verify(response: Response, reference: Any) -> Verdict:
        seen.append(response)
        return Verdict.correct()

    environment = made(
        Environment(name="test", check=dict, verify=verify),
        reward="domyn_math",
        tokenizer=str(tokenizer_folder),
        max_tokens=5,
    )

    rewards = step(environment, ["abc", "abcdef"]).rewards.tolist()

    assert [(one.tokens, one.finished) for one in sorted(seen, key=lambda one: one.text)] == [(3, True), (6, False)]
    assert rewards == pytest.approx([3.5 - 0.25 * n / 8192 for n in (3, 6)], abs=1e-6)


def test_registering_twice_changes_nothing(nemo_rl: ModuleType) -> None:
    register = importlib.import_module("nemo_ext.rl.nemo_rl.compat").register
    registry = importlib.import_module("nemo_rl.environments.utils").ENV_REGISTRY

    names = register()
    entered = dict(registry)

    assert register() == names and dict(registry) == entered
    assert names == [f"nemo_ext_{name}" for name in known_environments()]


def test_another_environment_of_the_name_is_not_replaced(nemo_rl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("nemo_ext.rl.nemo_rl.compat")
    registry = importlib.import_module("nemo_rl.environments.utils").ENV_REGISTRY
    monkeypatch.setitem(registry, "nemo_ext_math", {"actor_class_fqn": "elsewhere.Math"})

    with pytest.raises(
        ValueError,
        match=r"'nemo_ext_math' is already registered in NeMo-RL for elsewhere\.Math; register",
    ):
        module.register()
