"""The `nemo-ext mixture` job: trains small models on sampled mixtures, fits their losses, and finds the optimum.

conf/pipeline/NAME.yaml   each run as a pipeline of two stages, training and evaluation, which can also be run by hand
runs/NAME                 folder of a run: prior, sample_001 and so on, and best_HASH, trained on the optimum
conf/data/mixture.yaml    the optimum as a data file
mixture.json, report.md, report.html, mixture.png
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nemo_ext.data.blends.blend import tokens_of_run
from nemo_ext.data.blends.hierarchy import Leaf
from nemo_ext.data.blends.plan import plan_blend
from nemo_ext.evaluation.benchmark import Benchmark
from nemo_ext.evaluation.job import chosen, prepare
from nemo_ext.evaluation.settings import EvaluateSettings
from nemo_ext.evaluation.store import BITS, RESULTS
from nemo_ext.job.config import FAILED, INTERRUPTED, USER_ERROR, hydra_value
from nemo_ext.job.files import write_text
from nemo_ext.job.made_of import digest, note, noted
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import checked
from nemo_ext.mixture import report
from nemo_ext.mixture.law import Law, cross_validate, fit, optimum
from nemo_ext.mixture.sampling import Shares, sample
from nemo_ext.mixture.settings import RUNS_PER_STREAM, Mixture, Settings, evaluation_of, read_settings, training_of
from nemo_ext.pipeline.run import run as run_pipeline
from nemo_ext.pipeline.stages import EVALUATION
from nemo_ext.slurm import attempts

CONF, RUNS, PRIOR = "conf", "runs", "prior"
DATA = "mixture"
"""Name of the data config file, without suffix."""
_TRAIN = "train"
_MIXTURES = "mixtures.json"
_DIGITS = 6
"""Number of decimal places of the optimum's shares."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Streams to mix.

    Attributes:
        leaves: the streams, as leaves of the blend.
        sizes: number of tokens in each stream, [streams].
        prior: shares around which mixtures are sampled, [streams].
        repeats: maximum number of passes over each stream, [streams].
        tokens: number of tokens in a small run.
        data: `data` section of the training config.
    """

    leaves: Sequence[Leaf]
    sizes: Shares
    prior: Shares
    repeats: Shares
    tokens: int
    data: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """Names of the streams."""
        return [leaf.name for leaf in self.leaves]

    def written(self, shares: Shares) -> list[dict[str, Any]]:
        """Return the streams with a positive share as a list for `data.streams`, with name, weight and path prefix."""
        return [
            {"name": leaf.name, "weight": float(share), "prefix": str(leaf.prefix.absolute())}
            for leaf, share in zip(self.leaves, shares, strict=True)
            if share > 0
        ]

    def describe(self, shares: Shares) -> str:
        """Return a summary of a mixture for a message: the streams with a positive share, and their shares."""
        return ", ".join(f"{name} {share:.3f}" for name, share in zip(self.names, shares, strict=True) if share > 0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of the runs, made before the first one.

    Attributes:
        streams: streams to mix.
        mixtures: mapping from the name of each run to its shares, [streams]; the prior first.
        benchmarks: names of the benchmarks scored in bits per byte.
    """

    settings: Settings
    streams: Streams
    mixtures: Mapping[str, Shares]
    benchmarks: Sequence[str]

    @property
    def made_of(self) -> dict[str, Any]:
        """Settings that determine the runs, and thus must not change when a job is resumed.

        The number of runs, the benchmarks and the limits may change.
        """
        streams = zip(self.streams.names, self.streams.sizes.tolist(), self.streams.prior.tolist(), strict=True)
        values = {"train": self.settings.train, "streams": list(streams), "tokens": self.streams.tokens}
        normalised: dict[str, Any] = json.loads(json.dumps(values))
        return normalised

    @property
    def evaluation(self) -> str:
        """Name of the stage that evaluates a run, which depends on the evaluation settings."""
        return f"{EVALUATION}{digest(self.settings.evaluate)[:8]}"

    def results(self, name: str) -> Path:
        """Return the path of a run's results file."""
        return self.settings.folder / RUNS / name / self.evaluation / RESULTS

    def is_done(self, name: str) -> bool:
        """Return whether a run has been trained and evaluated."""
        return attempts.finished(self.results(name).parent) is not None


def check(config: Mapping[str, Any], *, files: bool = True) -> None:
    """Check the job's settings and data, as the job itself does before its first run.

    Args:
        files: True if the streams' tokenised files must exist.

    Raises:
        ValueError: a setting is invalid, streams are not tokenised, a benchmark's data is missing, or no mixture
            satisfies the limits.
    """
    if files:
        _check_benchmarks(_planned(config), config)
        return
    settings = read_settings(config)
    training_of(config)
    settings.mixture.weights_of(_in_bits(chosen(_evaluation(config)), settings))


def run(config: Mapping[str, Any]) -> None:
    """Do the unfinished runs of this shard; once all shards are done, compute the optimum and train on it.

    Raises:
        ValueError: a setting is invalid, or the folder has runs made with different settings.
        SystemExit: a run failed.
        KeyboardInterrupt: a run was interrupted, after saving.
    """
    settings = read_settings(config)
    with settings.claim():
        with settings.lock():
            plan = _planned(config)
            note(settings.record, plan.made_of)
            note(settings.own / _MIXTURES, {name: shares.tolist() for name, shares in plan.mixtures.items()})
        _check_benchmarks(plan, config)
        mine = settings.mine(list(plan.mixtures))
        for place, name in enumerate(mine, 1):
            if not plan.is_done(name):
                notice(f"run {place} of {len(mine)}, {name}: {plan.streams.describe(plan.mixtures[name])}")
                _train_and_evaluate(plan, name, plan.mixtures[name])
            _losses(plan, name)
        if unfinished := [name for name in plan.mixtures if not plan.is_done(name)]:
            notice(
                f"shard {settings.shard} is done, but {len(unfinished)} of {len(plan.mixtures)} runs are not; once all "
                "are, run shard 0 again for the optimum"
            )
        elif PRIOR in mine:
            _choose(plan)


def _planned(config: Mapping[str, Any]) -> Plan:
    """Plan the runs that a composed config describes.

    Raises:
        ValueError: see `check`.
    """
    settings = read_settings(config)
    streams = _streams(training_of(config), settings.mixture)
    names = _in_bits(chosen(_evaluation(config)), settings)
    settings.mixture.weights_of(names)
    _limits(streams, settings.mixture)
    plan = Plan(settings=settings, streams=streams, mixtures={}, benchmarks=names)
    settings.check_same(plan.made_of)
    return replace(plan, mixtures=_mixtures(plan))


def _evaluation(config: Mapping[str, Any]) -> EvaluateSettings:
    return checked(EvaluateSettings, evaluation_of(config)["evaluate"], "evaluate")


def _check_benchmarks(plan: Plan, config: Mapping[str, Any]) -> None:
    """Check that the data of all benchmarks exists, unless all runs are already evaluated."""
    if all(plan.is_done(name) for name in plan.mixtures):
        return
    evaluate = _evaluation(config)
    with prepare(evaluate, Path(evaluate.data_root).expanduser(), chosen(evaluate)) as prepared:
        missing = [why for name, why in prepared.missing.items() if name in plan.benchmarks]
    if missing:
        reasons = "; ".join(missing)
        raise ValueError(
            f"evaluate: benchmark data is missing ({reasons}); provide it, or select benchmarks with "
            "evaluate.benchmarks=[...]"
        )


def _in_bits(benchmarks: Sequence[Benchmark], settings: Settings) -> list[str]:
    """Return the names of the benchmarks that are scored in bits per byte."""
    names = [task.name for task in benchmarks if task.kind == "bits" or task.settings.get("headline") == BITS]
    if not names:
        raise ValueError(
            f"evaluate={' '.join(settings.evaluate)} has no benchmark scored in bits per byte: use "
            "suite=olmo3_base_easy"
        )
    return names


def _streams(training: Mapping[str, Any], mixture: Mixture) -> Streams:
    """Read the streams of a training config, with sizes from their files."""
    tokens = tokens_of_run(training)
    if tokens is None:
        raise ValueError("train: the length of the small runs is unknown; add train.tokens=NUMBER")
    plan = plan_blend(training["data"], tokens)
    leaves = list(plan.root.leaves())
    for leaf in leaves:
        size = plan.sizes.get(leaf.name)
        if size is None or size.known != "files":
            raise ValueError(
                f"train: {leaf.prefix}_train.idx does not exist; tokenise the stream (`nemo-ext tokenize`)"
            )
    if len(leaves) < 2:
        raise ValueError(f"train: a mixture requires at least two streams, not {len(leaves)}")
    mixture.check_names(leaf.name for leaf in leaves)
    sizes = np.array([float(plan.sizes[leaf.name].tokens) for leaf in leaves])
    weights = np.array([float(plan.shares[leaf.name]) for leaf in leaves])
    most = min(mixture.repeats, float(training["data"].get("refuse_epochs") or mixture.repeats))
    streams = Streams(
        leaves=leaves,
        sizes=sizes,
        prior=sizes / sizes.sum() if mixture.prior == "sizes" else weights,
        repeats=np.array([min(most, float(leaf.cap_epochs or most)) for leaf in leaves]),
        tokens=tokens,
        data=training["data"],
    )
    for name, passes, limit in zip(streams.names, streams.prior * tokens / sizes, streams.repeats, strict=True):
        if passes > limit + 1e-9:
            raise ValueError(
                f"mixture.prior={mixture.prior}: a run of {tokens:,} tokens would read {name} {passes:.3g} times, more "
                f"than {limit:g}; raise mixture.repeats, or lower train.tokens"
            )
    return streams


def _mixtures(plan: Plan) -> dict[str, Shares]:
    """Return the shares of each run, keyed by name; mixtures that the job sampled earlier are kept."""
    mixture, streams = plan.settings.mixture, plan.streams
    count = mixture.runs or RUNS_PER_STREAM * len(streams.leaves)
    before = noted(plan.settings.own / _MIXTURES) or {}
    mixtures = sample(
        count,
        streams.prior,
        strengths=mixture.strengths,
        least=mixture.least,
        most=streams.repeats * streams.sizes / streams.tokens,
        seed=mixture.seed,
        before=[np.array(shares) for shares in before.values()],
    )
    names = [PRIOR, *(f"sample_{number:03d}" for number in range(1, len(mixtures)))]
    return dict(zip(names, mixtures, strict=True))


def _limits(streams: Streams, mixture: Mixture) -> tuple[Shares, Shares]:
    """Return each stream's minimum and maximum share in the optimum, [streams] each.

    They follow from the user's limits and from the maximum number of passes over a stream, in small and target runs.
    """
    lowest = np.array([mixture.at_least.get(name, 0.0) for name in streams.names])
    longest = max(streams.tokens, mixture.tokens or 0)
    by_repeats = np.minimum(1, streams.repeats * streams.sizes / longest)
    highest = np.minimum(by_repeats, [mixture.at_most.get(name, 1.0) for name in streams.names])
    for name, low, high in zip(streams.names, lowest, highest, strict=True):
        if low > high:
            raise ValueError(
                f"mixture.at_least.{name}={low:g} is above {high:.3g}, the largest share of {longest:,.0f} tokens that "
                "mixture.at_most and mixture.repeats allow: lower at_least"
            )
    if highest.sum() < 1 - 1e-9 or lowest.sum() > 1 + 1e-9:
        raise ValueError(
            f"mixture: the shares cannot sum to 1, since their minimums sum to {lowest.sum():.3g} and their maximums "
            f"to {highest.sum():.3g}; change mixture.at_least, at_most, tokens or repeats"
        )
    return lowest, highest


def _train_and_evaluate(plan: Plan, name: str, shares: Shares) -> None:
    """Train and evaluate a small model on a mixture, as a pipeline of two stages.

    Args:
        shares: shares of the streams, [streams].

    Raises:
        ValueError: the pipeline's arguments are invalid.
        SystemExit: the pipeline failed.
        KeyboardInterrupt: the pipeline was interrupted.
    """
    conf, run_dir = plan.settings.folder / CONF, plan.settings.folder / RUNS / name
    streams = ", ".join(
        f"{{name: {hydra_value(row['name'])}, weight: {row['weight']!r}, prefix: {hydra_value(row['prefix'])}}}"
        for row in plan.streams.written(shares)
    )
    train = [word for word in plan.settings.train if word.partition("=")[0] not in ("streams", "data.directory")]
    stages = {
        _TRAIN: {"job": "train", "words": [*train, f"streams=[{streams}]"]},
        plan.evaluation: {"job": "evaluate", "parent": _TRAIN, "words": list(plan.settings.evaluate)},
    }
    text = yaml.safe_dump({"pipeline": name, "stages": stages}, sort_keys=False, width=1000)
    write_text(conf / "pipeline" / f"{name}.yaml", f"# @package _global_\n{text}")
    words = [f"--config-dir={conf}", f"pipeline={name}", f"run_dir={hydra_value(str(run_dir))}"]
    code = run_pipeline(words, dry_run=False)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == USER_ERROR:
        raise ValueError(
            f"the run in {run_dir} was not started, for the reason above: correct it and run the same command again"
        )
    if code:
        print(f"error: the run in {run_dir} failed, see above; the same command resumes it", file=sys.stderr)
        sys.exit(FAILED)


def _losses(plan: Plan, name: str) -> list[float]:
    """Return the bits per byte of a run, one value per benchmark."""
    path = plan.results(name)
    entries, losses = json.loads(path.read_text())["benchmarks"], list[float]()
    for benchmark in plan.benchmarks:
        entry = entries.get(benchmark) or {}
        value = entry.get("accuracy")
        short = sum(int(entry.get(key) or 0) for key in ("failed", "unscored", "missing"))
        if value is None or not 0 < value < float("inf") or short:
            raise ValueError(
                f"{path.parent}: {benchmark} has {f'{short} problems without a score' if short else 'no value'}; see "
                "report.md there for the reason, remove the folder and run the same command to evaluate again"
            )
        losses.append(float(value))
    return losses


def _choose(plan: Plan) -> None:
    """Fit the laws, compute the optimum, train on it, and write its data file and the report."""
    streams, mixture = plan.streams, plan.settings.mixture
    weights = mixture.weights_of(plan.benchmarks)
    shares = np.stack(list(plan.mixtures.values()))
    values = np.array([_losses(plan, name) for name in plan.mixtures])
    lowest, highest = _limits(streams, mixture)
    laws = [fit(shares, losses) for losses in values.T]
    quality = [cross_validate(shares, losses) for losses in values.T]

    def best_by(laws: Sequence[Law]) -> Shares:
        limits = {"lowest": lowest, "highest": highest}
        return optimum(laws, weights, streams.prior, kl=mixture.kl, least=mixture.least, **limits)

    best = _rounded(best_by(laws), highest)
    name = f"best_{hashlib.sha256(best.tobytes()).hexdigest()[:8]}"
    results = report.Results(
        streams=streams.names,
        sizes=streams.sizes,
        prior=streams.prior,
        best=best,
        highest=highest,
        others=np.stack([best_by(fold) for fold in zip(*(task.laws for task in quality), strict=True)]),
        tasks=plan.benchmarks,
        weights=weights,
        names=list(plan.mixtures),
        shares=shares,
        values=values,
        laws=laws,
        quality=quality,
        tokens=streams.tokens,
        target=mixture.tokens,
        run=f"{RUNS}/{name}",
    )
    file = plan.settings.folder / CONF / "data" / f"{DATA}.yaml"
    write_text(file, _data_file(streams, results))
    if not plan.is_done(name):
        notice(f"optimum: {streams.describe(best)}")
        _train_and_evaluate(plan, name, best)
    results = replace(results, measured=np.array(_losses(plan, name)))
    write_text(file, _data_file(streams, results))
    page = report.write(results, plan.settings.folder)
    if (reason := report.doubt(results)) is not None:
        notice(f"warning: {reason}")
    print(f"{report.verdict(results)}: {page}")


def _rounded(shares: Shares, highest: Shares) -> Shares:
    """Round shares to `_DIGITS` decimal places, such that they sum to 1 and none exceeds its limit in `highest`."""
    rounded: Shares = np.floor(shares * 10**_DIGITS + 1e-3) / 10**_DIGITS  # + 1e-3, since 0.29 * 100 is below 29
    place = int(np.argmax(np.where(rounded > 0, highest - rounded, -1)))
    rounded[place] = round(rounded[place] + 1 - rounded.sum(), _DIGITS)
    return rounded


def _data_file(streams: Streams, results: report.Results) -> str:
    """Return the contents of the optimum's data file, in the format of `hydra_conf/data`."""
    kept = {key: value for key, value in streams.data.items() if key not in ("streams", "blend") and value is not None}
    kept["directory"] = str(Path(str(streams.data["directory"])).absolute())
    path = Path(str(streams.data["tokenizer"].get("path") or "")).expanduser()
    if path.name and path.exists():
        kept["tokenizer"] = {**streams.data["tokenizer"], "path": str(path.absolute())}
    data = {"data": {**kept, "streams": streams.written(results.best)}}
    comment = f"# The optimal mixture by `nemo-ext mixture`. {report.verdict(results)}.\n"
    return f"# @package _global_\n{comment}{yaml.safe_dump(data, sort_keys=False)}"
