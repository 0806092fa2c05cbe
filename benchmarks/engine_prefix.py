"""The engine with shared prefixes, compared with the engine of another checkout, in one run.

    git worktree add /tmp/before 1fd06db~1    # before the change
    python benchmarks/engine_prefix.py FOLDER --other /tmp/before [--rounds 3]

A model (Hugging Face folder) answers prompts of 256 docstring tokens with 16 new tokens each, greedily, in float32; the
engines alternate, each in a separate process. Answers are compared.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOKENS, NEW = 256, 16
Asked = list[tuple[list[int], int]]


def workloads(tokenizer: Any, count: int) -> dict[str, tuple[int, Asked]]:
    """Workloads by name: number of concurrent requests, and prompts with numbers of new tokens."""
    from nemo_ext.evaluation.generators.sources import python_sources

    texts = (row["text"] for row in python_sources(120, seed=0, part="docstrings", characters=2000))
    prompts = [ids[:TOKENS] for text in texts if len(ids := tokenizer(text)["input_ids"]) >= TOKENS]
    each = [(prompt, NEW) for prompt in prompts[:count] for _ in range(8)]
    header = prompts[-1][: TOKENS * 3 // 4]
    return {
        "8 answers to each prompt, all at a time": (8 * count, each),
        "the same, 8 at a time": (8, each),
        "the same, 8 at a time, 8 to 24 new tokens": (8, [(p, 8 + n * 7 % 17) for n, (p, _) in enumerate(each)]),
        "prompts that share their first 192 tokens": (
            8 * count,
            [((header + p)[:TOKENS], NEW) for p in prompts[: 8 * count]],
        ),
        "prompts with nothing in common": (8 * count, [(p, NEW) for p in prompts[count : 5 * count]]),
        "8 prompts, 128 new tokens": (8, [(p, 128) for p in prompts[:8]]),
    }


def measure(folder: Path, count: int) -> None:
    """Print seconds and answers of every workload as JSON."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nemo_ext.serving.engine import Engine, Sampling

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    async def answer(engine: Engine, at_a_time: int, requests: Asked) -> list[list[int]]:
        answers, left = [[] for _ in requests], iter(range(len(requests)))

        async def worker() -> None:
            for number in left:
                prompt, new = requests[number]
                tokens = engine.generate(prompt, Sampling(max_tokens=new, temperature=0))
                answers[number] = [token.id async for token in tokens]

        await asyncio.gather(*(worker() for _ in range(at_a_time)))
        return answers

    def counted(engine: Any, read: list[int]) -> None:
        """Counts the prompt tokens that the model reads, including padding."""
        forward = engine._forward

        def noted(ids: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
            read.append(ids.numel() if ids.shape[1] > 1 else 0)
            return forward(ids, *given, **named)

        engine._forward = noted

    results = {}
    for number, (name, (at_a_time, requests)) in enumerate(
        workloads(AutoTokenizer.from_pretrained(folder), count).items()
    ):
        engine, read = Engine(model), []  # each workload starts without a cached prefix
        if not number:
            asyncio.run(answer(engine, 2, [([5, 6, 7], 4)] * 2))
        counted(engine, read)
        began, processor = time.perf_counter(), time.process_time()
        answers = asyncio.run(answer(engine, at_a_time, requests))
        seconds = {"seconds": time.perf_counter() - began, "processor": time.process_time() - processor}
        results[name] = {**seconds, "answers": answers, "read": sum(read)}
        engine.close()
    print(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--other", type=Path, help="the other checkout (default: only this one is measured)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return measure(given.folder, given.prompts)
    trees = [Path(__file__).parents[1], *([given.other] if given.other else [])]
    rounds: list[list[dict[str, Any]]] = []
    for turn in range(given.rounds):
        rounds.append([])
        for tree in trees:
            words = [sys.executable, __file__, str(given.folder), "--prompts", str(given.prompts), "--worker"]
            said = subprocess.run(
                words, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, check=True
            )
            rounds[-1].append(json.loads(said.stdout.splitlines()[-1]))
            seconds = {name: round(row["seconds"], 2) for name, row in rounds[-1][-1].items()}
            print(f"round {turn + 1}: {tree}: {seconds}", file=sys.stderr)
    print(
        "| requests | seconds | other / this | of processors | tokens read | equal answers |\n|:--|--:|--:|--:|--:|--:|"
    )
    for name in rounds[0][0]:
        mine, other = [[each[side][name] for each in rounds] for side in (0, -1)]
        cells = [f"{statistics.median(row['seconds'] for row in mine):.2f}"]
        for key in ("seconds", "processor"):
            ratios = [b[key] / a[key] for a, b in zip(mine, other, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        cells.append(f"{other[0]['read']} / {mine[0]['read']}")
        pairs = zip(mine[0]["answers"], other[0]["answers"], strict=True)
        print(f"| {name} | {' | '.join(cells)} | {statistics.mean(a == b for a, b in pairs):.0%} |")


if __name__ == "__main__":
    main()
