import pytest

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.rewards.format import closes_once, domyn_format, one_boxed, think_tags

TRACE = "<think>because</think>"


@pytest.mark.parametrize(
    ("text", "on", "off"),
    [
        (f"{TRACE}5", 1, 0),
        (f" \n{TRACE}5", 1, 0),
        ("<think></think>5", 1, 0),
        ("5", 0, 1),
        ("", 0, 1),
        ("because</think>5", 0, 0),
        ("<think>because 5", 0, 0),
        (f"{TRACE}{TRACE}5", 0, 0),
        (f"Well {TRACE}5", 0, 0),
        ("</think><think>5", 0, 0),
        ("<think><think>a</think>5", 0, 0),
    ],
)
def test_tags_of_llama_nemotron(text: str, on: float, off: float) -> None:
    response = parse_response(text)
    assert think_tags(response, thinking=True) == on
    assert think_tags(response, thinking=False) == off


def test_where_the_prompt_opens_the_trace_the_response_must_not() -> None:
    assert think_tags(parse_response("because</think>5", thinking_opened=True), thinking=True, opened=True) == 1
    assert think_tags(parse_response(f"{TRACE}5", thinking_opened=True), thinking=True, opened=True) == 0
    assert think_tags(parse_response("because", thinking_opened=True), thinking=True, opened=True) == 0


@pytest.mark.parametrize(("text", "opened"), [("<think>it is 5", False), ("it is 5", True)])
def test_a_trace_that_is_cut_off_leaves_no_answer(text: str, opened: bool) -> None:
    response = parse_response(text, thinking_opened=opened, finished=False)

    assert (response.thinking, response.answer) == ("it is 5", "")


@pytest.mark.parametrize(
    ("text", "thinking", "score"),
    [
        (rf"{TRACE}\boxed{{5}}", True, 1.0),
        (r"because</think>\boxed{5}", True, 1.0),  # Domyn counts closers
        (rf"{TRACE}5", True, 0.5),
        (r"\boxed{5}", True, 0.0),
        (r"<think>\boxed{5}", True, 0.0),
        (r"<think>\boxed{5}</think>5", True, 0.5),  # the box must be after the trace
        (rf"{TRACE}\boxed{{5}}</think>", True, 0.5),
        (rf"{TRACE}\boxed{{5}}\boxed{{5}}", True, 0.5),
        (rf"{TRACE}\boxed{{\boxed{{5}}}}", True, 0.5),
        (rf"{TRACE}\boxed{{5", True, 0.5),
        (r"\boxed{5}", False, 1.0),
        ("5", False, 0.5),
        (rf"{TRACE}\boxed{{5}}", False, 0.5),
        (rf"{TRACE}5", False, 0.0),
        ("", False, 0.5),
        ("", True, 0.0),
    ],
)
def test_format_of_domyn(text: str, thinking: bool, score: float) -> None:
    assert domyn_format(parse_response(text), thinking=thinking) == score


def test_its_parts() -> None:
    response = parse_response(rf"{TRACE}\boxed{{5}}")
    assert closes_once(response, thinking=True) == one_boxed(response) == 1
    assert closes_once(response, thinking=False) == 0
