"""Training steps of full-width models, cut to a few blocks, on one GPU: speed, and memory beside the rehearsal's.

    python benchmarks/gpu_train.py runs/gpu --rehearse     # the memory foretold; needs no GPU
    python benchmarks/gpu_train.py runs/gpu                # every case, one after the other

Every case is a rank of `nemo-ext train` on synthetic data for 20 steps, with the device to itself; speed is the median
of the last 12. Cases that are done are not run again. What fails is in the table with the last line of its error.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_runs import prepared, run

from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import METRICS, read_metrics

STEPS, COUNTED = 20, 12
AHEAD = 4
"""Processes at a time, of which one has the device."""
GIB = 1 << 30
COMMON = (
    "data=mock",
    "train.validate_at_start=false",
    "megatron.eval_interval=1000",
    "megatron.eval_iters=1",
    "megatron.save_interval=1000",
    "megatron.no_save_optim=true",
    "megatron.log_memory_to_tensorboard=true",
)


@dataclass(frozen=True)
class Model:
    """A model at its full width: `words` cut it to what one GPU trains."""

    title: str
    words: tuple[str, ...]


def model(name: str, pattern: str | None, length: int, batch: int, *more: str) -> Model:
    cut = () if pattern is None else (f"model.pattern={pattern}", "megatron.padded_vocab_size=32768")
    title = f"{name}{'' if pattern is None else f', {pattern}'}, {batch} x {length} tokens"
    batches = (f"megatron.micro_batch_size={batch}", f"megatron.global_batch_size={batch}")
    words = (f"model={name}", *cut, f"megatron.seq_length={length}", *batches, f"train.tokens={STEPS * batch * length}")
    return Model(title, (*words, *more))


OLMO1 = model("olmo1_1b", None, 2048, 8)
DOMYN = model("domyn_small_10b", "(*-)x4", 4096, 2)
NANO = model("nemotron3_nano_30b", "MEM*", 8192, 1, "megatron.moe_grouped_gemm=true")
OLMO3 = model("olmo3_7b", "(*-)x4", 8192, 1)

CASES: list[tuple[Model, str, tuple[str, ...]]] = [
    (OLMO1, "bf16", ("precision=bf16",)),
    (OLMO1, "bf16, fused attention", ("precision=bf16", "megatron.attention_backend=fused")),
    (DOMYN, "bf16", ("precision=bf16",)),
    (DOMYN, "fp8_current", ("precision=fp8_current",)),
    (NANO, "bf16", ("precision=bf16",)),
    (NANO, "nemotron3_selective", ("precision=nemotron3_selective",)),
    (OLMO3, "bf16", ("precision=bf16",)),
    (OLMO1, "bf16, local back end", ("precision=bf16", "model.backend=local")),
    (DOMYN, "fp8_blockwise", ("precision=fp8_blockwise",)),
    (DOMYN, "fp8_delayed", ("precision=fp8_delayed",)),
    (DOMYN, "bf16, local back end", ("precision=bf16", "model.backend=local")),
    (OLMO1, "fp8_current", ("precision=fp8_current",)),
    (OLMO3, "fp8_current", ("precision=fp8_current",)),
    (NANO, "bf16, local back end", ("precision=bf16", "model.backend=local")),
]
"""In the order of what is worth knowing first."""


def rehearse(directory: Path, words: Sequence[str], limit: float) -> str:
    """Runs `nemo-ext rehearse`; empty, or the line that says why it failed."""
    command = [sys.executable, "-m", "nemo_ext.cli", "rehearse", f"run_dir={directory}", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    said = [line for line in ended.stderr.splitlines() if "rror" in line]
    return "" if ended.returncode == 0 else (said or [f"exit status {ended.returncode}"])[-1]


def foretold(directory: Path) -> float | None:
    """Peak memory in GiB by the rehearsal, if there is one."""
    path = directory / "rehearsal" / "rehearsal.json"
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())["results"][0]
    return float(max(rank["peak_bytes"] for rank in result["ranks"])) / GIB


def row(side: str, directory: Path, failed: str) -> str:
    """A line of the table."""
    expected = foretold(directory)
    told = "" if expected is None else f"{expected:.2f}"
    steps = [line for line in read_metrics(directory / METRICS) if "loss" in line]
    if failed or len(steps) < STEPS:
        return f"| {side} | {failed or 'not run'} | | | {told} | | |"
    last = steps[-COUNTED:]
    seconds = statistics.median(line["seconds_per_step"] for line in last)
    tokens = statistics.median(line["tokens_per_second"] for line in last)
    shares = [line["mfu"] for line in last if line.get("mfu") is not None]
    mfu = f"{statistics.median(shares):.1%}" if shares else ""
    memory = max((line.get("mem_max_allocated_bytes") or 0.0 for line in steps), default=0.0) / GIB
    off = "" if expected is None or not memory else f"{expected / memory - 1:+.1%}"
    found = f"{seconds * 1e3:.0f} | {tokens:,.0f} | {mfu} | {told} | {memory:.2f}{f' ({off})' if off else ''}"
    return f"| {side} | {found} | {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f} |"


def table(out: Path, failed: dict[str, str]) -> str:
    """All cases as Markdown, by model."""
    lines = []
    for one in dict.fromkeys(case[0] for case in CASES):
        lines += ["", f"**{one.title}**", ""]
        lines += ["| | ms a step | tokens/s | MFU | GiB foretold | GiB measured (foretold beside it) | loss |"]
        lines += ["|:--|--:|--:|--:|--:|--:|:--|"]
        sides = [(side, out / folder(case, side)) for case, side, _ in CASES if case is one]
        lines += [row(side, path, failed.get(str(path), "")) for side, path in sides]
    return "\n".join(lines) + "\n"


def folder(one: Model, side: str) -> str:
    words = f"{one.words[0].removeprefix('model=')} {side}"
    return "".join(letter if letter.isalnum() else "_" for letter in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where runs and the table (training.md) go")
    parser.add_argument("--rehearse", action="store_true", help="foretell the memory of every case, without a GPU")
    parser.add_argument(
        "--limit", type=float, default=240.0, help="seconds for a case, with its wait for the device (default 240)"
    )
    arguments = parser.parse_args()
    out: Path = arguments.out
    failed: dict[str, str] = {}

    def write() -> None:
        (out / "training.md").write_text(table(out, dict(failed)))

    out.mkdir(parents=True, exist_ok=True)
    configs: dict[Path, Path] = {}
    for one, side, words in CASES:
        directory = out / folder(one, side)
        if arguments.rehearse:
            notice(f"{one.title}: {side}")
            if not (directory / "rehearsal" / "rehearsal.json").exists():
                given = [*COMMON, *one.words, *words]
                if said := rehearse(directory / "rehearsal", given, arguments.limit):
                    failed[str(directory)] = said
        elif not (directory / "done").exists():
            configs[directory] = prepared(directory, [*COMMON, *one.words, *words])
    lock = (out / ".device").resolve()

    def train(directory: Path) -> None:
        notice(directory.name)
        if said := run(configs[directory], arguments.limit, lock=lock):
            failed[str(directory)] = said
        else:
            (directory / "done").touch()
        write()

    with ThreadPoolExecutor(AHEAD) as pool:  # the next ones import what they need while one has the device
        list(pool.map(train, configs))
    write()
    print((out / "training.md").read_text(), end="")


if __name__ == "__main__":
    main()
