r"""Mathematics: the answer's last \boxed{} compared with a reference by math-verify (based on sympy).

math-verify compares; its inputs are prepared here, since it reads too much into some texts: "4 2" as a sum, the words
in \text{} as a unit, numbers nearer to each other than 1e-15 as equal, however small they are. It also evaluates any
expression, which is left to the model here: where 92 is the answer, 36 + 56 is wrong.
"""

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import checked, checked_whole
from nemo_ext.rl.answers import bare, final_answer, last_boxed, unreadable
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.workers import WorkerError, WorkerPool

Format = Literal["boxed", "text", "bare"]
MAX_LENGTH = 500
"""Maximum length in characters of an answer passed to sympy."""
MAX_DEPTH = 40
"""Maximum nesting depth of brackets; the parser's time grows as a power of it."""
CLOSE_ENOUGH = 1e-4
"""Relative tolerance: numbers that differ by more are not equal, whatever math-verify's rounding says."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?:\{,\}|\\[,! ]|,|~| )[0-9]{3})+(?![0-9])")
_SPACED = re.compile(r"[0-9](?:\s|\\[,;:! ]|~)+[0-9]")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z0-9.\\])([0-9]{1,40}(?:\.[0-9]{1,40})?)[eE]([+-]?[0-9]{1,6})(?![A-Za-z0-9.])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_BRACKETS = re.compile(r"\\.|[()\[\]{}]", re.DOTALL)
_TAKES_DIGITS = re.compile(r"\\[dtc]?frac\s|\\[dt]?binom\s|\\begin")
_DEGREES = re.compile(r"\^?\s*(?:\\degree(?![A-Za-z])|°)")
_INFINITY = re.compile(r"∞|(?<![\\A-Za-z])infinity(?![A-Za-z])")
_MIXED = re.compile(r"(?<![0-9.,/^_{}])([0-9]{1,20}) ([0-9]{1,20})/([0-9]{1,20})(?![0-9./])")
# With several units, math-verify drops everything between the first and the last.
_UNIT_IN_TEXT = re.compile(
    r"([0-9]\}*)(?:\s|\\[ ,;])*\\(?:text|mathrm)\s*\{(?!\s*(?:and|or)\b)[^{}0-9%]*\}(?:\^[23]|\^\{[23]\})?"
    r"(?=\s*(?:[,;)\]]|\\\}|\\text|$))"
)
_AND_IN_TEXT = re.compile(r"\\text\s*\{[^{}0-9]*\b(?:and|or)\s*\}")
# Units that math-verify does not know; it drops the others itself.
_UNIT = re.compile(
    r"(?<=[0-9])\s*(?:[kcdm]m(?:\^[23]|\^\{[23]\})|dollars?|euros?|(?<=\s)(?:[kc]?m|mi)/(?:h|min|s))\s*$"
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))

# A value in plain notation: a number, fraction, mixed or scientific number, with a unit, or a name.
_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_VALUE = re.compile(
    rf"(?:[+-]|\\pm|\\mp)?\s*(?:(?:{_NUMBER}\s*\\times\s*)?10\s*\^\s*[+-]?[0-9]+"
    rf"|(?:[0-9]+ +)?[+-]?{_NUMBER}\s*[/:]\s*{_NUMBER}|{_NUMBER}(?:_\w+)?)"
    r"\s*(?:%|\^\s*\\circ\s*[CF]?)?\s*(?:[cdghlmst]|[A-Za-z][A-Za-z /]+)?(?:(?<=[A-Za-z])\^-?[0-9])?"
    r"|[+-]?(?:[A-Za-z\s'_]|\\(?:infty|emptyset|varnothing|pi|mathbb)(?![A-Za-z]))*"
)
_BETWEEN = re.compile(
    r"[,<>≤≥≠≈∈∪&]|\\(?:in|cup|leq?|geq?|lt|gt|neq?|approx|q?quad)(?![A-Za-z])"
    r"|\\(?:begin|end)\{[pb]?matrix\}"
)
_FRACTION = re.compile(r"[0-9]\s*[/:]\s*[0-9.]")
_OPERATOR = re.compile(
    r"\\(?:sum|prod|i{0,2}int|lim|[dt]?binom|choose|gcd|det)(?![A-Za-z])|\\d?frac\{d\}|\\begin\{vmatrix\}|(?<!\\)!(?!=)"
)
_WORDS = re.compile(r"[A-Za-z ]*[A-Za-z] *[A-Za-z][A-Za-z ]*")
_REASON = re.compile(r",?\s(?:since|because)\b")
_SYMBOL = re.compile(r"[0-9][A-Za-z]|[0-9] +[A-Za-z](?![A-Za-z/])")
_BASE = re.compile(r"(?<=[0-9])_(\w+)")
# Simplifications of the notation of values, applied in this order.
_FLAT = (
    (_TEXT, r"\1"),
    (re.compile(r"\\\\|;|\b(?:and|or)\b|\\(?:lor|vee)(?![A-Za-z])"), ","),
    (re.compile(r"\\(?:(?:left|right|displaystyle)(?![A-Za-z])|[,:! $])|[$~]"), " "),
    (re.compile(r"\\([{}%])"), r"\1"),
    (re.compile(r"\\(?:cdot|ast)(?![A-Za-z])|\*|×|·"), r"\\times "),
    (re.compile(r"−"), "-"),
    (
        re.compile(rf"\\[dtc]?frac\s*(?:\{{\s*([+-]?{_NUMBER})\s*\}}|([0-9]))\s*(?:\{{\s*({_NUMBER})\s*\}}|([0-9]))"),
        r" \1\2/\3\4 ",
    ),
    (re.compile(r"([_^])\s*\{\s*([^{}]*?)\s*\}"), r"\1\2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    r"""Correct answer, and the format of the response's answer.

    Attributes:
        answer: LaTeX, or a number, expression, equation, set, interval, percentage or word in plain text.
        format: place of the response's answer: `boxed`, its last \boxed{}; `text`, the text after its last "answer is"
            or "Answer:" (or GSM8K's "####"), up to "since" or "because"; `bare`, the whole response, one line. A box
            counts in these, too.
    """

    answer: str
    format: Format = "boxed"


def check(reference: Mapping[str, Any], *, max_length: int = MAX_LENGTH) -> Reference:
    """Parse a task's reference, whose answer may be a number.

    Raises:
        ValueError: naming the key, what it holds and what it may hold.
    """
    answer = reference.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        reference = {**reference, "answer": repr(answer)}
    made = checked(Reference, reference, where="reference", strict=True)
    boxed = last_boxed(made.answer)
    text = made.answer.strip() if boxed is None else boxed
    _, refused = prepared(text, max_length=max_length)
    if refused:
        raise ValueError(f"reference.answer={made.answer[:80]!r}: expected an expression: {refused}")
    return Reference(answer=text, format=made.format)


def prepared(answer: str, *, max_length: int = MAX_LENGTH) -> tuple[str, str]:
    """Answer prepared for math-verify, or the reason why it is refused: (answer, "") or ("", reason)."""
    if len(answer) > max_length:
        return "", f"longer than {max_length} characters"
    for begin, end in _DELIMITERS:
        if len(answer) > len(begin) + len(end) and answer.startswith(begin) and answer.endswith(end):
            answer = answer[len(begin) : -len(end)]
            break
    answer = _INFINITY.sub(r"\\infty ", _DEGREES.sub(r"^\\circ ", re.sub("~(?!=)", " ", answer))).strip()
    if not answer:
        return "", "empty"
    if reason := unreadable(answer):
        return "", reason
    if r"\boxed" in answer:
        return "", "a box in a box"
    deepest, balanced = _nesting(answer)
    if deepest > MAX_DEPTH:
        return "", f"brackets nested deeper than {MAX_DEPTH}"
    if not balanced:
        return "", "braces that do not balance"
    if answer.endswith(".") and not answer.endswith(".."):
        answer = answer[:-1].rstrip()
    answer = _THOUSANDS.sub(_joined, answer)
    answer = _MIXED.sub(lambda found: _mixed(*found.groups()), answer)
    if _SPACED.search(answer) and not _TAKES_DIGITS.search(answer):
        return "", "numbers side by side"
    around = _TEXT.sub("", answer).strip()
    if around and any(any(map(str.isdigit, found[1])) for found in _TEXT.finditer(answer)):
        return "", "numbers in words beside others"  # "5 \text{ or 6}"
    answer = _AND_IN_TEXT.sub(r"\\text{ and }", _UNIT_IN_TEXT.sub(r"\1", _UNIT.sub("", answer)))
    return _SCIENTIFIC.sub(r"\1\\times 10^{\2}", answer), ""


def verify(response: Response, reference: Reference, *, pool: WorkerPool, max_length: int = MAX_LENGTH) -> Verdict:
    """Correct if the response's answer equals the reference's; `error` if that takes longer than the time limit."""
    if not response.answer:
        return Verdict.wrong("no answer")
    found = _FIND[reference.format](response.answer)
    if found is None:
        return Verdict.wrong(f"no answer in the format {reference.format}")
    answer, refused = prepared(found, max_length=max_length)
    shown = found[:max_length]
    if refused:
        return Verdict.wrong(refused, shown)
    expected, _ = prepared(reference.answer, max_length=max(max_length, len(reference.answer)))
    if answer == expected:
        return Verdict.correct(shown)
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(expected):
        return Verdict.correct(shown) if int(answer) == int(expected) else Verdict.wrong("another answer", shown)
    if reason := _refused(expected, answer):
        return Verdict.wrong(reason, shown)
    try:
        equal = pool.call(*_ordered(expected, answer))
    except WorkerError as error:
        return Verdict.error(str(error), shown)
    return Verdict.correct(shown) if equal else Verdict.wrong("another answer", shown)


def environment(
    *, time_limit: float = 10.0, workers: int | None = None, max_length: int = MAX_LENGTH, memory: int = 4096
) -> Environment:
    """The environment `math`.

    Args:
        time_limit: seconds for one comparison (NeMo Gym's math_with_judge: 10).
        workers: maximum number of worker processes; None for one per core, eight at most.
        max_length: maximum length of an answer in characters; longer ones are wrong without being parsed.
        memory: address space of a worker, in MiB.

    Raises:
        ValueError: a setting out of range, or math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("the environment math needs math-verify: pip install math-verify")
    checked_whole("max_length", max_length, least=1)
    pool = WorkerPool(f"{__name__}:equal", time_limit=time_limit, workers=workers, memory=memory)
    return Environment(
        name="math",
        check=functools.partial(check, max_length=max_length),
        verify=functools.partial(verify, pool=pool, max_length=max_length),
        waits=True,
    )


def prepare() -> None:
    """In a worker: import math-verify and silence its log of what it cannot parse."""
    import logging

    logging.disable(logging.CRITICAL)
    equal("1", "\\frac{1}{2}")


def equal(expected: str, answer: str) -> bool:
    """In a worker: True if math-verify takes two prepared answers for equal; may take any time and memory."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as same
    from sympy import Expr

    def read(text: str) -> list[Any]:
        # math-verify recognizes a percentage by the sign after the formula.
        percent = re.fullmatch(r"(.*?)\s*\\?%", text, re.DOTALL)
        formula = rf"$\boxed{{{text}}}$" if percent is None else f"${percent[1]}$%"
        return parse(formula, [LatexExtractionConfig()], parsing_timeout=None)

    gold, found = read(expected), read(answer)
    for part in _split(answer, ","):
        numbers = [made[0] for member in _split(part, "=") if "_" not in member and (made := read(member))]
        numbers = [number for number in numbers if isinstance(number, Expr) and number.is_number]
        if any(not same(numbers[-1], number, timeout_seconds=None) for number in numbers[:-1]):
            return False  # 4 = 5
    if not same(gold, found, timeout_seconds=None):
        return False
    one_percent = expected.endswith("%") != answer.endswith("%")
    return one_percent or not (gold and found and _apart(gold[0], found[0]))


def _apart(gold: Any, found: Any) -> bool:
    """True if two parsed answers that math-verify takes for equal are not.

    It rounds differences of numbers absolutely (1e-20 and 1e-30 are equal to it), simplifies products with infinity,
    and takes two equations without real solutions for equal, even in different unknowns.
    """
    from sympy import Expr, nan, oo, zoo
    from sympy.core.relational import Relational

    if isinstance(gold, Relational) and isinstance(found, Relational):
        return bool(gold.free_symbols != found.free_symbols)
    if not isinstance(gold, Expr) or not isinstance(found, Expr) or gold.free_symbols or found.free_symbols:
        return False
    if gold.has(oo, -oo, zoo, nan) or found.has(oo, -oo, zoo, nan):
        return bool(gold.doit() != found.doit())
    difference, size = abs((gold - found).evalf(30)), abs(gold.evalf(30))
    # What is left of an exact 0 is some 1e-100.
    return bool(difference.is_finite and size.is_finite and difference > CLOSE_ENOUGH * size + 1e-90)


def _refused(expected: str, answer: str) -> str:
    """Reason why an answer is wrong even if math-verify took it for equal; "" if math-verify is to decide."""
    wanted, given = _flat(expected), _flat(answer)
    if _literal(wanted) and not _SYMBOL.search(wanted):
        whole = not re.search(r"[0-9]\s*[/:.^]|\.[0-9]|%", wanted)
        if not _literal(given) or (whole and _FRACTION.search(given)):
            return "not worked out"
    elif set(_OPERATOR.findall(answer)) - set(_OPERATOR.findall(expected)):
        return "not worked out"
    # Letters would be multiplied: BAC would equal ABC.
    if (
        _WORDS.fullmatch(wanted)
        and "".join(wanted.split()).casefold() != "".join(given.split("=")[-1].split()).casefold()
    ):
        return "another answer"
    if set(_BASE.findall(given)) - set(_BASE.findall(wanted)):
        return "another base"
    if {_listed(wanted), _listed(given)} in ({"{", "("}, {"{", "["}):
        return "a set for a tuple or interval, or the reverse"
    return ""


def _literal(flat: str) -> bool:
    """True for numbers, and tuples, sets, intervals and inequalities of them, optionally after "x ="."""
    pieces = [piece for part in _split(flat, ",") for piece in _BETWEEN.split(_last(_split(part, "=")))]
    values = [_last(piece.split("=")).strip(" ()[]{}") for piece in pieces]
    return _digits(flat) and all(map(_VALUE.fullmatch, values))


def _last(members: Sequence[str]) -> str:
    """Last member of a chain of equations that has a digit; else the last."""
    return next(filter(_digits, reversed(members)), members[-1])


def _digits(text: str) -> bool:
    return any(map(str.isdigit, text))


def _flat(text: str) -> str:
    """Text without fonts, with fractions as a/b."""
    for pattern, replacement in _FLAT:
        text = pattern.sub(replacement, text)
    return text.strip()


def _listed(flat: str) -> str:
    """Opening bracket around a list of values; "" if there is none."""
    values = flat.split("=")[-1].rpartition(r"\in ")[2].strip()
    return values[0] if values[:1] in tuple("({[") and "," in values and len(_split(values, ",")) == 1 else ""


def _ordered(expected: str, answer: str) -> tuple[str, str]:
    """Both texts, with "x = 2, y = 3" as the tuple (2, 3) where the other names no variables."""
    wanted, given = _assigned(expected), _assigned(answer)
    if wanted and not given and "=" not in answer:
        return wanted, answer if _listed(_flat(answer)) else f"({answer})"
    return expected, given if given and not wanted and _listed(_flat(expected)) == "(" else answer


def _assigned(text: str) -> str:
    """Values of "y = 3, x = 2" as a tuple: x, y and z in this order, other names as they come; "" for other texts."""
    pairs = [_split(part, "=") for part in _split(text, ",")]
    names = [pair[0].strip() for pair in pairs]
    if len(pairs) < 2 or any(len(pair) != 2 for pair in pairs) or len(set(names)) < len(names):
        return ""
    if set(names) <= set("xyz"):
        pairs.sort(key=lambda pair: pair[0].strip())
    return f"({', '.join(pair[1] for pair in pairs)})"


def _split(text: str, separator: str) -> list[str]:
    """Split a text at separators outside of brackets."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == separator and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _mixed(whole: str, above: str, below: str) -> str:
    """Mixed number in LaTeX; unchanged if it is not one: 4 2/1."""
    return rf"{whole}\frac{{{above}}}{{{below}}}" if int(above) < int(below) else f"{whole} {above}/{below}"


def _shown_in(text: str | None, *, reasoned: bool) -> str | None:
    """Contents of the last box in a phrase; without a box, the phrase, up to its reason if it may have one."""
    if text is None:
        return None
    if (boxed := last_boxed(text)) is not None:
        return boxed
    return _REASON.split(text, maxsplit=1)[0].strip("*_ ") if reasoned else text


def _nesting(text: str) -> tuple[int, bool]:
    """Nesting depth of all kinds of brackets, and whether the braces balance, escaped ones aside."""
    deepest = depth = braces = 0
    balanced = True
    for found in _BRACKETS.finditer(text):
        mark = found[0]
        if mark in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in ")]}":
            depth -= 1
        braces += (mark == "{") - (mark == "}")
        balanced = balanced and braces >= 0
    return deepest, balanced and braces == 0


def _joined(found: re.Match[str]) -> str:
    """Digits of a grouped number. A comma alone is left to math-verify: 1,234 may be a number and a list of two."""
    commas = found[0].replace("{,}", "").replace("\\,", "").count(",")
    return found[0] if commas else "".join(filter(str.isdigit, found[0]))


_FIND: Mapping[str, Callable[[str], str | None]] = {
    "boxed": last_boxed,
    "text": lambda text: _shown_in(final_answer(text), reasoned=True),
    "bare": lambda text: _shown_in(bare(text), reasoned=False),
}
