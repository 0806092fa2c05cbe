"""Checks an RL job's algorithm, engine and NeMo-RL setup before it is queued. Does not import torch."""

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
    config: Mapping[str, Any], settings: Any, *, paths: bool, here: bool, model_to_come: Mapping[str, Any] | None
) -> Iterator[Finding]:
    """Check an RL job and yield the findings.

    Args:
        paths: whether to check files and NeMo-RL's setup.
        here: True if the job runs on this machine instead of being queued.
        model_to_come: config.json of a policy that earlier jobs will write; None if unknown.
    """
    yield from _reinforcement(config, settings, model_to_come, rehearsed=paths)
    yield from precision(config, settings.cluster)


def _reinforcement(
    config: Mapping[str, Any], settings: Any, model_to_come: Mapping[str, Any] | None, *, rehearsed: bool
) -> Iterator[Finding]:
    """Yield errors for inconsistent algorithm settings, a missing engine, or a config that NeMo-RL's setup rejects.

    NeMo-RL's setup is only tried if `rehearsed` is True and the site's hardware is known.
    """
    on_nemo_rl, algorithm = config["engine"] == "nemo_rl", None
    try:
        algorithm = checked_algorithm(config)
        check_steps(config, algorithm)
        if not on_nemo_rl and config["trl"] and find_spec("trl") is not None:
            check_arguments(algorithm, config["trl"])
    except ValueError as error:
        yield Finding("error", str(error))
    if on_nemo_rl and not os.environ.get("NEMO_RL_ROOT") and find_spec("nemo_rl") is None:
        yield Finding("error", "engine=nemo_rl requires NeMo-RL; set NEMO_RL_ROOT to its checkout (docs/rl/nemo_rl.md)")
    elif on_nemo_rl and rehearsed and algorithm is not None and settings.cluster.node is not None:
        exists = Path(str(config["policy"])).expanduser().is_dir()
        if not exists and model_to_come is None:
            yield Finding("note", "the model does not exist yet, so the layout is checked when the job starts")
            return
        with nullcontext() if exists else TemporaryDirectory() as folder:
            if folder is not None:
                (Path(folder) / "config.json").write_text(json.dumps(model_to_come), encoding="utf-8")
                config = {**config, "policy": folder}
            try:
                if all(r.path.exists() for r in training_inputs(config, "policy") if r.key == "pairs.train"):
                    algorithm = over_own_pairs(config, algorithm)  # else an earlier job makes them, or they are missing
                yield from _on_nemo_rl(config, algorithm, settings)
            except ValueError as error:
                yield Finding("error", str(error))


def _on_nemo_rl(config: Mapping[str, Any], algorithm: Any, settings: Any) -> Iterator[Finding]:
    """Yield the problems that NeMo-RL's own `setup` finds; nothing if NeMo-RL cannot be imported.

    Raises:
        ValueError: the config cannot be rendered.
    """
    from nemo_ext.rl.nemo_rl.checkout import Checkout
    from nemo_ext.rl.nemo_rl.draft import section_of
    from nemo_ext.rl.nemo_rl.job import on_cluster, settings_of

    node, nodes = settings.cluster.node, settings.slurm.nodes
    assert node is not None
    checkout = Checkout(os.environ.get("NEMO_RL_ROOT"))
    job_config = on_cluster(config, nodes, node.gpus, node.gpu_memory_gib)
    rendered = {"section": section_of(algorithm), "config": settings_of(job_config, algorithm, checkout)[1]}
    code, output = rehearsal(rendered, checkout.root)
    if code == 0:
        yield Finding("note", "NeMo-RL's own setup accepts the config")
    else:
        kind: Literal["error", "note"] = "error" if code == 1 else "note"
        yield Finding(kind, output if code == 1 else f"the config was not checked by NeMo-RL's own setup: {output}")


def rehearsal(rendered: Mapping[str, Any], root: Path) -> tuple[int, str]:
    """Run `nemo_ext.rl.nemo_rl.rehearsal` in a separate process, which imports torch and NeMo-RL.

    Args:
        rendered: mapping with NeMo-RL's `config`, and the name of the algorithm's `section` in it.
        root: folder of NeMo-RL's source checkout.

    Returns:
        Exit code and last line of output; the code is 3 if the process failed without printing to stdout.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(rendered), encoding="utf-8")
        path = os.pathsep.join([str(root), *(place for place in sys.path if place)])
        process = subprocess.run(
            [sys.executable, "-m", "nemo_ext.rl.nemo_rl.rehearsal", str(file)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = (process.stdout.strip() or process.stderr.strip() or "no output").splitlines()
    return (process.returncode if process.stdout.strip() or not process.returncode else 3), lines[-1]
