r"""Verifier for mathematics, which compares the answer's last \boxed{} with a reference.

`math_notation` parses values and `math_comparison` compares them. Anything outside that grammar (sums, integrals,
unknown functions) is passed to math-verify (based on sympy), unless it contains words, since math-verify reads
"5 or six" as 5. Expressions must be fully evaluated: if the answer is 92, 36 + 56 is wrong.
"""

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import checked, checked_whole
from nemo_ext.rl.answers import bare, final_answer, last_boxed, unreadable
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.math_notation import Ambiguous, Node, UnknownNotation, read
from nemo_ext.rl.verifiers.workers import WorkerError, WorkerPool

Format = Literal["boxed", "text", "bare"]
MAX_LENGTH = 500
"""Maximum length in characters of an answer passed to sympy."""
MAX_DEPTH = 40
"""Maximum nesting depth of brackets; the parser's run time grows as a power of it."""
CLOSE_ENOUGH = 1e-4
"""Relative tolerance; numbers that differ by more are unequal, even if math-verify rounds them to the same value."""

_BRACKETS = re.compile(r"\\.|[()\[\]{}]", re.DOTALL)
_REASON = re.compile(r",?\s(?:since|because)\b")
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|operatorname)|(?<![\\A-Za-z])[A-Za-z]{3,}")
_FONTS = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")
_BLANKS = re.compile(r"(?<!\d)\s+|\s+(?!\d)|\$")
_SYMBOL = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_SHARED = re.compile(r"\\(?:gcd|lcm)(?![A-Za-z])")
_SEVERAL = re.compile(r"[(\[]|\\\{|,\s|,\\")
# Spaces around an answer; a box that ends in "\\ " has lost the space.
_SPACE = r"\s|\\[ ,;:!]|~|\\(?:q?quad|enspace|thinspace)(?![A-Za-z])|\\hspace\*?\{[^{}]*\}"
_BEGINS = re.compile(rf"(?:{_SPACE})+")
_ENDS = re.compile(rf"(?:{_SPACE}|\\\\|\\)+\Z")
_FUNCTIONS = "gcd|lcm|GCD|LCM|HCF|max|min|sup|inf|det|dim|deg|rank|Pr|Var|Cov"
# Left side of an equation that names a result: neither a value nor a side of an equation to solve.
_RESULT = re.compile(
    rf"(?:\\(?:{_FUNCTIONS}|lim|sum|prod|i{{0,2}}int|oint)(?![A-Za-z])|(?:{_FUNCTIONS}|[EP])(?=\s*(?:\\left\s*)?[(\[])"
    rf"|\\(?:text|mathrm|operatorname|mathbb|mathbf)\s*\{{\s*(?:{_FUNCTIONS}|[EP])\s*\}}"
    r"|[fghFGHT]\s*\^\s*(?:\{\s*-\s*1\s*\}|-1)\s*\(\s*[A-Za-z]\s*\)\Z|[nN]?[|(](?=.*\\c[au]p)|\\\||\(?\s*[fghFGH]\s*\\circ(?![A-Za-z])|\\frac\s*\{\s*d(?![A-Za-z]))"
    r"(?:(?!\\text|\\mbox).)*",
    re.DOTALL,
)
_EQUALS = re.compile(r"\\.|[(\[{]|[)\]}]|(?<![<>!:=])=(?!=)", re.DOTALL)
_OF_NUMBERS = re.compile(r"\\?(?:[a-z]+\s*\{\s*)?(gcd|lcm)\s*\}?\s*\(([\d\s,]+)\)", re.IGNORECASE)
_PLAIN = re.compile(r"\\(?:text|mathrm|operatorname|mathbb|left|right|mid|[,;: ])|[\s{}\\|]")
_ROUND = str.maketrans("[]", "()")  # E[X] is E(X)
_MODULO = re.compile(
    r"(?:(?P<name>[A-Za-z])\s*\\equiv\s*)?(?P<value>-?\d+(?:\s*(?:,|\\text\s*\{\s*(?:or|and)\s*\})\s*-?\d+)*)"
    r"(?:\s|~|\\[,;: ]|\\q?quad)*(?:\\[pb]?mod\s*\{?|\\text\s*\{\s*mod\s*\}"
    r"|\(\s*(?:\\(?:text|mathrm)\s*\{\s*mod\s*\}|\\?b?mod)(?:\s|\\[,;: ])*)\s*"
    r"(?P<modulus>[1-9]\d*)\s*[})]?"
)
# "k in Z" after an answer with a parameter.
_PARAMETER = re.compile(
    r"(?:\s|[,;(]|\\[,;: ]|\\q?quad|\\text\s*\{\s*(?:where|for|with|for any|for all|for some)?\s*\})*"
    r"(?P<name>[a-z])\s*\\in\s*(?:\\mathbb|\\mathbf|\\Bbb)?\s*\{?\s*\\?(?P<set>[ZN])\s*\}?\s*\)?\Z"
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    r"""Correct answer, and the format of the response's answer.

    Attributes:
        answer: LaTeX, or a number, expression, equation, set, interval, percentage or word in plain text.
        format: where the response's answer is found: `boxed`, its last \boxed{}; `text`, the text after its last
            "answer is" or "Answer:" (or GSM8K's "####"), up to "since" or "because"; `bare`, the whole response, which
            must be one line. With `text` and `bare`, a box is also accepted.
    """

    answer: str
    format: Format = "boxed"


def check(reference: Mapping[str, Any], *, max_length: int = MAX_LENGTH) -> Reference:
    """Parse a task's reference, whose answer is a string or a number.

    Raises:
        ValueError: the reference is invalid; the message names the key and the accepted values.
    """
    answer = reference.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        reference = {**reference, "answer": repr(answer)}
    parsed = checked(Reference, reference, where="reference", strict=True)
    boxed = last_boxed(parsed.answer)
    text = parsed.answer.strip() if boxed is None else boxed
    plain, refused = prepared(text, max_length=max_length)
    if not refused:
        try:
            read(plain, grouped=not _SEVERAL.search(plain))
        except Ambiguous as error:
            refused = str(error)
        except UnknownNotation:
            pass  # math-verify may know it
    if refused:
        raise ValueError(f"reference.answer={parsed.answer[:80]!r} is not a valid expression ({refused}): correct it")
    return Reference(answer=text, format=parsed.format)


def prepared(answer: str, *, max_length: int = MAX_LENGTH) -> tuple[str, str]:
    """Remove an answer's delimiters and full stop: return (answer, ""), or ("", reason) if it is rejected."""
    if len(answer) > max_length:
        return "", f"longer than {max_length} characters"
    for begin, end in _DELIMITERS:
        if len(answer) > len(begin) + len(end) and answer.startswith(begin) and answer.endswith(end):
            answer = answer[len(begin) : -len(end)]
            break
    spaces = _BEGINS.match(answer)
    answer = _ENDS.sub("", answer[spaces.end() if spaces else 0 :])
    if not answer:
        return "", "empty"
    if reason := unreadable(answer):
        return "", reason
    if r"\boxed" in answer:
        return "", "nested boxes"
    deepest, balanced = _nesting(answer)
    if deepest > MAX_DEPTH:
        return "", f"brackets nested deeper than {MAX_DEPTH}"
    if not balanced:
        return "", "unbalanced braces"
    if answer.endswith(".") and not answer.endswith(".."):
        answer = _ENDS.sub("", answer[:-1])
    return answer, ""


def verify(response: Response, reference: Reference, *, pool: WorkerPool, max_length: int = MAX_LENGTH) -> Verdict:
    """Return the verdict `correct` if the response's answer equals the reference's; `error` if comparing fails.

    `pool` is the pool of workers that runs `difference`. Answers of more than `max_length` characters are wrong.
    """
    if not response.answer:
        return Verdict.wrong("no answer")
    extracted = _FIND[reference.format](response.answer)
    if extracted is None:
        return Verdict.wrong(f"no answer in the format {reference.format}")
    answer, refused = prepared(extracted, max_length=max_length)
    shown = extracted[:max_length]
    if refused:
        return Verdict.wrong(refused, shown)
    expected, _ = prepared(reference.answer, max_length=max(max_length, len(reference.answer)))
    if answer == expected:
        return Verdict.correct(shown)
    try:
        reason = pool.call(expected, answer)
    except WorkerError as error:
        return Verdict.error(f"the answer cannot be compared with the reference: {error}", shown)
    return Verdict.wrong(reason, shown) if reason else Verdict.correct(shown)


def verify_twice(response: Response, reference: Reference, *, grader: WorkerPool, **settings: Any) -> Verdict:
    """Variant of `verify` that adds math-verify's own verdict on the whole answer, which papers report.

    The verdict's `more["math_verify"]` is 1 or 0. `grader` is the pool of workers that runs `graded`, and
    `settings` are the arguments of `verify`.
    """
    try:
        equal = bool(response.answer) and grader.call(reference.answer, response.answer)
    except WorkerError:
        equal = False
    return replace(verify(response, reference, **settings), more={"math_verify": float(equal)})


def environment(
    *,
    time_limit: float = 10.0,
    workers: int | None = None,
    max_length: int = MAX_LENGTH,
    memory: int = 4096,
    math_verify: bool = False,
) -> Environment:
    """Create the environment `math`, which compares final answers with a reference.

    Args:
        time_limit: time limit of one comparison, in seconds (10 in NeMo Gym's math_with_judge).
        workers: maximum number of worker processes; if None, one per core, at most eight.
        max_length: maximum length of an answer in characters; longer ones are wrong without being parsed.
        memory: maximum address space of a worker process in MiB.
        math_verify: whether to report math-verify's own verdict on each answer as well; it does not affect the score.

    Raises:
        ValueError: a setting is out of range, or math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("math-verify is not installed: run pip install math-verify")
    checked_whole("max_length", max_length, least=1)
    pool = WorkerPool(f"{__name__}:difference", time_limit=time_limit, workers=workers, memory=memory)
    verifying = functools.partial(verify, pool=pool, max_length=max_length)
    if math_verify:
        grader = WorkerPool(f"{__name__}:graded", time_limit=time_limit, workers=workers, memory=memory)
        verifying = functools.partial(verify_twice, grader=grader, pool=pool, max_length=max_length)
    return Environment(
        name="math",
        check=functools.partial(check, max_length=max_length),
        verify=verifying,
        waits=True,
    )


def prepare() -> None:
    """Import math-verify in a worker, and silence its warnings about unparsable text."""
    import logging

    logging.disable(logging.CRITICAL)
    _equal("1", "\\frac{1}{2}")
    difference("\\sqrt{2}", "1")


def difference(expected: str, answer: str) -> str:
    """Return why an answer is wrong, or "" if it is correct; both arguments come from `prepared`.

    This runs in a worker, since it may take any amount of time and memory.
    """
    from nemo_ext.rl.verifiers import math_comparison

    (wanted_name, expected), (given_name, answer) = map(_without_name, (expected, answer))
    left = _split(answer)[0]
    if wanted_name and wanted_name != given_name and (given_name or len(left) > 1):
        return "different answer"  # f(x) = for f^{-1}(x) =
    if wanted_parameter := _PARAMETER.search(expected):
        given_parameter = _PARAMETER.search(answer)
        if given_parameter and given_parameter["set"] != wanted_parameter["set"]:
            return "different answer"
        expected, answer = (_PARAMETER.sub("", text) for text in (expected, answer))
    if wanted_class := _MODULO.fullmatch(expected):
        if given_class := _MODULO.fullmatch(answer):
            return "" if _residues(wanted_class) == _residues(given_class) else "different answer"
        if wanted_class["name"] and left:
            return "different answer"
        expected = wanted_class["value"]
    if math_comparison.operations(answer) - math_comparison.operations(expected):
        return "not worked out"
    target, _ = _tree(expected, grouped=not _SEVERAL.search(expected))
    readings = [_tree(answer, grouped=grouped) for grouped in (True, False)[: 1 + ("," in answer)]]
    trees = [tree for tree, _ in readings if tree is not None]
    if target is not None and trees:
        reasons = [math_comparison.difference(target, tree) for tree in trees]
        return "" if "" in reasons else reasons[0]
    if target is not None:
        return f"not a value: {readings[0][1]}"
    texts = [_BLANKS.sub("", _FONTS.sub(r"\1", text)) for text in (expected, answer)]
    words = _WORDS.search(expected) or _WORDS.search(answer)
    if texts[0] == texts[1] or (words and texts[0].casefold() == texts[1].casefold()):
        return ""
    if words:
        return "different words"
    symbols, given_symbols = (set(_SYMBOL.findall(text)) for text in (expected, answer))
    if _SHARED.search(expected) and symbols:
        return "different answer"  # sympy's gcd of any two symbols is 1
    if any(symbol.swapcase() in given_symbols - symbols for symbol in symbols - given_symbols):
        return "different answer"  # N and n are one symbol to math-verify
    return "" if _equal(expected, answer) else "different answer"


def graded(expected: str, answer: str) -> bool:
    """Return math-verify's own verdict on a whole answer.

    This runs in a worker, since it may take any amount of time and memory.
    """
    from math_verify import parse, verify

    gold = parse(rf"$\boxed{{{expected}}}$", parsing_timeout=None)
    return bool(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))


def _split(text: str) -> tuple[str, str]:
    """Split an equation into its left side and the rest; return ("", text) for anything else."""
    depth = 0
    for found in _EQUALS.finditer(text):
        depth += (found[0] in "([{") - (found[0] in ")]}")
        if found[0] == "=" and depth == 0:
            return text[: found.start()].strip(), text[found.end() :].strip()
    return "", text


def _without_name(text: str) -> tuple[str, str]:
    """Split off the name of a result, such as P(A|B) or f^{-1}(x), from its value; ("", text) if it has no name."""
    name, rest = _split(text)
    if not rest or not _RESULT.fullmatch(name):
        return "", text
    if numbers := _OF_NUMBERS.fullmatch(name):
        function = math.gcd if numbers[1].lower() == "gcd" else math.lcm
        if str(function(*map(int, numbers[2].replace(",", " ").split()))) != rest:
            return "", text  # the equation is false
    return _PLAIN.sub("", name).translate(_ROUND), _without_name(rest)[1]


def _residues(found: re.Match[str]) -> tuple[int, set[int]]:
    modulus = int(found["modulus"])
    return modulus, {int(number) % modulus for number in re.findall(r"-?\d+", found["value"])}


def _tree(text: str, *, grouped: bool) -> tuple[Node | None, str]:
    """Parse a string; return (tree, ""), or (None, reason). `grouped` says whether "1,234" is one number."""
    try:
        return read(text, grouped=grouped), ""
    except UnknownNotation as error:
        return None, str(error)


def _equal(expected: str, answer: str) -> bool:
    """Return whether math-verify considers two expressions equal and `_apart` finds no difference."""
    from math_verify import LatexExtractionConfig, parse, verify

    gold, parsed = (
        parse(rf"$\boxed{{{text}}}$", [LatexExtractionConfig()], parsing_timeout=None) for text in (expected, answer)
    )
    if r"\lim" in expected and gold and getattr(gold[0], "free_symbols", None):
        return False  # sympy's limit of a_n is a_n, whatever n tends to
    same = bool(gold and parsed) and verify(gold, parsed, timeout_seconds=None)
    return bool(same) and not _apart(gold[0], parsed[0])


def _apart(gold: Any, answer: Any) -> bool:
    """Return whether a parsed answer differs from the parsed reference `gold` although math-verify calls them equal.

    math-verify compares numbers with an absolute tolerance (1e-20 equals 1e-30), simplifies products with infinity, and
    considers any two equations without real solutions equal, even if their unknowns differ.
    """
    from sympy import Expr, nan, oo, zoo
    from sympy.core.relational import Relational

    if isinstance(gold, Relational) and isinstance(answer, Relational):
        return bool(gold.free_symbols != answer.free_symbols)
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return False
    if gold.free_symbols or answer.free_symbols:
        return bool(gold.free_symbols != answer.free_symbols)
    if gold.has(oo, -oo, zoo, nan) or answer.has(oo, -oo, zoo, nan):
        return bool(gold.doit() != answer.doit())
    difference, size = abs((gold - answer).evalf(30)), abs(gold.evalf(30))
    # An exact 0 is computed as about 1e-100.
    return bool(difference.is_finite and size.is_finite and difference > CLOSE_ENOUGH * size + 1e-90)


def _shown_in(text: str | None, *, reasoned: bool) -> str | None:
    r"""Return the contents of the last \boxed{} in a text, or the text itself if it has none; None if `text` is None.

    If `reasoned`, a text without a box is cut at "since" or "because".
    """
    if text is None:
        return None
    if (boxed := last_boxed(text)) is not None:
        return boxed
    return _REASON.split(text, maxsplit=1)[0].strip("*_ ") if reasoned else text


def _nesting(text: str) -> tuple[int, bool]:
    """Return the nesting depth of all kinds of brackets, and whether braces balance; escaped brackets are ignored."""
    deepest = depth = braces = 0
    balanced = True
    for match in _BRACKETS.finditer(text):
        mark = match[0]
        if mark in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in ")]}":
            depth -= 1
        braces += (mark == "{") - (mark == "}")
        balanced = balanced and braces >= 0
    return deepest, balanced and braces == 0


_FIND: Mapping[str, Callable[[str], str | None]] = {
    "boxed": last_boxed,
    "text": lambda text: _shown_in(final_answer(text), reasoned=True),
    "bare": lambda text: _shown_in(bare(text), reasoned=False),
}
