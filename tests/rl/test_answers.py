import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.rl.answers import bare, boxes, final_answer, last_boxed, named_choices, unreadable

CHOICES = {"A": "Paris", "B": "New York", "C": "a", "D": "12"}


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"So \boxed{42}.", "42"),
        (r"\boxed{1} or rather \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # the escaped brace has no partner
        (r"\boxed {5}", "5"),
        (r"\boxed{a \boxed{5}}", r"a \boxed{5}"),
        (r"} } \boxed{5}", "5"),
        (r"{ \boxed{5}", "5"),
        (r"\boxed{1 and \boxed{5}", "5"),  # the first does not close
        (r"\boxed{5", None),
        (r"\boxed 5", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_nested_boxes() -> None:
    assert len(boxes(r"\boxed{1} \boxed{2 \boxed{3}}")) == 3


@pytest.mark.parametrize("unit", [r"\boxed{", "{", "}", r"\boxed   ", "\\", r"\boxed{}", r"\boxed{\{"])
def test_many_braces_take_linear_time(unit: str) -> None:
    boxes(unit * (100_000 // len(unit)) + "}" * 100_000)


@given(st.text(alphabet="{}\\boxed 1", max_size=60))
def test_boxes_hold_balanced_braces(text: str) -> None:
    for begin, end in boxes(text):
        inner = text[begin:end].replace("\\\\", "").replace(r"\{", "").replace(r"\}", "")
        assert inner.count("{") == inner.count("}")
        assert text[end] == "}"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 5.", "5"),
        ("First the answer is 4. No: the answer is 3.5, I think", "3.5, I think"),
        ("**Answer:** B", "B"),
        ("**Answer**: B", "B"),
        ("Final Answer:\n\n 7", "7"),
        ("She has 4 left.\n#### 4", "4"),
        ("Option Selected: C", "C"),
        ("Answer: no. It was not", "no"),
        ("answers are 3", None),
        ("the answer", None),
        ("Answer:", None),
        ("The answer is **5**.", "5"),
        ("The answer is **5.**", "5"),
        ("The answer is 5.\n\n#### Check\n2+3=5", "5"),
        ("Answer: 42.\n\n#### Step 2: verify", "42"),
        ("Answer: 42.\n\n#### Step 2: verify\n40 + 2 is 42", "42"),
        ("Answer: 42.\n#### **Step 2: verify**\nYes", "42"),
        ("Answer: 42.\n#### 2. Verify\nYes", "42"),
        ("Answer: 42.\n#### 2) Verify\nYes", "42"),
        ("Answer: 42.\n#### Let's check\nYes", "42"),
        ("Answer: 42.\n##### Check 2", "42"),
        ("Steps\n#### 72 dollars", "72 dollars"),
        ("Steps\n#### $3:4$", "$3:4$"),
        ("Steps\n#### x = 4", "x = 4"),
        ("Steps\n####-7", "-7"),
        ("Steps\n#### 2.5", "2.5"),
        ("Steps\n#### Paris", "Paris"),
        ("### Step 1\n40 + 2\n\n### Answer\n42", "42"),
        ("#### Final Answer\n\n**42**", "42"),
        ("**Final Answer**\n42.", "42"),
        ("## Answer:\n42\n", "42"),
        ("### Answer the question\n42", None),
    ],
)
def test_text_after_the_last_phrase(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize("unit", ["answer ", "answer is ", "answer\n", "answer*", "#", "answer:\n", "is", " "])
def test_many_phrases_take_linear_time(unit: str) -> None:
    final_answer(unit * (200_000 // len(unit)))


def test_a_bare_answer_is_one_line() -> None:
    assert bare(" 42. ") == "42"
    assert bare("**42**.") == "42"
    assert bare("4\n2") is None
    assert bare(" . ") is None


@pytest.mark.parametrize("text", ["４２", "٣", "a\x00", "\ud800", "1\u200b2", "\x1b[0m"])
def test_characters_that_people_do_not_write_are_unreadable(text: str) -> None:
    assert unreadable(text)


@pytest.mark.parametrize("text", ["42", "x²", "π ≤ 4", "una città", "日本", "a\tb\nc"])
def test_other_languages_and_symbols_are_readable(text: str) -> None:
    assert unreadable(text) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("B", "B"),
        (" (B). ", "B"),
        ("{B}", "B"),
        ("[C]", "C"),
        (r"\text{B}", "B"),
        ("**b**", "B"),
        ("Paris", "A"),
        ("paris.", "A"),
        (r"\text{new   york}", "B"),
        ("A. Paris", "A"),
        ("(A) Paris", "A"),
        ("A: Paris", "A"),
        ("12", "D"),
        ("A", "A"),  # by letter, although C's text is the same but for its case
        ("a", "AC"),
        ("A. New York", "AB"),
        ("A or B", ""),
        ("A, B", ""),
        ("E", ""),
        ("Ｂ", ""),
        ("Rome", ""),
        ("", ""),
        ("B. because it is so", ""),
        ("B, since it is so", "B"),
        ("(B) because A is far", "B"),
        ("option B", "B"),
        ("the choice (b)", "B"),
        ("option A or B", ""),
        (r"(A)\ Paris", "A"),
        ("(A) or (B)", ""),
        ("(A) Paris is the capital of France.", "A"),
        ("A. Paris, the capital of France", "A"),
        ("A - Paris", "A"),
        ("A \u2013 Paris (the capital)", "A"),
        ("(A) Paris is larger than New York", ""),
        ("(A) Paris is B", ""),
        ("(A) Paris is wrong", ""),
        ("(A) Paris isn't it", ""),
        ("(A) Paris Hilton", ""),
        ("(D) 12 million", ""),
        ("(D) 12.5 is it", ""),
        ("(B) New York is large", "B"),
        ("(A) New York is large", ""),
        ("A - New York", "AB"),
        ("A - B", ""),
    ],
)
def test_which_choices_are_named(text: str, named: str) -> None:
    assert named_choices(text, CHOICES) == set(named)


@pytest.mark.parametrize(
    "choice", ["$4$", "(1, 2)", "[0, 1]", "{1, 2}", '"yes"', "`x`", "_private", "*x", "5:", "x_", "St. Paul"]
)
def test_the_text_of_a_choice_names_it(choice: str) -> None:
    choices = {"A": "zzz", "B": choice, "C": "other"}

    assert named_choices(choice, choices) == {"B"}
    assert named_choices(f"(B) {choice}", choices) == {"B"}
    assert named_choices(f"(A) {choice}", choices) == {"A", "B"}


def test_brackets_distinguish_choices() -> None:
    choices = {"A": "(0, 1)", "B": "[0, 1]"}

    assert named_choices("[0, 1]", choices) == {"B"}
    assert named_choices("$[0, 1]$", choices) == {"A", "B"}


@pytest.mark.parametrize(
    ("text", "named"),
    [("B. Paris", "B"), ("(B) Paris", "B"), ("b) Paris", "B"), ("B - Paris", "B"), ("(a) or (b)", ""), ("A. B.", "")],
)
def test_unknown_texts_may_follow_a_letter(text: str, named: str) -> None:
    assert named_choices(text, dict.fromkeys("ABC")) == set(named)
    assert named_choices(text, dict.fromkeys("ABC", "")) == set()


@given(st.text(max_size=40))
def test_only_choices_are_named(text: str) -> None:
    assert named_choices(text, CHOICES) <= set(CHOICES)
    assert named_choices("(" * 5000 + text + ")" * 5000, CHOICES) <= set(CHOICES)
