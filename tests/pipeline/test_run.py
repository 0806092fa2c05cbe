"""A pipeline on this machine: what is run again and what is not, and a chain that is killed and goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from nemo_ext.job.run_directory import read_metrics
from nemo_ext.pipeline.run import Work, planned, run, runs_here
from nemo_ext.pipeline.stages import read
from nemo_ext.slurm import attempts

Plan = Callable[..., dict[str, Work]]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """The stages of a chain of two jobs, by name."""
    stages = {
        "tasks": {"job": "rl_tasks", "words": ["generator=arithmetic", f"output={tmp_path}/tasks.jsonl"]},
        "more": {"job": "rl_tasks", "words": ["generator=tables", f"output={tmp_path}/more.jsonl"]},
    }
    (tmp_path / "pipeline").mkdir()
    text = "# @package _global_\n" + yaml.safe_dump({"pipeline": "two", "stages": stages}, sort_keys=False)
    (tmp_path / "pipeline" / "two.yaml").write_text(text)

    def made(*words: str) -> dict[str, Work]:
        works = planned(read([f"--config-dir={tmp_path}", "pipeline=two", f"run_dir={tmp_path}/r", *words]))
        return {work.stage.name: work for work in works}

    return made


def done(work: Work) -> None:
    attempts.begin(work.record, job="", restart=0, nodes="here", step=None)
    attempts.end(work.record, step=None, reason="finished")
    attempts.finish(work.record, step=None, words=work.stage.own)


def test_what_is_finished_is_not_run_again(plan: Plan) -> None:
    works = plan()
    assert [work.state for work in works.values()] == ["waiting", "waiting"]
    done(works["tasks"])
    assert [work.state for work in plan().values()] == ["finished before", "waiting"]
    done(works["more"])
    assert [work.state for work in plan().values()] == ["finished before"] * 2


def test_a_finished_stage_with_other_words_is_told(plan: Plan) -> None:
    done(plan()["tasks"])

    with pytest.raises(ValueError, match=r"tasks: finished with other words \(count=5\)"):
        plan("tasks.count=5")
    assert plan("more.count=5")["more"].state == "waiting"


def test_a_stage_made_from_what_was_made_again_is_told(plan: Plan, tmp_path: Path) -> None:
    works = plan()
    done(works["tasks"])
    done(works["more"])
    done(works["tasks"])

    with pytest.raises(
        ValueError, match=f"more: was begun before tasks was made again: remove {tmp_path}/more.jsonl and"
    ):
        plan()
    (works["tasks"].record / attempts.FOLDER / attempts.FINISHED).unlink()
    with pytest.raises(ValueError, match="more: was begun before tasks was finished"):
        plan()
    assert plan("from=more")["more"].state == "finished before", "what stands outside is taken to be done"


def test_a_stage_that_slurm_has_is_not_run_here(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = plan()["more"]
    (work.record / attempts.FOLDER).mkdir(parents=True)
    (work.record / attempts.FOLDER / "job").write_text("101\n")
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho '101|RUNNING|None'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")

    with pytest.raises(ValueError, match="more: job 101 of it is running: wait for it, or"):
        run([f"--config-dir={tmp_path}", "pipeline=two", f"run_dir={tmp_path}/r"], dry_run=False)
    assert not (tmp_path / "tasks.jsonl").exists()
    assert not runs_here(tmp_path / "r"), "the lock is let go"


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


def test_time_is_that_of_all_starts(plan: Plan) -> None:
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
        (["pipeline=quickstart", "cluster=leonardo"], "cluster=leonardo: is for `nemo-ext submit`"),
        (["pipeline=quickstart", "pretrain.recipe=olmo9"], "stages.pretrain: "),
        (["scale=laptop"], "pipeline=NAME is missing"),
        (["pipeline=quickstart", "run_dir='a,b'"], "run_dir=a,b: choose one without ,"),
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
    assert f"error: export: from={tmp_path}/r/pretrain: not there" in capsys.readouterr().out
    assert not (tmp_path / "r").exists()


TINY = (
    *("train.tokens=40960", "megatron.seq_length=64", "megatron.micro_batch_size=4", "megatron.global_batch_size=8"),
    *("train.validate_at_start=false", "megatron.eval_interval=1000", "megatron.eval_iters=1"),
    *(
        "megatron.save_interval=10",
        "data.streams=[{name: code, weight: 1, source: {kind: python_stdlib, max_bytes: 200000}}]",
    ),
)


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """The command in a folder, with its output in output.txt."""
    command = [sys.executable, "-m", "nemo_ext.cli", "pipeline", *words]
    with (folder / "output.txt").open("wb") as file:
        return subprocess.Popen(command, cwd=folder, stdout=file, stderr=file)


def end(process: subprocess.Popen[bytes], folder: Path, code: int = 0) -> str:
    """Its output, when it has ended."""
    output = folder / "output.txt"
    assert process.wait(300) == code, output.read_text()
    return output.read_text()


def wait(process: subprocess.Popen[bytes], folder: Path, until: Callable[[], bool]) -> None:
    limit = time.monotonic() + 300
    while not until():
        assert process.poll() is None and time.monotonic() < limit, (folder / "output.txt").read_text()
        time.sleep(0.1)


@pytest.mark.slow
def test_ctrl_c_ends_the_job_and_says_how_to_go_on(plan: Plan, tmp_path: Path) -> None:
    works = plan()
    words = (f"--config-dir={tmp_path}", "pipeline=two", f"run_dir={tmp_path}/r", "more.count=10000000")
    process = start(tmp_path, *words)
    wait(process, tmp_path, lambda: works["more"].log.exists() and len(attempts.read(works["more"].record)) == 1)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)

    told = end(process, tmp_path, 130)
    assert "tasks: finished, " in told and "more: interrupted" in told
    assert f"interrupted in more: the same command goes on (output: {works['more'].log})" in told
    assert not (tmp_path / "more.jsonl").exists()
    assert "tasks: finished before" in end(start(tmp_path, *words[:-1]), tmp_path)
    assert (tmp_path / "more.jsonl").exists()


@pytest.mark.slow
def test_a_chain_that_is_killed_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """The quickstart in small: kill -9 while it trains, then the same command to its end, and once more."""
    tokenize = "tokenize.data.streams=[{name: code, weight: 1, source: {kind: python_stdlib, max_bytes: 200000}}]"
    words = ["pipeline=quickstart", "run_dir=r", "data_root=data", tokenize, *(f"pretrain.{word}" for word in TINY)]
    run_dir = tmp_path / "r" / "pretrain"

    def step() -> int:
        metrics = run_dir / "metrics.jsonl"
        return max((line["step"] for line in read_metrics(metrics)), default=0) if metrics.exists() else 0

    killed = start(tmp_path, *words)
    wait(killed, tmp_path, lambda: step() >= 3)
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


def asking(folder: Path, model: Path) -> tuple[str, ...]:
    """Words of a pipeline with a stage that asks a server beside it, and a server that no stage asks."""
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}?"}}\n' for n in range(20)))
    ask = [
        f"input={folder}/rows.jsonl",
        f"output={folder}/answers",
        "endpoint=${run_dir}/judge",
        "generate.max_tokens=4",
    ]
    stages = {
        "judge": {"job": "serve", "words": [f"model={model}", "serving.device=cpu"]},
        "ask": {"job": "generate", "words": ask, "beside": ["judge"]},
        "public": {"job": "serve", "words": [f"model={model}", "serving.device=cpu"]},
    }
    (folder / "pipeline").mkdir()
    text = "# @package _global_\n" + yaml.safe_dump({"pipeline": "asked", "stages": stages}, sort_keys=False)
    (folder / "pipeline" / "asked.yaml").write_text(text)
    return f"--config-dir={folder}", "pipeline=asked", f"run_dir={folder}/r"


@pytest.mark.slow
def test_a_model_is_served_while_a_stage_asks_it(tmp_path: Path, served_folder: Path) -> None:
    words = asking(tmp_path, served_folder)

    told = end(start(tmp_path, *words), tmp_path)
    assert [line for line in told.splitlines() if line.startswith(("judge: ", "ask: "))] == [
        *("judge: running", "ask: running"),
        next(line for line in told.splitlines() if line.startswith("ask: finished, ")),
        "judge: stopped",
    ]
    assert (
        f"public: nemo-ext serve --config-dir={tmp_path} run_dir={tmp_path}/r/public port=0 model={served_folder}"
        in told
    )
    assert not (tmp_path / "r" / "judge" / "endpoint.json").exists()
    assert (tmp_path / "answers" / "report.md").is_file()
    again = end(start(tmp_path, *words), tmp_path)
    assert "ask: finished before" in again and "judge: running" not in again, "nobody asks it"
    broken = tmp_path / "broken"
    shutil.copytree(served_folder, broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    others = (f"judge.model={broken}", "ask.output=other", f"run_dir={tmp_path}/s")
    assert "error: judge, beside ask: the server ended with " in end(start(tmp_path, *words, *others), tmp_path, 1)
