"""Language identification of documents by py3langid, or by the user's fastText model, such as lid.176.bin."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from datatrove.data import Document
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.stage import Judge, Stage, shown
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.data.sft.filters.language import identifier
from nemo_ext.job.settings import STRICT, Place, Share, StringsOrNone, nearest

_NO_LETTERS = re.compile(r"[\W\d_]+")
_MOST = 1_000_000
Identify = Callable[[str], tuple[str, float]]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Language(Stage):
    """Records each document's `language` and `language_score`, and drops documents in other languages.

    Attributes:
        languages: codes (ISO 639-1) to keep; empty for any.
        least: minimum probability of the language.
        by_language: mapping from code to minimum probability, in place of `least`.
        model: fastText model file; null for py3langid.
        characters: number of characters to examine, from the middle of the text without digits and punctuation.
    """

    kind: ClassVar[str] = "language"
    languages: StringsOrNone = ()
    least: Share = 0.5
    by_language: dict[str, Share] = Field(default_factory=dict)
    model: Place | None = None
    characters: PositiveInt = 2000

    def check(self) -> None:
        if self.model is not None:
            fasttext_model(self.model)
            return
        known = frozenset(identifier().labels)
        for key, codes in (("languages", self.languages), ("by_language", self.by_language)):
            for code in codes:
                if code not in known:
                    raise ValueError(f"{key}: unknown language code {code!r}: {nearest(code, known)}")

    def reads(self) -> list[Path]:
        return [] if self.model is None else [Path(self.model).expanduser()]

    def start(self) -> Judge:
        identify = _by_py3langid if self.model is None else _by_fasttext(fasttext_model(self.model))

        def judge(document: Document) -> Drop | None:
            letters = _NO_LETTERS.sub(" ", document.text[:_MOST])
            start = max(0, (len(letters) - self.characters) // 2)
            piece = letters[start : start + self.characters]
            code, score = identify(piece)
            document.metadata["language"], document.metadata["language_score"] = code, round(score, 4)
            if self.languages and code not in self.languages:
                return Drop(code, shown(piece))
            if score < self.by_language.get(code, self.least):
                return Drop("unsure", f"{code} {score:.2f}: {shown(piece)}")
            return None

        return judge


def _by_py3langid(text: str) -> tuple[str, float]:
    code, score = identifier().classify(text)
    return str(code), float(score)


def _by_fasttext(model: Any) -> Identify:
    def identify(text: str) -> tuple[str, float]:
        labels, scores = model.predict(" ".join(text.split()))
        if not labels:
            return "und", 0.0
        return labels[0].removeprefix("__label__"), min(1.0, float(scores[0]))

    return identify


def fasttext_model(path: str) -> Any:
    """Load a fastText model; such files contain no code.

    Raises:
        ValueError: the library or the file is missing, or the file is not a model.
    """
    place = Path(path).expanduser()
    try:
        import fasttext
    except ImportError as error:
        raise ValueError(
            f"{path}: fastText models require fastText ({error}); pip install fasttext-numpy2-wheel"
        ) from error
    if not place.is_file():
        raise ValueError(f"fastText model {path} does not exist: correct the path")
    try:
        fasttext.FastText.eprint = lambda *_, **__: None  # silences a deprecation notice
        return fasttext.load_model(str(place))
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded as a fastText model ({error}): choose another file") from error
