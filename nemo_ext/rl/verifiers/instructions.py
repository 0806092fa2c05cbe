"""Instruction following: rules that a program can check (IFEval, Zhou et al. 2023, and IFBench's training constraints).

A reference is {instructions: [{id, kwargs}], mode: all | share}, with one to ten instructions a prompt as in
Llama-Nemotron, section 6.1. All must be followed; with `share` the verdict's score is the share of those that are.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import check_keys, checked_whole, nearest
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.instruction_rules import LANGUAGES, RELATIONS, RULES, words

MOST = 10
MAX_CHARACTERS = 100_000
MOST_WORDS = 30
"""Maximum number of words of a phrase to repeat."""

# Characters that no text has: control characters other than white space, lone surrogates.
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """An instruction of a prompt.

    Attributes:
        id: id of the rule, a key of `RULES`.
        kwargs: parameters of the rule.
    """

    id: str
    kwargs: Mapping[str, Any]

    def says(self) -> str:
        """Request for it in a prompt."""
        shown = {key: ", ".join(value) if isinstance(value, tuple) else value for key, value in self.kwargs.items()}
        return RULES[self.id].says.format(**shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Instructions that a response is checked against.

    Attributes:
        instructions: all instructions of the prompt.
        mode: score if only some are followed: 0 (`all`) or their share (`share`).
    """

    instructions: tuple[Instruction, ...]
    mode: Literal["all", "share"] = "all"


def check(reference: Mapping[str, Any]) -> Reference:
    """Parse a reference.

    Raises:
        ValueError: naming the key, what it holds and what it may hold.
    """
    check_keys(reference, ("instructions", "mode"), required=("instructions",), where="reference")
    given, mode = reference["instructions"], reference.get("mode", "all")
    if mode not in ("all", "share"):
        raise ValueError(f"reference.mode must be all or share, not {mode!r}")
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= MOST:
        raise ValueError(f"reference.instructions must be a list of 1 to {MOST} {{id, kwargs}}, not {given!r}")
    parsed = [_instruction(item, f"reference.instructions[{index}]") for index, item in enumerate(given)]
    return Reference(instructions=tuple(parsed), mode=mode)


def verify(response: Response, reference: Reference, *, max_characters: int = MAX_CHARACTERS) -> Verdict:
    """Correct if the answer follows all instructions; one that is not text, or has no word, follows none."""
    answer = response.answer
    if len(answer) > max_characters:
        return Verdict.wrong(f"longer than {max_characters} characters")
    if not re.search(r"\w", answer):
        return Verdict.wrong("no answer")
    if _NO_TEXT.search(answer):
        return Verdict.wrong("characters that no text has")
    broken = [each.id for each in reference.instructions if not RULES[each.id].follows(answer, **each.kwargs)]
    if not broken:
        return Verdict.correct()
    total = len(reference.instructions)
    score = (total - len(broken)) / total if reference.mode == "share" else 0.0
    return Verdict.wrong(f"{len(broken)} of {total} not kept: {', '.join(broken)}", score=score)


def environment(*, max_characters: int = MAX_CHARACTERS) -> Environment:
    """The environment `instructions`.

    Args:
        max_characters: maximum length of an answer; longer ones are wrong.

    Raises:
        ValueError: invalid setting.
    """
    checked_whole("max_characters", max_characters, least=1)
    return Environment(
        name="instructions",
        check=check,
        verify=lambda response, reference: verify(response, reference, max_characters=max_characters),
    )


def _instruction(item: Any, where: str) -> Instruction:
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} must be {{id, kwargs}}, not {item!r}")
    check_keys(item, ("id", "kwargs"), required=("id",), where=where)
    name = item["id"]
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(f"{where}.id: unknown {name!r}: {nearest(str(name), RULES)}")
    given = item.get("kwargs") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}.kwargs must be a mapping, not {given!r}")
    # Tables of several instructions have a column for the parameters of each, empty where they are another's.
    rule = RULES[name]
    given = {key: value for key, value in given.items() if value is not None and key not in rule.ignored}
    check_keys(given, tuple(rule.parameters), required=tuple(rule.parameters), where=f"{where}.kwargs")
    kwargs = {key: _KINDS[kind](given[key], f"{where}.kwargs.{key}") for key, kind in rule.parameters.items()}
    return Instruction(id=name, kwargs=kwargs)


def _whole(value: Any, where: str, *, least: int = 0) -> int:
    # Tables with empty cells make floats of whole numbers.
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    return checked_whole(where, value, least=least)


def _count(value: Any, where: str) -> int:
    return _whole(value, where, least=1)


def _text(value: Any, where: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"{where} must be a text, not {value!r}")


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and value:
        return tuple(_text(item, where) for item in value)
    raise ValueError(f"{where} must be a list of texts, not {value!r}")


def _phrase(value: Any, where: str) -> str:
    text = _text(value, where)
    # Time is linear in the answer times this.
    if 3 <= len(words(text)) <= MOST_WORDS:
        return text
    raise ValueError(f"{where} must have 3 to {MOST_WORDS} words, not {value!r}")


def _relation(value: Any, where: str) -> str:
    if value in RELATIONS:
        return str(value)
    raise ValueError(f"{where} must be one of {', '.join(RELATIONS)}, not {value!r}")


def _letter(value: Any, where: str) -> str:
    if isinstance(value, str) and len(value) == 1:
        return value
    raise ValueError(f"{where} must be one character, not {value!r}")


def _language(value: Any, where: str) -> str:
    if value in LANGUAGES:
        return str(value)
    raise ValueError(f"{where}: unknown language {value!r}: {nearest(str(value), LANGUAGES)}")


_KINDS: Mapping[str, Callable[[Any, str], Any]] = {
    "whole": _whole,
    "count": _count,
    "text": _text,
    "texts": _texts,
    "phrase": _phrase,
    "relation": _relation,
    "letter": _letter,
    "language": _language,
}
