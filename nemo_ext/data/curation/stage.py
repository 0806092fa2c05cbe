"""Base classes of curation stages: their settings, and how they judge documents.

A `Stage` judges one document at a time. A `Barrier` needs all documents: it records each document's features, decides
once all are recorded, and applies its verdicts in the next pass.
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
"""Function that returns the reason for dropping a document, or None; it may change the document's text and metadata."""
Values = npt.NDArray[np.uint64]
Verdicts = npt.NDArray[np.uint8]

URL_KEYS = ("url", "metadata.url", "metadata.warc_url", "warc_url")
"""Keys that may hold a record's URL; the first one that does is used."""


class Stage:
    """Base class of stage settings: a frozen pydantic dataclass, validated before the work and sent to workers."""

    kind: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    """Settings of which an optional stage (`curate.optional`) needs at least one, such as a model."""

    def check(self) -> None:
        """Check settings, files and libraries before any document is read.

        Raises:
            ValueError: a setting is invalid, or a file or library is missing or unusable.
        """

    def reads(self) -> list[Path]:
        """Return the paths of the files whose content affects the stage's decisions, such as models and lists."""
        return []

    def start(self) -> Judge:
        """Build the function that judges documents; called once per process."""
        raise NotImplementedError


Mark = Callable[[int, npt.NDArray[np.int64] | slice, npt.NDArray[np.uint8] | int], None]
"""Function that sets verdicts, which are initially 0, given the unit's number, indices within it, and the verdicts."""
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Features:
    """Features that a barrier recorded for a unit's documents, in a file.

    Attributes:
        path: file with the 64-bit values of all documents, concatenated.
        number: number of values.
        documents: number of documents.
    """

    path: Path
    number: int
    documents: int

    def blocks(self, width: int = 1) -> Iterator[Values]:
        """Yield the values in blocks of about 32 MB, [rows, width]."""
        step = max(1, _BLOCK // width) * width
        with open(self.path, "rb") as file:
            while len(values := np.fromfile(file, dtype=np.uint64, count=step)):
                yield values.reshape(-1, width)


class Barrier(Stage):
    """Base class of stages that need the features of all documents before they decide on any."""

    verdict_of_values: ClassVar[bool] = True
    """Whether each value has a verdict; otherwise, each document has one."""

    def features(self, document: Document) -> Values:
        """Compute the features of a document."""
        raise NotImplementedError

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        """Decide on all documents, and set their verdicts.

        Args:
            units: features of every unit, in order.
            mark: function that sets verdicts; see `Mark`.
            memory: memory to use, in bytes.
        """
        raise NotImplementedError

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        """Apply verdicts to a document: change it if necessary; return the reason to drop it, or None to keep it.

        Args:
            document: the document from which the features were computed.
            verdicts: verdicts on the document's feature values, or the single verdict on the document.
        """
        raise NotImplementedError


def url_of(document: Document) -> str | None:
    """Return the URL of a document; None if it has none."""
    for key in URL_KEYS:
        if isinstance(found := value_at(document.metadata, key), str) and found:
            return found
    return None


def language_of(document: Document) -> str | None:
    """Return the language code of a document, from a language stage or its record; None if there is none."""
    language = document.metadata.get("language")
    return language if isinstance(language, str) else None


def shown(text: str, length: int = 100) -> str:
    """Return the beginning of a text, on a single line of at most `length` characters."""
    return " ".join(text[: 2 * length].split())[:length]
