"""Cost of evaluation compared with generation, against one stand-in endpoint, in one run.

    python benchmarks/evaluate.py [--seconds 0.5] [--problems 2000] [--concurrency 64] [--json FILE]

`nemo-ext evaluate` asks generated sums, stores and scores every answer and writes its reports; `nemo-ext generate`
sends the same messages and stores the answers. They alternate three times; the time of a run with a fifth of the
problems is subtracted, which removes the start; medians.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nemo_ext.chat.sample import openai_messages
from nemo_ext.rl.tasks import generate

COMMAND = [sys.executable, "-m", "nemo_ext.cli"]


def seconds_of(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([*COMMAND, *words], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stand_in = Path(__file__).with_name("stand_in.py")
    server = subprocess.Popen([sys.executable, str(stand_in), f"--port={port}", f"--seconds={arguments.seconds}"])
    seconds_by_job: dict[str, list[float]] = {"evaluate": [], "generate": []}
    try:
        with tempfile.TemporaryDirectory() as place:
            for turn in range(3):
                folder = Path(place) / str(turn)
                folder.mkdir()
                times = {"evaluate": [], "generate": []}
                for count in (arguments.problems // 5, arguments.problems):
                    rows = folder / f"{count}.jsonl"
                    tasks = generate("arithmetic", count, seed=1234)
                    asked = [{"id": task.id, "messages": openai_messages(task.prompt)} for task in tasks]
                    rows.write_text("".join(f"{json.dumps(row)}\n" for row in asked))
                    suite = folder / f"suite_{count}.yaml"
                    suite.write_text(f"benchmarks: [{{name: arithmetic, count: {count}}}]\n")
                    words = [f"endpoint=http://127.0.0.1:{port}/v1"]
                    own = ["evaluate", f"suite={suite}", f"run_dir={folder / f'run_{count}'}"]
                    times["evaluate"].append(
                        seconds_of([*own, *words, f"evaluate.concurrency={arguments.concurrency}"])
                    )
                    own = ["generate", f"input={rows}", f"output={folder / f'out_{count}'}"]
                    times["generate"].append(
                        seconds_of(
                            [*own, *words, f"generate.concurrency={arguments.concurrency}", "generate.max_tokens=256"]
                        )
                    )
                for name, (start, whole) in times.items():
                    seconds_by_job[name].append(whole - start)
    finally:
        server.kill()
    medians = {name: statistics.median(each) for name, each in seconds_by_job.items()}
    ratio = medians["evaluate"] / medians["generate"]
    print(f"evaluate {medians['evaluate']:.1f} s, generate {medians['generate']:.1f} s: {ratio:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"seconds": seconds_by_job, "ratio": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
