from typing import Any

import pytest

from nemo_ext.chat.formats import FormatError
from nemo_ext.chat.sample import Message
from nemo_ext.data.preference.records import RecordKeys, group_key, to_group
from nemo_ext.data.text.documents import ReadReport

KEYS = RecordKeys()
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "So?"}]


def test_a_list_of_generations() -> None:
    record = {
        "id": 7,
        "messages": CHAT,
        "task": "chat",
        "language": "EN",
        "generations": [
            "plain",
            {"text": "<think>t</think>a", "model": "m", "score": 3, "correct": 1},
            {"message": {"content": "b"}, "label": "safe"},
        ],
    }

    group = to_group(record, KEYS)

    assert (group.id, group.task, group.language, group.multi_turn) == ("7", "chat", "en", True)
    assert [made.messages[0].content for made in group.generations] == ["plain", "a", "b"]
    second = group.generations[1]
    assert (second.messages[0].reasoning, second.model, second.score, second.correct) == ("t", "m", 3.0, True)


def test_traces_are_read_and_answers_with_unfinished_traces_skipped() -> None:
    record = {"prompt": "Hi", "generations": ["t</think>a", "<think>and", {"text": "<think>t</think>a", "model": "m"}]}
    report = ReadReport()

    group = to_group(record, KEYS, report=report)

    assert [made.messages for made in group.generations] == [
        (Message(role="assistant", content="a", reasoning="t"),)
    ] * 2
    assert report.skipped == {"answer with an unfinished trace": 1}
    with pytest.raises(FormatError, match=r"generations\[1\].text: messages\[0\].content: the trace does not end"):
        to_group(record, KEYS)


def test_one_answer_per_record_and_records_without_an_id() -> None:
    group = to_group({"prompt": "Why?", "response": "So."}, KEYS, side="weak")

    assert group.generations[0].side == "weak"
    assert group_key({"prompt": "Why?", "response": "a"}, KEYS) == group_key({"prompt": "Why?", "response": "b"}, KEYS)
    assert to_group({"id": "p", "text": "So."}, KEYS).prompt == ()


def test_an_rl_task_provides_the_prompt_of_its_answers() -> None:
    task = {"id": "t", "environment": "math", "prompt": "1 + 1?", "reference": {"answer": "2"}}
    group = to_group(task, KEYS)

    assert [message.content for message in group.prompt] == ["1 + 1?"] and not group.generations
    with pytest.raises(FormatError, match="no answer"):
        to_group({key: value for key, value in task.items() if key != "reference"}, KEYS)


def test_an_rl_task_answered_by_generate_keeps_the_trace() -> None:
    task = {"id": "t", "environment": "math", "prompt": "1 + 1?", "reference": {"answer": "2"}}
    keys = RecordKeys(answer="answer")

    (made,) = to_group({**task, "answer": "2", "reasoning": "One more than 1."}, keys).generations
    assert [(each.content, each.reasoning) for each in made.messages] == [("2", "One more than 1.")]
    (made,) = to_group({**task, "answer": "2", "reasoning": None}, keys).generations
    assert made.messages[0].reasoning is None
    assert not to_group(task, keys).generations, "the task alone"
    report = ReadReport()
    cut = {"id": "t1", "response": {"content": "1, 2"}, "reward": 0.0, "truncated": True}
    assert not to_group(cut, KEYS, report=report).generations
    assert len(to_group({**cut, "truncated": False}, KEYS).generations) == 1
    assert report.skipped["truncated answer"] == 1


def test_history_goes_before_the_prompt() -> None:
    group = to_group({"prompt": "So?", "history": CHAT[:2], "response": "x"}, KEYS)

    assert [message.content for message in group.prompt] == ["Hi", "Ho", "So?"]
    assert group.multi_turn


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "chosen": "good", "rejected": "bad"},
        {"prompt": [{"role": "user", "content": "Hi"}], "chosen": [{"role": "assistant", "content": "good"}]}
        | {"rejected": [{"role": "assistant", "content": "bad"}]},
        {
            "prompt": "Hi",  # as Dolci has it: the prompt's text and whole conversations
            "chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "good"}],
            "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "bad"}],
            "chosen_model": "big",
        },
    ],
)
def test_existing_pairs(record: dict[str, Any]) -> None:
    group = to_group(record, KEYS, pairs=True)

    assert [message.content for message in group.prompt] == ["Hi"]
    assert [(made.label, made.messages[-1].content) for made in group.generations] == [
        ("chosen", "good"),
        ("rejected", "bad"),
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, "text: there is no answer; the record's keys are prompt"),
        ({"prompt": "a", "generations": []}, "generations: expected a list"),
        (
            {"prompt": "a", "generations": [{"text": "b", "score": "high"}]},
            r"generations\[0\].score: expected a number",
        ),
        ({"prompt": "a", "generations": [{"text": "b", "correct": "yes"}]}, r"generations\[0\].correct: .*, not 'yes'"),
        (
            {"prompt": "a", "generations": [{"messages": CHAT[:1]}]},
            "the first and last message must be the assistant's",
        ),
        ({"messages": CHAT[:2], "response": "b"}, "the last message must be the user's or a tool's, not assistant"),
        ({"messages": CHAT, "history": CHAT[:2], "response": "b"}, "already has earlier turns"),
    ],
)
def test_invalid_records_are_refused_with_their_place(record: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        to_group(record, KEYS)


def test_conversations_that_differ_too_early_are_refused() -> None:
    other = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No"}, CHAT[2]]
    end = {"role": "assistant", "content": "x"}

    with pytest.raises(FormatError, match="chosen and rejected to be equal up to the last user message"):
        to_group({"chosen": [*CHAT, end], "rejected": [*other, end]}, KEYS, pairs=True)


def test_a_record_with_neither_id_nor_prompt_is_refused() -> None:
    with pytest.raises(FormatError, match="neither id nor a prompt"):
        group_key({"text": "b"}, KEYS)
