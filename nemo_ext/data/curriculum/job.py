"""The `nemo-ext curriculum` job: profiles rollouts, filters and orders prompts by pass rate, and writes files."""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.data.curriculum.layout import (
    ARRAYS,
    CURRICULUM,
    PROFILE,
    REPORT,
    STATS,
    domain_files,
    remove_order,
    save_order,
    stored_arrays,
)
from nemo_ext.data.curriculum.plan import Candidates, Plan, make_plan
from nemo_ext.data.curriculum.profile import Profile, read_profile, rows_of, write_profile
from nemo_ext.data.curriculum.prompts import Keys, Numbers, Prompts, read_prompts
from nemo_ext.data.curriculum.records import unpacked
from nemo_ext.data.curriculum.report import LATE, Steps, as_json, page, steps_of
from nemo_ext.data.curriculum.schedule import fixed
from nemo_ext.data.curriculum.select import Selection, select
from nemo_ext.data.curriculum.settings import Settings
from nemo_ext.data.curriculum.settings import settings as read_settings
from nemo_ext.data.curriculum.write import OFF, marker, write_ordered
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.data.text.user_files import find_files, outside, pyarrow_module
from nemo_ext.job.files import complete_file, only_run_in, write_text
from nemo_ext.job.progress import notice
from nemo_ext.job.workers import usable_cores

LEAST_TO_TEACH = 0.05
"""Minimum learning signal of a domain in `adapted`."""
MOST_LEVELS = 64


def run(config: Mapping[str, Any]) -> None:
    """Run `nemo-ext curriculum` as the composed config describes.

    Raises:
        ValueError: a setting or an input file is invalid.
    """
    settings = read_settings(config)
    output = Path(settings.output).expanduser()
    if settings.previous and Path(settings.previous).expanduser().resolve() == output.resolve():
        raise ValueError(f"output={settings.output} is the directory of the previous curriculum: choose another output")
    # Fail now if it is missing, not after hours of reading rollouts.
    pyarrow_module("pass rates are written to profile.parquet, whatever the format of the rollouts, which requires")
    with only_run_in(output, "output"):
        _run(settings, output)


def _run(settings: Settings, output: Path) -> None:
    workers = settings.workers or usable_cores()
    profile_path = Path(settings.profile).expanduser() if settings.profile else output / PROFILE
    if settings.rollouts:
        files = find_files(settings.rollouts, "rollouts")
        report = write_profile(
            files,
            profile_path,
            keys=settings.rollout_keys,
            success=settings.success,
            max_bad_share=settings.max_bad_share,
            workers=workers,
        )
        _report_malformed("rollouts", report)
    profile = read_profile(profile_path)
    notice(f"profile of {len(profile):,} prompts and {int(profile.rollouts.sum()):,} rollouts: {profile_path}")
    if not settings.prompts:
        return
    scratch = output / ".unpacked"
    files = find_files(settings.prompts, "prompts")
    outside(scratch, files)
    try:
        used = _used(settings)
        prompts, selection = _selected(settings, profile, files, scratch, workers, used)
        levels = settings.levels or profile.levels(MOST_LEVELS)
        del profile  # 24 bytes per prompt
        _make(settings, output, prompts, selection, used, levels)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _selected(
    settings: Settings,
    profile: Profile,
    files: Sequence[Path],
    scratch: Path,
    workers: int,
    used: tuple[Keys, Numbers],
) -> tuple[Prompts, Selection]:
    """Read the prompts and select those to train on; `used` as `_used` returns it."""
    scratch.mkdir(exist_ok=True)
    files = unpacked(files, scratch)
    prompts = read_prompts(files, settings.keys, max_bad_share=settings.max_bad_share, workers=workers)
    _report_malformed("prompts", prompts.report)
    return prompts, select(prompts, profile, rows_of(profile.key, prompts.key), settings, used)


def _make(
    settings: Settings,
    output: Path,
    prompts: Prompts,
    selection: Selection,
    used: tuple[Keys, Numbers],
    levels: int,
) -> None:
    """Order the selected prompts, and write the curriculum, its arrays and its report.

    Args:
        used: as `_used` returns it.
        levels: number of levels of difficulty.
    """
    candidates = selection.candidates
    shares = settings.domains
    if shares is None:
        counts = np.bincount(candidates.domain, minlength=len(candidates.domains)).tolist()
        shares = dict(zip(candidates.domains, counts, strict=True))
    plan = make_plan(
        candidates,
        fixed(adapted(shares, candidates, settings.adapt), candidates.domains),
        settings,
        levels=levels,
    )
    order = plan.order.ravel()
    rows, modes = selection.row[order], selection.mode[order]
    separate: dict[int, Path] = {}
    if settings.split_domains:
        separate = domain_files(output, prompts.domains, candidates.domain[plan.order])
    else:
        remove_order(output)  # an earlier run's domain files do not match the new curriculum
    change = marker(settings.thinking, settings.keys.prompt) if settings.thinking.off_share else None
    write_ordered(prompts, rows, output / CURRICULUM, change=change, modes=modes, domain_files=separate)
    _save(plan, selection, output, used)
    if separate:
        save_order(output, separate, candidates.domain[plan.order])
    _describe(settings, plan, selection, prompts, output)


def adapted(shares: Mapping[str, float], candidates: Candidates, power: float) -> dict[str, float]:
    """Weight each domain's share by a power of its remaining learning signal: adaptive weights of multi-environment RL.

    The learning signal of a prompt that is solved with probability p is 4 p (1 - p). It is proportional to the variance
    of the reward, and so to advantages that are not divided by the standard deviation. A domain's signal is the mean
    over its prompts, but at least LEAST_TO_TEACH, so that no domain is forgotten. The next curriculum, made from a new
    profile, gets new weights. OLMo 3's slides mention adaptive weights of datasets without details, so the method is
    our own (choice). The `power` is the exponent of the learning signal; 0 returns the shares unchanged.
    """
    if not power:
        return dict(shares)
    signal = 4 * candidates.rate * (1 - candidates.rate)
    counts = np.bincount(candidates.domain, minlength=len(candidates.domains))
    means = np.bincount(candidates.domain, weights=signal, minlength=len(candidates.domains)) / np.maximum(counts, 1)
    factors = dict(zip(candidates.domains, np.maximum(means, LEAST_TO_TEACH).tolist(), strict=True))
    weights = {name: share * factors.get(name, 1.0) ** power for name, share in shares.items()}
    total = sum(weights.values())
    notice("adapted shares: " + ", ".join(f"{name} {weight / total:.3f}" for name, weight in weights.items()))
    return weights


def _used(settings: Settings) -> tuple[Keys, Numbers]:
    """Return the sorted keys of the prompts that previous curricula trained on, and how often each was used."""
    if settings.previous is None:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    path = Path(settings.previous).expanduser() / ARRAYS
    if not path.is_file():
        raise ValueError(f"previous={settings.previous} has no {ARRAYS}: set it to the directory of a curriculum")
    key, used_key, used = stored_arrays(path, "key", "used_key", "used")
    steps = len(key)
    trained = steps if settings.previous_steps is None else settings.previous_steps
    if trained > steps:
        raise ValueError(f"previous_steps={trained} must be at most {steps}, the number of steps in {path}")
    keys, counts = np.unique(key[:trained], return_counts=True)
    all_keys, at = np.unique(np.concatenate([used_key, keys]), return_inverse=True)
    return all_keys, np.bincount(at, weights=np.concatenate([used, counts])).astype(np.int64)


def _save(plan: Plan, selection: Selection, output: Path, used: tuple[Keys, Numbers]) -> None:
    """Save the plan's arrays and `used` (see `_used`), from which the next curriculum knows the prompts trained on."""
    candidates = selection.candidates
    with complete_file(output / ARRAYS) as file:
        np.savez(
            file,
            key=candidates.key[plan.order],
            mode=selection.mode[plan.order],
            rate=candidates.rate[plan.order].astype(np.float32),
            first_step=plan.first_step,
            used_key=used[0],
            used=used[1],
        )


def _describe(settings: Settings, plan: Plan, selection: Selection, prompts: Prompts, output: Path) -> None:
    """Write curriculum.json, plot.png and report.md, and print a summary."""
    candidates, batch = selection.candidates, settings.batch
    steps = steps_of(plan, candidates)
    times = np.bincount(plan.order.ravel(), minlength=len(candidates))
    unused = prompts.report.skipped | selection.left
    if not_drawn := int((times == 0).sum()):
        unused["left over at the end"] = not_drawn
    first, last = plan.first_step, plan.first_step + len(plan.order) - 1
    off_target = float(steps.off_target.mean())
    copies, repeated = int((selection.mode == OFF).sum()), int((times > 1).sum())
    facts = {
        "steps": f"{len(plan.order):,} of {batch:,} prompts" + (f" (starting at step {first:,})" if first else ""),
        "prompts read": f"{prompts.report.records:,}",
        "to train on": f"{len(candidates):,}" + (f", {copies:,} with thinking off" if copies else ""),
        "drawn": f"{int((times > 0).sum()):,}" + (f", {repeated:,} repeatedly" if repeated else ""),
        "mean pass rate": f"{steps.mean[0]:.3f} in step {first:,}, {steps.mean[-1]:.3f} in step {last:,} "
        f"(target {steps.target[0]:.3f}, {steps.target[-1]:.3f})",
        "spread per step": f"{steps.spread.mean():.3f} on average",
        "off target": f"{off_target:.1%} of the prompts",
    }
    if plan.stopped:
        facts["stopped"] = plan.stopped
    domains = _domain_rows(candidates, plan, steps, times, batch)
    page(facts, domains, unused, plan, steps).write(output / REPORT)
    stats = {
        "settings": dataclasses.asdict(settings),
        "steps": len(plan.order),
        "left_out": unused,
        "examples": prompts.report.examples,
        "stopped": plan.stopped,
        "begun_again": dict(zip(candidates.domains, plan.epochs, strict=True)),
        "by_step": as_json(steps),
    }
    write_text(output / STATS, json.dumps(stats) + "\n")
    for name, value in facts.items():
        print(f"{name + ':':<18}{value}")
    if unused:
        print(f"{'not used:':<18}{', '.join(f'{count:,} {reason}' for reason, count in unused.items())}")
    print(f"{output / CURRICULUM}, {output / REPORT}")
    _warn(plan, candidates, steps)


def _domain_rows(
    candidates: Candidates, plan: Plan, steps: Steps, times: npt.NDArray[np.int64], batch: int
) -> list[list[object]]:
    rows = list[list[object]]()
    for number, name in enumerate(candidates.domains):
        members = candidates.domain == number
        drawn = int(steps.domains[name].sum()) if name in steps.domains else 0
        share = drawn / (batch * len(plan.order))
        mean = f"{(candidates.rate[members] * times[members]).sum() / drawn:.3f}" if drawn else ""
        rows.append([name, f"{share:.2%}", drawn, mean, int(members.sum()), plan.epochs[number]])
    return rows


def _warn(plan: Plan, candidates: Candidates, steps: Steps) -> None:
    """Warn about an early stop, repeated prompts, and steps whose mean pass rate misses the target."""
    if plan.stopped:
        notice(f"stopped after {len(plan.order):,} steps: {plan.stopped}; set exhausted=repeat to reuse prompts")
    for name, repeats in zip(candidates.domains, plan.epochs, strict=True):
        if repeats:
            notice(f"domain {name}: its prompts ran out and were reused {repeats} times; to avoid this, add prompts")
    missed = np.abs(steps.mean - steps.target) > LATE
    if missed.any():
        first = plan.first_step + int(np.argmax(missed))
        notice(
            f"in {int(missed.sum()):,} steps, beginning with step {first:,}, the mean pass rate is more than {LATE} "
            "from the target, because prompts of that pass rate are exhausted: use fewer steps, other means, or a "
            "larger sigma"
        )


def _report_malformed(what: str, report: ReadReport) -> None:
    if report.skipped:
        notice(f"{what}: skipped {report.summary(examples=3)}")
