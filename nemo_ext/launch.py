"""Launcher of a training run on this machine: checks, data preparation, ranks, progress and report.

The parent process never trains. It writes the resolved config into the run directory, starts
`nemo_ext.megatron.rank` (or another module, see `nemo_ext.job.ranks.training_rank`), by `torchrun` unless there is only
one rank, watches metrics.jsonl, and makes the ranks save a checkpoint on Ctrl-C.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nemo_ext.architecture.model import Architecture
from nemo_ext.data.blends.blend import other_order
from nemo_ext.data.phases import Plan, data_of, plan_of
from nemo_ext.data.training import index_digests
from nemo_ext.job import bf16, run_directory
from nemo_ext.job.config import INTERRUPTED
from nemo_ext.job.files import no_room, only_run_in
from nemo_ext.job.interrupts import signals_to
from nemo_ext.job.made_of import differing
from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.ranks import ON_NODES, training_command
from nemo_ext.megatron import fp8, packed_attention
from nemo_ext.megatron.guard import Guard, forget_stacks, pending, stood, turn_back
from nemo_ext.megatron.run import Run, target_of

SECONDS_BETWEEN_LINES = 10.0


def prepare(config: Mapping[str, Any]) -> Path:
    """Check a composed config, and write it for the ranks, together with its data arguments.

    Args:
        config: config from `nemo_ext.job.config.compose("train", ...)`.

    Returns:
        Path of the written config, for `python -m nemo_ext.megatron.rank PATH`. With phases, it is the config of the
        next segment (phases that one start of the ranks trains).

    Raises:
        ValueError: an error was found before any rank started, such as another model's run in the run directory.
    """
    run_dir = Path(config["run_dir"])
    console = Console(highlight=False, soft_wrap=True)
    for line in repaired(config):
        console.print(line)
    run = Run.from_config(config)
    run.check()
    done = run_directory.last_checkpoint(run_dir) or 0
    segment = next((each for each in run.segments if target_of(each)[0] > done), run.segments[-1])
    _check_same_run(segment, run_dir, console)
    return _write(run_dir, segment)


def repaired(config: Mapping[str, Any]) -> list[str]:
    """Return to the checkpoint before a bad step and set damaged checkpoints aside; return a line for each change.

    Raises:
        ValueError: the run is of another model, or has returned to this checkpoint too often.
    """
    from nemo_ext.checkpoint.sound import fall_back

    run_dir = Path(str(config["run_dir"]))
    _check_same_model(Run.from_config(config).config, run_dir)
    changes = (turn_back(run_dir, Guard.from_config(config)), fall_back(run_dir / run_directory.CHECKPOINTS))
    return [line for line in changes if line]


def _write(run_dir: Path, config: Mapping[str, Any]) -> Path:
    run_directory.write_versions(run_dir, sys.argv)
    return run_directory.write_config(run_dir, {**config, "index_digests": index_digests(config)})


def train(config: Mapping[str, Any]) -> None:
    """Run or resume the training run of a composed config.

    Raises:
        ValueError: the config has an error that was found before any rank started.
        SystemExit: with code 1 if a rank failed, or 130 if the user interrupted the run.
    """
    console = Console(highlight=False, soft_wrap=True)
    launcher, run_dir = config["launcher"], Path(str(config["run_dir"]))
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: set it to a directory, such as runs/mine")
    if launcher["nodes"] != 1 and ON_NODES not in os.environ:
        raise ValueError(
            f"launcher.nodes={launcher['nodes']}: this command starts ranks only on this machine; for one machine add "
            "scale=laptop and a tiny model, and for a cluster see docs/clusters.md"
        )
    with only_run_in(run_dir):
        while not _started(config, console):
            pass  # a bad step: start again from the checkpoint before it, without its batch
        from nemo_ext.megatron.report import write_report

        console.print(f"report: {write_report(run_dir)}")


def _started(config: Mapping[str, Any], console: Console) -> bool:
    """Start the run and wait for it to end; return False if it stopped at a bad step, which the next start skips."""
    launcher, run_dir = config["launcher"], Path(str(config["run_dir"]))
    for line in repaired(config):
        console.print(line)
    console.print("checking the configuration against the installed Megatron ...")
    run = Run.from_config(config)
    run.check()
    from nemo_ext.megatron.check import check_launcher, check_machine

    check_machine(run.config)
    check_launcher(run.config)
    table = None if run.plan is None else run.plan.table()
    slow = bf16.remark("megatron.bf16=false", used=bool(run.config["megatron"].get("bf16")))
    remarks = (slow, fp8.remark(run.config), packed_attention.remark(run.config), *not_reproduced(run.config), table)
    for line in filter(None, remarks):
        console.print(line)
    run = run.tokenized()
    for line in run.stream_remarks():
        console.print(line)
    for segment in run.segments:
        target, why = target_of(segment)
        done = run_directory.last_checkpoint(run_dir)
        if done is not None and done >= target and segment is not run.segments[-1]:
            continue
        _check_same_run(segment, run_dir, console)
        if done is not None and done >= target:
            console.print(f"finished: step {done} of {target} is saved in {run_dir}; {why}")
            break
        if done is not None:
            console.print(f"resuming {run_dir} from step {done}")
        if run.plan is not None:
            console.print(f"phases: {', '.join(segment['segment']['phases'])}")
        _write(run_dir, segment)
        _run_ranks(run_dir, int(launcher["nproc_per_node"]), target, console)
        if pending(run_dir) is not None:
            return False
        if (saved := run_directory.last_checkpoint(run_dir) or 0) < target:
            # A signal or time limit ended the ranks; the next segment can only start after the last step of this one.
            console.print(f"ended at step {saved} of {target} (see {run_directory.LOG}); the same command resumes")
            break
    return True


def not_reproduced(config: Mapping[str, Any]) -> list[str]:
    """Return one line for each difference between a config's recipe and the published source of that recipe."""
    return [f"not as in the source of {config['recipe']}: {what}" for what in config.get("not_reproduced") or ()]


def _check_same_model(config: Mapping[str, Any], run_dir: Path) -> dict[str, Any] | None:
    """Reject a run of another model in the run directory; return its config, or None if it has no checkpoint."""
    path = run_dir / run_directory.CONFIG
    if run_directory.last_checkpoint(run_dir) is None or not path.exists():
        return None
    before = run_directory.read_config(path)
    if changed := differing(before["model"], config["model"]):
        raise ValueError(
            f"{run_dir} holds a run of another model (model.{', model.'.join(changed)} differ): choose another run_dir "
            "or remove this one"
        )
    now, earlier = (bool((each.get("train") or {}).get("mtp_only")) for each in (config, before))
    if now != earlier:
        raise ValueError(
            f"{run_dir} holds a run with a different train.mtp_only, so its optimizer covers different weights: choose "
            "another run_dir"
        )
    now, earlier = (bool((each.get("train") or {}).get("quantization_aware")) for each in (config, before))
    if now != earlier:
        raise ValueError(
            f"{run_dir} holds a run with train.quantization_aware={str(earlier).lower()}: set it to that value, or "
            "choose another run_dir"
        )
    # Sequence length and RoPE may change, for example between phases.
    sizes, sizes_before = (
        replace(Architecture.from_config(each), seq_length=None, rotary=0.0, rotary_per_block=False)
        for each in (config, before)
    )
    if sizes.with_pattern(sizes_before.pattern) != sizes_before:
        raise ValueError(
            f"{run_dir} holds a run of a model with other sizes (see {run_directory.CONFIG}): choose another run_dir"
        )
    return before


def _check_same_run(config: Mapping[str, Any], run_dir: Path, console: Console) -> None:
    """Reject a run of another model in the run directory, and print other settings that changed since the run began."""
    step, before = run_directory.last_checkpoint(run_dir), _check_same_model(config, run_dir)
    if step is None or before is None:
        return
    data_before = before.get("index_digests") or {}
    for prefix, digest in index_digests(config).items():
        if data_before.get(prefix, digest) != digest:
            console.print(
                f"changed since this run began: the data in {prefix}, and with them the order of documents; "
                "some may be read twice and others not at all"
            )
    if before.get("phases") or config.get("phases"):
        _check_same_past(before, config, step, run_dir)
        if before["segment"]["phases"] != config["segment"]["phases"]:
            return  # changes between phases are expected
    elif note := other_order(before, config):
        console.print(note)
    for name in ("megatron", "precision_plan"):
        for key, change in differing(before.get(name) or {}, config.get(name) or {}).items():
            console.print(f"changed since this run began: {name}.{key}: {change}")


def _check_same_past(before: Mapping[str, Any], config: Mapping[str, Any], step: int, run_dir: Path) -> None:
    """Reject changes to the phases or data of the first `step` steps, which would repeat or skip samples."""
    plans = plan_of(before), plan_of(config)
    if plans[0] is None or plans[1] is None:
        begun = "without" if plans[0] is None else "with"
        raise ValueError(f"{run_dir} was begun {begun} phases, unlike this config: choose another run_dir")
    pasts = _past(before, plans[0], step), _past(config, plans[1], step)
    if pasts[0] != pasts[1]:
        changed = sorted({key for old, new in zip(*pasts, strict=False) for key in old if old[key] != new[key]})
        raise ValueError(
            f"{run_dir} is at step {step}, and its phases up to that step were different"
            + (f" ({', '.join(changed)} differ)" if changed else "")
            + ": choose another run_dir, or restore these phases, as only later ones may change"
        )


def _past(config: Mapping[str, Any], plan: Plan, step: int) -> list[dict[str, Any]]:
    """Return the settings and data of a run's first `step` steps according to its config, one entry per phase.

    Args:
        config: config of the run, as written for a segment.
        plan: the phases of this config.
        step: number of steps.
    """
    return [
        {
            "steps": (phase.seq_length, phase.global_batch_size, min(phase.last_step, step)),
            "lr": phase.lr,
            "data": data_of(config, phase)[0],
            "mixed_lengths": data_of(config, phase)[1],
            "seed": config["megatron"].get("seed"),
        }
        for phase in plan.phases
        if phase.first_step < step
    ]


def _run_ranks(run_dir: Path, ranks: int, target: int, console: Console) -> None:
    """Run the only rank, torchrun, or the command that starts ranks on several nodes, and wait for it to end.

    The first SIGINT or SIGTERM is passed on as SIGTERM to the ranks, which save and exit; a second signal kills them.
    """
    config = run_dir / run_directory.CONFIG
    command, environment = training_command(config, ranks, run_dir / run_directory.LOG)
    forget_stacks(run_dir)
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            console.print("stopping after this step, then saving; a second signal ends the run at once")
            process.terminate()
        else:
            root = psutil.Process(process.pid)
            for victim in [*root.children(recursive=True), root]:
                victim.kill()

    with (run_dir / run_directory.LOG).open("ab") as log:
        position = log.tell()
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # It gets SIGTERM if the launcher dies, so that no rank remains.
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
            env=environment,
        )
        with signals_to(forward):
            _watch(process, run_dir / run_directory.METRICS, target, console)
    step = run_directory.last_checkpoint(run_dir)
    saved = "no checkpoint was saved" if step is None else f"the last checkpoint is at step {step}"
    if received:
        console.print(f"interrupted: {saved}; the same command resumes")
        sys.exit(INTERRUPTED)
    if process.returncode and pending(run_dir) is None:
        minutes = (run_directory.read_config(config).get("guard") or {}).get("minutes")
        if stalled := stood(run_dir, minutes):
            print(f"error: {stalled}; the same command resumes", file=sys.stderr)
            sys.exit(1)
        words = "\n".join(_last_words(run_dir / run_directory.LOG, position))
        if room := no_room(run_dir, words):
            print(f"error: {room}; {saved}; the same command resumes", file=sys.stderr)
            sys.exit(1)
        print(words, file=sys.stderr)
        print(
            f"error: a rank failed (exit code {process.returncode}); full log: {run_dir / run_directory.LOG}",
            file=sys.stderr,
        )
        sys.exit(1)


def _watch(process: subprocess.Popen[bytes], metrics: Path, target: int, console: Console) -> None:
    """Show progress until the ranks end: a live line on a terminal, otherwise a line every few seconds."""
    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    with progress:
        bar = progress.add_task("starting", total=target)
        printed, last_print = None, time.monotonic()
        while True:
            running = process.poll() is None
            step, validation = run_directory.newest(metrics)
            if step is not None:
                text = describe_step(step, validation)
                progress.update(bar, completed=step["step"], description=text)
                due = not running or time.monotonic() - last_print > SECONDS_BETWEEN_LINES
                if not console.is_terminal and due and step["step"] != printed:
                    left = (target - step["step"]) * step["seconds_per_step"]
                    console.print(f"step {step['step']}/{target}  {text}  left {int(left // 60)}:{int(left % 60):02d}")
                    printed, last_print = step["step"], time.monotonic()
            if not running:
                return
            time.sleep(0.3)


def describe_step(step: Mapping[str, Any], validation: Mapping[str, Any] | None) -> str:
    """Format a step's loss, learning rate and speed, and the last validation loss if there is one, as one line."""
    words = ["loss nan" if step["loss"] is None else f"loss {step['loss']:.3f}"]
    if validation is not None and validation["val_loss"] is not None:
        words.append(f"val {validation['val_loss']:.3f}")
    if step.get("lr") is not None:
        words.append(f"lr {step['lr']:.1e}")
    words.append(f"{step['tokens_per_second']:,.0f} tok/s")
    if step.get("mfu") is not None:
        by_6n = step.get("mfu_6n")  # not in runs of older versions
        words.append(f"MFU {step['mfu']:.0%}" + ("" if by_6n is None else f" (by 6N {by_6n:.0%})"))
    return "  ".join(words)


def _last_words(log: Path, position: int) -> list[str]:
    """Return the last lines (at most 25) of the log after byte `position`, without torchrun's traceback."""
    with log.open("rb") as stream:
        stream.seek(position)
        lines = stream.read().decode(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if "torch.distributed.elastic" in line or "torch/distributed/elastic/" in line:
            lines = lines[:number]
            break
    while lines and (lines[-1].startswith("Traceback") or "frozen runpy" in lines[-1]):
        lines.pop()
    return lines[-25:]
