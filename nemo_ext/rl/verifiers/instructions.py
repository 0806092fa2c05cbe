"""Instruction following, checked by programmed rules (IFEval, Zhou et al. 2023, and IFBench's training constraints).

A reference is {instructions: [{id, kwargs}], mode: all | share, whole_words: false}, with one to ten instructions
per prompt as in Llama-Nemotron, section 6.1. All must be followed for a response to be correct; with `share`, the
verdict's score is the share of instructions that are followed.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from unicodedata import normalize

from pydantic import BeforeValidator, Field

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import STRICT, checked, checked_whole, nearest
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.instruction_rules import RULES

MOST = 10
MAX_CHARACTERS = 100_000

# Characters that text does not contain: control characters other than white space, and lone surrogates.
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]")


def _composed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_composed(part) for part in value]
    return normalize("NFC", value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction in a prompt.

    Attributes:
        id: id of the rule, a key of `RULES`.
        kwargs: parameters of the rule.

    Raises:
        ValueError: the rule is unknown or its parameters are invalid.
    """

    id: str
    kwargs: Annotated[Mapping[str, Any], BeforeValidator(lambda given: given or {})] = field(default_factory=dict)
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.id not in RULES:
            raise ValueError(f"unknown instruction id {self.id!r}: {nearest(self.id, RULES)}")
        # Tables have a column for each parameter of any rule, empty in rows of other rules.
        rule = RULES[self.id]
        given = {
            key: _composed(value) for key, value in self.kwargs.items() if value is not None and key not in rule.ignored
        }
        made = checked(rule.parameters, given, where=f"kwargs of {self.id!r}", strict=True)
        object.__setattr__(self, "kwargs", dict(made))

    def says(self) -> str:
        """Return the instruction as written in a prompt."""
        shown = {key: ", ".join(value) if isinstance(value, tuple) else value for key, value in self.kwargs.items()}
        return RULES[self.id].says.format(**shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Instructions that a response is checked against.

    Attributes:
        instructions: all instructions in the prompt.
        mode: score if only some instructions are followed: 0 (`all`) or their share (`share`).
        whole_words: whether keywords count only as whole words; IFEval also counts them inside words.
    """

    instructions: Annotated[tuple[Instruction, ...], Field(min_length=1, max_length=MOST)]
    mode: Literal["all", "share"] = "all"
    whole_words: bool = False


check = functools.partial(checked, Reference, where="reference", strict=True)
"""Parses a task's reference; raises ValueError if it is invalid."""


def verify(response: Response, reference: Reference, *, max_characters: int = MAX_CHARACTERS) -> Verdict:
    """Return the verdict `correct` if the answer follows all instructions.

    An answer with control characters, without words or of more than `max_characters` characters is wrong.
    """
    answer = response.answer
    if len(answer) > max_characters:
        return Verdict.wrong(f"longer than {max_characters} characters")
    if not re.search(r"\w", answer):
        return Verdict.wrong("no answer")
    if _NO_TEXT.search(answer):
        return Verdict.wrong("contains control characters or lone surrogates")
    answer = normalize("NFC", answer)  # a letter and its accent are one character
    broken = [
        each.id
        for each in reference.instructions
        if not RULES[each.id].is_followed(answer, each.kwargs, whole_words=reference.whole_words)
    ]
    if not broken:
        return Verdict.correct()
    total = len(reference.instructions)
    score = (total - len(broken)) / total if reference.mode == "share" else 0.0
    return Verdict.wrong(f"{len(broken)} of {total} instructions not followed: {', '.join(broken)}", score=score)


def environment(*, max_characters: int = MAX_CHARACTERS) -> Environment:
    """Create the environment `instructions`, for instructions that programmed rules can check.

    Args:
        max_characters: maximum length of an answer; longer ones are wrong.

    Raises:
        ValueError: the setting is invalid.
    """
    checked_whole("max_characters", max_characters, least=1)
    return Environment(
        name="instructions",
        check=check,
        verify=functools.partial(verify, max_characters=max_characters),
    )
