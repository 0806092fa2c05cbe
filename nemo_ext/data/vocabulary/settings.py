"""Checked settings of `nemo-ext train_tokenizer`."""

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
    """A stream of text: its name, its source, and its share of the sample."""

    name: str
    source: Source
    share: float


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(OutputFolder):
    """Settings of the job but for its text.

    Attributes:
        preset: name of the preset, for the report.
        output: folder to write.
        vocab: number of tokens, special ones included.
        split: regular expression of the pieces that no token crosses.
        normalizer: Unicode form that text is brought to first; None to leave it.
        special_tokens: tokens with ids of their own at the end of the vocabulary.
        end: the one of them, or of the template's, that ends a document: `eos_token`.
        template: chat template, whose `<|...|>` tokens are added; None for none.
        longest: most bytes of a token; None for any.
        min_frequency: least number of times that a pair is seen before it is merged.
        sample: bytes of text to train on.
        held_out: bytes of each stream, which training does not see, that the report is about.
        compare: other tokenizers that the report has beside it.
        seed: seed of what is sampled.
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
    """Settings and streams of a composed config; whether the streams' files are there is not looked at.

    Raises:
        ValueError: a setting is wrong, or no text is named.
    """
    # A data file also has what training reads.
    given = {each.name: config[each.name] for each in dataclasses.fields(Settings)}
    for key, what in (("output", "name a folder"), ("vocab", "say how many tokens"), ("split", "choose a preset")):
        if given[key] is None:
            raise ValueError(f"{key}=null: {what}")
    settings = checked(Settings, given)
    given = {**config, "tokenizer": None, "validation_share": None, "workers": None}
    found = sources_of(given, settings.folder, own=settings.folder / OWN / "text")
    whole = sum(amount for _, amount in found.values())
    shares = {name: amount / whole for name, (_, amount) in found.items() if amount}
    return settings, [Weighted(name=name, source=found[name][0], share=share) for name, share in shares.items()]
