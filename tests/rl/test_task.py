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
        ({"id": None}, "id must be a non-empty string"),
        ({"id": ""}, "id must be a non-empty string"),
        ({"id": False}, "id must be a non-empty string"),
        ({"environment": 5}, "environment must be a non-empty string, not 5"),
        ({"environment": ["math"]}, "environment must be a non-empty string"),
        ({"domain": ["x"]}, "domain must be a non-empty string"),
        ({"thinking": "sometimes"}, "invalid thinking mode (thinking='sometimes': expected on, off"),
        ({"prompt": [{"role": "judge", "content": "x"}]}, "invalid prompt or tools (prompt[0]"),
        ({"tools": [5]}, "invalid prompt or tools (tools[0]"),
        ({"reference": 5}, "reference must be a mapping"),
    ],
)
def test_an_invalid_record_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"t.jsonl:3: {said}")):
        Task.from_record({**RECORD, **changed}, "t.jsonl:3")


@pytest.mark.parametrize(("given", "read"), [("off", False), ("thinking on", True), (False, False), (None, None)])
def test_modes_are_read_as_in_conversations(given: object, read: bool | None) -> None:
    assert Task.from_record({**RECORD, "thinking": given}).thinking is read


@pytest.mark.parametrize("template", ["llama_nemotron", "domyn", "nemotron3_nano", "olmo3"])
def test_format_rewards_use_the_mode_of_the_prompt(template: str) -> None:
    prompts = Prompts.load(template)
    task = prompts.in_mode(Task.from_record(RECORD))
    text, opened = prompts.prompt(task)

    assert Facts.from_task(task, thinking_opened=opened).thinking
    assert "thinking on" in text or opened
    off = prompts.in_mode(Task.from_record({**RECORD, "thinking": False}))
    assert off.thinking is False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, "reward must be the name of a reward, or a mapping with the key name, not 5"),
        ({"name": ["outcome"]}, "unknown reward ['outcome']"),
        ({"name": "domyn_math", "max_tokens": 0}, "reward: invalid settings of reward domyn_math: "),
        (
            {"name": "accuracy_format", "format_weight": float("inf")},
            "reward: invalid settings of reward accuracy_format: ",
        ),
    ],
)
def test_an_impossible_reward_is_refused_at_once(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        reward_of(given)


def test_a_reward_that_reads_the_reference_requires_it() -> None:
    reward_of("genrm_training").check({"ranking": 2})
    with pytest.raises(ValueError, match="reward requires ranking"):
        reward_of("genrm_training").check({"answer": "5"})
