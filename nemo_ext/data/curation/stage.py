"""What a stage of curation is: its settings, and how it judges documents.

A `Stage` looks at one document at a time. A `Barrier` needs all of them: it notes features of every document, decides
when all are there, and applies what was decided in the next pass over them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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


Mark = Callable[[int, npt.NDArray[np.int64] | slice, npt.NDArray[np.uint8] | int], None]
"""Sets verdicts: number of the unit, places, and the verdicts; all are 0 at first."""
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Features:
    """What a barrier noted of the documents of a unit, in a file.

    Attributes:
        path: file of the values of all documents, one after the other.
        number: number of values.
        documents: number of documents.
    """

    path: Path
    number: int
    documents: int

    def blocks(self, width: int = 1) -> Iterator[Values]:
        """The values in blocks of some MB, as rows of so many: [rows, width]."""
        step = max(1, _BLOCK // width) * width
        with open(self.path, "rb") as file:
            while len(values := np.fromfile(file, dtype=np.uint64, count=step)):
                yield values.reshape(-1, width)


class Barrier(Stage):
    """Settings of a stage that needs all documents before it decides on any."""

    verdict_of_values: ClassVar[bool] = True
    """Whether there is a verdict for each value, or for each document."""

    def noting(self) -> Callable[[Document], Values]:
        """A function that gives the features of a document, made once in each process."""
        raise NotImplementedError

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        """Decide on all documents.

        Args:
            units: features of every unit, in order.
            mark: function that sets verdicts.
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
