"""Jobs other than training, and their arrays."""

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nemo_ext.job.config import compose
from nemo_ext.job.run_directory import last_checkpoint
from nemo_ext.slurm import attempts
from nemo_ext.slurm.batch import own_words
from nemo_ext.slurm.settings import settings_of
from nemo_ext.slurm.sweep import points
from nemo_ext.slurm.task import Task
from tests.job.test_registry import FILES

REPOSITORY = Path(__file__).parents[2]
TINY = (
    *("recipe=nemotron3_nano/quickstart", "data=mock", "megatron.seq_length=64", "megatron.micro_batch_size=1"),
    *("megatron.global_batch_size=2", "train.tokens=1280"),
    *("megatron.eval_iters=1", "megatron.eval_interval=1000"),
)


def test_a_sweep_has_a_run_directory_for_each_point() -> None:
    words = ["--multirun", "recipe=olmo1/1b", "cluster=leonardo", "megatron.lr=1e-4,2e-4", "megatron.seed=range(1,3)"]
    found = points("train", words)

    assert [point[-1] for point in found] == [
        f'run_dir="runs/olmo1/1b-olmo1_1b/megatron.lr={lr},megatron.seed={seed}"'
        for lr in ("0.0001", "0.0002")
        for seed in (1, 2)
    ]
    assert all("cluster=leonardo" in point and "recipe=olmo1/1b" in point for point in found)
    assert points("train", ["--multirun", "recipe=olmo1/1b,olmo1/7b", "run_dir=r"])[1][-1] == (
        'run_dir="r/recipe=olmo1_7b"'
    )
    with pytest.raises(ValueError, match="no key has several values; write, for example, megatron"):
        points("train", ["--multirun", "recipe=olmo1/1b", "slurm.options=[a,b]", "model.pattern='(*-)x4'"])
    with pytest.raises(ValueError, match="job=convert has no run directory"):
        points("convert", ["--multirun", "from=a", "to='b','c'"])


@pytest.mark.parametrize("values", ["/a,/b", '"/a","/b"', "choice(/a,/b)"])
def test_checkpoints_are_swept(values: str) -> None:
    found = points("train", ["--multirun", "recipe=olmo1/1b", f"megatron.pretrained_checkpoint={values}", "run_dir=r"])

    assert [compose("train", run)["megatron"]["pretrained_checkpoint"] for run in found] == ["/a", "/b"]
    names = [f"r/megatron.pretrained_checkpoint=_{name}" for name in "ab"]
    assert [compose("train", run)["run_dir"] for run in found] == names


def test_a_comma_in_quotes_does_not_sweep() -> None:
    words = ["--multirun", "recipe=olmo1/1b", 'data_root="/a,b"', "megatron.lr=1e-4,2e-4", "run_dir=r=1"]

    assert [compose("train", run)["data_root"] for run in points("train", words)] == ["/a,b"] * 2


def test_a_task_of_an_array_has_its_own_words() -> None:
    sweep = ["--multirun", "recipe=olmo1/1b", "megatron.lr=1e-4,2e-4"]

    assert own_words("train", ["recipe=a"], {}) == ["recipe=a"]
    assert own_words("train", sweep, {"SLURM_ARRAY_TASK_ID": "1"})[1] == "megatron.lr=0.0002"
    with pytest.raises(ValueError, match="2 runs: pass --array=0-1 to sbatch"):
        own_words("train", sweep, {})
    shard = own_words("puzzle", ["run_dir=r"], {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"})
    assert shard == ["run_dir=r", "puzzle.shard=3/8", "puzzle.stages=[distill]"]
    shard = own_words("curate", ["output=o"], {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"})
    assert shard == ["output=o", "shard=3/8"]


def test_puzzle_uses_the_nodes_of_its_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setattr(Task, "seconds_left", lambda self: None)

    with pytest.raises(
        ValueError, match=r"launcher\.nodes=1 differs from the allocation's 2: pass --nodes=1 to sbatch"
    ):
        Task(settings_of(["job=puzzle"]), ["run_dir=unused"]).prepare()


@pytest.mark.slow
@pytest.mark.slurm
def test_a_sweep_is_an_array(
    slurm: Any, nemo_ext: Callable[..., str], here: Callable[..., str], tmp_path: Path, standin: Callable[..., None]
) -> None:
    standin(holds_at="5")
    base = tmp_path / "sweep"
    words = ("--multirun", *TINY, f"run_dir={base}", "megatron.lr=1e-3,2e-3", "cluster=testbed")
    said = here("submit", *words, 'slurm.options=["--cpus-per-task=1"]')
    places = [base / f"megatron.lr={lr}" for lr in ("0.001", "0.002")]

    assert "--array=0-1" in said and "2 runs: " in said
    first, second = ((place / "slurm" / "job").read_text().strip() for place in places)
    assert (first.partition("_")[0], first[-2:], second[-2:]) == (second.partition("_")[0], "_0", "_1")
    assert "is running" in (again := here("submit", *words, code=2)) or "is pending" in again
    slurm.wait(lambda: all((place / "metrics.jsonl").is_file() for place in places), what=lambda: slurm.outputs(base))
    slurm.call("scancel", "--batch", "--signal=USR2", second)
    (places[0] / "go").touch()
    slurm.wait(lambda: here("status", str(base)).count("finished") == 2, what=lambda: slurm.outputs(base))

    assert [last_checkpoint(place) for place in places] == [10, 10]
    assert len(attempts.read(places[0])) == 1, "only the other one was stopped"
    assert [each.reason for each in attempts.read(places[1])] == ["time limit (SIGUSR2)", "done"]
    assert [attempts.read(place)[0].job for place in places] == [first, second]


@pytest.mark.deep
@pytest.mark.slurm
def test_a_task_resumes_after_a_time_limit(
    slurm: Any, here: Callable[..., str], endpoint: Any, reply: type[Any], tmp_path: Path
) -> None:
    """It is interrupted as by Ctrl-C; its next start sends only the unanswered requests."""
    rows, out, record = tmp_path / "rows.jsonl", tmp_path / "answers", tmp_path / "record"
    rows.write_text("".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(40)))
    endpoint.models = ["m"]
    endpoint.reply = lambda payload: reply(text="yes", seconds=600.0 if 20 < len(endpoint.requests) <= 24 else 0.0)
    words = ("job=generate", f"endpoint={endpoint.url}", f"input={rows}", f"output={out}", "generate.part_rows=10")
    here("submit", *words, "generate.concurrency=4", f"slurm.folder={record}", "cluster=testbed")
    job = (record / "slurm" / "job").read_text().strip()
    slurm.wait(lambda: len(endpoint.requests) >= 24, what=lambda: slurm.outputs(tmp_path))
    slurm.call("scancel", "--batch", "--signal=USR2", job)

    assert slurm.end_of(job, tmp_path) == "COMPLETED", slurm.outputs(tmp_path)
    assert [each.reason for each in attempts.read(record)] == ["time limit (SIGUSR2)", "done"]
    report = json.loads((out / "report.json").read_text())
    assert report["answers"] == 40
    asked = Counter(str(payload["messages"]) for payload in endpoint.requests)
    assert len(asked) == 40 and sum(asked.values()) == 44, "answered questions are not asked again"


@pytest.mark.slow
@pytest.mark.slurm
def test_a_mistake_in_a_task_ends_it(slurm: Any, here: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    here("submit", "job=tokenize", "input=bad.jsonl", "output=data/bad", "cluster=testbed")
    record = tmp_path / "runs" / "slurm" / "tokenize-data-bad"
    job = (record / "slurm" / "job").read_text().strip()

    assert slurm.end_of(job, record) == "FAILED"
    assert "not queued again: it would recur in a new start" in slurm.outputs(record)
    assert len(attempts.read(record)) == 1
    assert "stopped: a mistake in the command or its files" in here("status", str(record))


@pytest.mark.slow
@pytest.mark.slurm
def test_a_job_has_ranks_on_all_nodes(
    slurm: Any, here: Callable[..., str], tmp_path: Path, standin: Callable[..., None]
) -> None:
    """Puzzle's requests to the batch process: ranks of an interrupted stage, and of a training stage."""
    standin(holds_at="5")
    run_dir = tmp_path / "run"
    here(
        *("submit", "job=puzzle", "data=mock", f"run_dir={run_dir}", "launcher.nodes=2", "launcher.nproc_per_node=1"),
        *("cluster=testbed", 'slurm.options=["--cpus-per-task=1"]'),
    )
    job = (run_dir / "slurm" / "job").read_text().strip()
    slurm.wait(lambda: len(list(run_dir.glob("begun-*"))) == 2, what=lambda: slurm.outputs(tmp_path))
    slurm.call("scancel", "--batch", "--signal=USR2", job)
    slurm.wait(lambda: (run_dir / "parent" / "metrics.jsonl").is_file(), what=lambda: slurm.outputs(tmp_path))
    assert sorted(path.name for path in run_dir.glob("stage-*")) == ["stage-0", "stage-1"]
    slurm.wait(lambda: "iteration        5" in (run_dir / "parent" / "train.log").read_text())
    slurm.call("scancel", "--batch", "--signal=USR2", job)

    assert slurm.end_of(job, tmp_path) == "COMPLETED", slurm.outputs(tmp_path)
    assert [each.reason for each in attempts.read(run_dir)] == ["time limit (SIGUSR2)"] * 2 + ["done"]
    assert "stage: finished before" in slurm.outputs(run_dir)
    assert last_checkpoint(run_dir / "parent") == 20


@pytest.mark.deep
@pytest.mark.slurm
def test_rl_resumes_after_a_time_limit(
    slurm: Any, nemo_ext: Callable[..., str], tmp_path: Path, random_llama: Path
) -> None:
    run_dir, tasks = tmp_path / "run", tmp_path / "tasks.jsonl"
    nemo_ext("rl_tasks", "generator=arithmetic", "count=64", f"output={tasks}")
    words = (
        *(
            "job=rl",
            "preset=domyn_math_grpo",
            f"model={random_llama}",
            f"tasks.train.path={tasks}",
            f"run_dir={run_dir}",
        ),
        *("rl.prompts_per_step=2", "rl.generations_per_prompt=4", "rl.batch=8", "rl.lengths.response=8"),
        *("rl.lengths.prompt=512", "rl.lengths.total=1024", "rl.schedule.steps=40", "save_every=2", "cluster=testbed"),
        *("on_inexpressible=warn", 'slurm.options=["--cpus-per-task=1"]'),
    )
    assert "not found" in nemo_ext("submit", *words, "model=nowhere", code=2)
    nemo_ext("submit", *words)
    job = (run_dir / "slurm" / "job").read_text().strip()
    slurm.wait(lambda: list((run_dir / "checkpoints").glob("checkpoint-*")), what=lambda: slurm.outputs(run_dir))
    assert "/ 40" in nemo_ext("status", str(run_dir))

    slurm.call("scancel", "--batch", "--signal=USR2", job)

    assert slurm.end_of(job, run_dir) == "COMPLETED", slurm.outputs(run_dir)
    first, second = attempts.read(run_dir)
    assert first.reason == "time limit (SIGUSR2)"
    assert 0 < second.first_step < 40 == second.last_step
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 41))
    assert (run_dir / "model" / "config.json").is_file()
    assert (run_dir / "slurm" / "config.yaml").is_file()


@pytest.mark.deep
@pytest.mark.slurm
def test_puzzle_on_two_nodes_equals_two_ranks(
    slurm: Any, nemo_ext: Callable[..., str], train_ranks: Callable[..., object], tmp_path: Path
) -> None:
    parent, there, here = (tmp_path / name for name in ("parent", "there", "here"))
    train_ranks(parent, "model.pattern=*-")
    words = (
        *("data=mock", f"puzzle.parent={parent}", "puzzle.stages=[parent,library,distill,score]", "puzzle.fsdp=shard"),
        *("megatron.seq_length=32", "puzzle.calibration={sequences: 8, batch: 2}", "puzzle.heal.tokens=0"),
        *("puzzle.distill={steps: 200, batch: 2, save_interval: 10}", "puzzle.variants={kv: [], ffn: [0.5]}"),
    )
    nemo_ext(
        *("submit", "job=puzzle", *words, f"run_dir={there}", "launcher.nodes=2", "launcher.nproc_per_node=1"),
        *("cluster=testbed", 'slurm.options=["--cpus-per-task=1"]'),
    )
    job = (there / "slurm" / "job").read_text().strip()
    in_training = there / "blocks" / "trained" / "in_training.pt"
    slurm.wait(in_training.is_file, seconds=600, what=lambda: slurm.outputs(there))
    slurm.call("scancel", "--batch", "--signal=USR2", job)
    command = [sys.executable, "-m", "nemo_ext.cli", "puzzle", *words, f"run_dir={here}", "launcher.nproc_per_node=2"]
    subprocess.run(command, env={**slurm.environment, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)

    assert slurm.end_of(job, there, seconds=600) == "COMPLETED", slurm.outputs(there)
    assert [each.reason for each in attempts.read(there)] == ["time limit (SIGUSR2)", "done"]
    assert "library: finished before" in slurm.outputs(there)
    assert (there / "blocks" / "scores.jsonl").read_bytes() == (here / "blocks" / "scores.jsonl").read_bytes()
    files = [file.relative_to(here) for file in sorted(here.rglob("*.safetensors"))]
    assert files
    for file in files:
        ours, theirs = load_file(there / file), load_file(here / file)
        assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours), file


@pytest.mark.slow
@pytest.mark.slurm
def test_a_job_of_another_package_runs_resumes_and_fails(
    slurm: Any, nemo_ext: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site, points = tmp_path / "site", tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"]
    groups = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in points.items())
    installed = {
        "mine-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n",
        "mine-1.0.dist-info/entry_points.txt": "\n".join(groups),
        # It waits in its first start until the job is interrupted.
        "mine/counting.py": FILES["mine/counting.py"].replace(
            "    text =",
            "    import time\n"
            "    if Path(config['input']).name == 'slow.txt' and not Path('started').exists():\n"
            "        Path('started').touch()\n"
            "        time.sleep(600)\n"
            "    text =",
        ),
    }
    for name, text in {**FILES, **installed}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.setitem(slurm.environment, "PYTHONPATH", f"{REPOSITORY}{os.pathsep}{site}")
    for name, text in (("slow.txt", "one two three"), ("empty.txt", "")):
        (tmp_path / name).write_text(text)

    def submitted(name: str) -> str:
        words = ("job=count_words", f"input={name}.txt", f"output={name}", f"slurm.folder=record_{name}")
        nemo_ext("submit", *words, "cluster=testbed")
        return (tmp_path / f"record_{name}" / "slurm" / "job").read_text().strip()

    good, bad = submitted("slow"), submitted("empty")
    slurm.wait((tmp_path / "started").exists, what=lambda: slurm.outputs(tmp_path))
    assert "running" in nemo_ext("status", "record_slow")
    slurm.call("scancel", "--batch", "--signal=USR2", good)

    assert slurm.end_of(good, tmp_path) == "COMPLETED", slurm.outputs(tmp_path)
    assert (tmp_path / "slow" / "count").read_text() == "3"
    assert [start.reason for start in attempts.read(tmp_path / "record_slow")] == ["time limit (SIGUSR2)", "done"]
    assert "finished" in nemo_ext("status", "record_slow")
    assert slurm.end_of(bad, tmp_path) == "FAILED"
    assert len(attempts.read(tmp_path / "record_empty")) == 1, "a mistake is not queued again"
    assert "error: input=empty.txt: is empty: name a text" in slurm.outputs(tmp_path)
