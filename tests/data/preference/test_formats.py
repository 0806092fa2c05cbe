import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.preference.formats import Columns, nemo_rl_record, trl_record

TOOLS = [{"type": "function", "function": {"name": "python"}}]
STAGED: dict[str, Any] = {
    "id": "p/delta",
    "source": "s",
    "kind": "delta",
    "task": "math",
    "language": "en",
    "prompt": [{"role": "user", "content": "Why?"}],
    "chosen": [{"role": "assistant", "content": "a", "reasoning_content": "t"}],
    "rejected": [{"role": "assistant", "content": "b", "reasoning_content": "u"}],
    "tools": TOOLS,
    "thinking": True,
    "chosen_model": "strong",
    "rejected_model": "weak",
}
VALUES = st.recursive(
    st.text("ab", max_size=2),
    lambda inner: st.lists(st.dictionaries(st.sampled_from("kl"), inner, max_size=2), max_size=2),
    max_leaves=4,
)


def test_trl_has_an_explicit_prompt() -> None:
    record = trl_record(STAGED)

    assert {key: record[key] for key in ("prompt", "chosen", "rejected")} == {
        key: STAGED[key] for key in ("prompt", "chosen", "rejected")
    }
    assert json.loads(record["tools"]) == TOOLS
    assert record["chat_template_kwargs"] == {"enable_thinking": True}
    assert trl_record({**STAGED, "tools": []})["tools"] is None


def test_nemo_rl_has_ranks_of_which_the_lower_is_preferred() -> None:
    record = nemo_rl_record(STAGED)

    assert record["context"] == STAGED["prompt"]
    assert record["completions"] == [
        {"rank": 0, "completion": STAGED["chosen"]},
        {"rank": 1, "completion": STAGED["rejected"]},
    ]


def test_rendered_pairs_are_text_for_trl_and_messages_of_text_for_nemo_rl() -> None:
    rendered = STAGED | {"texts": ["<user>Why?<assistant>", "a<end>", "b<end>"]}

    trl, nemo_rl = trl_record(rendered), nemo_rl_record(rendered)

    assert (trl["prompt"], trl["chosen"], trl["rejected"]) == tuple(rendered["texts"])
    assert "tools" not in trl and "tools" not in nemo_rl, "they are in the text"
    assert nemo_rl["context"] == [{"role": "user", "content": "<user>Why?<assistant>"}]
    assert nemo_rl["completions"][1]["completion"] == [{"role": "assistant", "content": "b<end>"}]


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@given(st.lists(st.dictionaries(st.sampled_from("kl"), VALUES, max_size=2), max_size=6))
def test_all_records_get_the_same_keys_and_keep_their_values(records: list[dict[str, Any]]) -> None:
    columns = Columns()
    news = [columns.see(record) for record in records]
    if any(
        type(value) is not type(other.get(key, value))
        for record in records
        for key, value in record.items()
        for other in records
    ):
        return  # text in one record and a list in another is nothing that a file can hold

    filled = [columns.filled(record) for record in records]

    assert [without_nulls(record) for record in filled] == records
    assert len({tuple(sorted(record)) for record in filled}) <= 1
    again = Columns()
    for record, new in zip(records, news, strict=True):
        if new:
            again.see(record)
    assert not any(again.see(record) for record in records), "the new ones hold every key"


@pytest.mark.parametrize("others", [{}, {"name": "python", "arguments": {"x": 1}}])
def test_arguments_of_calls_keep_their_own_keys(others: dict[str, Any]) -> None:
    columns = Columns()
    call = {"name": "python", "arguments": {"code": "1"}}
    records = [{"calls": [call]}, {"calls": [others]}]

    assert [columns.see(record) for record in records] == [True, bool(others)]
    assert columns.filled(records[0]) == records[0]


def test_scores_of_answers_are_rewards_to_train_on() -> None:
    scored = STAGED | {"chosen_score": 0.0, "rejected_score": -1.5}

    assert [completion["reward"] for completion in nemo_rl_record(scored)["completions"]] == [0, -1.5]
    assert (trl_record(scored)["chosen_score"], trl_record(scored)["rejected_score"]) == (0, -1.5)
    assert "reward" not in nemo_rl_record(STAGED)["completions"][0]
