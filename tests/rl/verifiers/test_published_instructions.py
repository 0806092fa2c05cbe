"""The published checkers of instructions, with checkers of our own in their place."""

import sys
from typing import Any

import pytest

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.environments import make
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.published_instructions import check, verify


class Starts:
    """Checker with the library's interface: whether a text starts with a word, or with the prompt."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build_description(self, *, word: str = "", prompt: str = "") -> None:
        self.word = prompt or word

    def get_instruction_args(self) -> dict[str, str] | None:
        return {"prompt": ""} if self.name == "repeat" else None

    def check_following(self, text: str) -> bool:
        if text == "raise":
            raise LookupError("punkt_tab")
        return text.startswith(self.word)


CHECKERS = {"starts": Starts, "repeat": Starts}


def judged(answer: str, *instructions: dict[str, Any]) -> Verdict:
    reference = check({"instructions": list(instructions), "prompt": "Say A."}, known=CHECKERS)
    return verify(parse_response(answer), reference, checkers=CHECKERS)


A = {"id": "starts", "kwargs": {"word": "A", "prompt": None}}
REPEAT = {"id": "repeat", "kwargs": None}


@pytest.mark.parametrize(
    ("answer", "score", "loose", "strict_sum", "loose_sum"),
    [
        ("A", 1, 1, 1, 1),
        ("<think>Hm</think>A", 1, 1, 1, 1),
        ("*A*", 0, 1, 0, 1),
        ("Well:\nA", 0, 1, 0, 1),
        ("Well:\n**A**\nSo.", 0, 1, 0, 1),
        ("Well,\nwell:\nA", 0, 0, 0, 0),
        ("", 0, 0, 0, 0),
        ("A" * 100_001, 0, 0, 0, 0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_strict_and_loose(answer: str, score: float, loose: float, strict_sum: int, loose_sum: int) -> None:
    verdict = judged(answer, A)

    assert verdict.score == score
    assert verdict.more == {
        "loose": loose,
        "instruction_strict": (strict_sum, 1),
        "instruction_loose": (loose_sum, 1),
    }


def test_all_instructions_must_be_followed_and_some_need_the_prompt() -> None:
    assert judged("Say A. A", REPEAT).score == 1
    partly = judged("A", A, REPEAT)
    assert (partly.score, partly.more["instruction_strict"]) == (0, (1, 2))
    assert partly.reason == "1 of 2 instructions not followed: repeat"


def test_checkers_that_raise_are_errors() -> None:
    verdict = judged("raise", A)
    assert verdict.outcome == "error"
    assert verdict.reason == "the published checker starts raised LookupError: punkt_tab"


def test_unknown_ids_and_libraries_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown instruction id 'start'.*starts"):
        judged("A", {"id": "start"})
    with pytest.raises(ValueError, match=r"library='ifbnch'.*ifbench"):
        make("published_instructions", {"library": "ifbnch"})


@pytest.mark.parametrize(
    ("module", "message"), [("langdetect", r"pip install 'nemo_ext\[harness\]'"), ("", "nltk.downloader punkt_tab")]
)
def test_the_error_names_what_published_checkers_require(
    monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    nltk = pytest.importorskip("nltk")

    def missing(name: str) -> Any:
        raise LookupError(name)

    monkeypatch.setattr(nltk.data, "find", missing)
    if module:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        pytest.importorskip("langdetect")
    with pytest.raises(ValueError, match=message):
        make("published_instructions", {"library": "ifeval"})
