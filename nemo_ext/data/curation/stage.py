"""What a stage of curation is: its settings, and how it judges documents.

A `Stage` looks at one document at a time. A `Barrier` needs all of them: it notes features of every document, decides
when all are there, and applies what was decided in the next pass over them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from datatrove.data import Document

from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.data.text.user_files import value_at

Judge = Callable[[Document], Drop | None]
"""Why a document is left out, or None; it may change the document's text and metadata."""
Values = npt.NDArray[np.uint64]
Verdicts = npt.NDArray[np.uint8]

URL_KEYS = ("url", "metadata.url", "metadata.warc_url", "warc_url")
"""Keys of a record that may hold its address, the first that does counts."""


class Stage:
    """Settings of a stage: a frozen pydantic dataclass, checked before the work and sent to workers."""

    kind: ClassVar[str]

    def check(self) -> None:
        """Check what can be known without any document.

        Raises:
            ValueError: a setting, or a file or library that it needs, is wrong or missing.
        """

    def reads(self) -> list[Path]:
        """Files whose content determines the decisions."""
        return []

    def start(self) -> Judge:
        """The judge, made once in each process."""
        raise NotImplementedError


@dataclass(frozen=True)
class Features:
    """What a barrier noted of the documents of a unit.

    Attributes:
        values: [values] of all documents, one after the other.
        ends: [documents + 1] where each document's begin; the last is the number of values.
    """

    values: Values
    ends: npt.NDArray[np.int64]


class Barrier(Stage):
    """Settings of a stage that needs all documents before it decides on any."""

    verdict_of_values: ClassVar[bool] = True
    """Whether there is a verdict for each value, or for each document."""

    def noting(self) -> Callable[[Document], Values]:
        """A function that gives the features of a document, made once in each process."""
        raise NotImplementedError

    def decide(self, units: Sequence[Features], verdicts: Sequence[Verdicts], memory: int) -> None:
        """Decide on all documents.

        Args:
            units: features of every unit, in order.
            verdicts: arrays of zeros to fill, one for each unit.
            memory: bytes that may be used, about.
        """
        raise NotImplementedError

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        """Why a document is left out, by its verdicts; it may change the document.

        Args:
            document: the document, as its features were taken.
            verdicts: of its values, or one of the document.
        """
        raise NotImplementedError


def url_of(document: Document) -> str | None:
    """Address of a document; None if it has none."""
    for key in URL_KEYS:
        if isinstance(found := value_at(document.metadata, key), str) and found:
            return found
    return None


def language_of(document: Document) -> str | None:
    """Code of a document's language, as a language stage or the record says; None if neither does."""
    found = document.metadata.get("language")
    return found if isinstance(found, str) else None


def shown(text: str, length: int = 100) -> str:
    """The beginning of a text, in one line."""
    return " ".join(text[: 2 * length].split())[:length]


def by_language(settings: Mapping[str, Any], language: str | None) -> Mapping[str, Any]:
    """Settings for a language: those of `by_language` before the others."""
    own = settings.get("by_language") or {}
    return {**{key: value for key, value in settings.items() if key != "by_language"}, **own.get(language or "", {})}
