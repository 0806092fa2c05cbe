"""Validated settings of `nemo-ext mixture`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.job.config import check_place, compose, hydra_value
from nemo_ext.job.run_directory import OWN
from nemo_ext.job.settings import (
    REPLACED,
    STRICT,
    WORDS,
    Count,
    Place,
    Shard,
    Share,
    Strings,
    checked,
    nearest,
    prefixed_errors,
)
from nemo_ext.job.units import OutputFolder

RUNS_PER_STREAM = 5
"""Default number of runs per stream (OLMo 3)."""
_CHECKED_RUN = Path(OWN, "run")
"""Run folder in the configs of runs that are only checked."""
_Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mixture:
    """The config's `mixture` section; hydra_conf/mixture.yaml describes its other keys.

    Attributes:
        seed: seed of the samples.
    """

    runs: Count | None
    prior: Literal["sizes", "weights"]
    strengths: tuple[_Positive, _Positive]
    least: Annotated[float, Field(ge=0, lt=1)]
    repeats: _Positive
    tokens: _Positive | None
    kl: Annotated[float, Field(ge=0)]
    at_least: Annotated[dict[str, Share], REPLACED]
    at_most: Annotated[dict[str, Share], REPLACED]
    weights: Annotated[dict[str, Annotated[float, Field(ge=0)]], REPLACED]
    seed: int

    def check_names(self, streams: Iterable[str]) -> None:
        """Check that all limits name existing streams.

        Raises:
            ValueError: a stream does not exist; the message suggests the nearest name.
        """
        known = list(streams)
        for key, limits in (("at_least", self.at_least), ("at_most", self.at_most)):
            for name in (name for name in limits if name not in known):
                raise ValueError(f"mixture.{key}: the mixture has no stream {name!r}: {nearest(name, known)}")

    def weights_of(self, benchmarks: Sequence[str]) -> npt.NDArray[np.float64]:
        """Return the weights of benchmarks in their mean, [benchmarks], summing to 1.

        Raises:
            ValueError: a weight names an unknown benchmark, or all weights are 0.
        """
        for name in (name for name in self.weights if name not in benchmarks):
            raise ValueError(
                f"mixture.weights: {name!r} is not a benchmark in bits per byte: {nearest(name, benchmarks)}"
            )
        weights = np.array([self.weights.get(name, 1.0) for name in benchmarks])
        if not weights.sum():
            raise ValueError("mixture.weights: all weights are 0; give at least one benchmark a positive weight")
        return weights / weights.sum()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(OutputFolder):
    """Settings of `nemo-ext mixture`, described in hydra_conf/mixture.yaml."""

    train: Annotated[Strings, Field(min_length=1), WORDS]
    evaluate: Annotated[Strings, Field(min_length=1), WORDS]
    output: Annotated[Place, Field(min_length=1)]
    shard: Shard | None
    mixture: Mixture

    @property
    def folder(self) -> Path:
        """Absolute path of the output folder."""
        return Path(self.output).expanduser().absolute()


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Validate a composed config and return its settings; data and models are not read.

    Raises:
        ValueError: a setting is invalid.
    """
    check_place("output", config["output"])
    settings = checked(Settings, {field.name: config[field.name] for field in dataclasses.fields(Settings)})
    for key, words, taken in (
        ("train", settings.train, ("run_dir",)),
        ("evaluate", settings.evaluate, ("run_dir", "model", "served", "endpoint")),
    ):
        for word in words:
            if (name := word.partition("=")[0]) in taken:
                raise ValueError(f"{key}: {name} cannot be set, since it differs between runs; remove {word}")
    return settings


def runs_of(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the jobs of one small run, training and evaluation, as (name, composed config) pairs.

    Raises:
        ValueError: their arguments are invalid.
    """
    return [("train", training_of(config)), ("evaluate", evaluation_of(config))]


def training_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the composed config for training a small model.

    Raises:
        ValueError: its arguments are invalid, it requires several nodes, or it has no streams to mix.
    """
    settings = read_settings(config)
    training = _composed("train", [f"run_dir={hydra_value(str(settings.folder / _CHECKED_RUN))}", *settings.train])
    if int(training["launcher"]["nodes"]) != 1:
        raise ValueError(f"train: launcher.nodes must be 1 for small runs, not {training['launcher']['nodes']}")
    if phases := [name for name, phase in (training.get("phases") or {}).items() if (phase or {}).get("data")]:
        raise ValueError(
            f"train: phases.{phases[0]}.data cannot be set, since a small run has one mixture; remove data from phases"
        )
    flags = training["megatron"]
    if paths := [key for key in ("data_path", "train_data_path", "data_args_path") if flags.get(key)]:
        raise ValueError(
            f"train: megatron.{paths[0]} cannot be set, since each run has a different mixture; set data or streams "
            "instead"
        )
    data = training.get("data") or {}
    if data.get("packed") or not (data.get("blend") or data.get("streams")):
        raise ValueError(
            "train: there are no streams to mix; add data=NAME, or 'streams=[{name: web, weight: 1}, ...]'"
        )
    return training


def evaluation_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the composed config for evaluating a small model.

    Raises:
        ValueError: its arguments are invalid, or require more than one server.
    """
    settings = read_settings(config)
    run = settings.folder / _CHECKED_RUN
    evaluation = _composed("evaluate", [f"model={run}", f"run_dir={hydra_value(str(run))}", *settings.evaluate])
    for key in ("replicas", "nodes"):
        if (number := evaluation["serving"][key]) != 1:
            raise ValueError(f"evaluate: serving.{key} must be 1 for a small model, not {number}")
    return evaluation


def _composed(job: str, words: Sequence[str]) -> dict[str, Any]:
    with prefixed_errors(job):
        return compose(job, words)
