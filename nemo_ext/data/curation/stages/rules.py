"""Quality rules of C4, Gopher and FineWeb: datatrove's filters, with words and thresholds by language."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4ParagraphFilter,
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter, get_filter_result
from datatrove.utils.word_tokenizers import WhitespaceTokenizer, load_word_tokenizer
from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.stage import Judge, Stage, language_of, shown
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.data.text.words import words_of
from nemo_ext.job.settings import STRICT, nearest

WordsOf = Literal["spaces", "characters", "datatrove"]
_SAMPLE = "One of the lines that the rules are tried on, with words that are there and have an end.\n" * 3 + "The end."
"""Text that triggers all rules, so that values of the wrong type are found before the work starts."""
_NOT_SETTINGS = ("exclusion_writer", "language")


class _Spaces(WhitespaceTokenizer):
    """Tokenizer of words separated by white space, as in Gopher and Dolma."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


class Characters(WhitespaceTokenizer):
    """Tokenizer of words without punctuation; in scripts without spaces, each character is a word."""

    def word_tokenize(self, text: str) -> list[str]:
        return words_of(text)


@cache
def _tokenizer(words: str) -> WhitespaceTokenizer:
    return _Spaces() if words == "spaces" else Characters()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Rules(Stage):
    """Base class of stages that run one of datatrove's filters.

    Attributes:
        words: how to split texts into words: `spaces` at white space; `characters` for any script; `datatrove` by its
            tokenizer for the language (spaCy and others), or like `characters` if it has none.
        language: code to use for documents whose language is unknown.
        rules: the filter's arguments, keyed by name; the defaults are datatrove's.
        by_language: mapping from language code to arguments that override `rules`.
    """

    block: ClassVar[type[BaseFilter]]

    words: WordsOf = "spaces"
    language: str = "en"
    rules: dict[str, Any] = Field(default_factory=dict)
    by_language: dict[str, dict[str, Any]] = Field(default_factory=dict)

    def check(self) -> None:
        known = [name for name in inspect.signature(self.block).parameters if name not in _NOT_SETTINGS]
        for where, rules in [("rules", self.rules), *((f"by_language.{k}", v) for k, v in self.by_language.items())]:
            for name in rules:
                if name not in known:
                    raise ValueError(f"{where}: unknown key {name!r}: {nearest(name, known)}")
        for language in dict.fromkeys((self.language, *self.by_language)):
            try:
                self._block(language).filter(Document(text=_SAMPLE, id="sample"))
            except (TypeError, AttributeError) as error:
                raise ValueError(
                    f"rules or by_language.{language}: a value has the wrong type ({error}); correct it"
                ) from error

    def _block(self, language: str) -> BaseFilter:
        arguments = {**self.rules, **self.by_language.get(language, {})}
        if "language" in inspect.signature(self.block).parameters:
            named = language in (self.language, *self.by_language)
            by_datatrove = self.words == "datatrove"
            arguments["language"] = words_for(language, named=named) if by_datatrove else _tokenizer(self.words)
        try:
            return self.block(**arguments)
        except (TypeError, ImportError) as error:
            raise ValueError(
                f"{type(self).kind}: datatrove's filter cannot be created ({error}); correct its rules, or install "
                "the missing package"
            ) from error

    def start(self) -> Judge:
        cached_block = lru_cache(maxsize=None)(self._block)

        def judge(document: Document) -> Drop | None:
            block = cached_block(language_of(document) or self.language)
            # Some rules divide by the number of words, which is 0 for a document of punctuation.
            try:
                kept, reason = get_filter_result(block.filter(document))
            except ZeroDivisionError:
                return Drop("no-words", shown(document.text))
            return None if kept else Drop(str(reason or "dropped").replace("_", "-"), shown(document.text))

        return judge


def words_for(language: str, *, named: bool) -> WhitespaceTokenizer:
    """Load datatrove's tokenizer for a language, or the tokenizer `characters` if there is none.

    With `named`, for a language that the settings name, a missing tokenizer raises ValueError instead.
    """
    try:
        tokenizer = load_word_tokenizer(language)
        tokenizer.word_tokenize("a b")
    except (ImportError, ValueError) as error:
        if named:
            reason = str(error).rstrip(".: ")
            raise ValueError(
                f"words=datatrove cannot split {language!r} into words ({reason}): set words=spaces or words=characters"
            ) from error
        return _tokenizer("characters")
    return tokenizer


@dataclass(frozen=True, kw_only=True, config=STRICT)
class C4(_Rules):
    """C4's rules: remove lines that are not sentences; drop documents with few sentences, braces or lorem ipsum."""

    kind: ClassVar[str] = "c4"
    block: ClassVar[type[BaseFilter]] = C4QualityFilter


@dataclass(frozen=True, kw_only=True, config=STRICT)
class C4Paragraphs(_Rules):
    """mC4's rule: drop documents with fewer than three lines of at least 200 characters."""

    kind: ClassVar[str] = "c4_paragraphs"
    block: ClassVar[type[BaseFilter]] = C4ParagraphFilter


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GopherQuality(_Rules):
    """Gopher's quality rules: number and length of words, symbols, bullets, stop words."""

    kind: ClassVar[str] = "gopher_quality"
    block: ClassVar[type[BaseFilter]] = GopherQualityFilter


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GopherRepetition(_Rules):
    """Gopher's repetition rules: repeated lines, paragraphs and n-grams."""

    kind: ClassVar[str] = "gopher_repetition"
    block: ClassVar[type[BaseFilter]] = GopherRepetitionFilter


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FineWeb(_Rules):
    """FineWeb's rules: shares of lines that end in punctuation, short lines, repeated lines, and lists."""

    kind: ClassVar[str] = "fineweb"
    block: ClassVar[type[BaseFilter]] = FineWebQualityFilter


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Length(Stage):
    """Drops documents that are too short or too long.

    Attributes:
        least: minimum number of characters.
        most: maximum number of characters.
    """

    kind: ClassVar[str] = "length"
    least: int = 0
    most: int = 1 << 62

    def start(self) -> Judge:
        def judge(document: Document) -> Drop | None:
            length = len(document.text)
            if self.least <= length <= self.most:
                return None
            return Drop("too-short" if length < self.least else "too-long", f"{length:,} characters")

        return judge


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UniqueWords(Stage):
    """Drops documents with too few different words; case is ignored, and single characters count in some scripts.

    Attributes:
        least: minimum number of different words.
    """

    kind: ClassVar[str] = "unique_words"
    least: int

    def start(self) -> Judge:
        def judge(document: Document) -> Drop | None:
            number = len(set(words_of(document.text)))
            return None if number >= self.least else Drop("few-words", f"{number:,}: {shown(document.text)}")

        return judge


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Encoding(Stage):
    """Repairs wrongly decoded text with ftfy, and drops documents that remain broken.

    Attributes:
        mend: whether to repair text.
        most: maximum share of replacement and control characters, above which a document is dropped.
    """

    kind: ClassVar[str] = "encoding"
    mend: bool = True
    most: float = 0.001

    def check(self) -> None:
        try:
            self.start()
        except ImportError as error:
            raise ValueError(
                f"encoding requires ftfy ({error}): pip install 'nemo_ext[curate]', or set mend=false"
            ) from error

    def start(self) -> Judge:
        fix: Callable[[str], str] = str
        if self.mend:
            from datatrove.pipeline.formatters import FTFYFormatter

            fix = FTFYFormatter().format

        def judge(document: Document) -> Drop | None:
            text = fix(document.text)
            bad = sum(map(text.count, _BROKEN))
            if bad > self.most * len(text):
                return Drop("broken-characters", f"{bad:,} of {len(text):,}: {shown(text)}")
            document.text = text
            return None

        return judge


_BROKEN = ["\ufffd", *(chr(code) for code in (*range(9), *range(14, 32), *range(127, 160)) if code != 0x85)]


RULES: Mapping[str, type[Stage]] = {
    each.kind: each
    for each in (Length, UniqueWords, Encoding, C4, C4Paragraphs, GopherQuality, GopherRepetition, FineWeb)
}
