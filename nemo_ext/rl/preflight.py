"""Checks of RL before it waits in a queue: the algorithm, the engine, and NeMo-RL's own setup. No torch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from nemo_ext.job.findings import Finding
from nemo_ext.megatron.preflight import precision
from nemo_ext.rl.commands import training_inputs
from nemo_ext.rl.job import check_steps, checked_algorithm, over_own_pairs
from nemo_ext.rl.trl.render import check_arguments


def findings(
    config: Mapping[str, Any],
    settings: Any,
    *,
    paths: bool,
    here: bool,
    model_to_come: Mapping[str, Any] | None,
) -> Iterator[Finding]:
    """Findings on RL.

    Args:
        config: composed config.
        settings: settings of site and queue.
        paths: whether files and NeMo-RL's setup are checked.
        here: True for a run that is not queued but started on this machine.
        model_to_come: config.json of the policy that earlier jobs make; None if unknown.
    """
    yield from _reinforcement(config, settings, model_to_come, rehearsed=paths)
    yield from precision(config, settings.cluster)


def _reinforcement(
    config: Mapping[str, Any], settings: Any, model_to_come: Mapping[str, Any] | None, *, rehearsed: bool
) -> Iterator[Finding]:
    """Errors for inconsistent algorithm settings, a missing engine, or what NeMo-RL would refuse."""
    on_nemo_rl, algorithm = config["engine"] == "nemo_rl", None
    try:
        algorithm = checked_algorithm(config)
        check_steps(config, algorithm)
        if not on_nemo_rl and config["trl"] and find_spec("trl") is not None:
            check_arguments(algorithm, config["trl"])
    except ValueError as error:
        yield Finding("error", str(error))
    if on_nemo_rl and not os.environ.get("NEMO_RL_ROOT") and find_spec("nemo_rl") is None:
        yield Finding("error", "engine=nemo_rl: NEMO_RL_ROOT is not set: name a checkout (docs/rl/nemo_rl.md)")
    elif on_nemo_rl and rehearsed and algorithm is not None and settings.cluster.node is not None:
        there = Path(str(config["policy"])).expanduser().is_dir()
        if not there and model_to_come is None:
            yield Finding("note", "the layout is computed and checked when the job starts: the model is not there yet")
            return
        with nullcontext() if there else TemporaryDirectory() as folder:
            if folder is not None:
                (Path(folder) / "config.json").write_text(json.dumps(model_to_come), encoding="utf-8")
                config = {**config, "policy": folder}
            try:
                if all(r.path.exists() for r in training_inputs(config, "policy") if r.key == "pairs.train"):
                    algorithm = over_own_pairs(config, algorithm)  # else they are made before, or `_inputs` says so
                yield from _on_nemo_rl(config, algorithm, settings)
            except ValueError as error:
                yield Finding("error", str(error))


def _on_nemo_rl(config: Mapping[str, Any], algorithm: Any, settings: Any) -> Iterator[Finding]:
    """Findings of NeMo-RL's own `setup`, where it can be imported, with the config that the job will have.

    Raises:
        ValueError: the config cannot be made, or no layout fits.
    """
    from nemo_ext.rl.nemo_rl.checkout import Checkout
    from nemo_ext.rl.nemo_rl.draft import section_of
    from nemo_ext.rl.nemo_rl.job import on_cluster, settings_of

    node, nodes = settings.cluster.node, settings.slurm.nodes
    assert node is not None
    checkout = Checkout(os.environ.get("NEMO_RL_ROOT"))
    given = on_cluster(config, nodes, node.gpus, node.gpu_memory_gib)
    made = {"section": section_of(algorithm), "config": settings_of(given, algorithm, checkout)[1]}
    code, said = rehearsal(made, checkout.root)
    if code == 0:
        yield Finding("note", "NeMo-RL's own setup takes the config")
    else:
        kind: Literal["error", "note"] = "error" if code == 1 else "note"
        yield Finding(kind, said if code == 1 else f"NeMo-RL's own setup was not asked: {said}")


def rehearsal(made: Mapping[str, Any], root: Path) -> tuple[int, str]:
    """Exit code and last line of `nemo_ext.rl.nemo_rl.rehearsal`, in a process that imports torch and NeMo-RL."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(made), encoding="utf-8")
        path = os.pathsep.join([str(root), *(place for place in sys.path if place)])
        ended = subprocess.run(
            [sys.executable, "-m", "nemo_ext.rl.nemo_rl.rehearsal", str(file)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = (ended.stdout.strip() or ended.stderr.strip() or "it said nothing").splitlines()
    return (ended.returncode if ended.stdout.strip() or not ended.returncode else 3), lines[-1]
