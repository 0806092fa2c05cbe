"""Reading and writing of the files in a run directory. Does not import torch."""

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_ext.job.files import write_text
from nemo_ext.job.records import read_records

CONFIG = "config.yaml"
VERSIONS = "versions.json"
METRICS = "metrics.jsonl"
LOG = "train.log"
REPORT = "report.md"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
OWN = ".job"
"""Folder in a job's output for the job's internal files."""

PACKAGES = ("nemo_ext", "megatron-core", "torch", "transformer-engine", "mamba-ssm", "hydra-core", "numpy")


def write_config(run_dir: Path, config: Mapping[str, Any]) -> Path:
    """Write the resolved config, which every rank reads, and return its path."""
    path = run_dir / CONFIG
    write_text(path, yaml.safe_dump(dict(config), sort_keys=False, width=120))
    return path


def read_config(path: Path) -> dict[str, Any]:
    """Read a resolved config; raises ValueError if there is no such file."""
    if not path.is_file():
        raise ValueError(f"{path}: no such config; name the run directory of a `nemo-ext train` job")
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def write_versions(run_dir: Path, argv: list[str]) -> None:
    """Write a run's package versions, git commit of the working directory, Python version, host and command line."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    commit = None
    if shutil.which("git"):
        git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or None
    facts = {
        "packages": versions,
        "git": commit,
        "python": sys.version.split()[0],
        "host": platform.node(),
        "command": argv,
    }
    write_text(run_dir / VERSIONS, json.dumps(facts, indent=2) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl; a truncated last line is skipped.

    Raises:
        ValueError: any other line is not JSON.
    """
    return read_records(path, dict[str, Any], what="a line of metrics")


def newest(metrics: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Newest training step and newest evaluation among the last lines of metrics.jsonl; None where there is none."""
    lines = last_lines(metrics)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "val_loss" in line]
    return (steps[-1] if steps else None), (evaluations[-1] if evaluations else None)


def last_lines(metrics: Path) -> list[dict[str, Any]]:
    """Parsed lines in the last 64 KiB of metrics.jsonl, without truncated lines."""
    tail_bytes = 65536
    if not metrics.exists():
        return []
    with metrics.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - tail_bytes))
        whole = stream.read().split(b"\n")[1 if size > tail_bytes else 0 : -1]
    return [json.loads(line) for line in whole]


def truncate_metrics(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, which a resumed run writes again."""
    if path.exists():
        write_text(path, "".join(json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= step))


def last_checkpoint(run_dir: Path) -> int | None:
    """Step of the newest complete checkpoint (from Megatron's tracker file, written last); None if there is none."""
    tracker = run_dir / CHECKPOINTS / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() and tracker.read_text().strip().isdigit() else None


def target_of(run_dir: Path) -> int | None:
    """Total number of steps of a training or RL run, or of rounds of an online run; None if unknown."""
    if not (run_dir / CONFIG).is_file():
        return None
    config = read_config(run_dir / CONFIG)
    algorithm = config.get("rl") or {}
    steps = (config.get("megatron") or {}).get("train_iters")
    if steps is None and "online" in config:
        steps = (algorithm.get("online") or {}).get("rounds")
    elif steps is None:
        steps = (algorithm.get("schedule") or {}).get("steps")
    return None if steps is None else int(steps)
