"""`nemo-ext serve` as a process: its file, its key, Ctrl-C, replicas that are killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_ext.endpoint.address import Address, read_address
from nemo_ext.endpoint.client import Answer, Client, Request

Serve = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def serve(served_folder: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts `nemo-ext serve` and waits until it is up; run directory `serve`, output in serve.log."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nemo_ext.cli", "serve", f"model={served_folder}", "port=0"]
        command += [f"run_dir={tmp_path / 'serve'}", "serving.device=cpu", *words]
        with (tmp_path / "serve.log").open("ab") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
        until(lambda: (tmp_path / "serve" / "endpoint.json").exists(), tmp_path)
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


def until(true: Callable[[], object], folder: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        logs = [*folder.rglob("*.log")]
        assert time.monotonic() < end, "".join(f"{log}\n{log.read_text(errors='replace')}" for log in logs)
        time.sleep(0.1)


async def ask(place: Path | Address, count: int, **given: Any) -> list[Answer]:
    body = {"prompt": "Hello", "temperature": 0, "ignore_eos": True, "max_tokens": 8} | given
    async with Client(place) as client:
        return [answer async for answer in client.answers(Request(body=body, path="completions") for _ in range(count))]


@pytest.mark.slow
def test_ctrl_c_ends_what_is_begun(serve: Serve, tmp_path: Path) -> None:
    process, file = serve(), tmp_path / "serve" / "endpoint.json"
    address = read_address(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert address.key is not None
    assert address.key not in " ".join(psutil.Process(process.pid).cmdline())
    assert [p for p in (tmp_path / "serve").rglob("*") if p.is_file() and address.key in p.read_text()] == [file]

    async def interrupted() -> list[Answer]:
        asking = asyncio.create_task(ask(address, 1, max_tokens=250))
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGINT)
        return await asking

    (answer,) = asyncio.run(interrupted())

    assert (answer.completion_tokens, answer.problem) == (250, "")
    assert process.wait(60) in (0, 130)
    assert not file.exists()
    assert "Traceback" not in (tmp_path / "serve.log").read_text()


@pytest.mark.slow
def test_a_replica_that_is_killed_comes_back_and_no_answer_is_missed(serve: Serve, tmp_path: Path) -> None:
    process, run_dir = serve("serving.replicas=2"), tmp_path / "serve"
    files = [run_dir / "replicas" / f"{number:04}" / "endpoint.json" for number in range(2)]
    replicas = psutil.Process(process.pid).children()

    async def with_a_kill() -> list[Answer]:
        asking = asyncio.create_task(ask(run_dir, 40, max_tokens=60))
        await asyncio.sleep(0.5)
        os.kill(replicas[0].pid, signal.SIGKILL)
        return await asking

    before = [read_address(file).url for file in files]
    answers = asyncio.run(with_a_kill())

    assert [answer.problem for answer in answers] == [""] * 40
    assert len({answer.answer for answer in answers}) == 1
    until(lambda: [read_address(file).url for file in files if file.exists()] != before, tmp_path)
    until(lambda: all(file.exists() for file in files), tmp_path)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive


@pytest.mark.deep
def test_nothing_is_left_of_a_group_that_is_killed(serve: Serve, tmp_path: Path) -> None:
    process = serve("serving.replicas=2")
    replicas = psutil.Process(process.pid).children()
    assert len(replicas) == 2

    process.kill()

    _, alive = psutil.wait_procs(replicas, timeout=60)
    assert not alive
    again = serve("serving.replicas=2")  # what the first has left is not believed
    assert [answer.problem for answer in asyncio.run(ask(tmp_path / "serve", 4))] == [""] * 4
    again.send_signal(signal.SIGINT)
    assert again.wait(60) in (0, 130)


@pytest.mark.deep
def test_another_server_in_the_same_directory_is_refused_and_sigterm_ends_as_ctrl_c_does(
    serve: Serve, served_folder: Path, tmp_path: Path
) -> None:
    process, file = serve("serving.replicas=2"), tmp_path / "serve" / "endpoint.json"
    command = [sys.executable, "-m", "nemo_ext.cli", "serve", f"model={served_folder}", "port=0"]
    command += [f"run_dir={tmp_path / 'serve'}", "serving.device=cpu"]

    second = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (second.returncode, second.stderr.count("\n")) == (2, 1), second.stderr
    assert "another run is using this directory" in second.stderr
    assert file.exists()
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert not file.exists()
    assert not list((tmp_path / "serve" / "replicas").glob("*/endpoint.json"))
    assert not (tmp_path / "serve" / ".leases" / "balancer").exists()
