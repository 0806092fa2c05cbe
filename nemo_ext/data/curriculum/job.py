"""Job `nemo-ext curriculum`: rollouts -> profile -> filters -> plan -> files."""

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
from nemo_ext.data.curriculum.settings import Settings, settings
from nemo_ext.data.curriculum.write import OFF, marker, write_ordered
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.data.text.user_files import find_files, outside, pyarrow_module
from nemo_ext.job.files import complete_file, only_run_in, write_text
from nemo_ext.job.progress import notice
from nemo_ext.job.workers import usable_cores

LEAST_TO_TEACH = 0.05
"""Least value of a domain in `adapted`."""
MOST_LEVELS = 64


def run(config: Mapping[str, Any]) -> None:
    """Run the job that the composed config describes.

    Raises:
        ValueError: a setting or a file is at fault.
    """
    given = settings(config)
    output = Path(given.output).expanduser()
    if given.previous and Path(given.previous).expanduser().resolve() == output.resolve():
        raise ValueError(f"output={given.output}: is the previous curriculum's directory; give another")
    # Fail now if it is missing, not after hours of reading rollouts.
    pyarrow_module("pass rates are kept as Parquet (profile.parquet), whatever the rollouts are, and need")
    with only_run_in(output, "output"):
        _run(given, output)


def _run(given: Settings, output: Path) -> None:
    workers = given.workers or usable_cores()
    profile_path = Path(given.profile).expanduser() if given.profile else output / PROFILE
    if given.rollouts:
        files = find_files(given.rollouts, "rollouts")
        report = write_profile(
            files,
            profile_path,
            keys=given.rollout_keys,
            success=given.success,
            max_bad_share=given.max_bad_share,
            workers=workers,
        )
        _tell_malformed("rollouts", report)
    profile = read_profile(profile_path)
    notice(f"profile: {len(profile):,} prompts, {int(profile.rollouts.sum()):,} rollouts: {profile_path}")
    if not given.prompts:
        return
    scratch = output / ".unpacked"
    found = find_files(given.prompts, "prompts")
    outside(scratch, found)
    try:
        _make(given, output, profile, found, scratch, workers)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _make(given: Settings, output: Path, profile: Profile, found: Sequence[Path], scratch: Path, workers: int) -> None:
    scratch.mkdir(exist_ok=True)
    files = unpacked(found, scratch)
    prompts = read_prompts(files, given.keys, max_bad_share=given.max_bad_share, workers=workers)
    _tell_malformed("prompts", prompts.report)
    used = _used(given)
    selection = select(prompts, profile, rows_of(profile.key, prompts.key), given, used)
    candidates = selection.candidates
    plan = make_plan(
        candidates,
        fixed(adapted(_shares(given, candidates), candidates, given.adapt), candidates.domains),
        given,
        levels=given.levels or profile.levels(MOST_LEVELS),
    )
    order = plan.order.ravel()
    rows, modes = selection.row[order], selection.mode[order]
    separate: dict[int, Path] = {}
    remove_order(output)  # even if this run fails, an earlier one's domains no longer match the curriculum
    if given.split_domains:
        separate = domain_files(output, prompts.domains, candidates.domain[plan.order])
    change = marker(given.thinking, given.keys.prompt) if given.thinking.off_share else None
    write_ordered(prompts, rows, output / CURRICULUM, change=change, modes=modes, domain_files=separate)
    _save(plan, selection, output, used)
    if separate:
        save_order(output, separate, candidates.domain[plan.order])
    _describe(given, plan, selection, prompts, output)


def _shares(given: Settings, candidates: Candidates) -> dict[str, float]:
    """Shares of the domains: those given, else the numbers of their prompts."""
    if given.domains is None:
        counts = np.bincount(candidates.domain, minlength=len(candidates.domains)).tolist()
        return dict(zip(candidates.domains, counts, strict=True))
    return given.domains


def adapted(shares: Mapping[str, float], candidates: Candidates, power: float) -> dict[str, float]:
    """Weight each domain's share by what it can still teach, to a power: adaptive weights of multi-environment RL.

    A prompt that is solved with probability p teaches in proportion to 4 p (1 - p), the variance of its reward, which
    is what an advantage without division by the deviation scales with. A domain has the mean of its prompts, at least
    LEAST_TO_TEACH, so that none is forgotten. Profiled again, the next curriculum has the next weights. OLMo 3's slides
    name adaptive weights of datasets and do not describe them: all of this is a (choice).
    """
    if not power:
        return dict(shares)
    teaches = 4 * candidates.rate * (1 - candidates.rate)
    counts = np.bincount(candidates.domain, minlength=len(candidates.domains))
    means = np.bincount(candidates.domain, weights=teaches, minlength=len(candidates.domains)) / np.maximum(counts, 1)
    factors = dict(zip(candidates.domains, np.maximum(means, LEAST_TO_TEACH).tolist(), strict=True))
    made = {name: share * factors.get(name, 1.0) ** power for name, share in shares.items()}
    total = sum(made.values())
    notice("adapted shares: " + ", ".join(f"{name} {share / total:.3f}" for name, share in made.items()))
    return made


def _used(given: Settings) -> tuple[Keys, Numbers]:
    """Sorted keys that the previous curricula trained on, and their counts."""
    if given.previous is None:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    path = Path(given.previous).expanduser() / ARRAYS
    if not path.is_file():
        raise ValueError(f"previous={given.previous}: has no {ARRAYS}; name the directory of a curriculum")
    key, used_key, used = stored_arrays(path, "key", "used_key", "used")
    steps = len(key)
    taken = steps if given.previous_steps is None else given.previous_steps
    if taken > steps:
        raise ValueError(f"previous_steps={taken}: {path} has {steps} steps")
    keys, counts = np.unique(key[:taken], return_counts=True)
    found, at = np.unique(np.concatenate([used_key, keys]), return_inverse=True)
    return found, np.bincount(at, weights=np.concatenate([used, counts])).astype(np.int64)


def _save(plan: Plan, selection: Selection, output: Path, used: tuple[Keys, Numbers]) -> None:
    """Save the arrays from which the next curriculum knows what was trained on."""
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


def _describe(given: Settings, plan: Plan, selection: Selection, prompts: Prompts, output: Path) -> None:
    """Write curriculum.json, plot.png and report.md, and print a summary."""
    candidates, batch = selection.candidates, given.batch
    steps = steps_of(plan, candidates)
    times = np.bincount(plan.order.ravel(), minlength=len(candidates))
    left = prompts.report.skipped | selection.left
    never = int((times == 0).sum())
    if never:
        left["left over at the end"] = never
    first, last = plan.first_step, plan.first_step + len(plan.order) - 1
    off_target = float(steps.off_target.mean())
    copies, again = int((selection.mode == OFF).sum()), int((times > 1).sum())
    facts = {
        "steps": f"{len(plan.order):,} of {batch:,} prompts" + (f" (from step {first:,} on)" if first else ""),
        "prompts read": f"{prompts.report.records:,}",
        "to train on": f"{len(candidates):,}" + (f", {copies:,} with thinking off" if copies else ""),
        "drawn": f"{int((times > 0).sum()):,}" + (f", {again:,} repeatedly" if again else ""),
        "mean pass rate": f"{steps.mean[0]:.3f} in step {first:,}, {steps.mean[-1]:.3f} in step {last:,} "
        f"(target {steps.target[0]:.3f}, {steps.target[-1]:.3f})",
        "spread in a step": f"{steps.spread.mean():.3f} on average",
        "off target": f"{off_target:.1%} of the prompts",
    }
    if plan.stopped:
        facts["stopped"] = plan.stopped
    domains = _domain_rows(candidates, plan, steps, times, batch)
    page(facts, domains, left, plan, steps).write(output / REPORT)
    stats = {
        "settings": dataclasses.asdict(given),
        "steps": len(plan.order),
        "left_out": left,
        "examples": prompts.report.examples,
        "stopped": plan.stopped,
        "begun_again": dict(zip(candidates.domains, plan.epochs, strict=True)),
        "by_step": as_json(steps),
    }
    write_text(output / STATS, json.dumps(stats) + "\n")
    for name, value in facts.items():
        print(f"{name + ':':<18}{value}")
    if left:
        print(f"{'left out:':<18}{', '.join(f'{count:,} {reason}' for reason, count in left.items())}")
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
    """Warn of what the user may not have wanted."""
    if plan.stopped:
        notice(f"stopped after {len(plan.order):,} steps: {plan.stopped}; exhausted=repeat would begin it again")
    for name, again in zip(candidates.domains, plan.epochs, strict=True):
        if again:
            notice(f"{name}: all prompts were drawn and begun again {again} times")
    away = np.abs(steps.mean - steps.target) > LATE
    if away.any():
        at = plan.first_step + int(np.argmax(away))
        notice(
            f"in {int(away.sum()):,} steps, the first of them {at:,}, the mean pass rate is more than {LATE} from the "
            "target, for want of prompts of that pass rate: fewer steps, other means or a larger sigma come nearer"
        )


def _tell_malformed(what: str, report: ReadReport) -> None:
    if report.skipped:
        notice(f"{what}: left out {report.summary(examples=3)}")
