"""Rules that the verifier `instructions` checks, under their published ids: IFEval's 25, and 29 from NeMo Gym's server.

IFEval: Zhou et al. 2023, arXiv:2311.07911. The others are the training constraints of Pyatkin et al. 2025 (IFBench), as
in the library of Gym's instruction_following server. They are reimplemented because the published code (lm-eval, and
Gym's library, which is not on any package index) downloads NLTK data at run time, raises on some answers, and takes
quadratic time on others.

These rules are stricter than the published checks only where doing nothing would be rewarded; `docs/rl/tools.md` lists
the differences. All take time linear in the answer's length. Keywords are plain strings, never patterns.
"""

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, create_model

from nemo_ext.job.settings import STRICT, Count, Whole

MOST_WORDS = 30
"""Maximum number of words in a phrase to be repeated."""
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
# Languages of IFEval's data, and others that py3langid distinguishes.
LANGUAGES = (
    *("ar", "bg", "bn", "cs", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr", "gu", "he", "hi", "hr", "hu", "id"),
    *("it", "ja", "kn", "ko", "lt", "lv", "mk", "ml", "mr", "ne", "nl", "no", "pa", "pl", "pt", "ro", "ru", "sk", "sl"),
    *("sq", "sv", "sw", "ta", "te", "th", "tl", "tr", "uk", "ur", "vi", "zh"),
)
_LANGUAGE_CHARACTERS = 5000

_WORD = re.compile(r"\w+(?:[-'’]\w+)*")
# Possessive quantifiers: each run of marks is scanned once, without backtracking.
_SENTENCE_END = re.compile(r"(?<![.!?。！？])([.!?。！？]++)[\"'”’)\]*]*+(?=\s|$)")
_PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n")
_LOWERCASE = re.compile(r"\s*[^\W\d_A-Z]")
# Abbreviations with a full stop: before names, before numbers, and anywhere unless a capital letter follows.
_ABBREVIATIONS = frozenset(
    [
        *("mr", "mrs", "ms", "mx", "dr", "st", "prof", "capt", "lt", "col", "gen", "sgt", "rev", "hon", "gov", "sen"),
        *("jr", "sr", "inc", "ltd", "co", "corp", "vs", "cf", "al", "approx", "dept", "est", "mt", "ft", "messrs"),
    ]
)
_BEFORE_NUMBERS = frozenset(("no", "nos", "fig", "figs", "vol", "p", "pp", "eq", "ch", "sec", "art", "ca", "c"))
_BEFORE_LOWERCASE = frozenset(("etc", "a.m", "p.m", "b.c", "a.d", "ph.d", "m.d", "b.a", "m.a", "b.sc", "m.sc"))
# Several initials ("U.S", "e.g"), and the number or letter of a list item at the start of a line.
_INITIALS = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")
_ITEM = re.compile(r"[\s\-*+>#(\[]*(?:\d{1,3}|[^\W\d_]|[ivx]{1,4})")


def _phrase(text: str) -> str:
    # The check takes time proportional to the answer's length times this.
    if 3 <= len(words(text)) <= MOST_WORDS:
        return text
    raise ValueError(f"phrase must have 3 to {MOST_WORDS} words, not {text!r}")


Text = Annotated[str, Field(pattern=r"\S")]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]
Relation = Literal["less than", "at least"]
_KINDS: Mapping[Any, str] = {
    Whole: "frequency let_frequency capital_frequency num_sentences num_words num_placeholders num_bullets "
    "num_highlights n_start N",
    Count: "num_paragraphs nth_paragraph num_sections small_n n_end n_sent n_words n m",
    Text: "keyword keyword1 keyword2 first_word last_word postscript_marker section_spliter prompt_to_repeat "
    "end_phrase",
    Texts: "keywords forbidden_words",
    Relation: "relation let_relation capital_relation",
    Annotated[str, Field(min_length=1, max_length=1)]: "letter",
    Annotated[str, AfterValidator(_phrase)]: "phrase",
    Literal[LANGUAGES]: "language",
}
PARAMETERS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""Mapping from the published names of the rules' parameters to their types."""


@dataclass(frozen=True)
class Rule:
    """A rule that an answer is checked against.

    Attributes:
        says: instruction for a prompt, as a format string with the parameters.
        follows: function of an answer and the parameters that returns whether the answer follows the rule. If it has a
            parameter `count`, it receives the function that counts keywords.
        ignored: parameters that occur in data but are not used by the rule.
        kinds: types of the parameters that differ from `PARAMETERS`.
    """

    says: str
    follows: Callable[..., bool]
    ignored: tuple[str, ...] = ()
    kinds: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> type[BaseModel]:
        """Pydantic model of the rule's parameters, all required."""
        names = [name for name in inspect.signature(self.follows).parameters if name != "count"][1:]
        fields: dict[str, Any] = {name: ({**PARAMETERS, **self.kinds}[name], ...) for name in names}
        return create_model("kwargs", __config__=STRICT, **fields)

    def is_followed(self, answer: str, parameters: Mapping[str, Any], *, whole_words: bool) -> bool:
        """Return whether an answer follows the rule; with `whole_words`, keywords inside words are not counted."""
        if "count" in inspect.signature(self.follows).parameters:
            return self.follows(answer, **parameters, count=count_words if whole_words else count_texts)
        return self.follows(answer, **parameters)


def words(text: str) -> list[str]:
    """Return the words of a text; hyphens and apostrophes join words."""
    return _WORD.findall(text)


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, which are separated by blank lines."""
    return [part for part in _PARAGRAPH_END.split(text) if part.strip()]


def sentences(text: str) -> list[str]:
    """Split a text into sentences at end punctuation and blank lines, but not at abbreviations or item numbers."""
    parts = []
    for block in _PARAGRAPH_END.split(text):
        start = 0
        for end in _SENTENCE_END.finditer(block):
            if end[1] == "." and _continues(block, end.start(), end.end()):
                continue
            parts.append(block[start : end.end()].strip())
            start = end.end()
        parts.append(block[start:].strip())
    return [sentence for sentence in parts if re.search(r"\w", sentence)]


def _continues(text: str, stop: int, at: int) -> bool:
    """Return whether the full stop at index `stop` does not end a sentence; the text after it starts at index `at`."""
    before = text[max(0, stop - 20) : stop]
    line = before.rpartition("\n")[2]
    if (line != before or stop <= 20) and _ITEM.fullmatch(line):
        return bool(re.match(r"[^\S\n]+\S", text[at : at + 20]))
    last = (before.split()[-1:] or [""])[0].lstrip("(\"'*_[\u201c\u2018")
    word = last.casefold()
    if word in _BEFORE_NUMBERS:
        return text[at : at + 20].lstrip()[:1].isdigit()
    if word in _BEFORE_LOWERCASE:
        return _LOWERCASE.match(text, at) is not None
    initial = len(last) == 1 and last.isupper() and last != "I"
    return word in _ABBREVIATIONS or word == "p.s" or initial or _INITIALS.fullmatch(last) is not None


def language_of(text: str) -> str:
    """Return the ISO 639-1 code of a text's language, as detected by py3langid; "" if the text has no letters."""
    plain = text[:_LANGUAGE_CHARACTERS].lower()
    if not any(map(str.isalpha, plain)):
        return ""
    return str(_identifier().classify(plain)[0])


@lru_cache(maxsize=1)
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(list(LANGUAGES))
    return identifier


def _compare(number: int, relation: str, limit: int) -> bool:
    return number < limit if relation == "less than" else number >= limit


def count_texts(text: str, keyword: str) -> int:
    """Count how often a keyword occurs, also inside words, as the published checks do."""
    return text.casefold().count(keyword.casefold())


def count_words(text: str, keyword: str) -> int:
    """Count how often a keyword occurs as a whole word."""
    return len(_whole_word(keyword).findall(text))


def _whole_word(keyword: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(keyword)}(?!\w)", re.IGNORECASE)


def _same(one: str, other: str) -> bool:
    return one.strip().casefold() == other.strip().casefold()


def _parts(text: str, divider: str) -> list[str] | None:
    """Return the non-empty parts of a text between dividers; None if a part other than the first or last is empty."""
    parts = [part.strip() for part in text.split(divider)]
    if not all(parts[1:-1]):
        return None
    return [part for part in parts if part]


def _has_parts(text: str, divider: str, number: int) -> bool:
    parts = _parts(text, divider)
    return parts is not None and len(parts) == number


def _paragraph_first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = paragraphs(answer)
    if len(parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    found = words(parts[nth_paragraph - 1])
    return bool(found) and _same(found[0], first_word)


def _postscript(answer: str, postscript_marker: str) -> bool:
    known = {"p.s.": r"p\.\s?s\.", "p.p.s": r"p\.\s?p\.\s?s", "p.p.s.": r"p\.\s?p\.\s?s\."}
    pattern = known.get(postscript_marker.casefold(), re.escape(postscript_marker))
    marker = re.search(rf"(?<![\w.]){pattern}", answer, re.IGNORECASE)
    return marker is not None and re.search(r"\w", answer[marker.end() :]) is not None


def _highlights(answer: str, num_highlights: int) -> bool:
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", answer)
    return sum(bool(one.strip() or two.strip()) for one, two in found) >= num_highlights


def _json(answer: str) -> bool:
    text = answer.strip()
    if text.startswith("```"):
        text = re.sub(r"\A```(?:json)?", "", text, flags=re.IGNORECASE).removesuffix("```")

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict | list)
    except (ValueError, RecursionError):
        return False


def _title(answer: str) -> bool:
    return any(re.search(r"\w", title) for title in re.findall(r"<<([^\n<>]+)>>", answer))


def _two_responses(answer: str) -> bool:
    parts = _parts(answer, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _repeat_prompt(answer: str, prompt_to_repeat: str) -> bool:
    said, asked = answer.strip().casefold(), prompt_to_repeat.strip().casefold()
    return said.startswith(asked) and bool(said[len(asked) :].strip())


def _repeat_phrase(answer: str, phrase: str, small_n: int) -> bool:
    asked, said = words(phrase.casefold()), words(answer.casefold())
    found = 0
    for start in range(len(said) - len(asked) + 1):
        if said[start] == asked[0] and said[start + len(asked) - 1] == asked[-1]:
            differing = sum(one != two for one, two in zip(said[start : start + len(asked)], asked, strict=True))
            if differing == 0:
                return False
            found += differing == 1
    return found == small_n


def _copy_span(answer: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    # The prompt includes the last character, but the published check does not.
    return any(_same(answer, prompt_to_repeat[n_start:end]) for end in (n_end, n_end + 1))


def _hyphens(answer: str) -> bool:
    text = answer.strip()
    ends = [end for end in re.finditer(r"[.!?]+", text) if end.end() < len(text)]
    joined = [end for end in ends if re.match(r"-\w", text[end.end() : end.end() + 2])]
    loose = [end for end in ends if text[end.end()].isspace()]
    return bool(joined) and not loose and re.search(r"[.!?]-\s|\s-|-\s", text) is None


def _no_adjacent(answer: str) -> bool:
    first = [word[0].casefold() for word in words(answer)]
    return all(not (len(one) == len(two) == 1 and ord(two) - ord(one) == 1) for one, two in pairwise(first))


def _brackets(answer: str) -> bool:
    return all(len(word) > 2 and word[0] == "[" and word[-1] == "]" for word in answer.split())


def _bigrams(answer: str) -> bool:
    found = answer.split()
    pairs = list(zip(found[::2], found[1::2], strict=False))
    return bool(pairs) and all(one.startswith("<<") and two.endswith(">>") for one, two in pairs)


def _each_sentence(answer: str, place: int, word: str) -> bool:
    found = [words(sentence) for sentence in sentences(answer)]
    return bool(found) and all(each and _same(each[place], word) for each in found)


def _at(answer: str, place: int, word: str) -> bool:
    found = words(answer)
    return bool(found) and _same(found[place], word)


def _composition(answer: str, n_sent: int, n_words: int) -> bool:
    parts = _parts(re.sub(r"\* \* \*", "***", answer), "***")
    return (
        parts is not None
        and len(parts) == 3
        and all(
            len(found := sentences(part)) == n_sent and all(len(words(each)) == n_words for each in found)
            for part in parts
        )
    )


def _unique(answer: str) -> bool:
    return max(Counter(words(answer.casefold())).values(), default=0) == 1


def _position(answer: str, keyword: str, n: int, m: int) -> bool:
    found = sentences(answer)
    at = words(found[n - 1]) if len(found) >= n else []
    return len(at) >= m and _same(at[m - 1], keyword)


def _start_end(answer: str) -> bool:
    found = words(answer)
    return len(found) > 1 and _same(found[0], found[-1]) and answer.strip().endswith(found[-1])


def _copies(answer: str, prompt_to_repeat: str, N: int) -> bool:
    copies = answer.split("******")
    return len(copies) == N and all(_same(copy, prompt_to_repeat) for copy in copies)


_KEYWORD = Rule(
    'The word "{keyword}" must appear {relation} {frequency} times.',
    lambda answer, keyword, frequency, relation, *, count: _compare(count(answer, keyword), relation, frequency),
)
_LETTER = Rule(
    'The letter "{letter}" must appear {let_relation} {let_frequency} times.',
    lambda answer, letter, let_frequency, let_relation: _compare(
        answer.lower().count(letter.lower()), let_relation, let_frequency
    ),
)

RULES: Mapping[str, Rule] = {
    # IFEval
    "keywords:existence": Rule(
        "Use these words: {keywords}.",
        lambda answer, keywords, *, count: all(count(answer, keyword) for keyword in keywords),
    ),
    "keywords:frequency": _KEYWORD,
    "keywords:forbidden_words": Rule(
        "Do not use these words: {forbidden_words}.",
        lambda answer, forbidden_words: not any(_whole_word(word).search(answer) for word in forbidden_words),
    ),
    "keywords:letter_frequency": _LETTER,
    "language:response_language": Rule(
        "Answer in the language with the code {language} alone.",
        lambda answer, language: language_of(answer) == language,
    ),
    "length_constraints:number_sentences": Rule(
        "Write {relation} {num_sentences} sentences.",
        lambda answer, num_sentences, relation: _compare(len(sentences(answer)), relation, num_sentences),
    ),
    "length_constraints:number_paragraphs": Rule(
        "Write {num_paragraphs} paragraphs, with a line *** between them.",
        lambda answer, num_paragraphs: _has_parts(answer, "***", num_paragraphs),
    ),
    "length_constraints:number_words": Rule(
        "Write {relation} {num_words} words.",
        lambda answer, num_words, relation: _compare(len(re.findall(r"\w+", answer)), relation, num_words),
    ),
    "length_constraints:nth_paragraph_first_word": Rule(
        (
            "Write {num_paragraphs} paragraphs, with an empty line between them, of which number {nth_paragraph} "
            'begins with the word "{first_word}".'
        ),
        _paragraph_first_word,
    ),
    "detectable_content:number_placeholders": Rule(
        "Use at least {num_placeholders} placeholders in square brackets, such as [name].",
        lambda answer, num_placeholders: len(re.findall(r"\[[^\[\]\n]*\]", answer)) >= num_placeholders,
    ),
    "detectable_content:postscript": Rule("Add a postscript that begins with {postscript_marker}", _postscript),
    "detectable_format:number_bullet_lists": Rule(
        "Make exactly {num_bullets} bullet points, each a line that begins with * and a space.",
        lambda answer, num_bullets: len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-)", answer, re.MULTILINE)) == num_bullets,
    ),
    "detectable_format:constrained_response": Rule(
        "Answer with one of these: " + ", ".join(f'"{option}"' for option in OPTIONS),
        lambda answer: sum(option in answer for option in OPTIONS) == 1,
    ),
    "detectable_format:number_highlighted_sections": Rule(
        "Highlight at least {num_highlights} parts in markdown, *like this*.", _highlights
    ),
    "detectable_format:multiple_sections": Rule(
        "Write {num_sections} sections that begin with {section_spliter} 1, {section_spliter} 2 and so on.",
        lambda answer, section_spliter, num_sections: (
            len(re.findall(rf"{re.escape(section_spliter)}\s?[0-9]+", answer)) >= num_sections
        ),
    ),
    "detectable_format:json_format": Rule("The whole answer must be a JSON object.", _json),
    "detectable_format:title": Rule("Give it a title in double angular brackets, such as <<title>>.", _title),
    "combination:two_responses": Rule(
        "Give two different answers, with ****** between them and nowhere else.", _two_responses
    ),
    "combination:repeat_prompt": Rule(
        "First repeat the request word for word, without this sentence, then answer it.", _repeat_prompt
    ),
    "startend:end_checker": Rule(
        "End with exactly these words: {end_phrase}",
        lambda answer, end_phrase: answer.strip().strip('"').casefold().endswith(end_phrase.strip().casefold()),
    ),
    "startend:quotation": Rule(
        "Put double quotation marks around the whole answer.",
        lambda answer: len(text := answer.strip()) > 2 and text[0] == text[-1] == '"',
    ),
    "change_case:capital_word_frequency": Rule(
        "Words in capital letters alone must appear {capital_relation} {capital_frequency} times.",
        lambda answer, capital_frequency, capital_relation: _compare(
            sum(map(str.isupper, words(answer))), capital_relation, capital_frequency
        ),
    ),
    "change_case:english_capital": Rule(
        "Write in English and in capital letters alone.",
        lambda answer: answer.isupper() and language_of(answer) == "en",
    ),
    "change_case:english_lowercase": Rule(
        "Write in English and in lowercase letters alone.",
        lambda answer: answer.islower() and language_of(answer) == "en",
    ),
    "punctuation:no_comma": Rule("Use no commas.", lambda answer: "," not in answer),
    # IFBench's training constraints
    "copy:repeat_phrase": Rule(
        'Repeat "{phrase}" exactly {small_n} times, each time with another single word replaced in its middle.',
        _repeat_phrase,
    ),
    "copy:copy": Rule(
        "Do not answer: copy the request, without this sentence.",
        lambda answer, prompt_to_repeat: _same(answer, prompt_to_repeat),
    ),
    "new:copy_span_idx": Rule("Do not answer: copy the request's characters from {n_start} to {n_end}.", _copy_span),
    "detectable_format:sentence_hyphens": Rule("Join all sentences by hyphens, with no spaces between them.", _hyphens),
    "keywords:no_adjacent_consecutive": Rule(
        "No word may begin with the letter of the alphabet after the one before it begins with.", _no_adjacent
    ),
    "detectable_format:square_brackets": Rule("Put every word in square brackets.", _brackets),
    "keywords:word_once": Rule(
        'Use the word "{keyword}" once.', lambda answer, keyword, *, count: count(answer, keyword) == 1
    ),
    "keywords:word_count_different_numbers": _KEYWORD,
    "keywords:exclude_word_harder": Rule(
        'Do not use the word "{keyword}".',
        lambda answer, keyword: _whole_word(keyword).search(answer) is None,
        ignored=("instruction",),
    ),
    "paragraphs:paragraphs": Rule(
        "Write two paragraphs, with a line *** between them.", lambda answer: _has_parts(answer, "***", 2)
    ),
    "paragraphs:paragraphs2": Rule(
        "Write two paragraphs, with an empty line between them.",
        lambda answer: len(paragraphs(answer)) == 2,
    ),
    "first_word:first_word_sent": Rule(
        'Begin every sentence with the word "{first_word}".',
        lambda answer, first_word: _each_sentence(answer, 0, first_word),
    ),
    "first_word:first_word_answer": Rule(
        'Begin with the word "{first_word}".', lambda answer, first_word: _at(answer, 0, first_word)
    ),
    "last_word:last_word_sent": Rule(
        'End every sentence with the word "{last_word}".',
        lambda answer, last_word: _each_sentence(answer, -1, last_word),
    ),
    "last_word:last_word_answer": Rule(
        'End with the word "{last_word}".', lambda answer, last_word: _at(answer, -1, last_word)
    ),
    "detectable_format:bigram_wrapping": Rule(
        "Put every two words in double angular brackets, <<like this>> <<and this>>.", _bigrams
    ),
    "copy:copying_simple": Rule(
        "Do not answer: repeat the request, without this sentence.",
        lambda answer, prompt_to_repeat: _same(answer, prompt_to_repeat),
    ),
    "copy:copying_multiple": Rule(
        "Do not answer: repeat the request {N} times, without this sentence, with ****** between.",
        _copies,
        kinds={"N": Count},
    ),
    "punctuation:punctuation_dot": Rule("Use no dots.", lambda answer: "." not in answer),
    "punctuation:punctuation_exclamation": Rule("Use no exclamation marks.", lambda answer: "!" not in answer),
    "count:lowercase_counting": Rule(
        "Use at most {N} words in lowercase letters.",
        lambda answer, N: sum(word.isalpha() and word.islower() for word in re.findall(r"\w+", answer)) <= N,
    ),
    "letters:letter_counting": Rule(
        "Write {relation} {N} letters.",
        lambda answer, N, relation: _compare(sum(map(str.isalpha, answer)), relation, N),
    ),
    "letters:letter_counting2": _LETTER,
    "count:counting_composition": Rule(
        "Write 3 paragraphs, with * * * between them, of {n_sent} sentences each, each of {n_words} words.",
        _composition,
    ),
    "count:count_unique": Rule("Use no word twice.", _unique),
    "count:count_increment_word": Rule(
        'Use the word "{keyword1}" once and the word "{keyword2}" twice.',
        lambda answer, keyword1, keyword2, *, count: count(answer, keyword1) == 1 and count(answer, keyword2) == 2,
    ),
    "keywords:palindrome": Rule(
        "Use a palindrome.",
        lambda answer: any(
            len(word) > 2 and word.isalpha() and word == word[::-1] for word in words(answer.casefold())
        ),
    ),
    "keywords:keyword_specific_position": Rule('Word {m} of sentence {n} must be "{keyword}".', _position),
    "keywords:start_end": Rule("Begin and end with the same word, with nothing after it.", _start_end),
}
