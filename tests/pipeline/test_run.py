"""A pipeline on this machine: finished stages are not run again, and a killed pipeline resumes."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext import install
from nemo_ext.job.run_directory import read_metrics
from nemo_ext.pipeline import run as pipeline_run
from nemo_ext.pipeline.run import Work, planned, run, runs_here
from nemo_ext.pipeline.stages import read
from nemo_ext.slurm import attempts
from tests.composing import write_pipeline

Plan = Callable[..., dict[str, Work]]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Stages of a chain of two jobs, by name."""
    stages = {
        "tasks": {"job": "rl_tasks", "words": ["generator=arithmetic", f"output={tmp_path}/tasks.jsonl"]},
        "more": {"job": "rl_tasks", "words": ["generator=tables", f"output={tmp_path}/more.jsonl"]},
    }
    write_pipeline(tmp_path, "two", stages)

    def made(*words: str) -> dict[str, Work]:
        works = planned(read([f"--config-dir={tmp_path}", "pipeline=two", f"run_dir={tmp_path}/r", *words]))
        return {work.stage.name: work for work in works}

    return made


def done(work: Work) -> None:
    attempts.begin(work.record, job="", restart=0, nodes="here", step=None)
    attempts.end(work.record, step=None, reason="finished")
    attempts.finish(work.record, step=None, words=work.stage.own)


def test_a_finished_stage_is_not_run_again(plan: Plan) -> None:
    works = plan()
    assert [work.state for work in works.values()] == ["waiting", "waiting"]
    done(works["tasks"])
    assert [work.state for work in plan().values()] == ["finished before", "waiting"]
    done(works["more"])
    assert [work.state for work in plan().values()] == ["finished before"] * 2


def test_a_finished_stage_with_other_arguments_is_refused(plan: Plan) -> None:
    done(plan()["tasks"])

    with pytest.raises(ValueError, match=r"tasks was finished with other arguments \(count=5\)"):
        plan("tasks.count=5")
    assert plan("more.count=5")["more"].state == "waiting"


def test_a_stage_whose_input_was_made_again_is_refused(plan: Plan, tmp_path: Path) -> None:
    works = plan()
    done(works["tasks"])
    done(works["more"])
    done(works["tasks"])

    with pytest.raises(ValueError, match=f"more began before tasks was run again; remove {tmp_path}/more.jsonl and"):
        plan()
    (works["tasks"].record / attempts.FOLDER / attempts.FINISHED).unlink()
    with pytest.raises(ValueError, match="more began before tasks was finished"):
        plan()
    assert plan("from=more")["more"].state == "finished before", "stages outside are assumed to be finished"


def test_a_stage_that_is_queued_on_slurm_is_not_run_here(
    plan: Plan, tmp_path: Path, programs: Callable[..., Path]
) -> None:
    work = plan()["more"]
    (work.record / attempts.FOLDER).mkdir(parents=True)
    (work.record / attempts.FOLDER / "job").write_text("101\n")
    programs(squeue="echo '101|RUNNING|None'")

    with pytest.raises(ValueError, match="more: its Slurm job 101 is running; wait for it, or"):
        run([f"--config-dir={tmp_path}", "pipeline=two", f"run_dir={tmp_path}/r"], dry_run=False)
    assert not (tmp_path / "tasks.jsonl").exists()
    assert not runs_here(tmp_path / "r"), "the lock is released"


def test_a_folder_without_file_locks_is_held_by_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    monkeypatch.setattr(pipeline_run, "PATIENCE", 0.0)
    with pipeline_run._alone(tmp_path):
        assert runs_here(tmp_path)
        with (
            pytest.raises(ValueError, match="another command is running in this folder"),
            pipeline_run._alone(tmp_path),
        ):
            pass
        holder = (tmp_path / pipeline_run.LEASE).read_text()
    assert not runs_here(tmp_path)

    killed = json.loads(holder) | {"pid": 2**22 + 1, "id": "killed"}
    (tmp_path / pipeline_run.LEASE).write_text(json.dumps(killed))
    assert not runs_here(tmp_path), "its command was killed on this machine"


def test_an_array_is_finished_when_all_its_tasks_are(plan: Plan) -> None:
    works = plan()
    shards = [works["tasks"].record / "shards" / number for number in "01"]
    for shard in shards:
        attempts.begin(shard, job="7", restart=0, nodes="n", step=None)
        attempts.end(shard, step=None, reason="done")
    attempts.finish(shards[0], step=None, words=[])
    assert plan()["tasks"].state == "waiting"
    attempts.finish(shards[1], step=None, words=[])
    done(works["more"])

    assert [work.state for work in plan().values()] == ["finished before"] * 2


def test_time_is_the_total_of_all_starts(plan: Plan) -> None:
    work = plan()["tasks"]
    starts = [
        attempts.Attempt(job="", restart=number, nodes="", began=100.0 * number, first_step=0, ended=100.0 * number + 7)
        for number in range(2)
    ]
    attempts.write(work.record, starts)

    assert work.seconds == 14


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pipeline=quickstart", "cluster=leonardo"], "cluster=leonardo is an argument of `nemo-ext submit`"),
        (["pipeline=quickstart", "pretrain.recipe=olmo9"], "stages.pretrain: "),
        (["scale=laptop"], "pipeline is missing: set it"),
        (["pipeline=quickstart", "run_dir=it's"], "run_dir=it's: choose a path without '"),
        (["pipeline=quickstart", "skp=[export]"], "pipeline has no such key; `nemo-ext pipeline --help`"),
    ],
)
def test_mistakes_are_named(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\w") as raised:
        run([f"run_dir={tmp_path}/r", *words], dry_run=True)
    assert said in str(raised.value)
    assert not (tmp_path / "r").exists()


def test_errors_of_a_later_stage_are_found_before_the_first_starts(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--config-dir={tmp_path}", "pipeline=quickstart", f"run_dir={tmp_path}/r", "skip=[pretrain]"]

    assert run(words, dry_run=False) == 2
    assert f"error: export: from={tmp_path}/r/pretrain: not found" in capsys.readouterr().out
    assert not (tmp_path / "r").exists()


TINY = (
    *("train.tokens=40960", "megatron.seq_length=64", "megatron.micro_batch_size=4", "megatron.global_batch_size=8"),
    *("megatron.eval_interval=1000", "megatron.eval_iters=1"),
    *(
        "megatron.save_interval=10",
        "data.streams=[{name: code, weight: 1, source: {kind: python_stdlib, max_bytes: 200000}}]",
    ),
)


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start the command in a folder, with its output in output.txt."""
    command = [sys.executable, "-m", "nemo_ext.cli", "pipeline", *words]
    with (folder / "output.txt").open("wb") as file:
        return subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, env={**os.environ, **environment})


def end(process: subprocess.Popen[bytes], folder: Path, code: int = 0) -> str:
    """Wait for the end of the command; returns its output."""
    output = folder / "output.txt"
    assert process.wait(300) == code, output.read_text()
    return output.read_text()


def wait(process: subprocess.Popen[bytes], folder: Path, until: Callable[[], bool]) -> None:
    limit = time.monotonic() + 300
    while not until():
        assert process.poll() is None and time.monotonic() < limit, (folder / "output.txt").read_text()
        time.sleep(0.1)


def step_of(run_dir: Path) -> int:
    """Newest step that a training has logged."""
    metrics = run_dir / "metrics.jsonl"
    return max((line["step"] for line in read_metrics(metrics)), default=0) if metrics.exists() else 0


@pytest.mark.slow
def test_an_interrupted_or_killed_chain_resumes(tmp_path: Path, standins: Any) -> None:
    """Ctrl-C while it trains, then kill -9, then to its end, then again."""
    training = [
        *("recipe=nemotron3_nano/quickstart", "data=mock", "megatron.seq_length=64", "megatron.global_batch_size=2"),
        *("train.tokens=5120", "memory_profile=null"),
    ]
    stages = {
        "tasks": {"job": "rl_tasks", "words": ["generator=arithmetic", "count=5", f"output={tmp_path}/tasks.jsonl"]},
        "pretrain": {"job": "train", "words": training},
        "more": {"job": "rl_tasks", "words": ["generator=tables", "count=5", f"output={tmp_path}/more.jsonl"]},
    }
    write_pipeline(tmp_path, "three", stages)
    words = (f"--config-dir={tmp_path}", "pipeline=three", f"run_dir={tmp_path}/r")
    run_dir, environment = tmp_path / "r" / "pretrain", {**standins.environment, "STAND_IN_HOLDS_AT": "7,14"}

    interrupted = start(tmp_path, *words, **environment)
    wait(interrupted, tmp_path, lambda: step_of(run_dir) == 7)
    interrupted.send_signal(signal.SIGINT)
    output = end(interrupted, tmp_path, 130)
    assert "tasks: finished, " in output and "pretrain: interrupted" in output
    assert f"interrupted in pretrain: the same command resumes (output: {tmp_path}/r/pretrain.log)" in output
    killed = start(tmp_path, *words, **environment)
    wait(killed, tmp_path, lambda: step_of(run_dir) == 14)
    killed.kill()
    killed.wait()
    assert not (tmp_path / "more.jsonl").exists()
    output = end(start(tmp_path, *words, **environment), tmp_path)

    assert "tasks: finished before" in output and (tmp_path / "more.jsonl").exists()
    steps = [line["step"] for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]
    assert steps == list(range(1, 41)), "nothing was lost or done twice"
    starts = attempts.read(run_dir)
    assert [(each.reason, each.first_step) for each in starts] == [("interrupted", 0), ("killed", 7), ("finished", 14)]
    report = (tmp_path / "r" / "report.md").read_text()
    assert "| [pretrain](pretrain/report.md) | train | tasks | finished |" in report
    assert "5,120" in report
    assert end(start(tmp_path, *words), tmp_path).count(": finished before") == 3


@pytest.mark.deep
def test_a_killed_chain_resumes_to_the_same_end(tmp_path: Path) -> None:
    """The quickstart in small: kill -9 while it trains, then the same command to its end, then again."""
    tokenize = "tokenize.data.streams=[{name: code, weight: 1, source: {kind: python_stdlib, max_bytes: 200000}}]"
    words = ["pipeline=quickstart", "run_dir=r", "data_root=data", tokenize, *(f"pretrain.{word}" for word in TINY)]
    run_dir = tmp_path / "r" / "pretrain"

    killed = start(tmp_path, *words)
    wait(killed, tmp_path, lambda: step_of(run_dir) >= 3)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "r" / "hf").exists()

    end(start(tmp_path, *words), tmp_path)
    steps = [line["step"] for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]
    assert steps == list(range(1, 81)), "nothing was lost or done twice"
    assert (tmp_path / "r" / "hf" / "config.json").is_file()
    starts = attempts.read(run_dir)
    assert [each.reason for each in starts] == ["killed", "finished"]
    assert 3 <= starts[1].first_step < 80, "the killed command's job saved before it ended"
    report = (tmp_path / "r" / "report.md").read_text()
    assert "| [pretrain](pretrain/report.md) | train | tokenize | finished |" in report
    assert "40,960" in report and "](pretrain/" in report
    assert end(start(tmp_path, *words), tmp_path).count(": finished before") == 3


@pytest.mark.slow
def test_a_model_is_served_while_a_stage_uses_it(tmp_path: Path, standins: Any) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}?"}}\n' for n in range(20)))
    ask = [f"input={tmp_path}/rows.jsonl", f"output={tmp_path}/answers", "endpoint=${run_dir}/judge"]
    path, model = f"{standins.vllm(tmp_path)}{os.pathsep}{os.environ['PATH']}", tmp_path / "model"
    stages = {
        "judge": {"job": "serve", "words": [f"model={model}", "serving.engine=vllm"]},
        "ask": {"job": "generate", "words": ask, "beside": ["judge"]},
        "public": {"job": "serve", "words": [f"model={model}"]},
    }
    write_pipeline(tmp_path, "asked", stages)
    words = f"--config-dir={tmp_path}", "pipeline=asked", f"run_dir={tmp_path}/r"

    output = end(start(tmp_path, *words, PATH=path), tmp_path)
    assert [line for line in output.splitlines() if line.startswith(("judge: ", "ask: "))] == [
        *("judge: running", "ask: running"),
        next(line for line in output.splitlines() if line.startswith("ask: finished, ")),
        "judge: stopped",
    ]
    command = f"nemo-ext serve --config-dir={tmp_path} run_dir={tmp_path}/r/public port=0 model={model}"
    assert f"public: not started; to start it: {command}" in output
    assert not (tmp_path / "r" / "judge" / "endpoint.json").exists()
    assert (tmp_path / "answers" / "report.md").is_file()
    again = end(start(tmp_path, *words, PATH=path), tmp_path)
    assert "ask: finished before" in again and "judge: running" not in again, "no stage uses it"
    (model / "broken").touch()
    others = ("ask.output=other", f"run_dir={tmp_path}/s")
    assert "error: judge, the server of ask: the server ended with exit code " in end(
        start(tmp_path, *words, *others, PATH=path), tmp_path, 1
    )


def test_a_missing_package_is_reported_before_any_stage_starts(
    tmp_path: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, folder = install.distributions, install.folder_of
    monkeypatch.setattr(install, "distributions", lambda **of: [] if of.get("name") == "gguf" else installed(**of))
    monkeypatch.setattr(install, "folder_of", lambda module: "" if module == "gguf" else folder(module))
    stages = {
        "tasks": {"job": "rl_tasks", "words": ["generator=arithmetic", f"output={tmp_path}/tasks.jsonl"]},
        "fetch": {"job": "fetch", "words": ["model=smollm2_135m", f"to={tmp_path}/model"]},
    }
    write_pipeline(tmp_path, "two", stages)

    for more in (["--dry-run"], []):
        ended = command("pipeline", f"--config-dir={tmp_path}", "pipeline=two", f"run_dir={tmp_path}/r", *more)

        assert ended.returncode == 2
        assert "error: fetch: this job requires gguf: pip install 'nemo_ext[fetch]'" in ended.stdout
    assert not (tmp_path / "tasks.jsonl").exists()
