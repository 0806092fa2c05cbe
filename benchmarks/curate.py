"""`nemo-ext curate` compared with datatrove on the same rules and MinHash: ratios of time and memory, in one run.

    python benchmarks/curate.py FOLDER [--documents 100000] [--rounds 3] [--only rules] [--text-dedup PYTHON]

Requires xxhash<4, for datatrove. Documents are paragraphs of docstring sentences; a tenth are near copies. Both sides
apply Gopher's, C4's and FineWeb's rules on whitespace-separated words (datatrove's own filters), then MinHash (5-grams,
14 bands of 8), and write compressed JSONL. Sides alternate; median times and the largest process of each are compared.
`rules` and `minhash` are also timed separately. With `--text-dedup`, the interpreter of an environment with text-dedup,
its MinHash runs on the same documents.
"""

import argparse
import itertools
import json
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

RULES = ("gopher_repetition", "gopher_quality", "c4", "fineweb")


def make(path: Path, documents: int) -> None:
    """Write the documents."""
    from curate_faults import sentences

    chance, known = random.Random(0), sentences()
    texts: list[str] = []
    with open(path, "w", encoding="utf-8") as out:
        for number in range(documents):
            if texts and chance.random() < 0.1:
                words = chance.choice(texts).split(" ")
                words[chance.randrange(len(words))] = "another"
                text = " ".join(words)
            else:
                lines = (" ".join(chance.choice(known) for _ in range(4)) for _ in range(chance.randint(2, 8)))
                text = "\n".join(lines)
                texts.append(text)
                texts = texts[-1000:]
            out.write(json.dumps({"id": str(number), "text": text}) + "\n")


def ours(source: Path, output: Path, what: str, workers: int) -> None:
    """Run `nemo-ext curate`."""
    from nemo_ext.data.curation.job import run
    from nemo_ext.job.config import compose

    names = [*(RULES if what != "minhash" else ()), *(["near_duplicates"] if what != "rules" else [])]
    blocks = [f"+curate.blocks.{name}={{kind: {name}}}" for name in names]
    words = [f"input={source}", f"output={output}", f"workers={workers}", f"curate.stages=[{','.join(names)}]", *blocks]
    run(compose("curate", [*words, "curate.keep_dropped=none", "curate.unit=16e6"]))


def theirs(source: Path, output: Path, what: str, workers: int) -> None:
    """Run datatrove's pipeline and executor on the documents, in files of the same size as our units."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    from nemo_ext.data.curation.stages.rules import _Spaces as Spaces

    tasks = len(list((source.parent / "cut").glob("*.jsonl")))
    words = Spaces()
    rules = [
        GopherRepetitionFilter(language=words),
        GopherQualityFilter(language=words),
        C4QualityFilter(language=words),
        FineWebQualityFilter(language=words),
    ]

    def run(pipeline: list[object], number: int) -> None:
        logs = output / "logs" / str(time.monotonic_ns())
        LocalPipelineExecutor(pipeline, tasks=number, workers=workers, logging_dir=str(logs)).run()

    def writer(place: str) -> JsonlWriter:
        return JsonlWriter(str(output / place), output_filename="${rank}.jsonl.zst", compression="zstd")

    first = JsonlReader(str(source.parent / "cut"))
    if what != "minhash":
        run([first, *rules, writer("rules")], tasks)
        first = JsonlReader(str(output / "rules"), compression="zstd")
    if what != "rules":
        config = MinhashConfig()
        signatures, buckets, removed = (str(output / name) for name in ("signatures", "buckets", "removed"))
        run([first, MinhashDedupSignature(signatures, config=config, language=words)], tasks)
        run([MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets)
        run([MinhashDedupCluster(buckets, removed, config=config)], 1)
        run([first, MinhashDedupFilter(removed), writer("kept")], tasks)


def cut(source: Path) -> None:
    """Cut the documents into files of 16 MB for datatrove, whose tasks read whole files."""
    (source.parent / "cut").mkdir()
    with open(source, "rb") as lines:
        for number in itertools.count():
            if not (piece := lines.readlines(16_000_000)):
                return
            (source.parent / "cut" / f"{number:04}.jsonl").write_bytes(b"".join(piece))


def text_dedup(source: Path, output: Path, python: str, workers: int) -> str:
    """Seconds and kept documents of text-dedup's MinHash (0.4) on the same documents, or its error."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.toml").write_text(
        f"""[input]
input_type = "local_files"
file_type = "json"
[input.read_arguments]
path = "json"
data_files = "{source}"
split = "train"
cache_dir = "{output / "cache"}"
[algorithm]
algorithm_name = "minhash"
text_column = "text"
num_perm = 112
bands = 14
rows = 8
ngram_size = 5
threshold = 0.8
num_proc = {workers}
[output]
output_dir = "{output / "kept"}"
[debug]
logging_level = 30
"""
    )
    began = time.monotonic()
    command = [python, "-m", "text_dedup.minhash"]
    done = subprocess.run(command, cwd=output, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip().splitlines()
    kept = next((found[1] for line in said if (found := re.search(r"After\W+(\d+)", line))), "?")
    return f"{time.monotonic() - began:.1f} s, {kept} kept" if not done.returncode else said[-1]


def kept(output: Path) -> int:
    """Number of documents that a side wrote."""
    import zstandard

    place = next(place for place in (output / "documents", output / "kept", output / "rules") if place.exists())
    number = 0
    for path in place.rglob("*.zst"):
        with (
            open(path, "rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as text,
        ):
            while data := text.read(1 << 20):
                number += data.count(b"\n")
    return number


def main() -> None:
    """Time both sides alternately and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=("rules", "minhash", "all"))
    parser.add_argument("--text-dedup")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    source = arguments.folder.absolute() / "documents.jsonl"
    if arguments.side:
        side, what, output = arguments.side
        {"ours": ours, "theirs": theirs}[side](source, Path(output), what, arguments.workers)
        print(
            resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )
        return
    arguments.folder.mkdir(parents=True)
    make(source, arguments.documents)
    cut(source)
    print("| | ours, s | datatrove, s | ours / datatrove | kept | MB of the largest process |")
    print("|---|---|---|---|---|---|")
    for what in (arguments.only,) if arguments.only else ("rules", "minhash", "all"):
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        memory, numbers = dict[str, float](), dict[str, int]()
        for turn in range(arguments.rounds):
            for side in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
                output = arguments.folder.absolute() / side
                shutil.rmtree(output, ignore_errors=True)
                again = ["--side", side, what, str(output), "--workers", str(arguments.workers)]
                began = time.monotonic()
                command = [sys.executable, __file__, str(arguments.folder), *again]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                seconds[side].append(time.monotonic() - began)
                memory[side] = max(map(int, done.stdout.split()[-2:])) / 1024
                numbers[side] = kept(output)
        one, other = (statistics.median(seconds[side]) for side in ("ours", "theirs"))
        row = [what, f"{one:.1f}", f"{other:.1f}", f"{one / other:.2f}"]
        row += [f"{numbers['ours']:,} / {numbers['theirs']:,}", f"{memory['ours']:.0f} / {memory['theirs']:.0f}"]
        print(f"| {' | '.join(row)} |", flush=True)
    if arguments.text_dedup:
        output = arguments.folder.absolute() / "text_dedup"
        print(f"text-dedup's MinHash: {text_dedup(source, output, arguments.text_dedup, arguments.workers)}")


if __name__ == "__main__":
    main()
