"""Starts a training run on this machine: checks, prepares the data, starts the ranks, shows progress, reports.

The parent process never trains. It writes the resolved config into the run directory, starts `torchrun` on
`nemo_ext.megatron.rank`, watches metrics.jsonl, and turns Ctrl-C into a checkpoint.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nemo_ext.architecture.model import Architecture
from nemo_ext.data.blends.blend import other_order
from nemo_ext.data.blends.plan import MAX_EPOCHS
from nemo_ext.data.phases import data_paths, mixed_of, plan_of, resolved_path, segments, told_of_streams
from nemo_ext.data.training import tokenize_streams, use_data
from nemo_ext.job import run_directory
from nemo_ext.job.config import INTERRUPTED
from nemo_ext.job.files import only_run_in
from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.ranks import rank_environment
from nemo_ext.megatron.fp8 import remark, use_plan
from nemo_ext.memory import sampler

SECONDS_BETWEEN_LINES = 10.0


def prepare(config: dict[str, Any]) -> Path:
    """Checks a composed config, fills in the data arguments and writes it where every rank reads it.

    Args:
        config: config from `nemo_ext.job.config.compose("train", ...)`; changed in place.

    Returns:
        Path of the written config, for `python -m nemo_ext.megatron.rank PATH`; with phases that of the next segment.

    Raises:
        ValueError: for any error that can be found before a rank starts, such as a run of another model in the run
            directory.
    """
    run_dir = Path(config["run_dir"])
    use_plan(config)
    runs = checked_runs(config)
    done = run_directory.last_checkpoint(run_dir) or 0
    run = next((r for r in runs if target_of(r["megatron"])[0] > done), runs[-1])
    _check_same_run(run, run_dir, Console(highlight=False, soft_wrap=True))
    run_directory.write_versions(run_dir, sys.argv)
    return run_directory.write_config(run_dir, run)


def train(config: dict[str, Any]) -> None:
    """Runs, or resumes, the training run that the composed config describes.

    Raises:
        ValueError: for any error in the config that can be found before a rank starts.
        SystemExit: with code 1 if a rank failed, 130 if the user interrupted (after the ranks ended).
    """
    console = Console(highlight=False, soft_wrap=True)
    launcher, run_dir = config["launcher"], Path(str(config["run_dir"]))
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: name a directory")
    if launcher["nodes"] != 1:
        raise ValueError(
            f"launcher.nodes={launcher['nodes']}: this command starts ranks on this machine only. For one machine add "
            "scale=laptop and a tiny model; on a cluster see docs/clusters.md"
        )
    with only_run_in(run_dir):
        from nemo_ext.checkpoint.sound import fall_back

        if told := fall_back(run_dir / run_directory.CHECKPOINTS):
            console.print(told)
        console.print("checking the configuration against the installed Megatron ...")
        use_plan(config)
        given = deepcopy(config)
        runs = checked_runs(config)
        from nemo_ext.megatron.check import check_machine

        check_machine(config)
        if told := remark(config):
            console.print(told)
        if (plan := plan_of(config)) is not None:
            console.print(plan.table())
        limit = (given.get("data") or {}).get("max_epochs") or MAX_EPOCHS
        sections = (config.get("data"), *(phase.data for phase in (plan.phases if plan else ())))
        if any([tokenize_streams(data) for data in sections]):
            use_data(given)  # sizes are known only now, and a resumed run computes shares from them
            runs = segments(given, data_paths(given))
        for line in told_of_streams(runs[0], max_epochs=limit):
            console.print(line)
        for run in runs:
            target, why = target_of(run["megatron"])
            done = run_directory.last_checkpoint(run_dir)
            if done is not None and done >= target and run is not runs[-1]:
                continue
            _check_same_run(run, run_dir, console)
            if done is not None and done >= target:
                console.print(f"finished: step {done} of {target} is saved in {run_dir}; {why}")
                break
            if done is not None:
                console.print(f"resuming {run_dir} from step {done}")
            if plan is not None:
                console.print(f"phases: {', '.join(run['segment']['phases'])}")
            run_directory.write_config(run_dir, run)
            run_directory.write_versions(run_dir, sys.argv)
            _run_ranks(run_dir, int(launcher["nproc_per_node"]), target, console)
            if (saved := run_directory.last_checkpoint(run_dir) or 0) < target:
                # A rank got a signal, or a time limit; the next segment begins where this one should have ended.
                console.print(f"ended at step {saved} of {target} (see {run_directory.LOG}); the same command resumes")
                break
        from nemo_ext.evaluation.report import write_report

        console.print(f"report: {write_report(run_dir)}")


def checked_runs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Checked configs with which ranks are started in turn: one, or one for each segment of the phases.

    Args:
        config: composed config after `use_plan`; changed in place.
    """
    sampler.interval(config)
    use_data(config)
    from nemo_ext.megatron.check import check

    check(config)
    _check_objects(config)
    runs = segments(config, data_paths(config))
    for run in runs if len(runs) > 1 else ():
        check(run)
    return runs


def _check_objects(config: Mapping[str, Any]) -> None:
    """Refuses checkpoints whose pickles hold objects other than data, before Megatron loads them.

    Call it after Megatron has been imported, which then has told torch the classes of its own data.
    """
    from nemo_ext.checkpoint.pickles import check_objects
    from nemo_ext.checkpoint.torch_dist import CheckpointError, checkpoint_folder, whole_files

    own = Path(config["run_dir"]) / run_directory.CHECKPOINTS
    given = (own, config["megatron"].get("pretrained_checkpoint"), (config.get("distillation") or {}).get("teacher"))
    for path in (Path(str(each)) for each in given if each):
        try:
            folder = checkpoint_folder(path)
        except CheckpointError:
            continue  # no checkpoint, which Megatron reports itself
        check_objects(folder, whole_files(folder))


def target_of(megatron: Mapping[str, Any]) -> tuple[int, str]:
    """Step at which this command ends, and advice on how to continue from there."""
    steps, stop = int(megatron["train_iters"]), megatron.get("exit_interval")
    if stop is not None and int(stop) < steps:
        return int(stop), f"megatron.exit_interval stops it there; to go on to {steps} set megatron.exit_interval=null"
    return steps, "more steps: train.tokens=..."


def _check_same_run(config: Mapping[str, Any], run_dir: Path, console: Console) -> None:
    """Refuses to resume another model; prints which other settings changed since the run began."""
    path = run_dir / run_directory.CONFIG
    if run_directory.last_checkpoint(run_dir) is None or not path.exists():
        return
    before = run_directory.read_config(path)
    if before["model"] != config["model"]:
        changed = sorted(
            k for k in before["model"] | config["model"] if before["model"].get(k) != config["model"].get(k)
        )
        raise ValueError(
            f"{run_dir} holds a run of another model (model.{', model.'.join(changed)} differ): choose another run_dir "
            "or remove this one"
        )
    # The sequence length of a model may change, from phase to phase for example.
    sizes, sizes_before = (replace(Architecture.from_config(each), seq_length=None) for each in (config, before))
    if sizes.with_pattern(sizes_before.pattern) != sizes_before:
        raise ValueError(
            f"{run_dir} holds a run of a model of other sizes (see its {run_directory.CONFIG}): choose another run_dir"
        )
    if before.get("phases") or config.get("phases"):
        _check_same_past([before, config], run_directory.last_checkpoint(run_dir) or 0, run_dir)
        if (before.get("segment") or {}).get("phases") != (config.get("segment") or {}).get("phases"):
            return  # the changes of a phase were shown
    elif note := other_order(before, config):
        console.print(note)
    old, new = before["megatron"], config["megatron"]
    changed = sorted(key for key in old | new if old.get(key) != new.get(key))
    for key in changed:
        console.print(f"changed since this run began: megatron.{key}: {old.get(key)} -> {new.get(key)}")


def _check_same_past(configs: Sequence[Mapping[str, Any]], step: int, run_dir: Path) -> None:
    """Refuses changed phases or data in completed steps: samples would be repeated or skipped."""
    pasts = []
    for config in configs:
        plan = plan_of(config)
        if plan is None:
            begun = "with" if config is configs[1] else "without"
            raise ValueError(f"{run_dir} was begun {begun} phases: choose another run_dir")
        done = [phase for phase in plan.phases if phase.first_step < step]
        pasts.append(
            [
                {
                    "steps": (p.seq_length, p.global_batch_size, min(p.last_step, step)),
                    "lr": p.lr,
                    "data": resolved_path(config, p),
                    "mixed_lengths": mixed_of(config, p),
                    "seed": config["megatron"].get("seed"),
                }
                for p in done
            ]
        )
    if pasts[0] != pasts[1]:
        changed = sorted({key for old, new in zip(*pasts, strict=False) for key in old if old[key] != new[key]})
        raise ValueError(
            f"{run_dir} is at step {step}, and its phases until there were others"
            + (f" ({', '.join(changed)} differ)" if changed else "")
            + ": only later ones may change; choose another run_dir, or set them as they were"
        )


def _run_ranks(run_dir: Path, ranks: int, target: int, console: Console) -> None:
    """Runs torchrun to its end; SIGINT and SIGTERM become one SIGTERM to the ranks, which save and exit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "nemo_ext.megatron.rank", str(run_dir / run_directory.CONFIG)]
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            console.print("stopping: the ranks finish their step and save a checkpoint (again to kill them)")
            process.terminate()
        else:
            torchrun = psutil.Process(process.pid)
            for victim in [*torchrun.children(recursive=True), torchrun]:
                victim.kill()

    with (run_dir / run_directory.LOG).open("ab") as log:
        position = log.tell()
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_end_with_launcher,
            env=rank_environment(ranks),
        )
        previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            _watch(process, run_dir / run_directory.METRICS, target, console)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    step = run_directory.last_checkpoint(run_dir)
    if received:
        saved = "no checkpoint was saved" if step is None else f"the last checkpoint is of step {step}"
        console.print(f"interrupted: {saved}; the same command resumes")
        sys.exit(INTERRUPTED)
    if process.returncode:
        print("\n".join(_last_words(run_dir / run_directory.LOG, position)), file=sys.stderr)
        print(
            f"error: a rank failed (exit code {process.returncode}); whole log: {run_dir / run_directory.LOG}",
            file=sys.stderr,
        )
        sys.exit(1)


def _end_with_launcher() -> None:
    """Called in torchrun's process before exec: SIGTERM when the launcher dies, so that no rank is left behind."""
    end_with_parent(signal.SIGTERM)


def _watch(process: subprocess.Popen[bytes], metrics: Path, target: int, console: Console) -> None:
    """Shows the newest step until the ranks end: a live line on a terminal, a line every few seconds elsewhere."""
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
    """Loss, learning rate and speed of one step in a few words."""
    words = ["loss nan" if step["loss"] is None else f"loss {step['loss']:.3f}"]
    if validation is not None and validation["val_loss"] is not None:
        words.append(f"val {validation['val_loss']:.3f}")
    if step.get("lr") is not None:
        words.append(f"lr {step['lr']:.1e}")
    words.append(f"{step['tokens_per_second']:,.0f} tok/s")
    if step.get("mfu") is not None:
        words.append(f"MFU {step['mfu']:.0%}")
    return "  ".join(words)


def _last_words(log: Path, position: int) -> list[str]:
    """Last lines that the ranks wrote after byte `position`, without torchrun's own traceback after them."""
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
