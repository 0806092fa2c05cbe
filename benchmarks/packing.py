"""Packing compared with TRL's, on the same samples and from disk to disk, in one run: seconds, fill and memory.

    python benchmarks/packing.py [--samples 200000] [--median 300] [--lengths FILE.npy] [--capacity 262144] [--rounds 3]

TRL packs a Hugging Face dataset of `input_ids` and `assistant_masks` with its best-fit-decreasing strategy, by
default (batches of 1000 samples) and over the whole dataset (`batch_size=None`); ours packs sample files of the same
ids and masks. Times include reading samples and writing packs, but not making the input. Sides alternate in separate
processes; medians are reported. Memory is the growth of resident memory after the imports, and its anonymous part.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

VOCAB_SIZE = 100_000
CONTENDERS = ("ours", "trl", "trl, whole")


def make_input(folder: Path, lengths: np.ndarray, *, trl: bool) -> None:
    """Write the same samples as a sample file and as a dataset."""
    from nemo_ext.data.packs.sample_files import write_samples

    generator = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = generator.integers(0, VOCAB_SIZE, offsets[-1], dtype=np.int32)
    marks = (generator.random(offsets[-1], dtype=np.float32) < 0.5).astype(np.int8)
    rows = ((ids[a:b], marks[a:b]) for a, b in pairwise(offsets))
    write_samples(folder / "samples", rows, vocab_size=VOCAB_SIZE)
    if trl:
        import datasets
        import pyarrow as pa

        columns = {
            name: pa.LargeListArray.from_arrays(offsets, pa.array(values))
            for name, values in (("input_ids", ids), ("assistant_masks", marks))
        }
        datasets.Dataset(pa.table(columns)).save_to_disk(str(folder / "dataset"))


Run = Callable[[], Callable[[], float]]
"""Function that packs; returns the data for the fill."""


def ours(folder: Path, capacity: int) -> Run:
    """Pack sample files on disk."""
    from nemo_ext.data.packs.packed_files import PackingSettings, write_packed
    from nemo_ext.data.packs.sample_files import open_samples

    def run() -> Callable[[], float]:
        file = open_samples(folder / "samples", vocab_size=VOCAB_SIZE)
        settings = PackingSettings(capacity=capacity, longer="truncate")
        manifest = write_packed(folder / "packs", [file], settings, vocab_size=VOCAB_SIZE, progress=False)
        return lambda: manifest.fill

    return run


def theirs(folder: Path, capacity: int, *, whole: bool) -> Run:
    """Pack a dataset into its cache."""
    import datasets
    from trl import pack_dataset

    datasets.disable_progress_bars()

    def run() -> Callable[[], float]:
        options = {"batch_size": None} if whole else {}
        given = datasets.load_from_disk(str(folder / "dataset"))
        packed = pack_dataset(given, capacity, strategy="bfd", map_kwargs={"load_from_cache_file": False, **options})
        return lambda: sum(map(sum, packed["seq_lengths"])) / (len(packed) * capacity)

    return run


def resident() -> tuple[int, int]:
    """Resident memory of this process, and its anonymous part, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024, int(fields["RssAnon"].split()[0]) * 1024


def measured(run: Run) -> dict[str, float]:
    """Seconds, fill, and growth of memory."""
    before = resident()
    peaks, done = list(before), threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peaks[:] = [max(pair) for pair in zip(peaks, resident(), strict=True)]

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    fill_of = run()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    grown = [(peak - first) / 1e6 for peak, first in zip(peaks, before, strict=True)]
    return {"seconds": seconds, "fill": fill_of(), "resident MB": grown[0], "anonymous MB": grown[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000, help="number of samples, with log-normal lengths")
    parser.add_argument("--median", type=int, default=300, help="median of their lengths in tokens")
    parser.add_argument("--lengths", type=Path, help=".npy file of lengths instead")
    parser.add_argument("--capacity", type=int, default=262_144)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, folder = arguments.one[0], Path(arguments.one[1])
        run = ours(folder, arguments.capacity) if name == "ours" else None
        run = run or theirs(folder, arguments.capacity, whole=name == "trl, whole")
        print(json.dumps(measured(run)))
        return
    with_trl = all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets"))
    if not with_trl:
        print("TRL is not installed and therefore skipped: pip install trl (in a separate environment)")
    if arguments.lengths:
        lengths = np.load(arguments.lengths).astype(np.int64)
    else:
        drawn = np.random.default_rng(1).lognormal(np.log(arguments.median), 1.0, arguments.samples)
        lengths = drawn.clip(8, arguments.capacity).astype(np.int64)
    print(f"{len(lengths):,} samples, {lengths.sum():,} tokens, longest {lengths.max():,}")
    contenders = CONTENDERS if with_trl else CONTENDERS[:1]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_input(folder, lengths, trl=with_trl)
        for _ in range(arguments.rounds):
            for name in contenders:
                for old in folder.glob("packs*"):
                    old.unlink()
                command = [sys.executable, __file__, "--capacity", str(arguments.capacity), "--one", name, directory]
                ended = subprocess.run(command, capture_output=True, text=True, check=False)
                if ended.returncode:
                    sys.exit(f"{name} failed:\n{ended.stderr[-2000:]}")
                results[name].append(json.loads(ended.stdout.splitlines()[-1]))
    print("| | seconds | of ours | fill | memory, MB | of it anonymous, MB |\n|---|---|---|---|---|---|")
    base = statistics.median(result["seconds"] for result in results["ours"])
    for name, rounds in results.items():
        middle = {key: statistics.median(result[key] for result in rounds) for key in rounds[0]}
        print(
            f"| {name} | {middle['seconds']:.2f} | {middle['seconds'] / base:.1f} | {middle['fill']:.2%} | "
            f"{middle['resident MB']:.0f} | {middle['anonymous MB']:.0f} |"
        )


if __name__ == "__main__":
    main()
