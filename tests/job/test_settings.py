"""Validation of config sections."""

import functools
import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from omegaconf import OmegaConf
from pydantic.dataclasses import dataclass

from nemo_ext.job.settings import FLAT, STRICT, Count, Share, Strings, StringsOrNone, checked, strings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Part:
    """A part of the settings."""

    share: Share = 0.5


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Whole:
    """Settings of a job."""

    paths: Strings
    skipped: StringsOrNone = ()
    steps: Count = 1
    seed: int = 1
    on: bool = False
    folder: Path | None = None
    part: Part = field(default_factory=Part)
    stages: Literal["kinds", "all"] | tuple[Count, ...] = "all"
    parts: Mapping[str, Part | Share] = field(default_factory=dict)


def test_values_that_a_config_may_have() -> None:
    given: dict[str, Any] = {"paths": ["a", "b"], "skipped": None, "steps": 4e3, "part": {"share": 1}}
    made = checked(Whole, {**OmegaConf.create(given), "folder": Path("x")}, strict=True)

    assert (made.paths, made.skipped, made.steps, made.part.share) == (("a", "b"), (), 4000, 1.0)
    assert made.folder == Path("x") and checked(Whole, {"paths": "a"}, strict=True).paths == ("a",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"paths": None}, "here.paths=None"),
        ({"paths": "a", "steps": 0}, "here.steps=0"),
        ({"paths": "a", "steps": True}, "here.steps=True"),
        ({"paths": "a", "seed": "1"}, "here.seed='1'"),
        ({"paths": "a", "on": 1}, "here.on=1"),
        ({"paths": "a", "part": {"share": 2}}, r"here\.part\.share=2"),
        ({"paths": "a", "part": {"shares": 1}}, "did you mean 'share'"),
        ({"paths": "\udcff"}, "here: .*not valid Unicode"),
        ({"paths": json.loads("[" * 300 + "]" * 300)}, "here: .*deep"),
        ({"paths": functools.reduce(lambda inner, _: [inner], range(20_000), [])}, "here: .*deep"),
        ({"paths": {("a", "b"): 1}}, r"here: the section has an invalid value \(keys must be"),
        ({"paths": b"a"}, "here: the section has an invalid value .* not b'a'"),
        ({"paths": "a", "stages": "x"}, "here.stages='x': input should be 'kinds' or 'all', or a list$"),
        ({"paths": "a", "stages": [1, 0]}, r"here\.stages\.1=0: input should be greater than or equal to 1$"),
        ({"paths": "a", "parts": {"a": {"share": 2}}}, r"here\.parts\.a\.share=2: input should be less than or equal"),
        ({"paths": "a", "parts": {"a": {"shares": 2}}}, r"here: unknown key 'parts\.a\.shares'"),
        ({"pths": "a"}, "did you mean 'paths'"),
        ({}, "here: the key 'paths' is missing"),
    ],
)
def test_invalid_values_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked(Whole, given, where="here", strict=True)


def test_texts_may_be_one_string_a_list_or_null() -> None:
    assert [strings(value) for value in ("a", ["a", 5], 5, None)] == [("a",), ("a", "5"), ("5",), ()]


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Flat:
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True, kw_only=True)
class Among:
    name: str = ""
    part: Annotated[Flat, FLAT] = field(default_factory=Flat)


def test_keys_of_flat_fields_are_at_the_same_level_as_the_others() -> None:
    assert checked(Among, {"name": "a", "inner": {"size": 3}}).part.inner.size == 3
    for section, message in (
        ({"inner": {"sise": 3}}, "unknown key 'inner.sise': did you mean 'size'"),
        ({"part": {}}, "unknown key 'part'"),
    ):
        with pytest.raises(ValueError, match=message):
            checked(Among, section)
