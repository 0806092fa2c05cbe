"""Seconds per variant of Puzzle's scores and block-wise distillation, for one checkout or several alternately.

    python benchmarks/puzzle_stages.py PARENT . ../before --turns 3 --words precision=bf16

PARENT is a run directory or a converted checkpoint. Two of its blocks are scored and trained on random tokens. Each
measurement is a process, and checkouts alternate, so that a slowdown of the machine affects all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median


def measure(parent: str, sequences: int, steps: int, words: list[str]) -> dict[str, float]:
    """Wall-clock and processor seconds per variant of scores and distillation, in this process."""
    import torch

    from nemo_ext.blockwise.sharded import open_parent
    from nemo_ext.checkpoint.start import as_checkpoint, description_of
    from nemo_ext.job.config import compose
    from nemo_ext.megatron.session import data_parallel
    from nemo_ext.puzzle.configs import stage_config
    from nemo_ext.puzzle.settings import settings
    from nemo_ext.puzzle.stages.distill import distill, trainable
    from nemo_ext.puzzle.stages.library import Library, build
    from nemo_ext.puzzle.stages.score import score_blocks
    from nemo_ext.puzzle.variants import variants

    with data_parallel(), tempfile.TemporaryDirectory() as folder:
        config = compose("puzzle", ["recipe=puzzle/quickstart", f"run_dir={folder}", f"puzzle.parent={parent}", *words])
        chosen, description = settings(config["puzzle"]), description_of(Path(parent))
        config = as_checkpoint(config, Path(parent))
        opened = open_parent(stage_config(config, description, 1), Path(parent), None)
        every = variants(description.architecture, chosen.variants)
        half = len(every) // 2
        by_block = [each if number in (half, half + 1) else [] for number, each in enumerate(every)]
        generator = torch.Generator().manual_seed(1)
        length, size = int(config["megatron"]["seq_length"]), description.vocab_size
        tokens = [torch.randint(size, (4, length), generator=generator) for _ in range(sequences // 4)]
        library, trained = Library(Path(folder) / "initial"), Library(Path(folder) / "trained")
        build(opened, description, by_block, library, calibration=[])
        opened.logits(tokens[0])  # not counted

        began = time.perf_counter(), time.process_time()
        scores = score_blocks(
            opened,
            [each for each in by_block if each],
            lambda v: library.layer(opened, v),
            tokens,
            Path(folder) / "scores",
        )
        scored = time.perf_counter(), time.process_time()
        training = {"steps": steps, "batch": 4, "together": 64, "save_interval": steps}
        results = distill(
            opened,
            by_block,
            library,
            trained,
            lambda step: iter([tokens[n % len(tokens)] for n in range(step, steps)]),
            settings({**config["puzzle"], "distill": training}).distill,
        )
        distilled = time.perf_counter(), time.process_time()
    count = len(trainable(by_block)) * steps
    return {
        "score": (scored[0] - began[0]) / len(scores),
        "score, processor": (scored[1] - began[1]) / len(scores),
        "distill step": (distilled[0] - scored[0]) / count,
        "distill step, processor": (distilled[1] - scored[1]) / count,
        "sum of KL": sum(score.kl for score in scores),
        "sum of errors": sum(result.last for result in results),
    }


def main() -> None:
    """Measure the checkouts alternately, and print a line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parent", help="run directory or converted checkpoint")
    parser.add_argument("checkouts", nargs="*", default=["."], help="folders of nemo_ext")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=8, help="sequences of the calibration set, in batches of four")
    parser.add_argument("--steps", type=int, default=4, help="of distillation")
    parser.add_argument("--words", nargs="*", default=[], help="arguments of the command, such as precision=bf16")
    parser.add_argument("--here", action="store_true", help="measure this process's checkout once, as JSON")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.parent, arguments.sequences, arguments.steps, arguments.words)))
        return
    results: dict[str, list[dict[str, float]]] = {checkout: [] for checkout in arguments.checkouts}
    for _ in range(arguments.turns):
        for checkout in arguments.checkouts:
            words = [arguments.parent, "--here", f"--sequences={arguments.sequences}", f"--steps={arguments.steps}"]
            done = subprocess.run(
                [sys.executable, __file__, *words, "--words", *arguments.words],
                env={**os.environ, "PYTHONPATH": str(Path(checkout).resolve())},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
            results[checkout].append(json.loads(done.stdout.splitlines()[-1]))
    for name in results[arguments.checkouts[0]][0]:
        first = median(turn[name] for turn in results[arguments.checkouts[0]])
        for checkout, turns in results.items():
            values = [turn[name] for turn in turns]
            print(f"{name}, {checkout}: {median(values):.4f} ({min(values):.4f} to {max(values):.4f}), "
                  f"{median(values) / first:.2f} of the first")  # fmt: skip


if __name__ == "__main__":
    main()
