"""Servers and batch jobs on a real Slurm: replicas that die, time limits, a node that fails."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_ext import generate
from nemo_ext.data.text.user_files import pyarrow_module
from nemo_ext.endpoint.address import read_address
from nemo_ext.serving.vllm import answers
from nemo_ext.slurm import attempts
from tests.composing import write_pipeline

ROWS = 400
CPU = ("cluster=testbed", "serving.device=cpu", 'slurm.options=["--cpus-per-task=1"]')
pytestmark = pytest.mark.slurm


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"What is {n} and {n}?"}) + "\n" for n in range(ROWS)))
    return file


def table(folder: Path) -> list[dict[str, Any]]:
    parquet = pyarrow_module().parquet
    found = [row for part in sorted(folder.glob("part-*.parquet")) for row in parquet.read_table(part).to_pylist()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in found]


def up(run_dir: Path) -> bool:
    try:
        address = read_address(run_dir)
    except ValueError:
        return False
    return answers(f"{address.url}/models", address.key)


@pytest.mark.slow
def test_a_batch_job_starts_its_replicas(
    slurm: Any, here: Callable[..., str], vllm: tuple[str, ...], rows: Path, tmp_path: Path
) -> None:
    out, record = tmp_path / "answers", tmp_path / "record"
    words = ("job=generate", f"model={tmp_path}/model", f"input={rows}", f"output={out}", "serving.replicas=2")

    here("submit", *words, "generate.part_rows=50", f"slurm.folder={record}", *vllm)
    slurm.wait(lambda: here("status", str(record)).count("finished") == 2, what=lambda: slurm.outputs(tmp_path))

    assert len(table(out)) == ROWS
    assert (out / "report.md").is_file()
    assert not list((out / ".job" / "servers").iterdir())


@pytest.mark.slow
def test_a_data_frame_is_answered_on_slurm(
    slurm: Any, endpoint: Any, reply: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted call leaves its job in the queue, and the same call waits for it."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("nemo_ext.slurm.submit.POLL", 0.2)
    monkeypatch.chdir(tmp_path)
    body = json.dumps({"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}], "usage": {}}).encode()
    waiting, record = threading.Event(), tmp_path / "record"

    def held(payload: object) -> Any:
        if not waiting.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            waiting.wait(60)
        return reply(body=body)

    endpoint.models, endpoint.reply = ["m"], held
    frame = pyarrow_module().table({"prompt": ["What is 2 and 2?"]})
    words = ["cluster=testbed", 'slurm.options=["--cpus-per-task=1"]', f"slurm.folder={record}"]

    def call() -> Any:
        return generate.map(frame, output="answers", endpoint=endpoint.url, slurm=words)

    with pytest.raises(KeyboardInterrupt):
        call()
    waiting.set()

    assert call()["answer"].to_pylist() == ["4"]
    assert len(list((record / attempts.FOLDER).glob("*.out"))) == 1


@pytest.mark.deep
def test_an_evaluation_starts_its_replicas(
    slurm: Any, here: Callable[..., str], served_folder: Path, tmp_path: Path
) -> None:
    """With our engine. Workers of an array share the samples; the last to end writes the whole table."""
    benchmark, suite = tmp_path / "sums.yaml", tmp_path / "suite.yaml"
    benchmark.write_text("generator: arithmetic\ncount: 100\nmax_tokens: 16\nmodes: {a: {}, b: {system: Think.}}\n")
    suite.write_text(f"benchmarks: [{benchmark}]\n")
    out = tmp_path / "evaluation"
    words = ("job=evaluate", f"model={served_folder}", f"suite={suite}", f"run_dir={out}", "serving.replicas=2")

    here("submit", *words, "evaluate.draws=100", *CPU)
    slurm.wait(lambda: here("status", str(out)).count("finished") == 2, what=lambda: slurm.outputs(out), seconds=400)

    found = json.loads((out / "results.json").read_text())["benchmarks"]["sums"]
    assert (found["samples"], found["wanted"], found["missing"]) == (100, 200, 0)
    assert found["modes"]["b"]["samples"] == 100
    lines = [line for file in out.glob("store/answers-*") for line in file.read_text().splitlines()]
    assert len(list(out.glob("store/answers-*"))) == 2
    assert len(lines) == 200


def node_of(slurm: Any, job: str) -> str:
    words = slurm.call("scontrol", "show", "job", job).split()
    return str(next(word.removeprefix("NodeList=") for word in words if word.startswith("NodeList=")))


@pytest.mark.deep
def test_replicas_come_and_go_behind_one_endpoint(
    slurm: Any,
    nemo_ext: Callable[..., str],
    here: Callable[..., str],
    vllm: tuple[str, ...],
    rows: Path,
    tmp_path: Path,
) -> None:
    """k of N replicas, a time limit, and the failure of the node with the balancer."""
    run_dir, asked = tmp_path / "serve", ("generate.max_tokens=16", "generate.temperature=0", "generate.part_rows=20")
    words = ("job=serve", f"model={tmp_path}/model", f"run_dir={run_dir}", "serving.replicas=2", "serving.least=1")
    slurm.call("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    said = here("submit", *words, *vllm[:2], 'slurm.options=["--exclusive"]')
    assert "--array=0-1" in said
    slurm.wait(lambda: up(run_dir), what=lambda: slurm.outputs(run_dir))
    assert (run_dir / "endpoint.json").stat().st_mode & 0o777 == 0o600
    assert here("status", str(run_dir)).count("pending") == 1
    slurm.call("scontrol", "update", "nodename=n2", "state=resume")
    both = "running, up at http://"
    slurm.wait(lambda: here("status", str(run_dir)).count(both) == 2, what=lambda: slurm.outputs(run_dir))
    balancing = json.loads((run_dir / ".leases" / "balancer").read_text())["pid"]
    number = int(psutil.Process(balancing).environ()["SLURM_ARRAY_TASK_ID"])
    with_it, without = (run_dir / "shards" / str(each) for each in (number, 1 - number))
    jobs = {record: (record / "slurm" / "job").read_text().strip() for record in (with_it, without)}
    node, before = node_of(slurm, jobs[with_it]), read_address(run_dir).url

    out = tmp_path / "answers"
    command = [sys.executable, "-m", "nemo_ext.cli", "generate", f"endpoint={run_dir}", f"input={rows}"]
    working = subprocess.Popen(
        [*command, f"output={out}", *asked, "generate.requests_a_minute=1200"], cwd=tmp_path, env=slurm.environment
    )
    slurm.wait(lambda: any(out.glob("part-*")), what=lambda: "the first part")
    hold = tmp_path / "hold"
    hold.touch()
    slurm.call("scancel", "--batch", "--signal=USR2", jobs[without])  # like Slurm before the time limit
    slurm.wait(lambda: len(attempts.read(without)) == 2, what=lambda: slurm.outputs(run_dir))
    assert working.poll() is None
    slurm.lose(node)
    hold.unlink()

    assert working.wait(600) == 0, slurm.outputs(run_dir)
    slurm.repair(node)
    slurm.wait(lambda: up(run_dir), what=lambda: slurm.outputs(run_dir))
    nemo_ext("generate", f"endpoint={run_dir}", f"input={rows}", f"output={tmp_path / 'calm'}", *asked)
    assert table(out) == table(tmp_path / "calm")
    assert len(table(out)) == ROWS
    assert read_address(run_dir).url != before
    for record in (with_it, without):
        slurm.wait(lambda record=record: len(attempts.read(record)) == 2, what=lambda: slurm.outputs(run_dir))
    slurm.wait(lambda: here("status", str(run_dir)).count(both) == 2, what=lambda: slurm.outputs(run_dir))
    here("cancel", str(run_dir))
    slurm.wait(lambda: here("status", str(run_dir)).count("cancelled") == 2, what=lambda: slurm.outputs(run_dir))
    key = (run_dir / "key").read_text()
    written = [path for path in run_dir.rglob("*") if path.is_file() and path.name not in ("key", "endpoint.json")]
    assert not [path for path in written if key in path.read_text(errors="replace")]


@pytest.mark.deep
def test_a_replica_of_two_nodes(
    slurm: Any,
    here: Callable[..., str],
    vllm: tuple[str, ...],
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes, out, record = tmp_path / "notes", tmp_path / "answers", tmp_path / "slurm"
    notes.mkdir()
    monkeypatch.setitem(slurm.environment, "STAND_IN_NOTES", str(notes))
    words = ("job=generate", f"model={tmp_path}/model", f"input={rows}", f"output={out}", "serving.nodes=2")

    said = here("submit", *words, f"slurm.folder={record}", *vllm)

    assert "--nodes=2" in said
    slurm.wait(lambda: "finished" in here("status", str(record)), what=lambda: slurm.outputs(tmp_path))
    assert len(table(out)) == ROWS
    first, second = (file.read_text().split() for file in sorted(notes.glob("?-*")))
    for rank, told in enumerate((first, second)):
        assert " ".join(told[told.index("--nnodes") :][:6]) == f"--nnodes 2 --node-rank {rank} --master-addr 127.0.0.1"
        assert ("--headless" in told) == bool(rank)
    slurm.wait(lambda: not slurm.call("squeue", "-h"), what=lambda: "no job is left")


@pytest.mark.slow
def test_a_stage_uses_the_server_next_to_it_and_ends_it(
    slurm: Any, here: Callable[..., str], vllm: tuple[str, ...], rows: Path, tmp_path: Path
) -> None:
    ask = [f"input={rows}", f"output={tmp_path}/answers", "endpoint=${run_dir}/judge", "generate.max_tokens=4"]
    stages = {
        "judge": {"job": "serve", "words": [f"model={tmp_path}/model", vllm[1]]},
        "ask": {"job": "generate", "words": ask, "beside": ["judge"]},
    }
    write_pipeline(tmp_path, "asked", stages)
    words = (f"--config-dir={tmp_path}", "pipeline=asked", f"run_dir={tmp_path}/r", vllm[0], vllm[2])

    assert '"--dependency=after:$judge"' in here("submit", *words, "--dry-run")
    here("submit", *words)
    judge, asked = ((tmp_path / "r" / name / "slurm" / "job").read_text().strip() for name in stages)

    assert (slurm.end_of(asked, tmp_path), slurm.end_of(judge, tmp_path)) == ("COMPLETED", "COMPLETED"), slurm.outputs(
        tmp_path
    )
    assert len(table(tmp_path / "answers")) == ROWS
    told = here("submit", *words)
    assert "ask: finished before" in told and "judge: not needed" in told
