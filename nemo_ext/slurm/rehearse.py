"""The rehearsal of a job before it is queued (docs/rehearsal.md): what it found, as findings. No torch.

python -m nemo_ext.slurm.rehearse FOLDER     rehearses FOLDER/asked.json; writes FOLDER/rehearsal.json
"""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.start import model_of_start
from nemo_ext.job.files import write_text
from nemo_ext.job.findings import Finding
from nemo_ext.job.job import will_exist
from nemo_ext.job.made_of import digest
from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.progress import notice
from nemo_ext.job.registry import job as find
from nemo_ext.megatron.preflight import ADVICE, GIB, MEMORY, fits
from nemo_ext.rehearsal.settings import STAGES, one_phase
from nemo_ext.rehearsal.teacher import model_of
from nemo_ext.slurm.cluster import Node
from nemo_ext.slurm.settings import Settings

REHEARSALS = "rehearsals"
"""Folder beside a record of starts with what was rehearsed."""
SECONDS = 60.0
"""Time after which a rehearsal is given up, unless slurm.rehearse=true asks for it."""
DIFFERENT = 0.1
"""Relative difference from the cost model from which it is said."""
OF_STAGES = (
    "lower puzzle.distill.together, puzzle.distill.batch or puzzle.calibration, or share out the parent with "
    "puzzle.fsdp=shard"
)
_PACKAGES = ("nemo_ext", "megatron-core", "torch")
_OF_NO_MATTER = (
    *("lr", "min_lr", "seed", "weight_decay", "start_weight", "end_weight", "adam_", "sgd_", "train_iters"),
    *("data_", "train_data_path", "valid_data_path", "mock_data", "tokenizer_", "pretrained_checkpoint", "finetune"),
    *("train_samples", "eval_", "log_", "save", "load", "exit_", "tensorboard_", "wandb_", "num_workers"),
)
"""Beginnings of flags on which no shape depends."""
_RESULT, _ASKED = "rehearsal.json", "asked.json"


def is_wanted(settings: Settings) -> bool:
    """Whether a job is rehearsed: as slurm.rehearse says, by default if the GPUs' memory is known."""
    node, asked = settings.cluster.node, settings.slurm.rehearse
    known = node is not None and node.gpu_memory_gib is not None
    return find(settings.job).rehearsed and (known if asked is None else asked)


def with_rehearsals(
    found: Sequence[Finding],
    configs: Sequence[Mapping[str, Any]],
    settings: Settings,
    kept: Path,
    coming: Sequence[Path] = (),
) -> list[Finding]:
    """The findings with those of rehearsals, which take the place of the cost model's on memory.

    Args:
        found: findings so far.
        configs: composed configs of training runs; what is equal is rehearsed once.
        settings: settings of site and queue.
        kept: folder of what was rehearsed before.
        coming: paths that earlier jobs write.
    """
    missing = [name for name in ("torch", "megatron") if find_spec(name) is None]
    if missing:
        why = f"not rehearsed: {' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed here"
        return [*found, Finding("error" if settings.slurm.rehearse else "note", why)]
    told: list[Finding] = []
    measured = True
    runs = [one_phase({**each, **model_of_start(each)}) for each in configs]
    for key, config in {key_of(each): each for each in runs}.items():
        if config["megatron"].get("freeze_all_layers"):
            told.append(Finding("note", "not rehearsed: a run that trains nothing (megatron.freeze_all_layers)"))
            measured = False
            continue
        if later := [
            f"{name}={path}" for name, path in _models(config) if not path.exists() and will_exist(path, coming)
        ]:
            told.append(Finding("note", f"not rehearsed: {later[0]} is not there yet"))
            measured = False
            continue
        own, result = _result(config, kept / key, SECONDS if settings.slurm.rehearse is None else None)
        told += [one for one in own if one not in told]
        measured = measured and result is not None
        if result is not None:
            told += [one for one in memory(result, settings.cluster.node) if one not in told]
    return [*(one for one in found if not (measured and one.text.startswith(MEMORY))), *told]


def _models(config: Mapping[str, Any]) -> list[tuple[str, Path]]:
    """Folders whose models are rehearsed too, by their keys."""
    given = [
        ("distillation.teacher", (config.get("distillation") or {}).get("teacher")),
        ("puzzle.parent", (config.get("puzzle") or {}).get("parent")),
    ]
    return [(key, Path(str(place)).expanduser()) for key, place in given if place]


def key_of(config: Mapping[str, Any]) -> str:
    """Name of a config's results: a digest of settings and models that a rehearsal depends on, and of the versions."""
    flags = {name: value for name, value in config["megatron"].items() if not name.startswith(_OF_NO_MATTER)}
    model = {name: value for name, value in config["model"].items() if name != "name"}
    others = [_model_at(path, key) for key, path in _models(config)]
    others += [config.get(name) for name in ("launcher", "precision_plan", "distillation", "puzzle", "stability")]
    return digest([model, flags, others, [*map(_version, _PACKAGES)]])[:16]


def _model_at(folder: Path, key: str) -> Mapping[str, Any] | None:
    """The model of a folder as far as it says, since another may come to lie there."""
    with contextlib.suppress(ValueError):
        found = model_of(str(folder), key)
        return {name: found[name] for name in ("model", "megatron")}
    return None


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _result(
    config: Mapping[str, Any], folder: Path, limit: float | None
) -> tuple[list[Finding], Mapping[str, Any] | None]:
    """What a rehearsal returned, an earlier one's or that of a process now; else findings on why there is none."""
    made = folder / _RESULT
    if not made.is_file():
        write_text(folder / _ASKED, json.dumps(config))
        within = "" if limit is None else f", for {limit:.0f} s at most"
        notice(f"rehearsing the run's ranks{within} (slurm.rehearse=false leaves it out) ...")
        code = _run(folder, limit)
        if code is None:
            more = "slurm.rehearse=true waits for it, slurm.rehearse=false does not try"
            return [Finding("note", f"not rehearsed within {SECONDS:.0f} s: {more}")], None
        if code:
            return [Finding("warning", f"not rehearsed: its process ended with {code}")], None
    result: dict[str, Any] = json.loads(made.read_text())
    if (why := result.get("error")) is None:
        return [], result
    made.unlink()
    if ": code -" in why:  # by the kernel where memory ran out, or by a limit of the login node
        return [Finding("warning", f"not rehearsed: {why}")], None
    return [Finding("error", f"rehearsal: {why}; slurm.rehearse=false submits it all the same")], None


def _run(folder: Path, limit: float | None) -> int | None:
    """Exit code of the process that rehearses; None if it was ended at the limit. Its ranks end with it."""
    command = [sys.executable, "-m", "nemo_ext.slurm.rehearse", str(folder)]
    none = subprocess.DEVNULL
    # A group of its own: ranks that are just importing do not end with their parent yet.
    with subprocess.Popen(command, stdin=none, stdout=none, start_new_session=True) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def memory(result: Mapping[str, Any], node: Node | None) -> Iterator[Finding]:
    """Findings on the fullest rank's memory."""
    if not result["ranks"]:
        yield Finding("note", "nothing to rehearse: none of these stages runs a model")
        return
    if node is None or node.gpu_memory_gib is None:
        return
    most = max(result["ranks"], key=lambda rank: float(rank["peak_bytes"]))
    peak, kinds = most["peak_bytes"] / GIB, {name: size / GIB for name, size in most["peak"].items()}
    states = sum(kinds.pop(name, 0) for name in ("weights", "gradients", "optimizer"))
    parts = [f"weights, gradients and optimizer {states:.3g}"]
    parts += [f"{name} {size:.3g}" for name, size in kinds.items() if size > peak / 100]
    where = f" on pipeline rank {most['stage']}" if result["pipeline"] > 1 else ""
    where = f" in {most['name']}" if "name" in most else where
    text = f"{peak:.3g} GiB of the {node.gpu_memory_gib:g} of a {node.gpu}, rehearsed{where} ({', '.join(parts)})"
    guess = max((rank["estimate"]["bytes"] for rank in result["ranks"] if "estimate" in rank), default=0) / GIB
    if "name" not in most and abs(guess / peak - 1) > DIFFERENT:
        text += f"; the cost model says {guess:.3g} ({100 * (guess / peak - 1):+.0f} %)"
    if result["set_aside"]:
        text += f"; without {', '.join(result['set_aside'])}, which is not rehearsed"
    kind = fits(peak / node.gpu_memory_gib)
    advice = OF_STAGES if most.get("name") in STAGES else ADVICE
    yield Finding(kind, f"{MEMORY}{text}" + (f": {advice}" if kind == "error" else ""))


def main() -> None:
    """Rehearse what FOLDER/asked.json has; a mistake is the result's `error`."""
    end_with_parent(signal.SIGKILL)
    folder = Path(sys.argv[1])
    from nemo_ext.rehearsal.puzzle import rehearse_puzzle
    from nemo_ext.rehearsal.ranks import rehearse

    try:
        config = json.loads((folder / _ASKED).read_text())
        result = rehearse_puzzle(config, folder) if "puzzle" in config else rehearse(config, "kinds", folder)
    except ValueError as error:
        result = {"error": " ".join(str(error).split())}
    write_text(folder / _RESULT, json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
