"""Language filter of prompts, answers and traces, based on py3langid.

Domyn-Small, SFT: "language filtering on prompts, answers, and reasoning traces based on pre-defined language tiers".
Code, formulas, addresses and names (capitalised words) are ignored, texts with too few letters are not judged, and only
confident identifications count. Long texts are judged by three excerpts, most of which must be in another language.
"""

import re
from functools import lru_cache, reduce
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.sft.filters.base import Drop, Filter, Texts
from nemo_ext.job.settings import STRICT, Strings, nearest

# Languages that identifiers cannot distinguish in a few sentences.
_ALIKE = (
    *("no nb nn da", "id ms", "hr bs sr sl", "cs sk", "pt gl", "es gl an", "af nl", "hi mr ne", "ru uk be bg mk"),
    *("fa ps ur", "ar ary arz", "zh yue wuu", "en pcm", "it vec lij", "fr gcf gcr wa"),
)
CONFUSABLE: tuple[frozenset[str], ...] = tuple(frozenset(codes.split()) for codes in _ALIKE)

_FENCE = re.compile(r"(```|~~~).*?(?:\1|\Z)", re.DOTALL)
_NOT_PROSE = re.compile(
    r"`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)|\\[A-Za-z]+(?:\{[^{}\n]*\})*"
    r"|https?://\S+|</?[A-Za-z][^<>\n]*>"
    r"|(?!(?<=[a-z])[a-z])(?:"  # nothing below starts inside a lower-case word, so most positions are skipped quickly
    r"[\w+-]++(?:[.@]\w[\w-]*+)+|(?<!\S)[^\s\d_=/\\{}<>]*+[\d_=/\\{}<>]\S*"
    r"|\b[A-Z]\w*)",  # names do not indicate a language
    re.DOTALL,
)
# The same for ASCII text: explicit character sets are faster than Unicode classes.
_ASCII_SETS = {r"\w+-]": "A-Za-z0-9_+-]", r"\s\d": r" \t-\r\x1c-\x1f0-9", r"[\d": "[0-9"}
_NOT_ASCII_PROSE = re.compile(
    reduce(lambda text, pair: text.replace(*pair), _ASCII_SETS.items(), _NOT_PROSE.pattern), re.DOTALL
)
_LONG = 3000

# Words frequent in English and rare elsewhere: most data is English, and this check is faster than the identifier.
_USUAL = (
    "the of and to that this these with which are be been have has from you your it its not can then there they "
    "their by but what would should"
)
_ENGLISH = frozenset(_USUAL.split())
_ENGLISH_SHARE = 0.15


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Language(Filter):
    """Filter by the language of prompts, answers and traces; tool calls and tool results are not judged.

    Attributes:
        languages: ISO 639-1 codes of the allowed languages; empty for all.
        by_source: mapping from source name to allowed codes, in place of `languages`.
        declared: True if a sample that declares its language must be in that language; `en-GB` is read as `en`.
        confidence: minimum probability that a text is in another language for the sample to be dropped.
        characters: number of characters in an excerpt; more characters are more reliable but slower.
        min_letters: minimum number of letters in an excerpt; shorter ones are not judged.
    """

    name: ClassVar[str] = "language"
    languages: Strings = ()
    by_source: dict[str, Strings] = Field(default_factory=dict)
    declared: bool = True
    confidence: Annotated[float, Field(gt=0, le=1)] = 0.95
    characters: PositiveInt = 160
    min_letters: PositiveInt = 60

    def check(self) -> None:
        known = _known()
        for where, codes in [
            ("languages", self.languages),
            *((f"by_source.{name}", codes) for name, codes in self.by_source.items()),
        ]:
            for code in codes:
                if code not in known:
                    raise ValueError(f"filters.language.{where}: unknown language {code!r}; {nearest(code, known)}")

    def drop(self, texts: Texts) -> Drop | None:
        sample = texts.sample
        allowed = set(self.by_source.get(sample.source, self.languages))
        if self.declared and sample.language:
            code = re.split("[-_]", sample.language, maxsplit=1)[0]
            if code not in _known():
                return Drop("language-code", f"{sample.language!r} is not a supported ISO 639-1 code")
            allowed = {code}
        if not allowed:
            return None
        for text in texts.spoken:
            if text.is_call or text.role == "tool":
                continue
            code = self._foreign(text.text, allowed)
            if code is not None:
                part = "prompt" if text.role == "user" else "reasoning" if text.is_reasoning else "answer"
                return Drop(f"language-{part}", f"{code}, not {'/'.join(sorted(allowed))}: {text.text[:60]!r}")
        return None

    def _foreign(self, text: str, allowed: set[str]) -> str | None:
        """Return the language of the text if it is confidently not an allowed one; otherwise None."""
        likely = _with_confusable(frozenset(allowed))
        prose = _FENCE.sub(" ", text) if "```" in text or "~~~" in text else text
        pieces = 1 if len(prose) < _LONG else 3
        others: list[str] = []
        for number in range(pieces):
            # Code and formulas are removed later, so start with twice the length.
            middle = len(prose) * (2 * number + 1) // (2 * pieces)
            start = max(0, min(middle - self.characters, len(prose) - 2 * self.characters))
            piece = prose[start : start + 2 * self.characters]
            piece = (_NOT_ASCII_PROSE if piece.isascii() else _NOT_PROSE).sub(" ", piece)[: self.characters]
            english = "en" in likely and _is_english(piece)
            if english and pieces == 1:
                return None
            if sum(map(str.isalpha, piece)) * _weight(piece) < self.min_letters:
                continue
            code = "en" if english else identifier().classify(piece)[0]
            # Dialects share the probability of a language, so test the probability that remains for the allowed ones.
            if code not in likely and _probability(piece, likely) <= 1 - self.confidence:
                others.append(code)
            elif 2 * (len(others) + pieces - number - 1) <= pieces:
                return None
        return max(set(others), key=others.count) if 2 * len(others) > pieces else None


def _probability(piece: str, codes: frozenset[str]) -> float:
    return sum(probability for code, probability in identifier().rank(piece) if code in codes)


def _is_english(piece: str) -> bool:
    words = piece.lower().split()
    return sum(map(_ENGLISH.__contains__, words)) >= _ENGLISH_SHARE * len(words)


def _weight(piece: str) -> int:
    """Return how many letters each character of a text counts as: 4 in Chinese, Japanese or Korean, otherwise 1."""
    return 4 if not piece.isascii() and sum("\u3040" <= character <= "\ud7ff" for character in piece[:40]) > 10 else 1


@lru_cache(maxsize=64)
def _with_confusable(allowed: frozenset[str]) -> frozenset[str]:
    return allowed.union(*(group for group in CONFUSABLE if allowed & group), ["zxx"])  # zxx: no linguistic content


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    return frozenset(identifier().labels)


@lru_cache(maxsize=1)
def identifier() -> Any:
    """Return py3langid's language identifier with normalised probabilities."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
