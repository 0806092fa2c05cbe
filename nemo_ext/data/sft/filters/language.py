"""Language filter of prompts, answers and traces, by py3langid.

Domyn-Small, SFT: "language filtering on prompts, answers, and reasoning traces based on pre-defined language tiers".
Code, formulas, addresses and names (words with a capital) are ignored, texts with too few letters are not judged, and
only a confident judgement counts. Of long texts three pieces are examined; most of them must be in another language.
"""

import re
from functools import lru_cache, reduce
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.sft.filters.base import Drop, Filter, Text, Texts
from nemo_ext.job.settings import STRICT, Strings, nearest

# Languages that no identifier tells apart in a few sentences.
_ALIKE = (
    *("no nb nn da", "id ms", "hr bs sr sl", "cs sk", "pt gl", "es gl an", "af nl", "hi mr ne", "ru uk be bg mk"),
    *("fa ps ur", "ar ary arz", "zh yue wuu", "en pcm", "it vec lij", "fr gcf gcr wa"),
)
CONFUSABLE: tuple[frozenset[str], ...] = tuple(frozenset(codes.split()) for codes in _ALIKE)

_FENCE = re.compile(r"(```|~~~).*?(?:\1|\Z)", re.DOTALL)
_NOT_PROSE = re.compile(
    r"`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)|\\[A-Za-z]+(?:\{[^{}\n]*\})*"
    r"|https?://\S+|</?[A-Za-z][^<>\n]*>"
    r"|(?!(?<=[a-z])[a-z])(?:"  # nothing below begins between two such letters: this spares most places the attempts
    r"[\w+-]++(?:[.@]\w[\w-]*+)+|(?<!\S)[^\s\d_=/\\{}<>]*+[\d_=/\\{}<>]\S*"
    r"|\b[A-Z]\w*)",  # names are in no language
    re.DOTALL,
)
# Spelled out for ASCII: sets of characters are looked up where classes of Unicode call a function for each.
_ASCII_SETS = {r"\w+-]": "A-Za-z0-9_+-]", r"\s\d": r" \t-\r\x1c-\x1f0-9", r"[\d": "[0-9"}
_NOT_ASCII_PROSE = re.compile(
    reduce(lambda text, pair: text.replace(*pair), _ASCII_SETS.items(), _NOT_PROSE.pattern), re.DOTALL
)
_LONG = 3000

# Words frequent in English and rare elsewhere: most data are English, and this spares most of the library's time.
_USUAL = (
    "the of and to that this these with which are be been have has from you your it its not can then there they "
    "their by but what would should"
)
_ENGLISH = frozenset(_USUAL.split())
_ENGLISH_SHARE = 0.15


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Language(Filter):
    """Language of user, assistant and traces; calls and answers of tools may be in any.

    Attributes:
        languages: ISO 639-1 codes that any sample may be in; empty for any.
        by_source: name of a source -> codes of its samples, instead of `languages`.
        declared: True if a sample that declares its language must be in it, whatever else is allowed; `en-GB` is `en`.
        confidence: least probability that a text is in none of its languages.
        characters: number of characters of a piece of text that are examined; more is more reliable and slower.
        min_letters: least number of letters of a piece that is judged.
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
                    raise ValueError(f"language: {where}: {code!r}: {nearest(code, known)}")

    def drop(self, texts: Texts) -> Drop | None:
        sample = texts.sample
        allowed = set(self.by_source.get(sample.source, self.languages))
        if self.declared and sample.language:
            code = re.split("[-_]", sample.language, maxsplit=1)[0]
            if code not in _known():
                return Drop("language-code", f"{sample.language!r} is no ISO 639-1 code that can be checked")
            allowed = {code}
        if not allowed:
            return None
        for text in texts.spoken:
            if text.is_call or text.role == "tool":
                continue
            found = self._found(text.text, allowed)
            if found is not None:
                return Drop(f"language-{_part(text)}", f"{found}, not {'/'.join(sorted(allowed))}: {text.text[:60]!r}")
        return None

    def _found(self, text: str, allowed: set[str]) -> str | None:
        """Language that most of the text is in, if it is confidently none of those allowed."""
        likely = _with_confusable(frozenset(allowed))
        prose = _FENCE.sub(" ", text) if "```" in text or "~~~" in text else text
        pieces = 1 if len(prose) < _LONG else 3
        others: list[str] = []
        for number in range(pieces):
            # Code and formulas are removed later, so the piece is taken twice as long.
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
            # Dialects share the probability: what counts is how little is left for the allowed languages.
            if code not in likely and _probability(piece, likely) <= 1 - self.confidence:
                others.append(code)
            elif 2 * (len(others) + pieces - number - 1) <= pieces:
                return None
        return max(set(others), key=others.count) if 2 * len(others) > pieces else None


def _part(text: Text) -> str:
    return "prompt" if text.role == "user" else "reasoning" if text.is_reasoning else "answer"


def _is_english(piece: str) -> bool:
    words = piece.lower().split()
    return sum(map(_ENGLISH.__contains__, words)) >= _ENGLISH_SHARE * len(words)


def _probability(piece: str, codes: frozenset[str]) -> float:
    return sum(probability for code, probability in identifier().rank(piece) if code in codes)


def _weight(piece: str) -> int:
    """Weight of a character in letters: one of Chinese, Japanese or Korean counts as several."""
    return 4 if not piece.isascii() and sum("\u3040" <= character <= "\ud7ff" for character in piece[:40]) > 10 else 1


@lru_cache(maxsize=64)
def _with_confusable(allowed: frozenset[str]) -> frozenset[str]:
    return allowed.union(*(group for group in CONFUSABLE if allowed & group), ["zxx"])  # zxx: no language


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    return frozenset(identifier().labels)


@lru_cache(maxsize=1)
def identifier() -> Any:
    """py3langid's identifier, whose probabilities add up to 1."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
