"""Writing a curriculum of ten million prompts: seconds of each stage and peak memory.

    python benchmarks/curriculum.py [--prompts 10000000] [--rollouts 0] [--workers 2] [--bytes 250] [--json FILE]

The prompts are records of about `bytes` bytes in four domains with a profile of pass rates of 16 rollouts. With
`--rollouts`, that number of rollouts per prompt is written and grouped first; otherwise the profile exists already. The
job runs as `nemo-ext curriculum` in a separate process; a plain copy of the same file (cat, then sync) in the same run
shows the speed of the disk.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

DOMAINS = ("math", "code", "stem", "instruction")
ROLLOUTS = 16


def make_prompts(path: Path, count: int, size: int) -> None:
    """Write the prompts."""
    filler = "x" * max(0, size - 90)
    with open(path, "w", buffering=1 << 20) as file:
        for begin in range(0, count, 10_000):
            for n in range(begin, min(begin + 10_000, count)):
                head = f'{{"id": "p{n}", "domain": "{DOMAINS[n % 4]}", "prompt": "question {n}'
                file.write(f'{head} {filler}", "answer": "{n}"}}\n')


def make_profile(path: Path, count: int) -> None:
    """Write pass rates: many prompts always or never solved, the rest uniform."""
    draw = np.random.default_rng(0)
    successes = draw.binomial(ROLLOUTS, draw.beta(0.6, 0.6, count))
    columns = {"id": [f"p{n}" for n in range(count)], "rollouts": np.full(count, ROLLOUTS)}
    table = pyarrow.table({**columns, "pass_rate": successes / ROLLOUTS})
    pyarrow.parquet.write_table(table, path)


def make_rollouts(path: Path, count: int, each: int) -> None:
    """Write rollouts in the order of a sampler."""
    draw = np.random.default_rng(0)
    with open(path, "w", buffering=1 << 20) as file:
        for begin in range(0, count, 10_000):
            rates = draw.beta(0.6, 0.6, 10_000)
            for n in range(begin, min(begin + 10_000, count)):
                rewards = (draw.random(each) < rates[n - begin]).astype(int).tolist()
                file.writelines(f'{{"id": "p{n}", "reward": {reward}.0, "tokens": 512}}\n' for reward in rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10_000_000)
    parser.add_argument("--rollouts", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=250)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        prompts, profile, rollouts = folder / "prompts.jsonl", folder / "profile.parquet", folder / "rollouts.jsonl"
        make_prompts(prompts, arguments.prompts, arguments.bytes)
        if arguments.rollouts:
            make_rollouts(rollouts, arguments.prompts, arguments.rollouts)
        else:
            make_profile(profile, arguments.prompts)
        os.sync()
        begin = time.monotonic()
        with open(folder / "copy", "wb") as copy:
            subprocess.run(["cat", prompts], stdout=copy, check=True)
            os.fsync(copy.fileno())
        copied = time.monotonic() - begin
        (folder / "copy").unlink()
        source = f"rollouts={rollouts}" if arguments.rollouts else f"profile={profile}"
        words = [f"prompts={prompts}", source, f"output={folder / 'made'}", f"workers={arguments.workers}"]
        program = "import sys; from nemo_ext.cli import main; main(['curriculum', *sys.argv[1:]])"
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([sys.executable, "-c", program, *words], check=True)
        seconds = time.monotonic() - begin
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
        result = {
            "prompts": arguments.prompts,
            "gigabytes": round(prompts.stat().st_size / 1e9, 2),
            "rollouts": arguments.prompts * arguments.rollouts,
            "seconds": round(seconds, 1),
            "processor seconds of all processes": round(processor, 1),
            "machine load at the end": round(os.getloadavg()[0], 1),
            "seconds of a copy": round(copied, 1),
            "peak resident GB of the largest process": round(usage.ru_maxrss / 1e6, 2),
        }
        print(json.dumps(result, indent=1))
        if arguments.json:
            arguments.json.write_text(json.dumps(result) + "\n")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
