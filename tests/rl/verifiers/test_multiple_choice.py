import pytest

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.verifiers.multiple_choice import check, verify
from tests.json_lines import read_jsonl
from tests.rl.gym_data import gym_data

CITIES = ["Paris", "New York", "Rome", "Oslo"]


def outcome(text: str, **reference: object) -> str:
    return verify(parse_response(text), check({"answer": "B", "choices": CITIES, **reference})).outcome


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{B}",
        r"\boxed{ [B] }",
        r"\boxed{{B}}",
        r"\boxed{\text{B}}",
        r"\boxed{new york}",
        r"\boxed{B. New York}",
        r"\boxed{B} as I said: \boxed{(B)}",
        r"A is wrong. \boxed{B}",
        r"Answer: A. But then \boxed{B}",  # a box counts before a phrase
        "Answer: b",
        "**Answer:** B",
        "The answer is New York.",
        "Maybe Answer: A? Final Answer: B",
        "B",
        "(B)",
        "B. New York",
        "<think>Answer: A</think>B",
        "The answer is option B.",
        "The correct choice is B because it is large.",
        "Answer: B. It is large.",
        "Answer: B (New York)",
        r"$\boxed{\textbf{(B)}\ New York}$",
        r"\boxed{B)}",
        r"\boxed{\text{B.)}}",
        r"\boxed{B]}",
        r"\boxed{B) New York}",
        r"\boxed{\text{Option B)}}",
        "Answer: B)",
        "Answer: (B). It is large.",
        "Answer: B.\tIt is large. I am sure.",
        "Answer: B. A city that I like.",
        "Answer: B. C is colder.",  # what it says about C is unknown
        "Answer: B. New York. Yes, B.",
        "Answer: B.\n\nNew York",
        "Answer: B\n---\nParis is smaller.",
        "The answer is B because C is cold. It is large.",
        "Answer: New York. It is large.",
        "Answer: **B**. _Rome_ is smaller.",
        "Answer: A. No, wait. Answer: B.",
    ],
)
def test_named(text: str) -> None:
    assert outcome(text) == "correct"


@pytest.mark.parametrize(
    "text",
    [
        "",
        r"\boxed{A}",
        r"\boxed{A, B}",
        r"\boxed{A} \boxed{B}",
        r"\boxed{B} \boxed{}",
        r"\boxed{\boxed{B}}",
        r"\boxed{B. Paris}",
        "Answer: B. Paris",
        r"\boxed{E}",
        r"\boxed{Ｂ}",
        r"\boxed{}, so B",
        "B or C",
        "Answer: A",
        "Answer: B or C",
        "It is New York or Rome",
        "<think>Answer: B",
        "<think>B</think>",
        r"\boxed{B" + " " * 20_000 + "}" + r"\boxed{A}",
        "Answer: B. A",
        "Answer: B. C",
        "Answer: B. (A)",
        "Answer: B. [C].",
        "Answer: B.\u00a0A",
        "Answer: B.. A",
        "Answer: b. a",
        "Answer: (B). **C**",
        "Answer: B. Or A.",
        "Answer: B. A or C.",
        "Answer: B. Also maybe C",
        "Answer: B. Alternatively, C",
        "Answer: B. Hmm, A.",
        "Answer: B. On second thought, A",
        "Answer: B. No, wait: A",
        "Answer: B. Option C.",
        "Answer: B. Rome",
        "Answer: B. It is large. C.",
        "Answer: B because it is large. C",
        "Answer: New York. Rome.",
        "Answer: B. New York. Rome.",
        "Answer: B\nA",
        "Answer: B.\n\nor C",
        "Answer: B\nRome",
        "Answer: B/A",
        "Answer: B A",
        "Answer: B; A",
        "Answer: (B)(A)",
        "Answer: (B) [A]",
        "Answer: B.A",
        "Answer: B, A",
        "Answer: B)(A",
        "Answer: B) A",
        r"\boxed{B. A}",
        r"\boxed{B) A}",
        r"\boxed{B)(A)}",
        r"\boxed{B),A)}",
        r"\boxed{B) or C)}",
        r"\boxed{B)} \boxed{A)}",
        "B. A",
        "B) A",
        "B.\nA",
    ],
)
def test_not_named(text: str) -> None:
    assert outcome(text) == "wrong"


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("boxed", "Answer: B", "wrong"),
        ("boxed", r"\boxed{New York}", "correct"),
        ("text", r"\boxed{B}", "wrong"),
        ("text", "Answer: B", "correct"),
        ("text", "B", "wrong"),
        ("letter", r"\boxed{B}", "correct"),
        ("letter", r"\boxed{New York}", "wrong"),
        ("letter", "B", "wrong"),
        ("letter", r"\boxed{B. New York}", "wrong"),
    ],
)
def test_formats(format: str, text: str, expected: str) -> None:
    assert outcome(text, format=format) == expected


@pytest.mark.parametrize(
    "text", ["Answer: B. A", "Answer: (B). (C)", "Answer: B\nA", "Answer: B or A", r"\boxed{B. A}"]
)
@pytest.mark.parametrize("choices", [4, ["first", "second", "Both A and B", "d"]], ids=str)
@pytest.mark.parametrize("format", ["any", "text"])
def test_two_letters_are_not_an_answer(text: str, choices: object, format: str) -> None:
    assert outcome(text, choices=choices, format=format) == "wrong"


def test_texts_that_look_like_several_answers() -> None:
    assert outcome("Answer: B. Both A and C", choices=["x", "Both A and C", "y"]) == "correct"
    assert outcome("Answer: B\nBoth A and C.", choices=["x", "Both A and C", "y"]) == "correct"
    assert outcome("Answer: St. Petersburg", choices=["St", "St. Petersburg", "Petersburg"]) == "correct"
    assert outcome("Answer: B. St. Petersburg", choices=["St", "St. Petersburg", "Petersburg"]) == "correct"
    assert outcome("Answer: A. No", choices=["Yes", "No"], answer="A") == "wrong"


@pytest.mark.parametrize("unit", ["ab. ", "ab\n", ").", "B. "])
def test_many_sentences_are_read_in_one_pass(unit: str) -> None:
    assert outcome("Answer: B. " + unit * (200_000 // len(unit)), choices=["x" * 5000, "y" * 5000]) == "correct"


def test_the_number_of_choices_is_enough() -> None:
    assert outcome(r"\boxed{B}", choices=4) == "correct"
    assert outcome(r"\boxed{B}", choices=4, answer="D") == "wrong"
    assert outcome(r"\boxed{E}", choices=4) == "wrong"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ({"answer": "B"}, "'choices' is missing"),
        ({"answer": "E", "choices": 4}, "A to D"),
        ({"answer": "", "choices": 4}, "A to D"),
        ({"answer": "AB", "choices": 4}, "A to D"),
        ({"answer": 1, "choices": 4}, "A to D"),
        ({"answer": "A", "choices": 1}, "2 to 26"),
        ({"answer": "A", "choices": True}, "2 to 26"),
        ({"answer": "A", "choices": ["x"]}, "2 to 26"),
        ({"answer": "A", "choices": "xy"}, "2 to 26"),
        ({"answer": "A", "choices": ["x", " X"]}, "the same"),
        ({"answer": "A", "choices": ["x", ""]}, "empty"),
        ({"answer": "A", "choices": 4, "format": "boxd"}, "did you mean 'boxed'"),
        ({"answer": "A", "choices": 4, "options": []}, "unknown key 'options'"),
    ],
)
def test_a_reference_that_cannot_be_used_is_named(reference: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(reference)


@pytest.mark.gym
@pytest.mark.parametrize(
    ("file", "format"), [("example_rollouts", "letter"), ("example_rollouts_with_template_metadata", "any")]
)
def test_agrees_with_gym_on_its_examples(file: str, format: str) -> None:
    data = gym_data("mcqa")
    asked, rollouts = (read_jsonl(data / f"{name}.jsonl") for name in ("example", file))
    options = {str(task["responses_create_params"]["input"]): task["options"] for task in asked}
    for rollout in rollouts:
        listed = rollout.get("options") or options.get(str(rollout["responses_create_params"]["input"]))
        choices = [text for option in listed for text in option.values()] if listed else 10
        text = "".join(part["text"] for item in rollout["response"]["output"] for part in item["content"])
        reference = check({"answer": rollout["expected_answer"], "choices": choices, "format": format})
        assert verify(parse_response(text), reference).score == rollout["reward"], text[-100:]
    assert len(rollouts) == 5
