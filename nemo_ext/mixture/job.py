"""The job `nemo-ext mixture`: small models on sampled mixtures, their losses, and the mixture that follows from them.

conf/pipeline/NAME.yaml   each run as a pipeline of two stages, training and evaluation, which can be run by hand too
runs/NAME                 its folder: prior, sample_001 and so on, and best_HASH, trained on the optimum
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
from nemo_ext.mixture.law import Law, fit, foreseen, optimum
from nemo_ext.mixture.sampling import Shares, sample
from nemo_ext.mixture.settings import RUNS_A_STREAM, Mixture, Settings, evaluation_of, read_settings, training_of
from nemo_ext.pipeline.run import run as run_pipeline
from nemo_ext.pipeline.stages import EVALUATION
from nemo_ext.slurm import attempts

CONF, RUNS, PRIOR = "conf", "runs", "prior"
DATA = "mixture"
"""Name of the data file."""
_TRAIN = "train"
_MIXTURES = "mixtures.json"
_DIGITS = 6
"""Digits of the optimum's shares."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """What is mixed.

    Attributes:
        leaves: the streams.
        sizes: tokens of each, [streams].
        prior: share of each that mixtures are sampled around, [streams].
        repeats: most passes over each, [streams].
        tokens: tokens of a small run.
        data: the data section that they stand in.
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
        """Streams with a share as a list for `streams`."""
        return [
            {"name": leaf.name, "weight": float(share), "prefix": str(leaf.prefix.absolute())}
            for leaf, share in zip(self.leaves, shares, strict=True)
            if share > 0
        ]

    def told(self, shares: Shares) -> str:
        """Streams with a share in one line."""
        return ", ".join(f"{name} {share:.3f}" for name, share in zip(self.names, shares, strict=True) if share > 0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is known before the first run.

    Attributes:
        settings, mixture: the config's.
        streams: what is mixed.
        mixtures: name of each run -> its shares, [streams]; the prior's first.
        benchmarks: those in bits per byte.
    """

    settings: Settings
    mixture: Mixture
    streams: Streams
    mixtures: Mapping[str, Shares]
    benchmarks: Sequence[str]

    @property
    def made_of(self) -> dict[str, Any]:
        """What runs depend on: more of them, other benchmarks and another optimum go on with what is there."""
        streams = zip(self.streams.names, self.streams.sizes.tolist(), self.streams.prior.tolist(), strict=True)
        found: dict[str, Any] = json.loads(
            json.dumps({"train": self.settings.train, "streams": list(streams), "tokens": self.streams.tokens})
        )
        return found

    @property
    def evaluation(self) -> str:
        """Name of the stage that evaluates a run with the benchmarks asked for."""
        return f"{EVALUATION}{digest(self.settings.evaluate)[:8]}"

    def results(self, name: str) -> Path:
        """File with the results of a run."""
        return self.settings.folder / RUNS / name / self.evaluation / RESULTS

    def is_done(self, name: str) -> bool:
        """Whether a run is trained and evaluated."""
        return attempts.finished(self.results(name).parent) is not None


def check(config: Mapping[str, Any], *, files: bool = True) -> None:
    """Refuse what the job would refuse before its first run.

    Args:
        config: composed config.
        files: whether the streams' tokens must be there.

    Raises:
        ValueError: a setting is wrong, streams are not tokenised, benchmarks cannot be asked, or there are no mixtures.
    """
    if files:
        _check_benchmarks(_planned(config), config)
        return
    settings, mixture = read_settings(config)
    training_of(config)
    mixture.weights_of(_in_bits(chosen(_evaluation(config)), settings))


def run(config: Mapping[str, Any]) -> None:
    """Do this shard's runs, and with all of them done fit, choose and measure; goes on with what is there.

    Raises:
        ValueError: a setting is wrong, or the folder has runs of other settings.
        SystemExit: a run failed.
        KeyboardInterrupt: a run was interrupted; it has saved.
    """
    settings, _ = read_settings(config)
    with settings.claim():
        with settings.lock():
            plan = _planned(config)
            note(settings.record, plan.made_of)
            note(settings.own / _MIXTURES, {name: shares.tolist() for name, shares in plan.mixtures.items()})
        _check_benchmarks(plan, config)
        mine = settings.mine(list(plan.mixtures))
        for place, name in enumerate(mine, 1):
            if not plan.is_done(name):
                notice(f"run {place} of {len(mine)}: {name}: {plan.streams.told(plan.mixtures[name])}")
                _train_and_evaluate(plan, name, plan.mixtures[name])
            _losses(plan, name)
        if left := [name for name in plan.mixtures if not plan.is_done(name)]:
            notice(f"shard {settings.shard} is done, {len(left)} of {len(plan.mixtures)} runs are not; shard 0 goes on")
        elif PRIOR in mine:
            _choose(plan)


def _planned(config: Mapping[str, Any]) -> Plan:
    """All that is known before the first run.

    Raises:
        ValueError: see `check`.
    """
    settings, mixture = read_settings(config)
    streams = _streams(training_of(config), mixture)
    names = _in_bits(chosen(_evaluation(config)), settings)
    mixture.weights_of(names)
    _limits(streams, mixture)
    plan = Plan(settings=settings, mixture=mixture, streams=streams, mixtures={}, benchmarks=names)
    settings.check_same(plan.made_of)
    return replace(plan, mixtures=_mixtures(plan))


def _evaluation(config: Mapping[str, Any]) -> EvaluateSettings:
    return checked(EvaluateSettings, evaluation_of(config)["evaluate"], "evaluate")


def _check_benchmarks(plan: Plan, config: Mapping[str, Any]) -> None:
    """Refuse benchmarks whose data are missing, where they are still to be asked.

    Raises:
        ValueError: naming them.
    """
    if all(plan.is_done(name) for name in plan.mixtures):
        return
    evaluate = _evaluation(config)
    prepared = prepare(evaluate, Path(evaluate.data_root).expanduser(), chosen(evaluate))
    for scorer in prepared.scorers.values():
        scorer.close()
    if missing := [why for name, why in prepared.missing.items() if name in plan.benchmarks]:
        why = "; ".join(missing)
        raise ValueError(f"evaluate: {why}: mend it, or name the benchmarks to ask with evaluate.benchmarks=[...]")


def _in_bits(benchmarks: Sequence[Benchmark], settings: Settings) -> list[str]:
    """Names of the benchmarks in bits per byte.

    Raises:
        ValueError: there is none.
    """
    found = [each.name for each in benchmarks if each.kind == "bits" or each.settings.get("headline") == BITS]
    if not found:
        raise ValueError(
            f"evaluate={' '.join(settings.evaluate)}: no benchmark is in bits per byte; take suite=olmo3_base_easy"
        )
    return found


def _streams(training: Mapping[str, Any], mixture: Mixture) -> Streams:
    """What is mixed, with sizes from the files.

    Raises:
        ValueError: files are missing, there is one stream alone, or limits name no stream.
    """
    tokens = tokens_of_run(training)
    if tokens is None:
        raise ValueError("train: the length of the runs is not known: give train.tokens")
    plan = plan_blend(training["data"], tokens)
    leaves = list(plan.root.leaves())
    for leaf in leaves:
        size = plan.sizes.get(leaf.name)
        if size is None or size.known != "files":
            raise ValueError(f"train: {leaf.prefix}_train.idx is not there; `nemo-ext tokenize` writes it")
    if len(leaves) < 2:
        raise ValueError("train: one stream alone is no mixture: give two or more")
    mixture.check_names(leaf.name for leaf in leaves)
    sizes = np.array([float(plan.sizes[leaf.name].tokens) for leaf in leaves])
    weights = np.array([float(plan.shares[leaf.name]) for leaf in leaves])
    most = min(mixture.repeats, float(training["data"].get("refuse_epochs") or mixture.repeats))
    found = Streams(
        leaves=leaves,
        sizes=sizes,
        prior=sizes / sizes.sum() if mixture.prior == "sizes" else weights,
        repeats=np.array([min(most, float(leaf.cap_epochs or most)) for leaf in leaves]),
        tokens=tokens,
        data=training["data"],
    )
    for name, passes, limit in zip(found.names, found.prior * tokens / sizes, found.repeats, strict=True):
        if passes > limit + 1e-9:
            raise ValueError(
                f"mixture.prior={mixture.prior}: a run of {tokens:,} tokens reads {name} {passes:.3g} times, above "
                f"{limit:g}: raise mixture.repeats, or lower train.tokens"
            )
    return found


def _mixtures(plan: Plan) -> dict[str, Shares]:
    """Shares of each run by its name; those of runs that were begun stay as they are."""
    mixture, streams = plan.mixture, plan.streams
    count = mixture.runs or RUNS_A_STREAM * len(streams.leaves)
    before = noted(plan.settings.own / _MIXTURES) or {}
    found = sample(
        count,
        streams.prior,
        strengths=mixture.strengths,
        least=mixture.least,
        most=streams.repeats * streams.sizes / streams.tokens,
        seed=mixture.seed,
        before=[np.array(shares) for shares in before.values()],
    )
    names = [PRIOR, *(f"sample_{number:03d}" for number in range(1, len(found)))]
    return dict(zip(names, found, strict=True))


def _limits(streams: Streams, mixture: Mixture) -> tuple[Shares, Shares]:
    """Least and most share of each stream in the optimum, which is trained small and for the run that it is for."""
    lowest = np.array([mixture.at_least.get(name, 0.0) for name in streams.names])
    longest = max(streams.tokens, mixture.tokens or 0)
    often = np.minimum(1, streams.repeats * streams.sizes / longest)
    highest = np.minimum(often, [mixture.at_most.get(name, 1.0) for name in streams.names])
    for name, low, high in zip(streams.names, lowest, highest, strict=True):
        if low > high:
            raise ValueError(
                f"mixture.at_least.{name}={low:g}: at most {high:.3g} of {longest:,.0f} tokens can be of it "
                "(mixture.at_most, or mixture.repeats passes)"
            )
    if highest.sum() < 1 - 1e-9 or lowest.sum() > 1 + 1e-9:
        raise ValueError(
            f"mixture: shares of at least {lowest.sum():.3g} and at most {highest.sum():.3g} together cannot sum to 1: "
            "mend mixture.at_least, at_most, tokens or repeats"
        )
    return lowest, highest


def _train_and_evaluate(plan: Plan, name: str, shares: Shares) -> None:
    """A run of its own as a pipeline.

    Raises:
        ValueError: its words are wrong.
        SystemExit: it failed.
        KeyboardInterrupt: it was interrupted.
    """
    conf, run_dir = plan.settings.folder / CONF, plan.settings.folder / RUNS / name
    mixed = ", ".join(
        f"{{name: {hydra_value(each['name'])}, weight: {each['weight']!r}, prefix: {hydra_value(each['prefix'])}}}"
        for each in plan.streams.written(shares)
    )
    given = [word for word in plan.settings.train if word.partition("=")[0] not in ("streams", "data.directory")]
    stages = {
        _TRAIN: {"job": "train", "words": [*given, f"streams=[{mixed}]"]},
        plan.evaluation: {"job": "evaluate", "parent": _TRAIN, "words": list(plan.settings.evaluate)},
    }
    text = yaml.safe_dump({"pipeline": name, "stages": stages}, sort_keys=False, width=1000)
    write_text(conf / "pipeline" / f"{name}.yaml", f"# @package _global_\n{text}")
    words = [f"--config-dir={conf}", f"pipeline={name}", f"run_dir={hydra_value(str(run_dir))}"]
    code = run_pipeline(words, dry_run=False)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == USER_ERROR:
        raise ValueError(f"{run_dir}: nothing was started, for the reason above")
    if code:
        print(f"error: {run_dir}: this run failed, as said above; the same command goes on", file=sys.stderr)
        sys.exit(FAILED)


def _losses(plan: Plan, name: str) -> list[float]:
    """Bits per byte of a run's benchmarks.

    Raises:
        ValueError: some have not all of their answers.
    """
    path = plan.results(name)
    entries, found = json.loads(path.read_text())["benchmarks"], list[float]()
    for benchmark in plan.benchmarks:
        entry = entries.get(benchmark) or {}
        value = entry.get("accuracy")
        short = sum(int(entry.get(key) or 0) for key in ("failed", "unscored", "missing"))
        if value is None or not 0 < value < float("inf") or short:
            raise ValueError(
                f"{path.parent}: {benchmark} has {f'{short} problems without a score' if short else 'no value'}: "
                f"report.md there says why; remove the folder, and the same command asks again"
            )
        found.append(float(value))
    return found


def _choose(plan: Plan) -> None:
    """Fit the laws, find the optimum, train on it, and write all of it."""
    streams, mixture = plan.streams, plan.mixture
    weights = mixture.weights_of(plan.benchmarks)
    shares = np.stack(list(plan.mixtures.values()))
    values = np.array([_losses(plan, name) for name in plan.mixtures])
    lowest, highest = _limits(streams, mixture)
    laws = [fit(shares, each) for each in values.T]
    quality = [foreseen(shares, each) for each in values.T]

    def best_of(laws: Sequence[Law]) -> Shares:
        within = {"lowest": lowest, "highest": highest}
        return optimum(laws, weights, streams.prior, kl=mixture.kl, least=mixture.least, **within)

    best = _rounded(best_of(laws), highest)
    name = f"best_{hashlib.sha256(best.tobytes()).hexdigest()[:8]}"
    found = report.Found(
        streams=streams.names,
        sizes=streams.sizes,
        prior=streams.prior,
        best=best,
        highest=highest,
        others=np.stack([best_of(each) for each in zip(*(one.laws for one in quality), strict=True)]),
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
    write_text(file, _data_file(streams, found))
    if not plan.is_done(name):
        notice(f"the optimum: {streams.told(best)}")
        _train_and_evaluate(plan, name, best)
    found = replace(found, measured=np.array(_losses(plan, name)))
    write_text(file, _data_file(streams, found))
    page = report.write(found, plan.settings.folder)
    if (why := report.doubt(found)) is not None:
        notice(f"warning: {why}")
    print(f"{report.verdict(found)}: {page}")


def _rounded(shares: Shares, highest: Shares) -> Shares:
    """Shares of a few digits with sum 1, none above its limit."""
    found: Shares = np.floor(shares * 10**_DIGITS + 1e-3) / 10**_DIGITS  # 0.29 is a little less than that
    place = int(np.argmax(np.where(found > 0, highest - found, -1)))
    found[place] = round(found[place] + 1 - found.sum(), _DIGITS)
    return found


def _data_file(streams: Streams, found: report.Found) -> str:
    """The optimum as a file of `hydra_conf/data`."""
    kept = {key: value for key, value in streams.data.items() if key not in ("streams", "blend") and value is not None}
    kept["directory"] = str(Path(str(streams.data["directory"])).absolute())
    path = Path(str(streams.data["tokenizer"].get("path") or "")).expanduser()
    if path.name and path.exists():
        kept["tokenizer"] = {**streams.data["tokenizer"], "path": str(path.absolute())}
    data = {"data": {**kept, "streams": streams.written(found.best)}}
    about = f"# The mixture that `nemo-ext mixture` chose. {report.verdict(found)}.\n"
    return f"# @package _global_\n{about}{yaml.safe_dump(data, sort_keys=False)}"
