"""Seconds from `nemo-ext train` (the quickstart) to its first step, for one checkout or several alternately.

    python benchmarks/first_step.py . ../before --turns 5

Also the processor seconds of all its processes until then and of `import torch`, on which the load of the machine has
less influence.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from nemo_ext.job.run_directory import METRICS, read_metrics


def first_step(checkout: Path, run_dir: Path, data: Path) -> tuple[float, float]:
    """Wall-clock and processor seconds until metrics.jsonl has the first step."""
    words = ["train", f"run_dir={run_dir}", f"data_root={data}"]
    before = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "nemo_ext", *words],
        env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
        cwd=run_dir.parent,  # Python looks for the package in the working directory first
        stdout=subprocess.DEVNULL,
    ) as command:
        used: dict[int, float] = {}
        try:
            while not any("loss" in line for line in read_metrics(run_dir / METRICS)):
                if command.poll() is not None:
                    raise SystemExit(f"{checkout}: the run ended before its first step: see {run_dir}")
                used |= _processor_seconds(command.pid)
                time.sleep(0.05)
            return time.perf_counter() - before, sum(used.values())
        finally:
            for process in [*psutil.Process(command.pid).children(recursive=True), command]:
                process.kill()


def _processor_seconds(root: int) -> dict[int, float]:
    """Processor seconds so far of a process and its descendants, by process."""
    found = {}
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            spent = process.cpu_times()
        except psutil.Error:  # ended in the meantime
            continue
        found[process.pid] = spent.user + spent.system
    return found


def import_of_torch() -> float:
    """Processor seconds of `import torch` in a separate process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the medians of every checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(".")])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--data", type=Path, help="folder of the quickstart's tokenised data (default: made first, untimed)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times_by_checkout: dict[Path, list[tuple[float, float]]] = {each: [] for each in arguments.checkouts}
        torch = []
        for turn in range(int(arguments.data is not None), arguments.turns + 1):
            torch.append(import_of_torch())
            for checkout, times in times_by_checkout.items():
                run_dir = Path(folder) / "run"
                times.append(first_step(checkout, run_dir, arguments.data or Path(folder) / "data"))
                shutil.rmtree(run_dir)
            if not turn:  # also tokenises the data
                torch.clear()
                for times in times_by_checkout.values():
                    times.clear()
    print(f"import torch: {median(torch):.1f} processor seconds")
    for checkout, times in times_by_checkout.items():
        clock, processors = (median(each) for each in zip(*times, strict=True))
        print(f"{checkout}: {clock:.1f} s to the first step, {processors:.1f} processor seconds")


if __name__ == "__main__":
    main()
