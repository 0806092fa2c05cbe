"""The memory profile: what the sampler measures and when it ends, its file, phases, peaks, and the report's part."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from nemo_ext.job.config import compose
from nemo_ext.job.report import Report
from nemo_ext.megatron.report import write_report
from nemo_ext.megatron.run import Run
from nemo_ext.memory import report as memory
from nemo_ext.memory import sampler as memory_profile
from nemo_ext.memory.sampler import Phases

MIB = 1 << 20
HOLDS_A_BYTE_ARRAY = "import time; held = bytearray({bytes}); print('held', flush=True); time.sleep(600)"
WITH_A_CHILD = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=sys.stdout); "
    "time.sleep(600)"
)


def until(reached: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline, "never reached"
        time.sleep(0.02)


def samples(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [line for line in lines if "rss" in line]


def is_sampler(process: psutil.Process) -> bool:
    """False for what other tests have left in the process table."""
    with suppress(psutil.ZombieProcess):
        return "nemo_ext.memory.sampler" in " ".join(process.cmdline())
    return False


@pytest.fixture
def root() -> Iterator[subprocess.Popen[str]]:
    """A process with a child that holds 80 MiB."""
    held = HOLDS_A_BYTE_ARRAY.format(bytes=80 * MIB)
    process = subprocess.Popen([sys.executable, "-c", WITH_A_CHILD, held], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    yield process
    for each in tree:
        if each.is_running():
            each.kill()
    process.wait()
    process.stdout.close()


def test_the_sampler_counts_the_tree_and_ends_with_its_root(root: subprocess.Popen[str], tmp_path: Path) -> None:
    sampler = memory_profile.start(tmp_path / "memory", root=root.pid, seconds=0.1)
    until(lambda: samples(tmp_path / "memory"))
    sampler.send_signal(signal.SIGTERM)  # as a scheduler sends to all of a job: the run is still there
    with pytest.raises(subprocess.TimeoutExpired):
        sampler.wait(timeout=0.5)

    root.kill()  # and is not reaped, so that its name is still in the process table

    assert sampler.wait(timeout=60) == 0
    first = samples(tmp_path / "memory")[0]
    assert 80 * MIB < first["rss"] < 200 * MIB
    total = psutil.virtual_memory().total
    assert 0.01 * total < first["host"] < total and first["shm"] >= 0 and first["gpu"] == []
    assert abs(first["time"] - time.time()) < 120


def test_the_sampler_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    words = (
        "import os, sys, time; from pathlib import Path; from nemo_ext.memory import sampler as memory_profile\n"
        f"print(memory_profile.start(Path({str(tmp_path)!r}), root={os.getpid()}, seconds=3000).pid, flush=True)\n"
        "time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    sampler = psutil.Process(int(starter.stdout.readline()))
    until(lambda: samples(tmp_path))
    assert sampler.is_running()

    starter.kill()
    starter.wait()
    starter.stdout.close()

    until(lambda: not sampler.is_running() or sampler.status() == psutil.STATUS_ZOMBIE)


def test_a_job_in_one_process_is_sampled_while_it_runs(tmp_path: Path) -> None:
    with memory_profile.sampled(tmp_path / "memory", 0.1):
        until(lambda: samples(tmp_path / "memory"))
        (sampler,) = filter(is_sampler, psutil.Process().children())

    assert not sampler.is_running()
    with memory_profile.sampled(tmp_path / "none", None):
        pass
    assert not (tmp_path / "none").exists()


def test_a_directory_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    Phases(tmp_path / "file" / "memory").begin("training")
    with memory_profile.sampled(tmp_path / "file", 1.0):
        pass


def wrapped(folder: Path, *command: str) -> list[str]:
    return [sys.executable, "-m", "nemo_ext.memory.sampler", str(folder), "--seconds", "0.1", "--", *command]


@pytest.mark.parametrize(
    ("words", "code"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_a_wrapped_command_ends_with_its_own_code(tmp_path: Path, words: str, code: int) -> None:
    assert subprocess.run(wrapped(tmp_path, sys.executable, "-c", words), check=False).returncode == code


def test_a_wrapped_command_is_sampled(tmp_path: Path) -> None:
    wait = f"from pathlib import Path\nwhile not [*Path({str(tmp_path)!r}).glob('*.jsonl')]: pass\n"
    words = f"{wait}held = bytearray({80 * MIB}); import time; time.sleep(600)"
    process = subprocess.Popen(wrapped(tmp_path, sys.executable, "-c", words))

    until(lambda: any(sample["rss"] > 80 * MIB for sample in samples(tmp_path)))
    (sampler,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()

    until(lambda: not sampler.is_running() or sampler.status() == psutil.STATUS_ZOMBIE)


def test_a_root_that_has_ended_is_not_sampled(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert memory_profile.start(tmp_path, root=process.pid).wait(timeout=60) == 0
    process.wait()
    assert memory_profile.start(tmp_path, root=process.pid).wait(timeout=60) == 0

    assert samples(tmp_path) == []


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = subprocess.run(wrapped(tmp_path, "no-such-command"), capture_output=True, text=True, check=False)

    assert done.returncode == 2 and "no-such-command cannot be run: No such file" in done.stderr


def test_a_wrapped_command_gets_the_signals_once_and_may_take_its_time(tmp_path: Path) -> None:
    words = (
        "import signal, sys, time\n"
        "got = []\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))\n"
        "signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))\n"
        "print('ready', flush=True)\n"
        "while signal.SIGUSR2 not in got: time.sleep(0.02)\n"
        "print([int(number) for number in got]); sys.exit(3)"
    )
    process = subprocess.Popen(
        wrapped(tmp_path, sys.executable, "-c", words), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"

    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGUSR2)

    assert process.stdout.read() == f"[{int(signal.SIGTERM)}, {int(signal.SIGUSR2)}]\n"
    assert process.wait(timeout=60) == 3
    process.stdout.close()


def test_gpus_are_measured_where_nvml_is(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = memory_profile.pynvml
    assert memory_profile.gpu_memory("used") == []

    monkeypatch.setattr(nvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", lambda number: number)
    memory = {0: SimpleNamespace(used=MIB, total=80 * MIB), 1: SimpleNamespace(used=2 * MIB, total=80 * MIB)}
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", memory.__getitem__)

    assert memory_profile.sample(psutil.Process())["gpu"] == [MIB, 2 * MIB]
    assert memory_profile.node_memory("total")["gpu"] == [80 * MIB, 80 * MIB]


def made_up(at: float, rss: float = 100, shm: float = 0, gpu: float = 0) -> dict[str, Any]:
    """A sample in MiB."""
    line = {"time": at, "rss": int(rss * MIB), "host": int(2 * rss * MIB), "shm": int(shm * MIB)}
    return {**line, "gpu": [MIB, None, int(gpu * MIB)]} if gpu else line


def recorded(folder: Path, lines: list[dict[str, Any]], node: str = "node1") -> None:
    """Writes a start of a sampler and these samples."""
    totals = {"host": 512 * 1024 * MIB, "shm": 256 * 1024 * MIB, "gpu": [80 * 1024 * MIB]}
    for line in ({"start": 0.0, "seconds": 10.0, "total": totals}, *lines):
        memory_profile._append(folder / f"{node}.jsonl", line)


def test_half_a_line_is_skipped(tmp_path: Path) -> None:
    recorded(tmp_path, [made_up(0.0), made_up(10.0, rss=200)])
    with (tmp_path / "node1.jsonl").open("a") as stream:
        stream.write('{"time": 20.0, "rs')

    (node,) = memory.read(tmp_path)

    assert node.time.tolist() == [0.0, 10.0]


def test_nothing_is_drawn_while_the_run_was_down(tmp_path: Path) -> None:
    recorded(tmp_path, [made_up(0.0), made_up(10.0, rss=200)])
    recorded(tmp_path, [made_up(5000.0, rss=300)])

    (node,) = memory.read(tmp_path)

    assert node.time.tolist() == [0.0, 10.0, 20.0, 5000.0]
    assert np.isnan(node.values[:, 0]).tolist() == [False, False, True, False]


def test_peaks_are_of_their_phase_and_node(tmp_path: Path) -> None:
    recorded(
        tmp_path,
        [
            made_up(0.0, rss=900, gpu=2),  # before the first phase: of it
            made_up(10.0, rss=100, gpu=3),
            made_up(20.0, rss=200, shm=7, gpu=40),
            made_up(30.0, rss=500, gpu=41),
            made_up(40.0, rss=300, gpu=50),
            made_up(50.0, rss=9000, gpu=70),  # after the run's end
        ],
    )
    recorded(tmp_path, [made_up(20.0, rss=250, gpu=30)], node="node2")
    phases: list[tuple[float, str | None]] = [
        *((5.0, "setup"), (15.0, "training"), (25.0, "checkpoint"), (31.0, "validation"), (32.0, "training")),
        (45.0, None),
    ]

    found = memory.peaks(memory.read(tmp_path), phases)

    def megabytes(phase: str, quantity: str) -> tuple[float, str]:
        values = found[phase][1][:, ["rss", "host", "shm", "gpu"].index(quantity)]
        return np.nanmax(values) / MIB, f"node{np.nanargmax(values) + 1}"

    assert {phase: count for phase, (count, _) in found.items()} == {
        "setup": 2,
        "training": 3,
        "checkpoint": 1,
        "validation": 0,
    }
    assert megabytes("setup", "rss") == (900, "node1")
    assert megabytes("training", "rss") == (300, "node1") and megabytes("training", "host") == (600, "node1")
    assert megabytes("training", "shm") == (7, "node1") and megabytes("training", "gpu") == (50, "node1")
    assert megabytes("checkpoint", "rss") == (500, "node1") and megabytes("checkpoint", "gpu") == (41, "node1")
    assert np.isnan(found["validation"][1]).all()
    assert memory.peaks(memory.read(tmp_path), [])["run"][0] == 7


@pytest.mark.parametrize("nodes", [1, 12])
def test_the_report_has_the_picture_and_the_table(tmp_path: Path, nodes: int) -> None:
    folder = tmp_path / memory_profile.FOLDER
    for number in range(nodes):
        lines = [made_up(10.0 * at, rss=1024 * (100 + 10 * number + at), shm=number, gpu=40) for at in range(20)]
        recorded(folder, lines, node=f"node{number}")
        recorded(folder, [made_up(9000.0 + 10 * at, gpu=41) for at in range(20)], node=f"node{number}")
    for at, phase in ((0.0, "setup"), (50.0, "training"), (9000.0, "setup"), (9050.0, "training"), (9100.0, None)):
        memory_profile._append(folder / memory_profile.PHASES, {"time": at, "phase": phase})

    report = Report("run")
    assert memory.add_section(report, tmp_path)
    text = report.write(tmp_path / "report.md").read_text()

    most = 100 + 10 * (nodes - 1) + 19
    where = f" (node{nodes - 1})" if nodes > 1 else ""
    assert f"| {most}.00 GiB{where} |" in next(line for line in text.splitlines() if line.startswith("| training |"))
    assert "| total on a node |  |  | 512.00 GiB | 256.00 GiB | 80.00 GiB |" in text
    picture = (tmp_path / memory.PLOT).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 2_000
    folder.rename(tmp_path / "elsewhere")
    assert not memory.add_section(Report("run"), tmp_path)


def test_a_phase_that_interrupts_another_gives_it_back(tmp_path: Path) -> None:
    phases = Phases(tmp_path / "memory")
    phases.begin("setup")
    phases.begin("training")
    phases.begin("training")
    with pytest.raises(OSError, match="disk"), phases.during("checkpoint"), phases.during("checkpoint"):
        raise OSError("disk")
    phases.begin(None)
    phases.leave()

    noted = memory.read_phases(tmp_path / "memory")
    assert [phase for _, phase in noted] == ["setup", "training", "checkpoint", "training", None]
    assert all(abs(at - time.time()) < 60 for at, _ in noted)


def test_megatrons_timers_note_the_phases(tmp_path: Path, megatron: None) -> None:
    from megatron.core.timers import Timers

    from nemo_ext.megatron.metrics import PhaseTimers

    phases = Phases(tmp_path)
    phases.begin("setup")
    timers = Timers(0, "minmax")
    PhaseTimers.take_over(timers, phases)
    timers("load-checkpoint", log_level=0).start(barrier=True)
    timers("load-checkpoint").stop(barrier=True)
    assert timers.cpu.seconds() == 0
    timers("interval-time", log_level=0).start(barrier=True)
    timers("forward-backward", log_level=1).start()
    timers("interval-time").elapsed(barrier=True, reset=True)
    for name in ("evaluate", "save-checkpoint"):
        timers("interval-time").stop()
        timers(name, log_level=0).start(barrier=False)
        in_steps = timers.cpu.seconds()
        timers(name).stop()
        assert timers.cpu.seconds() == in_steps > 0
        timers("interval-time", log_level=0).start()

    assert [phase for _, phase in memory.read_phases(tmp_path)] == [
        *("setup", "loading", "setup", "training", "validation", "training", "checkpoint", "training")
    ]
    assert timers("evaluate").active_time() > 0


@pytest.mark.slow
def test_trls_trainers_note_the_phases(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from nemo_ext.rl.trl.trainers import _OurPrompts

    class Trainer:
        """As TRL's calls itself."""

        def __init__(self) -> None:
            self.model = SimpleNamespace(training=True)

        def _generate_and_score_completions(self, inputs: list[str]) -> list[str]:
            return self._generate(inputs)

        def _generate(self, prompts: list[str]) -> list[str]:
            return [*prompts, "answer"]

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            pass

        def evaluate(self) -> dict[str, float]:
            self.model.training = False
            self._generate_and_score_completions([])
            self.model.training = True
            return {"loss": 1.0}

    class Ours(_OurPrompts, Trainer):
        pass

    ours = Ours()
    ours.phases = Phases(tmp_path)
    ours.phases.begin("training")
    assert ours._generate_and_score_completions(["prompt"]) == ["prompt", "answer"]
    ours._save_checkpoint(None, trial=None)
    assert ours.evaluate() == {"loss": 1.0}

    assert [phase for _, phase in memory.read_phases(tmp_path)] == [
        *("training", "generation", "scoring", "training", "checkpoint", "training", "validation", "training")
    ]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("memory_profile.seconds=0", r"memory_profile.seconds=0: .* 0\.1"),
        ("memory_profile.seconds=true", r"memory_profile.seconds=True"),
        ("memory_profile.seconds=often", r"memory_profile.seconds='often'"),
        ("+memory_profile.second=3", "memory_profile: unknown key 'second'.*seconds"),
        ("memory_profile=5", "memory_profile=5: expected a section"),
    ],
)
def test_a_wrong_key_is_told_before_a_rank_starts(tmp_path: Path, override: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Run.from_config(compose("train", [f"run_dir={tmp_path}", "data=mock", override]))


def test_null_leaves_it_out() -> None:
    assert memory_profile.interval(compose("train", ["run_dir=unused", "data=mock"])) == 10.0
    assert memory_profile.interval(compose("train", ["run_dir=unused", "data=mock", "memory_profile=null"])) is None
    assert memory_profile.interval({}) is None  # a run directory of before


def test_the_root_of_ranks_is_torchrun_or_slurms_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    above = psutil.Process().parents()
    monkeypatch.setattr(psutil.Process, "name", lambda self: "slurmstepd" if self.pid == above[-1].pid else "python")
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)

    assert memory_profile.root_of_ranks() == os.getppid()
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert memory_profile.root_of_ranks() == above[-1].pid
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert memory_profile.root_of_ranks() == os.getppid()


@pytest.mark.slow
def test_a_training_run_leaves_its_memory_in_the_report(
    tmp_path: Path, train_ranks: Callable[..., list[dict[str, Any]]]
) -> None:
    train_ranks(tmp_path, "memory_profile={seconds: 0.1}", "megatron.eval_interval=5")

    text = write_report(tmp_path).read_text()

    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in text.splitlines() if line[:1] == "|"}
    assert {"setup", "training", "validation", "checkpoint"} <= rows.keys()
    # The first phases may be over before the sampler has started.
    sampled = [row for row in rows.values() if row[1].isdigit() and int(row[1])]
    assert float(sampled[-1][2].removesuffix(" GiB")) > 0.3
    assert "![memory over time](memory.png)" in text and (tmp_path / "memory.png").is_file()
    phases = [phase for _, phase in memory.read_phases(tmp_path / "memory")]
    assert phases[0] == "setup" and phases[-1] is None
    assert phases.count("checkpoint") == 2 and phases.count("validation") >= 2
