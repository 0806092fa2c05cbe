"""Checked settings of `nemo-ext mixture`."""

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
from nemo_ext.job.settings import REPLACED, STRICT, WORDS, Count, Place, Shard, Share, Strings, checked, nearest
from nemo_ext.job.units import OutputFolder

RUNS_A_STREAM = 5
"""Runs for each stream where their number is not given (OLMo 3)."""
_OF_CHECKS = Path(OWN, "run")
"""Folder of a run that is only checked."""
_Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mixture:
    """Section `mixture` of the config.

    Attributes:
        runs: number of sampled mixtures, beside the prior; null for five for each stream.
        prior: centre of the samples: by the streams' tokens (`sizes`) or as the training's data weigh them (`weights`).
        strengths: ends of the range of concentrations of the Dirichlet distribution, from which each sample draws its
            own on a logarithmic scale: low ones give few streams, high ones mixtures near the prior.
        least: share below which a stream is left out.
        repeats: most passes over a stream, in the small runs and in the run that the mixture is for.
        tokens: tokens of that run; null to limit nothing there.
        kl: weight of the mixture's divergence from the prior, in bits per byte a nat.
        at_least, at_most: limits of shares, by stream.
        weights: weight of benchmarks in the mean that is minimised, by name; those not named weigh 1.
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
        """Refuse limits of streams that are not there.

        Raises:
            ValueError: naming the nearest stream.
        """
        known = list(streams)
        for key, given in (("at_least", self.at_least), ("at_most", self.at_most)):
            for name in given.keys() - set(known):
                raise ValueError(f"mixture.{key}: no stream {name!r}: {nearest(name, known)}")

    def weights_of(self, benchmarks: Sequence[str]) -> npt.NDArray[np.float64]:
        """Weights of benchmarks in their mean, with sum 1.

        Raises:
            ValueError: one that has a weight is not among them, or none weighs anything.
        """
        for name in self.weights.keys() - set(benchmarks):
            raise ValueError(f"mixture.weights: no benchmark {name!r} in bits per byte: {nearest(name, benchmarks)}")
        found = np.array([self.weights.get(name, 1.0) for name in benchmarks])
        if not found.sum():
            raise ValueError("mixture.weights: all are 0")
        return found / found.sum()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(OutputFolder):
    """Settings of the job but for the section `mixture`.

    Attributes:
        train: words of `nemo-ext train` of a small model, with the streams to mix as its data.
        evaluate: words of `nemo-ext evaluate`, with benchmarks in bits per byte.
        output: folder to write.
        shard: this process's share of the runs, as 0/40; null for all of them.
        mixture: sampled mixtures, the fit, and limits of the optimum.
    """

    train: Annotated[Strings, Field(min_length=1), WORDS]
    evaluate: Annotated[Strings, Field(min_length=1), WORDS]
    output: Annotated[Place, Field(min_length=1)]
    shard: Shard | None
    mixture: Mixture

    @property
    def folder(self) -> Path:
        """Folder to write."""
        return Path(self.output).expanduser().absolute()


def read_settings(config: Mapping[str, Any]) -> tuple[Settings, Mixture]:
    """Settings of a composed config; data and models are not looked at.

    Raises:
        ValueError: a setting is wrong.
    """
    check_place("output", config["output"])
    settings = checked(Settings, {each.name: config[each.name] for each in dataclasses.fields(Settings)})
    for key, words, taken in (
        ("train", settings.train, ("run_dir",)),
        ("evaluate", settings.evaluate, ("run_dir", "model", "served", "endpoint")),
    ):
        for word in words:
            if (name := word.partition("=")[0]) in taken:
                raise ValueError(f"{key}: {word}: each run has its own {name}: take the word away")
    return settings, settings.mixture


def runs_of(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Jobs and composed configs of one small run: its training and its evaluation.

    Raises:
        ValueError: words are wrong.
    """
    return [("train", training_of(config)), ("evaluate", evaluation_of(config))]


def training_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Composed config of a small training.

    Raises:
        ValueError: its words are wrong, it takes several nodes, or its length is not in tokens.
    """
    settings, _ = read_settings(config)
    try:
        found = compose("train", [f"run_dir={hydra_value(str(settings.folder / _OF_CHECKS))}", *settings.train])
    except ValueError as error:
        raise ValueError(f"train: {error}") from error
    if int(found["launcher"]["nodes"]) != 1:
        raise ValueError(f"train: launcher.nodes={found['launcher']['nodes']}: a small run takes one node")
    if own := [name for name, phase in (found.get("phases") or {}).items() if (phase or {}).get("data")]:
        raise ValueError(
            f"train: phases.{own[0]}.data: a small run has one mixture: choose a recipe without such phases"
        )
    flags = found["megatron"]
    if own := [key for key in ("data_path", "train_data_path", "data_args_path") if flags.get(key)]:
        raise ValueError(f"train: megatron.{own[0]}: each run has its own mixture: give the streams as data")
    data = found.get("data") or {}
    if data.get("packed") or not (data.get("blend") or data.get("streams")):
        raise ValueError("train: no streams to mix: add data=NAME, or 'streams=[{name: web, weight: 1}, ...]'")
    return found


def evaluation_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Composed config of the evaluation of a small model.

    Raises:
        ValueError: its words are wrong, or want more than one server.
    """
    settings, _ = read_settings(config)
    place = settings.folder / _OF_CHECKS
    own = [f"model={place}", f"run_dir={hydra_value(str(place))}"]
    try:
        found = compose("evaluate", [*own, *settings.evaluate])
    except ValueError as error:
        raise ValueError(f"evaluate: {error}") from error
    for key in ("replicas", "nodes"):
        if (number := found["serving"][key]) != 1:
            raise ValueError(
                f"evaluate: serving.{key}={number}: a small model is served once, on one node: leave it at 1"
            )
    return found
