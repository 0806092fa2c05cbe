"""Validated settings of `nemo-ext train_tokenizer`."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.data.streams import sources_of
from nemo_ext.data.text.documents import Source
from nemo_ext.job.run_directory import OWN
from nemo_ext.job.settings import STRICT, Count, Place, PlacesOrNone, Text, checked
from nemo_ext.job.units import OutputFolder

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """A stream of text, and its share of the sample."""

    name: str
    source: Source
    share: float


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(OutputFolder):
    """Settings of `nemo-ext train_tokenizer`, except its text; hydra_conf/train_tokenizer.yaml describes the others.

    Attributes:
        min_frequency: minimum number of occurrences for a pair to be merged.
    """

    preset: str | None
    output: Annotated[Place, Field(min_length=1)]
    vocab: Annotated[int, Field(gt=BYTES, le=1 << 24)]
    split: Annotated[Text, Field(min_length=1)]
    normalizer: Literal["NFC", "NFKC"] | None
    special_tokens: tuple[Annotated[str, Field(min_length=2)], ...]
    end: Text
    template: Place | None
    longest: Annotated[int, Field(gt=1, le=1 << 16)] | None
    min_frequency: Annotated[int, Field(ge=1, le=1 << 31)]
    sample: Count
    held_out: Count
    compare: PlacesOrNone
    seed: int


def read_settings(config: Mapping[str, Any]) -> tuple[Settings, list[Weighted]]:
    """Read the settings and streams of a composed config, without checking that the streams' files exist.

    Raises:
        ValueError: a setting is invalid, or no text is given.
    """
    values = {field.name: config[field.name] for field in dataclasses.fields(Settings)}
    for key, advice in (
        ("output", "set it to a folder"),
        ("vocab", "set the number of tokens"),
        ("split", "set preset"),
    ):
        if values[key] is None:
            raise ValueError(f"{key}=null, but train_tokenizer requires it: {advice}")
    settings = checked(Settings, values)
    weighted = sources_of(config, settings.folder, own=settings.folder / OWN / "text")
    total = sum(weight for _, weight in weighted.values())
    return settings, [
        Weighted(name=name, source=source, share=weight / total)
        for name, (source, weight) in weighted.items()
        if weight
    ]
