"""Every command that is rendered for Slurm, exactly: commands.txt; `NEMO_EXT_WRITE=1 pytest` writes it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_ext.pipeline.stages import read
from nemo_ext.slurm.settings import settings_of, split
from nemo_ext.slurm.start import RANKS
from nemo_ext.slurm.submit import SCRIPTS, planned
from nemo_ext.slurm.task import Task
from nemo_ext.slurm.training import Training

REPOSITORY = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "commands.txt"
SUBMITTED = {
    "training": ["recipe=domyn_small/cpt", "account=X", "run_dir=runs/cpt"],
    "a sweep": ["--multirun", "recipe=olmo1/1b", "megatron.lr=1e-4,2e-4", "run_dir=runs/sweep", "time=02:00:00"],
    "RL with TRL": ["job=rl", "preset=dpo_delta", "model=hf", "pairs.train=pairs", "run_dir=runs/dpo"],
    "RL with NeMo-RL": [
        *("job=rl", "preset=domyn_math_grpo", "engine=nemo_rl", "model=hf", "tasks.train.path=tasks.jsonl"),
        *("slurm.nodes=16", "run_dir=runs/grpo"),
    ],
    "Puzzle": ["job=puzzle", "recipe=puzzle/hybrid", "run_dir=runs/puzzle", "launcher.nproc_per_node=4"],
    "Puzzle on several nodes": [
        *("job=puzzle", "recipe=puzzle/hybrid", "run_dir=runs/puzzle", "launcher.nodes=2", "launcher.nproc_per_node=4"),
        *("puzzle.fsdp=shard", "puzzle.calibration.sequences=256", "puzzle.evaluation.sequences=256"),
    ],
    "shards of Puzzle's distillation": ["job=puzzle", "slurm.shards=8", "run_dir=runs/puzzle"],
    "conversion": ["job=convert", "from=runs/cpt", "to=exports/cpt"],
    "quantisation": [
        *("job=quantize", "from=exports/nano", "to=exports/nano_fp8", "precision=nemotron3_selective"),
        "calibration.data=data/sft",
    ],
    "sensitivity": [
        *("job=sensitivity", "sensitivity.model=runs/mine", "run_dir=runs/mine_fp8", "launcher.nproc_per_node=4")
    ],
    "replicas of a server": [
        *("job=serve", "model=exports/nano", "serving.engine=vllm", "serving.replicas=8", "serving.least=6"),
        "run_dir=runs/serve",
    ],
    "a server over two nodes": [
        *("job=serve", "model=exports/ultra", "serving.engine=vllm", "serving.nodes=2", "serving.gpus=4"),
        "run_dir=runs/ultra",
    ],
    "a batch job with its servers": [
        *("job=generate", "model=exports/nano", "serving.engine=vllm", "serving.replicas=8"),
        *("input=rows.parquet", "output=answers"),
    ],
    "a batch job": ["job=generate", "endpoint=runs/serve", "input=rows.parquet", "output=answers"],
    "synthetic data with its servers": [
        *("job=synthesize", "recipe=verified_traces", "model=exports/nano", "serving.engine=vllm"),
        *("serving.replicas=8", "input=tasks.jsonl", "output=traces", "steps.solve.samples=4"),
    ],
    "an evaluation with its servers": [
        *("job=evaluate", "model=exports/nano", "serving.engine=vllm", "serving.replicas=8"),
        *("suite=nemotron3_nano", "run_dir=runs/evaluate"),
    ],
    "rollouts with their servers": [
        *("job=rollouts", "model=exports/nano", "serving.engine=vllm", "serving.replicas=8"),
        *("rollouts.tasks=tasks/math.jsonl", "run_dir=rollouts/first"),
    ],
    "rounds": [
        *("job=online", "preset=rpo_online", "model=exports/nano", "serving.engine=vllm", "serving.gpus=4"),
        *("tasks.train.path=tasks/math.jsonl", "run_dir=runs/rounds"),
    ],
    "averages": [
        *("job=merge_sweep", "from=[exports/a,exports/b]", "serving.engine=vllm", "suite=nemotron3_nano"),
        "run_dir=runs/merges",
    ],
    "tokenising": ["job=tokenize", "input=texts.jsonl", "output=data/mine", "account=X"],
}
CONTAINERS = {
    "no container": [],
    "Singularity": ["cluster.container.image=/images/nemo.sif"],
    "Apptainer": ["cluster.container.runtime=apptainer", "cluster.container.image=/images/nemo.sif"],
    "pyxis": [
        "cluster.container.runtime=pyxis",
        "cluster.container.image=/images/nemo.sqsh",
        "cluster.container.options=[]",
    ],
}


def rendered(folder: Path) -> Iterator[str]:
    for site in ("leonardo", "dgx_h100", "testbed", "generic"):
        for name, words in SUBMITTED.items():
            if site == "generic" and "engine=nemo_rl" in words:
                continue  # refused: the GPUs per node are unknown
            yield f"# {name}, {site}"
            yield shlex.join(planned([f"cluster={site}", *words]).command())
    given = [f"{key}=/given" for key in ("start", "tokenizer", "math_tasks", "environment_tasks", "pairs")]
    for pipeline in ("quickstart", "domyn_small", "puzzle"):
        own = given if pipeline == "domyn_small" else []
        for stage in read([f"pipeline={pipeline}", "run_dir=runs/chain", "cluster=leonardo", *own]).stages:
            yield f"# pipeline {pipeline}, {stage.name}"
            yield shlex.join(replace(planned(stage.words), after=tuple(f"<{name}>" for name in stage.after)).command())
    for name, words in CONTAINERS.items():
        settings = settings_of(split(["cluster=leonardo", *words])[0])
        for kind, of, module, options in (
            (Training, "ranks", "nemo_ext.slurm.rank", (*RANKS, "--label")),
            (Task, "another job", "nemo_ext.cli", ()),
        ):
            yield f"# {of} on leonardo, {name}"
            yield shlex.join(kind(settings, []).srun(["-m", module, "..."], *options))


@pytest.mark.slow
def test_every_command_is_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WORK", "FAST", "CINECA_SCRATCH"):
        monkeypatch.setenv(name, f"/{name.lower()}")
    caches = ("TRITON_CACHE_DIR", "TRITON_CACHE_AUTOTUNING", "TORCHINDUCTOR_CACHE_DIR")  # torch sets the last itself
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", *caches):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("USER", "me")
    monkeypatch.setattr("nemo_ext.slurm.start.Batch.seconds_left", lambda self: None)

    text = "\n".join(rendered(tmp_path)) + "\n"
    for place, name in ((str(SCRIPTS), "SCRIPTS"), (str(tmp_path), "HERE"), (sys.executable, "PYTHON")):
        text = text.replace(place, name)
    if os.environ.get("NEMO_EXT_WRITE"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


BATCH_SCRIPTS = pytest.mark.parametrize(
    "script", sorted((REPOSITORY / "slurm").glob("*.sbatch")), ids=lambda script: script.stem
)


@BATCH_SCRIPTS
def test_a_script_whose_python_has_no_nemo_ext_reports_it(script: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named nemo_ext >&2; exit 1\n")
    python.chmod(0o755)
    given = {"NEMO_EXT_PYTHON": str(python), "PATH": os.environ["PATH"]}

    done = subprocess.run(["bash", str(script)], env=given, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {python}, first on PATH or NEMO_EXT_PYTHON, has no nemo_ext: ")


@BATCH_SCRIPTS
def test_the_signal_before_the_limit_does_not_kill_a_script_that_has_no_handler_yet(
    script: Path, tmp_path: Path
) -> None:
    """Slurm sends it at once if the limit is shorter than the margin."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -USR2 $$\necho lives\n")
    python.chmod(0o755)

    words = ["bash", str(script), "rl_tasks"]
    done = subprocess.run(words, env={"NEMO_EXT_PYTHON": str(python)}, capture_output=True, text=True, check=False)

    assert done.stdout == "lives\n"
