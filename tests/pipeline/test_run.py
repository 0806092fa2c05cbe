"""A pipeline on this machine: what is run again and what is not, and a chain that is killed and goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from nemo_ext.job.run_directory import last_checkpoint, read_metrics
from nemo_ext.pipeline.run import Work, planned, run
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
    ],
)
def test_mistakes_are_named(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\w") as raised:
        run([*words, f"run_dir={tmp_path}/r"], dry_run=True)
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


@pytest.mark.slow
def test_a_chain_that_is_killed_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """The quickstart in small: kill -9 while it trains, then Ctrl-C, then to its end, and once more."""
    tokenize = "tokenize.data.streams=[{name: code, weight: 1, source: {kind: python_stdlib, max_bytes: 200000}}]"
    words = ["pipeline=quickstart", "run_dir=r", "data_root=data", tokenize, *(f"pretrain.{word}" for word in TINY)]
    command = [sys.executable, "-m", "nemo_ext.cli", "pipeline", *words]
    output = tmp_path / "output.txt"
    root = tmp_path / "r"

    def start() -> subprocess.Popen[bytes]:
        with output.open("ab") as file:
            return subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=file)

    def wait_for_step(step: int, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + 300
        metrics = root / "pretrain" / "metrics.jsonl"
        while not metrics.exists() or max((line["step"] for line in read_metrics(metrics)), default=0) < step:
            assert process.poll() is None and time.monotonic() < end, output.read_text()
            time.sleep(0.1)

    def finish(code: int, process: subprocess.Popen[bytes]) -> str:
        assert process.wait(300) == code, output.read_text()
        return output.read_text()

    killed = start()
    wait_for_step(3, killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    second = start()
    wait_for_step(20, second)
    os.kill(second.pid, signal.SIGINT)
    assert "interrupted in pretrain: the same command goes on" in finish(130, second)
    saved = last_checkpoint(root / "pretrain")
    assert saved is not None and 20 <= saved < 80

    finish(0, start())
    steps = [line["step"] for line in read_metrics(root / "pretrain" / "metrics.jsonl") if "loss" in line]
    assert steps == list(range(1, 81)), "nothing was lost or done twice"
    assert (root / "hf" / "config.json").is_file()
    starts = attempts.read(root / "pretrain")
    assert [each.reason for each in starts] == ["killed", "interrupted", "finished"]
    assert starts[1].first_step >= 3, "the killed command's job saved before it ended"
    report = (root / "report.md").read_text()
    assert "| [pretrain](pretrain/report.md) | train | tokenize | finished |" in report
    assert "40,960" in report and "](pretrain/" in report

    output.write_text("")
    assert finish(0, start()).count(": finished before") == 3
