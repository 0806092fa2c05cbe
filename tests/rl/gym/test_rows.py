"""Tasks as rows of NeMo Gym's data."""

import json
from dataclasses import replace
from typing import Any

import pytest

from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.rl.environments import make
from nemo_ext.rl.gym.rows import messages, of_gym, to_gym
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import GENERATORS, generate


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_task_round_trips_through_its_row(generator: str) -> None:
    for task in generate(generator, 6, seed=3):
        row = json.loads(json.dumps(to_gym(task)))

        back = of_gym(row, task.environment)

        assert json.loads(json.dumps(back.record())) == json.loads(json.dumps(task.record()))


def test_a_mode_is_passed_to_the_chat_template() -> None:
    task = replace(next(generate("arithmetic", 1, seed=3)), thinking=False)

    row = to_gym(task, thinking_key="reasoning")

    assert json.loads(row["responses_create_params"]["metadata"]["chat_template_kwargs"]) == {"reasoning": False}
    assert of_gym(row, "math").thinking is False
    assert "metadata" not in to_gym(replace(task, thinking=None))["responses_create_params"]


def test_a_conversation_with_calls_round_trips() -> None:
    calls = (ToolCall(name="find", arguments={"name": "Ada"}, id="a"), ToolCall(name="list", id="b"))
    said = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Who?"),
        Message(role="assistant", content="I look.", tool_calls=calls),
        Message(role="tool", content="1", tool_call_id="a"),
        Message(role="tool", content="2", tool_call_id="b"),
        Message(role="assistant", tool_calls=calls[:1]),
        Message(role="tool", content="3", tool_call_id="a"),
        Message(role="assistant", content="Ada."),
        Message(role="user", content="Thanks."),
    )

    row = to_gym(Task(id="1", environment="math", prompt=said, reference={"answer": "1"}))

    assert messages(row["responses_create_params"]["input"]) == said
    assert messages("Who?") == (Message(role="user", content="Who?"),)


def asked(**row: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "?"}, **row}


@pytest.mark.parametrize(
    ("environment", "row", "reference"),
    [
        ("math", {"question": "?", "expected_answer": "32"}, {"answer": "32"}),
        (
            "multiple_choice",
            {"options": [{"A": "x"}, {"B": "y"}], "expected_answer": "B"},
            {"answer": "B", "choices": ["x", "y"], "format": "letter"},
        ),
        (
            "instructions",
            {"instruction_id_list": ["last_word:last_word_answer"], "kwargs": [{"last_word": "end"}]},
            {"instructions": [{"id": "last_word:last_word_answer", "kwargs": {"last_word": "end"}}], "mode": "all"},
        ),
        (
            "instructions",
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None], "grading_mode": "fraction"},
            {"instructions": [{"id": "punctuation:no_comma", "kwargs": {}}], "mode": "share"},
        ),
        ("structured_output", {"schema_str": '{"type": "object"}'}, {"schema": '{"type": "object"}', "strict": True}),
        (
            "code",
            {"verifier_metadata": {"unit_tests": {"inputs": ["1\n"], "outputs": ["2\n"], "fn_name": None}}},
            {"language": "python", "style": "stdin", "tests": [{"input": "1\n", "output": "2\n"}]},
        ),
        ("tool_calls", {"expected_action": {"type": "message", "content": "hello"}}, {"expected": []}),
        (
            "graded",
            {"rubric": [{"question": "Is it short?", "pass_criteria": "YES"}, {"question": "Is it rude?"}]},
            {
                "question": "user: ?",
                "rubric": "One point for each of these questions on the response whose answer is the expected one:\n"
                "- Is it short? (expected: YES)\n- Is it rude? (expected: YES)",
                "best": 2,
            },
        ),
    ],
)
def test_gyms_own_rows_are_read(environment: str, row: dict[str, Any], reference: dict[str, Any]) -> None:
    task = of_gym(asked(**row), environment)

    assert task.reference == reference
    judge = {"judge": {"endpoint": "http://localhost:1/v1", "model": "m"}} if environment == "graded" else None
    make(environment, judge).check(task.reference)


@pytest.mark.parametrize(
    ("environment", "row", "message"),
    [
        ("math", asked(answer="32"), "or the keys of Gym's own rows .* not the keys"),
        ("bank", asked(ground_truth=[]), "expected a row with verifier_metadata.environment, not"),
        ("math", asked(verifier_metadata={"environment": "bank"}), "must be 'math' for this server"),
        ("math", asked(verifier_metadata={"environment": "math", "reference": [1]}), "reference must be a mapping"),
        ("math", asked(verifier_metadata={"environment": "math", "refrence": {}}), "did you mean 'reference'"),
        ("math", {"expected_answer": "32"}, "responses_create_params must be"),
        (
            "math",
            {"expected_answer": "3", "responses_create_params": {"input": [{"role": "tool"}]}},
            "role must be one of",
        ),
        (
            "math",
            {
                "expected_answer": "3",
                "responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            },
            "content must be a string",
        ),
        ("structured_output", asked(schema_str="{}", schema_type="xml"), "schema_type must be json"),
        ("structured_output", asked(schema_str="{}", response_mode="tool_call"), "response_mode must be text"),
        ("multiple_choice", asked(options=[{"X": "x"}], expected_answer="X"), "must be A, B, C"),
        (
            "multiple_choice",
            asked(options=[{"A": "x"}], expected_answer="A", template_metadata={"output_regex": "(.)"}),
            "regular expressions",
        ),
        ("code", asked(verifier_metadata={"unit_tests": {"inputs": [], "outputs": [], "fn_name": "f"}}), "unit_tests"),
        ("instructions", asked(instruction_id_list=["a"], kwargs=[{}, {}]), "kwargs"),
    ],
)
def test_a_row_that_cannot_be_verified_is_refused(environment: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_gym(row, environment)


def test_outputs_have_the_order_of_the_calls() -> None:
    calls = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in "ab"]
    outputs = [{"type": "function_call_output", "call_id": name, "output": f"of {name}"} for name in "ba"]
    asked = {"role": "user", "content": "q"}

    made = messages([asked, *calls, *outputs])

    assert [message.content for message in made] == ["q", "", "of a", "of b"]
    with pytest.raises(ValueError, match="tool_call_id='b': no preceding unanswered call has this id"):
        messages([asked, calls[0], *outputs])
