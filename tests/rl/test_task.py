import re
from typing import Any

import pytest

from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.rewards.named import Facts, reward_of
from nemo_ext.rl.task import Task

RECORD = {"id": "a", "environment": "math", "prompt": "2 + 3?", "reference": {"answer": "5"}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"id": None}, "id must be a text"),
        ({"id": ""}, "id must be a text"),
        ({"id": False}, "id must be a text"),
        ({"environment": 5}, "environment must be a text that is not empty, not 5"),
        ({"environment": ["math"]}, "environment must be a text"),
        ({"domain": ["x"]}, "domain must be a text"),
        ({"thinking": "sometimes"}, "thinking='sometimes': expected on, off"),
        ({"reference": 5}, "reference must be a mapping"),
    ],
)
def test_a_record_that_is_no_task_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"t.jsonl:3: {said}")):
        Task.of({**RECORD, **changed}, "t.jsonl:3")


@pytest.mark.parametrize(("given", "read"), [("off", False), ("thinking on", True), (False, False), (None, None)])
def test_modes_are_read_as_conversations_have_them(given: object, read: bool | None) -> None:
    assert Task.of({**RECORD, "thinking": given}).thinking is read


@pytest.mark.parametrize("template", ["llama_nemotron", "domyn", "nemotron3_nano", "olmo3"])
def test_a_format_is_rewarded_that_the_prompt_asks_for(template: str) -> None:
    prompts = Prompts.load(template)
    task = prompts.in_mode(Task.of(RECORD))
    text, opened = prompts.prompt(task)

    assert Facts.from_task(task, thinking_opened=opened).thinking
    assert "thinking on" in text or opened
    off = prompts.in_mode(Task.of({**RECORD, "thinking": False}))
    assert off.thinking is False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, "reward must be a name, or a mapping with a name, not 5"),
        ({"name": ["outcome"]}, "unknown name ['outcome']"),
        ({"name": "domyn_math", "max_tokens": 0}, "reward (domyn_math): "),
        ({"name": "accuracy_format", "format_weight": float("inf")}, "reward (accuracy_format): "),
    ],
)
def test_a_reward_that_cannot_work_is_refused_at_once(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        reward_of(given)


def test_a_reward_that_reads_the_reference_wants_it() -> None:
    reward_of("genrm_training").check({"ranking": 2})
    with pytest.raises(ValueError, match="reads ranking"):
        reward_of("genrm_training").check({"answer": "5"})
