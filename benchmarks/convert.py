"""Conversion compared with a plain copy of the same safetensors bytes, in one run: GB/s, ratios, and memory.

    python benchmarks/convert.py [--gigabytes 2] [--shard 0.25] [--model olmo1_1b] [--rounds 3] [--folder DIR]

The checkpoint is a model with fewer blocks, in bf16, with random weights. The copy loads each file with safetensors,
saves it again and calls fsync, as a conversion does with its files. Every round runs the copy and all conversions in
sequence; medians are reported.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nemo_ext.architecture.pattern import Pattern, parse
from nemo_ext.checkpoint import hf
from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import choose
from nemo_ext.checkpoint.parameters import Piece
from nemo_ext.checkpoint.writing import HUGGING_FACE, Slot, Work, cut_into_parts, write_checkpoint
from nemo_ext.job.config import compose


def make_checkpoint(folder: Path, model: str, gigabytes: float, shard: float) -> float:
    """Write a checkpoint of about `gigabytes`; returns its size in GB."""
    config = compose("describe", [f"model={model}"])
    blocks = parse(config["model"]["pattern"]).blocks
    count = 0
    while True:
        count += 2
        config["model"]["pattern"] = str(Pattern(blocks[:count]))
        description = from_config(config)
        found, facts = choose(description)
        entries = list(found.entries(description))
        pairs = [(name, shape) for entry in entries for name, shape in zip(entry.names, entry.shapes, strict=True)]
        size = sum(torch.Size(shape).numel() for _, shape in pairs) * 2 / 1e9
        if size >= gigabytes or count >= len(blocks):
            break

    def work(name: str, shape: tuple[int, ...]) -> Work:
        return Work(
            (Slot(Piece.from_shape(name, *shape), "bfloat16"),), lambda: [torch.rand(shape, dtype=torch.bfloat16)]
        )

    parts = cut_into_parts([work(name, shape) for name, shape in pairs], shard)
    write_checkpoint(
        folder,
        HUGGING_FACE,
        parts,
        identity={"benchmark": model},
        finish=lambda where: (where / "config.json").write_text(json.dumps(facts)) and None,
        verify=False,
        progress=False,
    )
    return size


def copy(source: Path, to: Path) -> None:
    """Baseline: copy the same bytes with safetensors, file by file, followed by fsync as in a conversion."""
    to.mkdir()
    for file in sorted(source.glob("*.safetensors")):
        save_file(load_file(file), to / file.name)
    for file in to.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


def measured(job: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a job, and growth of its anonymous memory in MB (without mapped files)."""
    peak = start = anonymous_memory()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    job()
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    return seconds, (peak - start) / 1e6


def anonymous_memory() -> int:
    """Bytes of this process's memory that are not file mappings."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shard", type=float, default=0.25, help="GB per file")
    parser.add_argument("--model", default="olmo1_1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="folder to write to (default: a temporary one)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="convert_benchmark_"))
    try:
        size = make_checkpoint(folder / "hf", options.model, options.gigabytes, options.shard)
        plain = hf.Settings(shard_gigabytes=options.shard, verify=False)
        checked = hf.Settings(shard_gigabytes=options.shard)

        def convert(source: str, to: str, settings: hf.Settings) -> Callable[[], object]:
            return lambda: hf.convert(hf.plan(folder / source, folder / to, settings), settings, progress=False)

        jobs: dict[str, Callable[[], object]] = {
            "plain safetensors copy": lambda: copy(folder / "hf", folder / "copied"),
            "Hugging Face -> Megatron": convert("hf", "megatron", plain),
            "Megatron -> Hugging Face": convert("megatron", "back", plain),
            "Hugging Face -> Megatron, verified": convert("hf", "megatron2", checked),
            "Megatron -> Hugging Face, verified": convert("megatron2", "back2", checked),
        }
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
        for _ in range(options.rounds):
            for name, job in jobs.items():
                results[name].append(measured(job))
            for made in ("copied", "megatron", "back", "megatron2", "back2"):
                shutil.rmtree(folder / made)
        base = statistics.median(seconds for seconds, _ in results["plain safetensors copy"])
        print(f"{options.model}, {size:.2f} GB in files of {options.shard} GB, {options.rounds} rounds, median")
        for name, measurements in results.items():
            seconds = statistics.median(each for each, _ in measurements)
            memory = max(each for _, each in measurements)
            print(f"{name:<36} {size / seconds:6.2f} GB/s  {base / seconds:5.2f} x copy  +{memory:6.0f} MB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
