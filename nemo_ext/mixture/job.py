"""The job `nemo-ext mixture`: small models on sampled mixtures, their losses, and the mixture that follows from them.

conf/pipeline/NAME.yaml   each run as a pipeline of two stages, train and evaluate, which can be run by hand too
runs/NAME                 its folder: prior, sample_001 and so on, and best_HASH, trained on the optimum
conf/data/mixture.yaml    the optimum as a data file
mixture.json, report.md, report.html, mixture.png
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nemo_ext.data.blends.blend import tokens_of_run
from nemo_ext.data.blends.hierarchy import Leaf
from nemo_ext.data.blends.plan import plan_blend
from nemo_ext.evaluation.job import chosen
from nemo_ext.evaluation.runs import BITS
from nemo_ext.evaluation.settings import EvaluateSettings
from nemo_ext.evaluation.store import RESULTS
from nemo_ext.job.config import INTERRUPTED, hydra_value
from nemo_ext.job.files import only_run_in, write_text
from nemo_ext.job.made_of import differing, note, told
from nemo_ext.job.progress import notice
from nemo_ext.mixture import report
from nemo_ext.mixture.law import fit, foreseen, optimum
from nemo_ext.mixture.sampling import Shares, sample
from nemo_ext.mixture.settings import RUNS_A_STREAM, Mixture, Settings, evaluation_of, read_settings, training_of
from nemo_ext.pipeline.run import run as run_pipeline
from nemo_ext.slurm import attempts

CONF, RUNS, PRIOR = "conf", "runs", "prior"
DATA = "mixture"
"""Name of the data file."""
_STAGE = "train"
_EVALUATION = f"evaluate_{_STAGE}"
_RECORD = "settings.json"


@dataclass(frozen=True, kw_only=True)
class Streams:
    """What is mixed.

    Attributes:
        leaves: the streams.
        sizes: tokens of each, [streams].
        prior: share of each that mixtures are sampled around, [streams].
        tokens: tokens of a small run.
        data: the data section that they stand in.
    """

    leaves: Sequence[Leaf]
    sizes: Shares
    prior: Shares
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


def check(config: Mapping[str, Any], *, files: bool = True) -> None:
    """Refuse what the job would refuse before its first run.

    Args:
        config: composed config.
        files: whether the streams' tokens must be there.

    Raises:
        ValueError: a setting is wrong, streams are not tokenised, or there are no such mixtures.
    """
    settings, mixture = read_settings(config)
    training = training_of(config)
    benchmarks = chosen(EvaluateSettings.of(evaluation_of(config)["evaluate"]))
    if not any(each.kind in ("bits", "harness") for each in benchmarks):
        names = ", ".join(each.name for each in benchmarks)
        raise ValueError(f"evaluate: none of {names} is in bits per byte: suite=olmo3_base_easy has some that are")
    if files:
        streams = _streams(training, mixture)
        mixtures = _mixtures(streams, mixture)
        _limits(streams, mixture)
        _check_made_of(settings, _made_of(settings, mixture, streams), len(mixtures))


def run(config: Mapping[str, Any]) -> None:
    """Do this shard's runs, and with all of them done fit, choose and measure; goes on with what is there.

    Raises:
        ValueError: a setting is wrong, a run failed, or the folder has runs of other settings.
        KeyboardInterrupt: a run was interrupted; it has saved.
    """
    check(config)
    settings, mixture = read_settings(config)
    streams = _streams(training_of(config), mixture)
    mixtures = dict(zip(_names(mixture, streams), _mixtures(streams, mixture), strict=True))
    number, count = settings.part
    with only_run_in(settings.own / f"shard_{number}_of_{count}", "shard"):
        note(settings.own / _RECORD, _made_of(settings, mixture, streams))
        mine = list(mixtures)[number::count]
        for place, name in enumerate(mine, 1):
            if not _is_done(settings, name):
                notice(f"run {place} of {len(mine)}: {name}: {_told(streams, mixtures[name])}")
                _train_and_evaluate(settings, streams, name, mixtures[name])
        if left := [name for name in mixtures if not _is_done(settings, name)]:
            notice(
                f"shard {settings.shard} is done; {len(left)} of {len(mixtures)} runs are not: shard 0 ends the work"
            )
        elif number == 0:
            _choose(settings, mixture, streams, mixtures)


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
    prior = sizes / sizes.sum() if mixture.prior == "sizes" else weights
    return Streams(leaves=leaves, sizes=sizes, prior=prior, tokens=tokens, data=training["data"])


def _mixtures(streams: Streams, mixture: Mixture) -> list[Shares]:
    return sample(
        mixture.runs or RUNS_A_STREAM * len(streams.leaves),
        dict(zip(streams.names, streams.prior.tolist(), strict=True)),
        strengths=mixture.strengths,
        least=mixture.least,
        most=mixture.repeats * streams.sizes / streams.tokens,
        seed=mixture.seed,
    )


def _names(mixture: Mixture, streams: Streams) -> list[str]:
    count = mixture.runs or RUNS_A_STREAM * len(streams.leaves)
    return [PRIOR, *(f"sample_{number:03d}" for number in range(1, count + 1))]


def _limits(streams: Streams, mixture: Mixture) -> tuple[Shares, Shares]:
    """Least and most share of each stream in the optimum, which is trained small and for the run that it is for."""
    lowest = np.array([mixture.at_least.get(name, 0.0) for name in streams.names])
    longest = max(streams.tokens, mixture.tokens or 0)
    often = np.minimum(1, mixture.repeats * streams.sizes / longest)
    highest = np.minimum(often, [mixture.at_most.get(name, 1.0) for name in streams.names])
    for name, low, high in zip(streams.names, lowest, highest, strict=True):
        if low > high:
            raise ValueError(
                f"mixture.at_least.{name}={low:g}: at most {high:.3g} of {longest:,.0f} tokens can be of it "
                "(mixture.at_most, or mixture.repeats passes)"
            )
    if highest.sum() < 1 or lowest.sum() > 1:
        raise ValueError(
            f"mixture: shares of at least {lowest.sum():.3g} and at most {highest.sum():.3g} together cannot sum to 1: "
            "mend mixture.at_least, at_most, tokens or repeats"
        )
    return lowest, highest


def _made_of(settings: Settings, mixture: Mixture, streams: Streams) -> dict[str, Any]:
    """What runs depend on: more of them, and another optimum, go on with what is there."""
    own = {key: getattr(mixture, key) for key in ("prior", "strengths", "least", "repeats", "seed")}
    sizes = dict(zip(streams.names, streams.sizes.tolist(), strict=True))
    found: dict[str, Any] = json.loads(
        json.dumps({"train": settings.train, "evaluate": settings.evaluate, "mixture": own, "streams": sizes})
    )
    return found


def _check_made_of(settings: Settings, made_of: Mapping[str, Any], count: int) -> None:
    record = settings.own / _RECORD
    if record.exists() and (changed := differing(json.loads(record.read_text()), made_of)):
        raise ValueError(f"output={settings.folder}: was begun otherwise ({told(changed)}): choose another folder")


def _train_and_evaluate(settings: Settings, streams: Streams, name: str, shares: Shares) -> None:
    """A run of its own as a pipeline.

    Raises:
        ValueError: it failed.
        KeyboardInterrupt: it was interrupted.
    """
    conf = settings.folder / CONF
    mixed = ", ".join(
        f"{{name: {each['name']}, weight: {each['weight']!r}, prefix: {hydra_value(each['prefix'])}}}"
        for each in streams.written(shares)
    )
    words = [*(word for word in settings.train if not word.startswith("streams=")), f"streams=[{mixed}]"]
    pipeline = {
        "pipeline": name,
        "evaluate": list(settings.evaluate),
        "stages": {_STAGE: {"job": "train", "words": words}},
    }
    write_text(
        conf / "pipeline" / f"{name}.yaml",
        "# @package _global_\n" + yaml.safe_dump(pipeline, sort_keys=False, width=1000),
    )
    run_dir = settings.folder / RUNS / name
    code = run_pipeline([f"--config-dir={conf}", f"pipeline={name}", f"run_dir={run_dir}"], dry_run=False)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise ValueError(f"{run_dir}: this run failed, as said above: mend it, and the same command goes on")


def _is_done(settings: Settings, name: str) -> bool:
    return attempts.finished(settings.folder / RUNS / name / _EVALUATION) is not None


def _losses(settings: Settings, name: str) -> dict[str, float]:
    """Bits per byte of a run's benchmarks.

    Raises:
        ValueError: some were not evaluated, or none is in bits per byte.
    """
    path = settings.folder / RUNS / name / _EVALUATION / RESULTS
    results = json.loads(path.read_text())
    if missing := results.get("missing"):
        raise ValueError(f"{path}: {', '.join(missing)} was not evaluated: its report says why")
    entries = {key: entry for key, entry in results["benchmarks"].items() if BITS in entry["metric"]}
    if not entries:
        raise ValueError(f"{path}: no benchmark in bits per byte: suite=olmo3_base_easy has some")
    if bad := [key for key, entry in entries.items() if not 0 < (entry["accuracy"] or 0) < float("inf")]:
        raise ValueError(f"{path}: {bad[0]} has no value: its report says why")
    return {key: float(entry["accuracy"]) for key, entry in entries.items()}


def _choose(settings: Settings, mixture: Mixture, streams: Streams, mixtures: Mapping[str, Shares]) -> None:
    """Fit the laws, find the optimum, train on it, and write all of it."""
    losses = {name: _losses(settings, name) for name in mixtures}
    tasks = list(losses[PRIOR])
    if unknown := mixture.weights.keys() - set(tasks):
        raise ValueError(f"mixture.weights: {', '.join(unknown)}: not among {', '.join(tasks)}")
    weights = np.array([mixture.weights.get(task, 1.0) for task in tasks])
    if not weights.sum():
        raise ValueError("mixture.weights: all are 0")
    weights /= weights.sum()
    shares = np.stack(list(mixtures.values()))
    values = np.array([[losses[name][task] for task in tasks] for name in mixtures])
    laws = [fit(shares, values[:, place]) for place in range(len(tasks))]
    quality = [foreseen(shares, values[:, place]) for place in range(len(tasks))]
    lowest, highest = _limits(streams, mixture)
    best = optimum(laws, weights, streams.prior, kl=mixture.kl, lowest=lowest, highest=highest, least=mixture.least)
    name = f"best_{hashlib.sha256(np.round(best, 6).tobytes()).hexdigest()[:8]}"
    found = report.Found(
        streams=streams.names,
        sizes=streams.sizes,
        prior=streams.prior,
        best=best,
        highest=highest,
        tasks=tasks,
        weights=weights,
        names=list(mixtures),
        shares=shares,
        values=values,
        laws=laws,
        quality=quality,
        tokens=streams.tokens,
        target=mixture.tokens,
        run=f"{RUNS}/{name}",
    )
    write_text(settings.folder / CONF / "data" / f"{DATA}.yaml", _data_file(streams, found))
    if not _is_done(settings, name):
        notice(f"the optimum: {_told(streams, best)}")
        _train_and_evaluate(settings, streams, name, best)
    measured = _losses(settings, name)
    found = report.measured(found, np.array([measured[task] for task in tasks]))
    write_text(settings.folder / CONF / "data" / f"{DATA}.yaml", _data_file(streams, found))
    page = report.write(found, settings.folder)
    if (why := report.doubt(found)) is not None:
        notice(f"warning: {why}")
    print(f"{report.verdict(found)}: {page}")


def _data_file(streams: Streams, found: report.Found) -> str:
    """The optimum as a file of `hydra_conf/data`."""
    kept = {key: value for key, value in streams.data.items() if key not in ("streams", "blend") and value is not None}
    kept["directory"] = str(Path(str(streams.data["directory"])).absolute())
    data = {"data": {**kept, "streams": streams.written(np.round(found.best, 6))}}
    about = f"# The mixture that `nemo-ext mixture` chose. {report.verdict(found)}.\n"
    return f"# @package _global_\n{about}{yaml.safe_dump(data, sort_keys=False)}"


def _told(streams: Streams, shares: Shares) -> str:
    return ", ".join(f"{name} {share:.3f}" for name, share in zip(streams.names, shares, strict=True) if share > 0)
