"""Filter of texts that speak for a nation, a party or a model vendor.

Nemotron 3 Nano, section 3.1.3: "we apply targeted keyword- and regex-based filters (e.g., patterns such as "our
nation/party [...]", "our values") and remove all trajectories matching such behavior". The paper's list is not public.
`PAPER` contains the patterns that it quotes; other lists are read from files. Each pattern costs a search through the
text, whereas keywords cost one look-up per word, however many there are.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import yaml
from pydantic.dataclasses import dataclass

from nemo_ext.data.sft.filters.base import Drop, Filter, Texts
from nemo_ext.data.text.user_files import utf8_text
from nemo_ext.data.text.words import Hashes, ngram_hashes, word_hashes, words_of
from nemo_ext.job.settings import STRICT, PlacesOrNone, Strings, StringsOrNone

PAPER = (r"\bour\s+(?:great\s+|beloved\s+)?(?:nation|party)\b", r"\bour\s+values\b")

_SHOWN = 40


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Narrative(Filter):
    """Filter for patterns in the assistant's answers, reasoning and tool calls.

    Attributes:
        patterns: case-insensitive regular expressions, without references to groups.
        keywords: whole words and phrases, matched without case and punctuation.
        files: list files, either .yaml with the keys `patterns` and `keywords`, or text with one pattern per line and
            comment lines starting with #.
    """

    name: ClassVar[str] = "narrative"
    patterns: Strings = PAPER
    keywords: StringsOrNone = ()
    files: PlacesOrNone = ()

    def check(self) -> None:
        _compiled.cache_clear()
        _compiled(self.patterns, self.keywords, self.files)

    def reads(self) -> list[Path]:
        return [Path(name).expanduser() for name in self.files]

    def drop(self, texts: Texts) -> Drop | None:
        lists = _compiled(self.patterns, self.keywords, self.files)
        for index, text in enumerate(texts.spoken):
            if text.role != "assistant":
                continue
            excerpt = None
            if lists.pattern is not None and (match := lists.pattern.search(text.text)):
                excerpt = text.text[max(0, match.start() - _SHOWN) : match.end() + _SHOWN]
            elif lists.keywords:
                excerpt = _keyword(text.text, texts.words.hashes_of(index), lists.keywords)
            if excerpt is not None:
                return Drop("narrative-reasoning" if text.is_reasoning else "narrative-answer", repr(excerpt))
        return None


class _Lists(NamedTuple):
    pattern: re.Pattern[str] | None
    keywords: dict[int, Hashes]  # by their length in words


def _keyword(text: str, words: Hashes, keywords: dict[int, Hashes]) -> str | None:
    """Return an excerpt around a keyword in the text; None if there is none.

    `keywords` maps numbers of words to the hashes of keywords of this length.
    """
    for length, known in keywords.items():
        if (found := np.isin(ngram_hashes(words, length), known)).any():
            place = int(found.argmax())
            return " ".join(words_of(text)[max(0, place - 5) : place + length + 5])
    return None


@lru_cache(maxsize=8)
def _compiled(patterns: tuple[str, ...], keywords: tuple[str, ...], files: tuple[str, ...]) -> _Lists:
    entries = [("filters.narrative.patterns", pattern, True) for pattern in patterns]
    entries += [("filters.narrative.keywords", word, False) for word in keywords]
    for name in files:
        entries += _listed(Path(name).expanduser())
    if not entries:
        raise ValueError(
            "filters.narrative has no patterns, keywords or files: set at least one of them, or disable the filter "
            "with filters.narrative=null"
        )
    alternatives = []
    phrases: dict[int, list[int]] = {}
    for where, text, is_pattern in entries:
        if not is_pattern:
            words = word_hashes(text)
            if not len(words):
                raise ValueError(f"{where}: {text!r} contains no word: remove or correct this keyword")
            phrases.setdefault(len(words), []).append(int(ngram_hashes(words, len(words))[0]))
            continue
        try:
            compiled = re.compile(f"(?:x)|(?:{text})", re.IGNORECASE)  # refuses flags, which must be at the very start
        except re.error as error:
            raise ValueError(
                f"{where}: {text!r} is not a valid regular expression ({error}): correct it, and use no "
                "flags such as (?i)"
            ) from None
        if compiled.search(""):
            raise ValueError(f"{where}: {text!r} matches every text: make the pattern more specific")
        if compiled.groups and re.search(r"\\[1-9]|\(\?P=|\(\?\(", text):
            raise ValueError(
                f"{where}: {text!r} must not contain a reference to a group, such as \\1: write out the group instead"
            )
        alternatives.append(f"(?:{re.sub(r'[(][?]P<[^>]*>', '(?:', text)})")
    keywords_by_length = {length: np.unique(np.array(hashes, dtype=np.uint64)) for length, hashes in phrases.items()}
    return _Lists(re.compile("|".join(alternatives), re.IGNORECASE) if alternatives else None, keywords_by_length)


def _listed(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield the entries of a list file: place, text, and True for a pattern or False for a keyword."""
    try:
        text = utf8_text(path)
        content: Any = yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"filters.narrative.files: {path} cannot be read ({error}): correct it") from None
    if path.suffix not in (".yaml", ".yml"):
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                yield f"filters.narrative.files: {path}:{number}", line.strip(), True
        return
    if not isinstance(content, dict) or not content.keys() <= {"patterns", "keywords"}:
        raise ValueError(
            f"filters.narrative.files: {path} must have only the keys patterns and keywords, with lists, not "
            f"{str(content)[:60]!r}"
        )
    for key in ("patterns", "keywords"):
        for word in content.get(key) or ():
            if not isinstance(word, str) or not word:
                raise ValueError(
                    f"filters.narrative.files: {path}: the entries of {key} must be non-empty strings, not {word!r}"
                )
            yield f"filters.narrative.files: {path}, {key}", word, key == "patterns"
