"""Decontamination: drops samples that share word n-grams with test sets (`nemo_ext.data.text.test_sets`)."""

from typing import ClassVar

from pydantic.dataclasses import dataclass

from nemo_ext.data.sft.filters.base import Drop, Filter, Texts
from nemo_ext.data.text.test_sets import TestSets, index_of
from nemo_ext.job.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Decontamination(TestSets, Filter):
    """Filter for overlap between test sets and the texts of users and assistants, including tool calls."""

    name: ClassVar[str] = "decontamination"

    def drop(self, texts: Texts) -> Drop | None:
        users = [index for index, text in enumerate(texts.spoken) if text.role == "user"]
        judged = [index for index, text in enumerate(texts.spoken) if text.role in ("user", "assistant")]
        item = index_of(self).found_in(texts.words, share=self.share, judged=judged, whole=users)
        return None if item is None else Drop("benchmark", item)
