"""Findings from the rehearsal of a job before it is queued (docs/rehearsal.md). Does not import torch.

python -m nemo_ext.slurm.rehearse FOLDER     rehearses FOLDER/asked.json and writes FOLDER/rehearsal.json
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

from nemo_ext.checkpoint.start import model_of, model_of_start
from nemo_ext.job.files import write_text
from nemo_ext.job.findings import Finding
from nemo_ext.job.job import will_exist
from nemo_ext.job.made_of import digest
from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.progress import notice
from nemo_ext.job.registry import job as find
from nemo_ext.megatron.preflight import ADVICE, GIB, MEMORY, fits
from nemo_ext.rehearsal.settings import STAGES, one_phase
from nemo_ext.slurm.cluster import Node
from nemo_ext.slurm.settings import Settings

REHEARSALS = "rehearsals"
"""Folder next to a record of starts that holds the results of rehearsals."""
SECONDS = 60.0
"""Seconds after which a rehearsal is stopped, unless slurm.rehearse=true."""
DIFFERENT = 0.1
"""Relative difference between rehearsal and cost model above which it is reported."""
OF_STAGES = (
    "lower puzzle.distill.together, puzzle.distill.batch or puzzle.calibration, or shard the parent with "
    "puzzle.fsdp=shard"
)
_PACKAGES = ("nemo_ext", "megatron-core", "torch")
_OF_NO_MATTER = (
    *("lr", "min_lr", "seed", "weight_decay", "start_weight", "end_weight", "adam_", "sgd_", "train_iters"),
    *("data_", "train_data_path", "valid_data_path", "mock_data", "tokenizer_", "pretrained_checkpoint", "finetune"),
    *("train_samples", "eval_", "log_", "save", "load", "exit_", "tensorboard_", "wandb_", "num_workers"),
)
"""Prefixes of Megatron flags that do not affect tensor shapes."""
_RESULT, _ASKED = "rehearsal.json", "asked.json"


def is_wanted(settings: Settings) -> bool:
    """True if a job is to be rehearsed, as slurm.rehearse says; by default, if the GPUs' memory is known."""
    node, asked = settings.cluster.node, settings.slurm.rehearse
    known = node is not None and node.gpu_memory_gib is not None
    return find(settings.job).rehearsed and (known if asked is None else asked)


def with_rehearsals(
    findings: Sequence[Finding],
    configs: Sequence[Mapping[str, Any]],
    settings: Settings,
    kept: Path,
    coming: Sequence[Path] = (),
) -> list[Finding]:
    """Add the findings of rehearsals, which replace the cost model's findings on memory.

    Args:
        configs: composed configs of training runs; configs with equal shapes are rehearsed once.
        kept: folder for results, which may hold earlier ones.
        coming: paths that earlier jobs will write.
    """
    missing = [name for name in ("torch", "megatron") if find_spec(name) is None]
    if missing:
        why = f"not rehearsed: {' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed here"
        return [*findings, Finding("error" if settings.slurm.rehearse else "note", why)]
    added: list[Finding] = []
    measured = True
    runs = [one_phase({**config, **model_of_start(config)}) for config in configs]
    for key, config in {key_of(run): run for run in runs}.items():
        if config["megatron"].get("freeze_all_layers"):
            added.append(Finding("note", "not rehearsed: the run trains no weights (megatron.freeze_all_layers)"))
            measured = False
            continue
        if later := [
            f"{name}={path}" for name, path in _models(config) if not path.exists() and will_exist(path, coming)
        ]:
            added.append(Finding("note", f"not rehearsed: {later[0]} does not exist yet"))
            measured = False
            continue
        problems, result = _result(config, kept / key, SECONDS if settings.slurm.rehearse is None else None)
        added += [finding for finding in problems if finding not in added]
        measured = measured and result is not None
        if result is not None:
            added += [finding for finding in memory(result, settings.cluster.node) if finding not in added]
    return [*(finding for finding in findings if not (measured and finding.text.startswith(MEMORY))), *added]


def _models(config: Mapping[str, Any]) -> list[tuple[str, Path]]:
    """Config keys and folders of models, such as a teacher, on which the rehearsal of a config depends."""
    models = [
        ("distillation.teacher", (config.get("distillation") or {}).get("teacher")),
        ("puzzle.parent", (config.get("puzzle") or {}).get("parent")),
    ]
    return [(key, Path(str(place)).expanduser()) for key, place in models if place]


def key_of(config: Mapping[str, Any]) -> str:
    """Name under which a config's results are kept: a digest of the relevant settings, models and package versions."""
    flags = {name: value for name, value in config["megatron"].items() if not name.startswith(_OF_NO_MATTER)}
    model = {name: value for name, value in config["model"].items() if name != "name"}
    others = [_model_at(path, key) for key, path in _models(config)]
    others += [config.get(name) for name in ("launcher", "precision_plan", "distillation", "puzzle", "stability")]
    return digest([model, flags, others, [*map(_version, _PACKAGES)]])[:16]


def _model_at(folder: Path, key: str) -> Mapping[str, Any] | None:
    """Read the sections `model` and `megatron` of the model in a folder, so that `key_of` notices another model there.

    The result is None if the folder holds no model. `key` is the config key that names the folder.
    """
    with contextlib.suppress(ValueError):
        config = model_of(str(folder), key)
        return {name: config[name] for name in ("model", "megatron")}
    return None


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _result(
    config: Mapping[str, Any], folder: Path, limit: float | None
) -> tuple[list[Finding], Mapping[str, Any] | None]:
    """Read the result of a config's rehearsal from a folder; if there is none yet, run the rehearsal first.

    Args:
        limit: time limit in seconds; None for no limit.

    Returns:
        A pair: no findings and the result, or else findings that say why there is no result, and None.
    """
    file = folder / _RESULT
    if not file.is_file():
        write_text(folder / _ASKED, json.dumps(config))
        within = "" if limit is None else f" for at most {limit:.0f} s"
        notice(f"rehearsing the run's ranks{within} (slurm.rehearse=false skips this) ...")
        code = _run(folder, limit)
        if code is None:
            more = "slurm.rehearse=true waits for it, slurm.rehearse=false skips it"
            return [Finding("note", f"not rehearsed within {SECONDS:.0f} s; {more}")], None
        if code:
            return [Finding("warning", f"not rehearsed: its process ended with exit code {code}")], None
    result: dict[str, Any] = json.loads(file.read_text())
    if (why := result.get("error")) is None:
        return [], result
    file.unlink()
    if ": code -" in why:  # killed by the kernel when out of memory, or by a limit of the login node
        return [Finding("warning", f"not rehearsed: {why}")], None
    return [Finding("error", f"the rehearsal failed: {why}; slurm.rehearse=false submits the run anyway")], None


def _run(folder: Path, limit: float | None) -> int | None:
    """Run a rehearsal in its own process group; return its exit code, None if it was killed after `limit` seconds."""
    command = [sys.executable, "-m", "nemo_ext.slurm.rehearse", str(folder)]
    none = subprocess.DEVNULL
    # A new session, as ranks that are still importing do not end with their parent yet.
    with subprocess.Popen(command, stdin=none, stdout=none, start_new_session=True) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def memory(result: Mapping[str, Any], node: Node | None) -> Iterator[Finding]:
    """Yield a finding on the peak memory of the rank that needs the most; `node` is None if its hardware is unknown."""
    if not result["ranks"]:
        yield Finding("note", "nothing to rehearse: no stage runs a model")
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
        text += f"; the cost model estimates {guess:.3g} ({100 * (guess / peak - 1):+.0f} %)"
    if result["set_aside"]:
        text += f"; without {', '.join(result['set_aside'])}, which is not rehearsed"
    kind = fits(peak / node.gpu_memory_gib)
    advice = OF_STAGES if most.get("name") in STAGES else ADVICE
    yield Finding(kind, f"{MEMORY}{text}" + (f": {advice}" if kind == "error" else ""))


def main() -> None:
    """Rehearse the config in FOLDER/asked.json; a user error is stored in the result's `error`."""
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
