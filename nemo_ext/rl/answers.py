r"""Finds the answer in a response: in \boxed{}, after "the answer is", or among choices. All searches are linear."""

import re
import unicodedata
from collections.abc import Mapping

MAX_CHOICE = 10_000
"""Maximum length in characters of an answer that is compared with the choices."""

# One pass over the tokens that matter; escaped characters are skipped.
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_MARKER = re.compile(
    r"(?:\banswer|\bchoice|\boption(?:[ \t]selected)?)[*_]{0,3}[ \t]*(?::|=|\bis\b)[*_]{0,3}:?"
    # A heading or a line in bold type that holds nothing else.
    r"|^[ \t]*(?:#{1,6}[ \t]*|(?=[*_]{2}))[*_]{0,3}(?:the[ \t]+)?(?:final[ \t]+|correct[ \t]+)?answer[*_#: \t]*$"
    # GSM8K's marker, as opposed to a heading: words above a text, words with numbers or a colon, or a section number.
    r"|(?<!#)####(?!#)(?![*_ \t]*(?:[a-z][a-z'\u2019]+[a-z \t*_]*(?:\n|[^a-z \t*_\n])|\d+[*_]*[.):][*_]*[ \t]+[a-z]))",
    re.IGNORECASE | re.MULTILINE,
)
_FENCE = re.compile(
    r"(?P<indent>\s*(?:(?:[-*+]|\d{1,9}[.)])\s+)*)(?P<mark>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)[^`]*$"
)
_WRAPPERS = ("text", "textbf", "textit", "mathrm", "mathbf", "mathit", "mbox", "rm", "bf")
_WRAPPED = re.compile(rf"\\(?:{'|'.join(_WRAPPERS)})\s*\{{([^{{}}]*)\}}")
_PAIRS = {"(": ")", "[": "]", "{": "}", "$": "$", '"': '"', "`": "`"}
_SPACES = re.compile(r"\\[ ,;]|~")
_OPTION = re.compile(r"(?:the\s+)?(?:option|choice)\s+", re.IGNORECASE)
_STOP = re.compile(r"\.\s+")
_LINKING = {"or", "and", "also", "maybe", "perhaps", "possibly", "either", "both", "no", "wait", "actually", "rather"}
_LINKING |= {"option", "choice", "alternatively", "alternative", "correction", "hmm", "else", "on", "second", "thought"}
_REASONED = re.compile(r"[(\[*_]*([A-Za-z])[)\]*_]*,?\s+(?:because|since)\b.*", re.DOTALL)
_DASH = r"\s+[\-\u2013\u2014](?=\s)"
_MARKED = re.compile(rf"(?:\(([A-Za-z])\)|([A-Za-z])(?:[.)]|{_DASH}))\s*(\S.*)", re.DOTALL)
_LETTERED = re.compile(rf"[(\[]?([A-Za-z])[)\]]?(?:[.:,\-\u2013]|{_DASH})?\s+(\S.*)|([A-Za-z])[).:](\S.*)", re.DOTALL)
# Explanation that may follow the text of a choice; without one, "12 million" would match 12.
_EXPLANATION = re.compile(
    r"(?:[,;:]?\s+(?:is|are|was|were|has|have|had|can|does|because|since|as|which|it)\b"
    r"|\s*[,;:(\-\u2013\u2014]\s*[^\W\d_]{2,}).*",
    re.DOTALL,
)
_DENIED = re.compile(r"\b(?:no|not|nor|never|neither|wrong|incorrect|false|unlike|except|or|but)\b|n['\u2019]t\b")


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Return the spans (begin, end) of the contents of all \boxed{}, sorted by end, so inner boxes come first.

    Braces must balance, except for escaped ones (`\{`); an unclosed box is ignored.
    """
    spans, open_braces = [], []
    for token in _BRACES.finditer(text):
        mark = token.group()
        if mark.startswith(r"\boxed"):
            open_braces.append(token.end())
        elif mark == "{":
            open_braces.append(-1)
        elif mark == "}" and open_braces:
            begin = open_braces.pop()
            if begin >= 0:
                spans.append((begin, token.start()))
    return spans


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last \boxed{}, including any inner boxes; None if there is no box."""
    spans = boxes(text)
    return text[slice(*spans[-1])].strip() if spans else None


def final_line(text: str) -> str | None:
    """Return the rest of the line after the last "answer is", "Answer:", "Choice:", "Option selected:" or "####".

    None if there is no such phrase or nothing follows it.
    """
    final = final_text(text)
    return final and _trimmed(final.split("\n", 1)[0])


def final_text(text: str) -> str | None:
    """Return everything after the phrase that `final_line` looks for; None if there is no phrase or no text."""
    text, end = text.strip(), None
    for marker in _MARKER.finditer(text):
        end = marker.end()
    return None if end is None else text[end:].strip() or None


def final_answer(text: str) -> str | None:
    """Return the first sentence of `final_line`; None if there is none."""
    line = final_line(text)
    return line and _trimmed(line.split(". ", 1)[0])


def bare(text: str) -> str | None:
    """Return the text without surrounding emphasis and final full stop; None if it is empty or has several lines."""
    stripped = _trimmed(text)
    return stripped if stripped and "\n" not in stripped else None


def unreadable(text: str) -> str | None:
    """Return why a string cannot be an answer written by a person; None if it can.

    Rejects control characters, lone surrogates, and digits other than 0 to 9, which Python would parse as numbers.
    """
    if text.isascii() and text.isprintable():
        return None
    for character in text:
        kind = unicodedata.category(character)
        if kind == "Nd" and not character.isascii():
            return "digits other than 0 to 9"
        if kind in ("Cc", "Cf", "Cs", "Co", "Cn") and character not in "\t\n\r":
            return "characters that cannot be read"
    return None


def fences(text: str) -> list[tuple[str, str, int, int]]:
    """Return the closed code blocks in Markdown: language, contents, and numbers of the first and last line, from 0.

    A block ends at a line with at least as many fence characters as its first line. If the block is inside a list, its
    indentation is removed from the contents.
    """
    blocks: list[tuple[str, str, int, int]] = []
    lines = text.split("\n")
    opened: re.Match[str] | None = None
    begin = 0
    for number, line in enumerate(lines):
        mark = line.strip()
        if opened is None:
            opened, begin = _FENCE.match(line), number
        elif mark.startswith(opened["mark"]) and not mark.strip(mark[0]):
            indent = len(opened["indent"])
            inner = [line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines[begin + 1 : number]]
            blocks.append((opened["language"].lower(), "\n".join(inner), begin, number))
            opened = None
    return blocks


def named_choices(text: str, choices: Mapping[str, str | None]) -> set[str]:
    """Return the letters of all choices that an answer names by letter, by text or by both ("B. Paris").

    Args:
        text: the answer without its context, such as the contents of a box or the text after "Answer:".
        choices: mapping from letters to the choices' texts; None for an unknown text.
    """
    if len(text) > MAX_CHOICE:
        return set()
    inner = _unwrap(text)
    # A single upper-case letter names its choice, whatever the choices' texts are.
    if len(inner) == 1 and inner in choices:
        return {inner}
    named = _by_text(text, choices)
    if not named and (option := _OPTION.match(inner)):
        inner = _unwrap(inner[option.end() :])
    if len(inner) == 1 and inner.isascii() and inner.upper() in choices:
        return named | {inner.upper()}
    if named:
        return named
    if reasoned := _REASONED.fullmatch(inner):
        return {reasoned[1].upper()} & set(choices)
    if lettered := _LETTERED.fullmatch(inner):
        letter, rest = (lettered[1] or lettered[3]).upper(), lettered[2] or lettered[4]
        described = _by_text(rest, choices)
        if letter in choices and (described or _explains(rest, letter, choices)):
            return {letter} | described
    if (marked := _MARKED.fullmatch(inner)) and choices.get(letter := (marked[1] or marked[2]).upper(), "") is None:
        # "(A) or (B)" names none, and neither does "B. A dog", which looks the same.
        also = {word.upper() for word in re.findall(r"\b[A-Za-z]\b", marked[3])} & set(choices)
        return {letter} if also <= {letter} else set()
    return set()


def named_in_sentences(text: str, choices: Mapping[str, str | None]) -> set[str]:
    """Return the letters of all choices that an answer of one or more sentences names.

    "B. It is large" names one; "B. A", "B. Rome" and "B. Or maybe C" name two. A letter among other words in a later
    sentence names none, because "C is colder" may argue for or against C.
    """
    line, *below = text.split("\n")
    first, *others = _STOP.split(line)
    named = named_choices(line, choices)
    if not named or _REASONED.fullmatch(_unwrap(line)):
        named |= named_choices(first, choices)
        below += others
    texts = {normal(_unwrap(choice)): letter for letter, choice in choices.items() if choice}
    for sentence in below:
        if len(sentence) > MAX_CHOICE:
            continue
        if letter := texts.get(normal(_unwrap(sentence))):
            named.add(letter)
            continue
        letters = {word.upper() for word in re.findall(r"\w+", sentence) if word.casefold() not in _LINKING}
        named |= letters if letters <= set(choices) else set()
    return named


def normal(text: str) -> str:
    """Normalise a choice for comparison: ignore letter case, LaTeX fonts, white space and a final full stop."""
    return " ".join(_SPACES.sub(" ", _WRAPPED.sub(r"\1", text)).casefold().split()).removesuffix(".").strip()


def _by_text(text: str, choices: Mapping[str, str | None]) -> set[str]:
    """Return the letters of all choices whose text equals `text` after `normal`.

    If there are none, both are also stripped of font commands, brackets and punctuation (`_unwrap`) and compared again.
    """
    for form in (normal, lambda text: normal(_unwrap(text))):
        sought = form(text)
        named = {
            letter for letter, choice in choices.items() if choice is not None and sought and form(choice) == sought
        }
        if named:
            return named
    return set()


def _explains(text: str, letter: str, choices: Mapping[str, str | None]) -> bool:
    """Return whether `text` is the choice `letter` plus an explanation ("Paris is the capital").

    A negation in the explanation, or another choice, makes it False.
    """
    whole, choice = normal(text), normal(choices[letter] or "")
    rest = whole.removeprefix(choice)
    others = [normal(text or "") for other, text in choices.items() if other != letter]
    return (
        bool(choice and rest != whole and _EXPLANATION.fullmatch(rest) and not _DENIED.search(rest))
        and not set(re.findall(r"\b[A-Z]\b", text)) & set(choices) - {letter, "A"}
        and not any(re.search(rf"(?<!\w){re.escape(other)}(?!\w)", rest) for other in others if other)
        and not any(len(other) > len(choice) and whole.startswith(other) for other in others)
    )


def _trimmed(text: str) -> str | None:
    """Return the text without surrounding emphasis and final full stop; None if nothing is left."""
    return text.strip().strip("*_").strip().removesuffix(".").strip().strip("*_").strip() or None


def _unwrap(text: str) -> str:
    """Return the text without surrounding font commands, brackets and punctuation."""
    inner = _SPACES.sub(" ", _WRAPPED.sub(r"\1", text)).strip()
    while inner:
        before = inner
        inner = inner.strip("*_ \t\r\n").removesuffix(".").removesuffix(":").strip()
        if inner.endswith((")", "]")) and not {"(", "["} & set(inner):
            inner = inner[:-1]
        elif len(inner) > 1 and _PAIRS.get(inner[0]) == inner[-1] and inner[0] not in inner[1:-1]:
            inner = inner[1:-1].strip()
        elif inner.startswith("{{") and inner.endswith("}}"):
            inner = inner[1:-1]
        if inner == before:
            break
    return inner
