"""Rows per second of batch jobs against one stand-in endpoint, in one run.

    python benchmarks/generate.py [--only quick|slow] [--swarm-python PYTHON] [--datatrove-python PYTHON] [--json FILE]

`nemo-ext generate`, with the same concurrency as the peers and with adapted concurrency; a few lines of asyncio with
the openai client, which store nothing; and, if a Python with them is given, domyn-swarm's runner (as on its command
line) and datatrove's InferenceRunner (with checkpoints). The endpoint (benchmarks/stand_in.py) answers after 20 ms; in
the second setting after 2 s, and one row in twenty after 20 s, the same rows for all.

Jobs run alternately in separate processes; medians are reported. The start is measured on one row that is answered
immediately, and subtracted. Every answer is checked. The endpoint's busy cores show whether it limits a rate.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow.parquet

SETTINGS = {
    "quick": {"seconds": 0.02, "slow_share": 0, "slow_seconds": 0, "rows": 20000, "concurrency": 64},
    "slow": {"seconds": 2, "slow_share": 0.05, "slow_seconds": 20, "rows": 2500, "concurrency": 128},
}
TABLE = "| | start, s | rows/s | ours / its | number found / its | endpoint, cores |\n|---|---|---|---|---|---|"
Job = Callable[[str, Path, Path, int], list[dict]]
"""Function that sends the rows of FILE.jsonl and FILE.parquet to a URL with a concurrency; returns ids and answers."""


def bare(url: str, rows: Sequence[dict], out: Path, concurrency: int) -> list[dict]:
    """The openai client and a semaphore; with aiohttp, which is faster, if it is installed."""
    import openai

    async def ask() -> list[dict]:
        try:
            transport = openai.DefaultAioHttpClient()
        except RuntimeError:
            transport = openai.DefaultAsyncHttpxClient()
        turns = asyncio.Semaphore(concurrency)

        async def one(row: dict) -> dict:
            async with turns:
                made = await client.chat.completions.create(model="m", messages=row["messages"])
            return {"id": row["id"], "answer": made.choices[0].message.content}

        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=transport) as client:
            return await asyncio.gather(*map(one, rows))

    return asyncio.run(ask())


def datatrove(url: str, rows: Sequence[dict], out: Path, concurrency: int) -> list[dict]:
    """InferenceRunner with checkpoints."""
    from datatrove.data import Document
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
    from datatrove.pipeline.writers import JsonlWriter

    async def ask(document: Document, generate: Callable) -> object:
        return await generate({"messages": document.metadata["messages"]})

    InferenceRunner(
        ask,
        InferenceConfig("endpoint", "m", endpoint_url=url.removesuffix("/v1"), max_concurrent_generations=concurrency),
        JsonlWriter(str(out / "answers"), output_filename="${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir=str(out / "checkpoints"),
    ).run(Document(text=".", id=str(row["id"]), metadata={"messages": row["messages"]}) for row in rows)
    lines = [json.loads(line) for file in (out / "answers").iterdir() for line in file.open()]
    return [{"id": int(line["id"]), "answer": line["metadata"]["rollout_results"][0]["text"]} for line in lines]


def called(*words: object) -> None:
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{words} failed:\n{ended.stderr[-2000:]}")


def inside(name: str, python: str, url: str, file: Path, out: Path, concurrency: int) -> list[dict]:
    """Run a job of this file in another Python."""
    called(python, __file__, "--inside", name, url, file, out, concurrency)
    return json.loads((out / "read.json").read_text())


def ours(found: bool, url: str, file: Path, out: Path, concurrency: int) -> list[dict]:
    """`nemo-ext generate`."""
    words = [f"endpoint={url}", f"input={file}.jsonl", f"output={out / 'answers'}"]
    words += [] if found else [f"generate.concurrency={concurrency}"]
    called(sys.executable, "-m", "nemo_ext.cli", "generate", *words)
    parts = map(pyarrow.parquet.read_table, (out / "answers").glob("part-*.parquet"))
    return [row for part in parts for row in part.to_pylist()]


def swarm(python: str, url: str, file: Path, out: Path, concurrency: int) -> list[dict]:
    """domyn-swarm's runner, with its command's checkpoints and retries."""
    words = ["--job-class", "domyn_swarm.jobs:ChatCompletionJob", "--model", "m", "--endpoint", url.removesuffix("/v1")]
    words += ["--input-parquet", f"{file}.parquet", "--output-parquet", out / "answers.parquet"]
    words += ["--checkpoint-dir", out / "checkpoints", "--job-kwargs", json.dumps({"max_concurrency": concurrency})]
    called(python, "-m", "domyn_swarm.jobs.cli.run", *words)
    return pyarrow.parquet.read_table(out / "answers.parquet").rename_columns({"result": "answer"}).to_pylist()


@contextmanager
def endpoint(seconds: float, slow_share: float = 0, slow_seconds: float = 0) -> Iterator[tuple[str, Callable]]:
    """Start a stand-in; yields its URL and a function that returns its processor seconds."""
    import psutil

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--port", port, "--seconds", seconds, "--slow_share", slow_share, "--slow_seconds", slow_seconds]
    with subprocess.Popen([sys.executable, Path(__file__).with_name("stand_in.py"), *map(str, words)]) as server:
        try:
            while server.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/v1", lambda: sum(psutil.Process(server.pid).cpu_times()[:2])
        finally:
            server.terminate()


def timed(job: Job, url: str, file: Path, concurrency: int) -> float:
    """Seconds of a job, after checking its answers."""
    from stand_in import answer_to

    with tempfile.TemporaryDirectory() as out:
        began = time.perf_counter()
        rows = job(url, file, Path(out), concurrency)
        seconds = time.perf_counter() - began
    wanted = [(row["id"], answer_to(row)) for row in map(json.loads, Path(f"{file}.jsonl").read_text().splitlines())]
    assert sorted((row["id"], row["answer"]) for row in rows) == wanted, "answers are missing or wrong"
    return seconds


def run(jobs: dict[str, Job], setting: dict[str, float], rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Medians of a setting for each job."""
    *delays, count, concurrency = setting.values()
    rows = [{"id": n, "messages": [{"role": "user", "content": f"What is {n} plus {7 * n}?"}]} for n in range(count)]
    for name, some in (("one", rows[:1]), ("all", rows)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(some), folder / f"{name}.parquet")
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    with endpoint(0) as (at_once, _), endpoint(*delays) as (url, processor):
        for job in jobs.values():  # warms the file cache for its imports
            timed(job, at_once, folder / "one", concurrency)
        for name, job in [*jobs.items()] * rounds:
            start, before = timed(job, at_once, folder / "one", concurrency), processor()
            took = timed(job, url, folder / "all", concurrency) - start
            measured[name] += [{"start": start, "rows/s": count / took, "endpoint": (processor() - before) / took}]
            print(f"{name}: {count / took:.1f} rows/s", file=sys.stderr)
    return {name: {key: statistics.median(e[key] for e in all_) for key in all_[0]} for name, all_ in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client-python", default=sys.executable, help="a Python with openai[aiohttp] and pyarrow")
    parser.add_argument("--swarm-python", help="a Python with domyn-swarm")
    parser.add_argument("--datatrove-python", help="a Python with datatrove[io], aiofiles, aiosqlite and httpx")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--inside", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # also ends child processes
    if arguments.inside:
        name, url, file, out, concurrency = arguments.inside
        rows = list(map(json.loads, Path(f"{file}.jsonl").read_text().splitlines()))
        answers = {"bare": bare, "datatrove": datatrove}[name](url, rows, Path(out), int(concurrency))
        Path(out, "read.json").write_text(json.dumps(answers))
        return
    jobs: dict[str, Job] = {"ours": partial(ours, False), "ours, number found": partial(ours, True)}
    jobs["openai client"] = partial(inside, "bare", arguments.client_python)
    if arguments.swarm_python:
        jobs["domyn-swarm"] = partial(swarm, arguments.swarm_python)
    if arguments.datatrove_python:
        jobs["datatrove"] = partial(inside, "datatrove", arguments.datatrove_python)
    print("Skipped, as no Python was given:", *sorted({"domyn-swarm", "datatrove"} - jobs.keys()) or ["none"])
    results = {}
    for label in [arguments.only] if arguments.only else SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            found = results[label] = run(jobs, SETTINGS[label], arguments.rounds, Path(folder))
        print(f"\n{label}: {SETTINGS[label]}; load at the end {os.getloadavg()[0]:.1f}\n\n{TABLE}")
        for name, each in found.items():
            ratios = [found[first]["rows/s"] / each["rows/s"] for first in jobs if first.startswith("ours")]
            cells = [f"{value:.2f}" for value in (each["start"], each["rows/s"], *ratios, each["endpoint"])]
            print(f"| {name} | {' | '.join(cells)}{' (may limit the rate)' * (each['endpoint'] > 0.8)} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"settings": SETTINGS, "medians": results}, indent=1))


if __name__ == "__main__":
    main()
