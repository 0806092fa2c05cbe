"""Ten checks on one GPU, in two commands of at most five minutes; the most useful checks come first.

    python benchmarks/gpu_checks.py runs/gpu prepare     # optional, on any machine: steps without a GPU
    python benchmarks/gpu_checks.py runs/gpu first       # attention packs losses puzzle
    python benchmarks/gpu_checks.py runs/gpu second      # nano head checkpoint resume shared steps
    python benchmarks/gpu_checks.py runs/gpu head steps  # only these checks

OUT/report.md is updated after every case; logs are in OUT/CHECK/CASE/log.txt. A finished case is not run again unless
its folder is deleted; Ctrl-C or the time limit ends running cases, and the same command resumes with the rest.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from nemo_ext.data.packs.packed_files import PackingSettings, write_packed
from nemo_ext.data.packs.sample_files import write_samples
from nemo_ext.job.config import compose
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import METRICS, read_metrics
from nemo_ext.megatron.run import Run

HERE = Path(__file__).parent
GIB = 1 << 30
COUNTED = 12
"""Number of last steps whose median is the speed of a run."""
TOGETHER, AHEAD = 8, 3
"""Concurrent processes: of cases that share the GPU, and of timed cases (one has the GPU, two import)."""
LOSSES = ("loss of step 1", "mean of the last 10", "validation", "against its reference")
TIMED = (*LOSSES[:2], "ms per step", "tokens/s", "MFU", "GiB rehearsed", "GiB measured")
OVER = "not run: time limit reached"
OUT = "OUT"
"""Placeholder for the output folder in the arguments of a case."""


@dataclass(frozen=True)
class Case:
    """One process of a check.

    Attributes:
        name: name within its check.
        words: overrides of a training run, or a command.
        command: whether `words` is a Python command instead of a training run.
        environment: additional environment variables.
        reference: case of the same check whose validation loss is the reference.
        rehearse: whether `prepare` rehearses its memory.
    """

    name: str
    words: tuple[str, ...]
    command: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    reference: str | None = None
    rehearse: bool = False


@dataclass(frozen=True)
class Check:
    """Cases that answer one question.

    Attributes:
        title: the question.
        cases: cases, most useful first.
        alone: whether each case has the GPU to itself, for timing.
        result: file for the report, relative to a case's folder.
    """

    title: str
    cases: tuple[Case, ...]
    alone: bool = False
    result: str | None = None


MODELS = ("nemotron3_nano", "domyn_small", "llama_nemotron", "olmo1", "olmo3")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
LOCAL, FP32, BF16 = "model.backend=local", "precision=fp32", "precision=bf16"
SAME_WEIGHTS = (
    "megatron.use_cpu_initialization=true",
    "megatron.save_interval=1000",
    "megatron.eval_interval=50",
    "train.tokens=204800",
)
SIDES = {
    "fp32": (FP32,),
    "bf16": (BF16,),
    "fp8_current": ("precision=fp8_current",),
    "fp8_delayed": ("precision=fp8_delayed",),
    "bf16, local": (BF16, LOCAL),
    "fp8_current, local": ("precision=fp8_current", LOCAL),
}
CPU = "fp32 on the CPU"


def losses() -> tuple[Case, ...]:
    """Cases for losses of every family's smallest model by precision and back end, with equal weights and batches."""

    def case(model: str, side: str, words: Sequence[str], environment: Mapping[str, str]) -> Case:
        reference = None if side == CPU else f"{model}, {CPU}"
        everything = (f"model={model}_tiny", f"data_root={OUT}/data", *SAME_WEIGHTS, *words)
        return Case(f"{model}, {side}", everything, environment=environment, reference=reference)

    references = [case(model, CPU, (FP32, LOCAL), NO_GPU) for model in MODELS]
    return (*references, *(case(model, side, words, {}) for side, words in SIDES.items() for model in MODELS))


def packs() -> tuple[Case, ...]:
    """Cases for packed sequences with full attention, windows and Mamba, with and without Transformer Engine."""
    wide = ("megatron.hidden_size=512", "megatron.num_attention_heads=4", "megatron.num_query_groups=2")
    common = (
        "data=packed",
        f"data.packed.train={OUT}/packs/train",
        f"data.packed.valid={OUT}/packs/valid",
        "megatron.seq_length=1024",
        "megatron.micro_batch_size=1",
        "megatron.global_batch_size=4",
        *SAME_WEIGHTS,
        BF16,
        *wide,
        "megatron.kv_channels=128",
    )
    return tuple(
        Case(f"{model}, {side}", (f"model={model}_tiny", *common, *words), reference=f"{model}, local")
        for model in ("domyn_small", "olmo3", "nemotron3_nano")
        for side, words in (("local", (LOCAL,)), ("Transformer Engine", ("model.backend=transformer_engine",)))
    )


def full_width(name: str, pattern: str | None, length: int, batch: int, steps: int = 20) -> tuple[str, ...]:
    """Arguments of a full-width model with only the blocks of `pattern`, on synthetic data."""
    rows = ("megatron.padded_vocab_size=32768", "++model.vocab_size=null")
    cut = () if pattern is None else (f"model.pattern={pattern}", *rows)
    return (
        "data=mock",
        f"model={name}",
        *cut,
        f"train.tokens={steps * batch * length}",
        f"megatron.micro_batch_size={batch}",
        f"megatron.global_batch_size={batch}",
        f"megatron.seq_length={length}",
        "megatron.eval_interval=1000",
        "megatron.eval_iters=1",
        "megatron.save_interval=1000",
        "megatron.no_save_optim=true",
        "megatron.log_memory_to_tensorboard=true",
    )


OLMO1 = full_width("olmo1_1b", None, 2048, 8)
DOMYN = full_width("domyn_small_10b", "(*-)x4", 4096, 2)
OLMO3 = full_width("olmo3_7b", "(*-)x4", 8192, 1)
NANO = (*full_width("nemotron3_nano_30b", "MEM*", 8192, 1), "megatron.moe_grouped_gemm=true")
FUSED = ("moe_permute_fusion", "use_fused_weighted_squared_relu", "cross_entropy_loss_fusion")
SAVING = (*full_width("olmo1_1b", "(*-)x2", 2048, 2, steps=30), "megatron.save_interval=10", BF16)
ASYNC = (*SAVING, "megatron.async_save=true", "megatron.async_strategy=mcore")
PUZZLE = (
    "-m",
    "nemo_ext.cli",
    "puzzle",
    f"run_dir={OUT}/puzzle/run",
    f"data_root={OUT}/data",
    BF16,
    "puzzle.export=false",
    "puzzle.measure.enabled=true",
    "train.tokens=409600",
    "puzzle.heal.tokens=102400",
    "puzzle.distill.steps=40",
)


def measured(part: str) -> Check:
    """Check that runs a part of gpu.py."""
    words = (str(HERE / "gpu.py"), "--parts", part, "--output", f"{OUT}/{part}/times/{part}.md")
    titles = {
        "attention": "Which attention loads, and is it right?",
        "head": "What does an odd number of vocabulary rows cost?",
    }
    return Check(titles[part], (Case("times", words, command=True),), alone=True, result=f"{part}.md")


def tested(title: str, *words: str) -> Check:
    """Check that runs tests with the marker `gpu`."""
    pytest = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *words)
    return Check(title, (Case("tests", pytest, command=True),))


FIRST = {
    "attention": measured("attention"),
    "packs": Check("Are packed sequences the same through Transformer Engine?", packs()),
    "losses": Check("Are losses of all precisions near the CPU's?", losses()),
    "puzzle": Check(
        "Does Puzzle's quickstart run in bf16 with timed costs?",
        (Case("quickstart", PUZZLE, command=True),),
        result="../run/child/report.md",
    ),
}
SECOND = {
    "nano": Check(
        "Do four blocks of Nemotron 3 Nano train at full width with grouped GEMMs and fused kernels?",
        (
            Case("grouped", (*NANO, BF16, *(f"megatron.{flag}=false" for flag in FUSED)), rehearse=True),
            Case("grouped and fused", (*NANO, BF16)),
        ),
        alone=True,
    ),
    "head": measured("head"),
    "checkpoint": Check(
        "Does asynchronous saving shorten a run, and how many processes hold the GPU?",
        (
            Case("synchronous", SAVING),
            Case("asynchronous", ASYNC),
            Case("asynchronous, persistent worker", (*ASYNC, "megatron.use_persistent_ckpt_worker=true")),
        ),
        alone=True,
        result="usage.json",
    ),
    "resume": tested(
        "Does a resumed run equal an undisturbed one?",
        *("-n", "4", "tests/megatron/test_gpu.py", "-k", "resumed and transformer_engine"),
    ),
    "shared": tested("Does a sharded parent give the same scores?", "tests/blockwise/test_sharded.py"),
    "steps": Check(
        "How fast are steps of full-width models, and is the rehearsed memory right?",
        tuple(
            Case(name, (*words, f"precision={precision}", *more), rehearse=True)
            for name, words, precision, more in (
                ("OLMo 1 1B, bf16", OLMO1, "bf16", ()),
                ("Domyn 4 layers, bf16", DOMYN, "bf16", ()),
                ("Domyn 4 layers, fp8_current", DOMYN, "fp8_current", ()),
                ("OLMo 3 7B 4 layers, bf16", OLMO3, "bf16", ()),
                ("Nano 4 blocks, nemotron3_selective", NANO, "nemotron3_selective", ()),
                ("Domyn 4 layers, fp8_blockwise", DOMYN, "fp8_blockwise", ()),
                ("Domyn 4 layers, fp8_delayed", DOMYN, "fp8_delayed", ()),
                ("Domyn 4 layers, bf16, local", DOMYN, "bf16", (LOCAL,)),
                ("Nano 4 blocks, bf16, local", NANO, "bf16", (LOCAL,)),
            )
        ),
        alone=True,
    ),
}
CHECKS = FIRST | SECOND
COMMANDS = {"first": tuple(FIRST), "second": tuple(SECOND)}


def spelled(text: str) -> str:
    """Name as a folder name."""
    return "".join(letter if letter.isalnum() else "_" for letter in text)


class Session:
    """Checks of one command: runs cases until the deadline and updates the report.

    Args:
        out: output folder.
        seconds: time limit, after which all processes are ended.
    """

    def __init__(self, out: Path, seconds: float):
        self.out = out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + seconds
        self.failed: dict[Path, str] = {}
        self.running: set[subprocess.Popen[bytes]] = set()
        self.ended = False
        self.writing = threading.Lock()

    def folder(self, name: str, case: Case) -> Path:
        return self.out / name / spelled(case.name)

    def run(self, names: Sequence[str]) -> None:
        """Run checks by name; adjacent checks that share the GPU run concurrently."""
        for alone, group in groupby(names, lambda name: CHECKS[name].alone):
            cases = [(name, case) for name in group for case in CHECKS[name].cases]
            todo = [(name, case) for name, case in cases if not (self.folder(name, case) / "done").exists()]
            todo.sort(key=lambda pair: not alone and not pair[1].command)  # with several runs each, the longest
            pool = ThreadPoolExecutor(AHEAD if alone else TOGETHER)
            try:
                for future in [pool.submit(self.one, name, case, alone) for name, case in todo]:
                    future.result()
            except BaseException:
                self.end()
                raise
            finally:
                pool.shutdown(cancel_futures=True)
        self.report()

    def one(self, name: str, case: Case, alone: bool) -> None:
        """Run a case, or record why it was not run."""
        folder = self.folder(name, case)
        folder.mkdir(parents=True, exist_ok=True)
        if not case.command and not self.over():
            for path in folder.iterdir():  # an interrupted run starts over, so that its figures are from one run
                if path.name != "rehearsal":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        lock = self.out / ".gpu" if alone else None
        with ExitStack() as stack:
            if case.command and lock is not None:
                fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
            words = [word.replace(OUT, str(self.out)) for word in case.words]
            if case.command:
                command = [sys.executable, *words]
            else:
                rank = [str(HERE / "gpu_rank.py"), str(lock or "-"), f"run_dir={folder}"]
                command = [sys.executable, *rank, *words]
            if not self.over():
                notice(f"{name}: {case.name}")
            why = self.process(command, folder, case.environment, alone and not case.command)
        if why:
            self.failed[folder] = why
            if why != OVER:
                notice(f"{name}: {case.name}: {why}")
        else:
            (folder / "done").touch()
        self.report()

    def process(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], watched: bool) -> str:
        """Run a command until its end or the deadline; returns an error message or an empty string."""
        if self.over():
            return OVER
        log = folder / "log.txt"
        with log.open("wb") as stream:
            # In a new session, so that its child processes end with it.
            process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=stream,
                cwd=HERE.parent,
                env={**os.environ, **environment},
                start_new_session=True,
            )
            self.running.add(process)
            usage = Usage(process.pid)
            try:
                while process.poll() is None and time.monotonic() < self.deadline and not self.ended:
                    time.sleep(0.25)
                    if watched and (folder / METRICS).exists():
                        usage.sample()
                late = process.poll() is None
            finally:
                kill(process)
                self.running.discard(process)
        if watched:
            (folder / "usage.json").write_text(json.dumps(usage.most) + "\n")
        if late or self.ended:
            return "not finished at the time limit"
        if process.returncode == 0:
            return ""
        lines = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line]
        return (lines or [f"exit status {process.returncode}"])[-1].strip().replace("|", "/")[:300]

    def over(self) -> bool:
        """True if it is too late to start a process."""
        return self.ended or time.monotonic() > self.deadline - 1

    def end(self) -> None:
        """End all running processes."""
        self.ended = True
        for process in list(self.running):
            kill(process)

    def report(self) -> None:
        """Write OUT/report.md."""
        with self.writing:
            begun = [name for name in CHECKS if (self.out / name).is_dir()]
            text = "\n".join(self.section(name, CHECKS[name]) for name in begun)
            if later := [name for name in CHECKS if name not in begun]:
                text += f"\nNot started: {', '.join(later)}.\n"
            temporary = self.out / "report.part"
            temporary.write_text(text)
            temporary.replace(self.out / "report.md")

    def section(self, name: str, check: Check) -> str:
        """Section of a check as Markdown."""
        lines = [f"## {name}: {check.title}", ""]
        if any(not case.command for case in check.cases):
            columns = TIMED if check.alone else LOSSES
            lines += [f"| | {' | '.join(columns)} |", "|:--" + "|--:" * len(columns) + "|"]
            lines += [f"| {case.name} | {' | '.join(self.cells(name, case, len(columns)))} |" for case in check.cases]
        for case in check.cases:
            folder = self.folder(name, case)
            state = self.failed.get(folder, "done" if (folder / "done").exists() else "not run")
            if case.command:
                lines += [f"{case.name}: {state}{'' if check.result else last_line(folder / 'log.txt')}", ""]
            if check.result is not None and (folder / check.result).is_file():
                head = [] if case.command else ["", f"{case.name}:"]
                lines += [*head, (folder / check.result).read_text().replace("\n#", "\n##"), ""]
        return "\n".join(lines) + "\n"

    def cells(self, name: str, case: Case, count: int) -> list[str]:
        """A training run as `count` cells of its check's table."""
        folder = self.folder(name, case)
        steps = [line for line in read_metrics(folder / METRICS) if "loss" in line]
        rehearsed = gib(rehearsed_bytes(folder / "rehearsal"))
        if not (folder / "done").exists() or not steps:
            cells = [self.failed.get(folder, "not run"), *[""] * (count - 1)]
            if CHECKS[name].alone:
                cells[TIMED.index("GiB rehearsed")] = rehearsed
            return cells
        values = [line["loss"] for line in steps]
        ends = [f"{values[0]:.4f}", f"{statistics.mean(values[-10:]):.4f}"]
        if CHECKS[name].alone:
            most = max((line.get("mem_max_allocated_bytes") or 0.0 for line in steps), default=0.0)
            return [*ends, *speed(steps[-COUNTED:]), rehearsed, gib(most)]
        loss = validation(folder)
        reference = next((other for other in CHECKS[name].cases if other.name == case.reference), None)
        base = None if reference is None else validation(self.folder(name, reference))
        off = "" if base is None or loss is None else f"{loss / base - 1:+.2%}"
        return [*ends, "" if loss is None else f"{loss:.4f}", off]

    def prepare(self) -> None:
        """Run the steps without a GPU: data, losses on the CPU, rehearsals."""
        self.write_data(list(CHECKS))
        for name, check in CHECKS.items():
            for case in check.cases:
                folder = self.folder(name, case)
                if case.environment == NO_GPU and not (folder / "done").exists():
                    self.one(name, case, alone=False)
                rehearsal = folder / "rehearsal"
                if case.rehearse and rehearsed_bytes(rehearsal) is None:
                    notice(f"{name}: rehearsal of {case.name}")
                    rehearsal.mkdir(parents=True, exist_ok=True)
                    command = [sys.executable, "-m", "nemo_ext.cli", "rehearse", f"run_dir={rehearsal}", *case.words]
                    if why := self.process(command, rehearsal, {}, watched=False):
                        notice(f"{name}: rehearsal of {case.name}: {why}")
        self.report()

    def write_data(self, names: Sequence[str]) -> None:
        """Tokenise the corpus and write packs, before several processes need them."""
        if {"losses", "puzzle"} & set(names):
            Run.from_config(compose("train", [f"run_dir={self.out}/unused", f"data_root={self.out}/data"])).tokenized()
        if "packs" in names:
            for number, prefix in enumerate((self.out / "packs/train", self.out / "packs/valid")):
                if not (prefix.parent / f"{prefix.name}.done").exists():
                    write_packs(prefix, seed=number)
                    (prefix.parent / f"{prefix.name}.done").touch()


def write_packs(prefix: Path, seed: int) -> None:
    """Write packs of 1,024 tokens, of samples that repeat a phrase, which a model can learn."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)

    def sample() -> tuple[np.ndarray, np.ndarray]:
        length = int(generator.integers(8, 700))
        ids = np.resize(generator.integers(1, 256, size=int(generator.integers(3, 12))), length)
        return ids, (np.arange(length) >= 2).astype(np.uint8)

    samples = write_samples(prefix.with_name(f"{prefix.name}.samples"), (sample() for _ in range(1500)), vocab_size=257)
    write_packed(prefix, [samples], PackingSettings(capacity=1024), vocab_size=257, progress=False)


class Usage:
    """GPU usage of a process and its children from the first step to their end.

    Attributes:
        most: maximum of each sampled value.
    """

    def __init__(self, session: int):
        self.session = session
        self.most: dict[str, float] = {}
        self.began: float | None = None

    def sample(self) -> None:
        """Take a sample; without nvidia-smi, only of time and open devices."""
        self.began = self.began or time.monotonic()
        values = {"seconds_since_the_first_step": round(time.monotonic() - self.began, 1)}
        values["processes_with_the_device_open"] = sum(map(self._holds, Path("/proc").glob("[0-9]*")))
        for key, query in (("memory_used_mib", "gpu=memory.used"), ("compute_processes", "compute-apps=pid")):
            with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
                command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
                lines = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.split()
                values[key] = len(lines) if key == "compute_processes" else int(lines[0])
        self.most |= {key: max(value, self.most.get(key, 0)) for key, value in values.items()}

    def _holds(self, process: Path) -> bool:
        with suppress(OSError):
            if os.getsid(int(process.name)) == self.session:
                return any(os.readlink(file).startswith("/dev/nvidia-uvm") for file in (process / "fd").iterdir())
        return False


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def validation(folder: Path) -> float | None:
    """Last validation loss of a run."""
    found = [line["val_loss"] for line in read_metrics(folder / METRICS) if "val_loss" in line]
    return found[-1] if found else None


def speed(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Medians: ms per step, tokens per second, MFU."""

    def median(key: str) -> float:
        return statistics.median(line[key] for line in steps)

    mfu = f"{median('mfu'):.1%}" if all(line.get("mfu") is not None for line in steps) else ""
    return [f"{1e3 * median('seconds_per_step'):.0f}", f"{median('tokens_per_second'):,.0f}", mfu]


def rehearsed_bytes(folder: Path) -> float | None:
    """Rehearsed peak memory of the fullest rank, or None."""
    path = folder / "rehearsal.json"
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())["results"][0]
    return max((float(rank["peak_bytes"]) for rank in result.get("ranks") or ()), default=None)


def last_line(log: Path) -> str:
    """Last line of a log, such as pytest's summary, after a comma."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return f", {lines[-1].strip('= ')}" if lines else ""


def gib(size: float | None) -> str:
    return f"{size / GIB:.2f}" if size else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="output folder")
    choices = ("prepare", *COMMANDS, *CHECKS)
    parser.add_argument("checks", nargs="+", choices=choices, metavar="CHECK", help=", ".join(choices))
    parser.add_argument("--limit", type=float, help="time limit in seconds (default: 290; prepare: none)")
    arguments = parser.parse_args()
    names = [name for word in arguments.checks for name in COMMANDS.get(word, (word,)) if name != "prepare"]
    preparing = "prepare" in arguments.checks
    limit = arguments.limit or (float("inf") if preparing else 290.0)
    session = Session(arguments.out, limit)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if preparing:
            session.prepare()
        session.write_data(names)
        session.run(names)
    except KeyboardInterrupt:
        session.end()
        session.report()
        raise SystemExit("interrupted; the same command resumes") from None
    notice(f"{session.out / 'report.md'}")
    if session.failed:
        raise SystemExit(f"{len(session.failed)} cases failed or did not finish")


if __name__ == "__main__":
    main()
