"""The CPU engine compared with transformers' generate and with the engine of another checkout, in one run.

    git worktree add /tmp/before COMMIT
    python benchmarks/engine.py FOLDER [--other /tmp/before] [--rounds 3] [--only TEXT ...]

A model (Hugging Face folder) continues docstrings in float32. The engines alternate, each in a separate process, which
also runs `generate` on batches without common prefixes. Greedy answers are compared.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Request = tuple[list[int], int]
"""Prompt and number of new tokens."""
Answers = list[list[int]]


@dataclass(frozen=True)
class Workload:
    """Requests, with the number of concurrent ones and sampling parameters other than lengths.

    Attributes:
        batches: whether `generate` can run them as batches: all have equal lengths.
    """

    at_a_time: int
    requests: Sequence[Request]
    sampling: dict[str, float] = field(default_factory=lambda: {"temperature": 0.0})
    batches: bool = False


def workloads(tokenizer: Any) -> dict[str, Workload]:
    """Workloads by name."""
    from nemo_ext.evaluation.generators.sources import python_sources

    texts = (row["text"] for row in python_sources(160, seed=0, part="docstrings", characters=2000))
    prompts = [ids[:256] for text in texts if len(ids := tokenizer(text)["input_ids"]) >= 256]
    header = prompts[-1][:192]
    repeated = [(prompt, 16) for prompt in prompts[:8] for _ in range(8)]
    several = [(p, 8 + n * 7 % 17) for n, (p, _) in enumerate(repeated)]
    made = {
        "8 answers to each of 8 prompts, all at a time": Workload(64, repeated),
        "the same, 8 at a time": Workload(8, repeated),
        "the same, 8 at a time, 8 to 24 new tokens": Workload(8, several),
        "64 prompts that share their first 192 tokens": Workload(64, [((header + p)[:256], 16) for p in prompts[:64]]),
    }
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.95}):
        words = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        for count in (1, 16, 64):
            requests = [(prompt[:64], 32) for prompt in prompts[: max(4, count)]]
            made[f"{count} at a time, {words}"] = Workload(count, requests, sampling, batches=True)
    return made


def measure(folder: Path, only: Sequence[str]) -> None:
    """Print seconds and answers of every workload as JSON."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nemo_ext.serving.engine import Engine, Sampling

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def by_engine(work: Workload, read: list[int]) -> Answers:
        engine: Any = Engine(model)  # without a cached prefix
        forward = engine._forward

        def noted(ids: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
            read.append(ids.numel() if ids.shape[1] > 1 else 0)
            return forward(ids, *given, **named)

        engine._forward = noted
        answers: Answers = [[] for _ in work.requests]
        left = iter(range(len(work.requests)))

        async def worker() -> None:
            for number in left:
                prompt, new = work.requests[number]
                tokens = engine.generate(prompt, Sampling(max_tokens=new, **work.sampling))
                answers[number] = [token.id async for token in tokens]

        async def workers() -> None:
            await asyncio.gather(*(worker() for _ in range(work.at_a_time)))

        asyncio.run(workers())
        engine.close()
        return answers

    def by_generate(work: Workload) -> Answers:
        answers: Answers = []
        sampled = work.sampling if work.sampling["temperature"] else {"temperature": None}
        settings = {"top_p": None, "top_k": 0, **sampled, "do_sample": sampled is work.sampling}
        for first in range(0, len(work.requests), work.at_a_time):
            batch = work.requests[first : first + work.at_a_time]
            ids, new = torch.tensor([prompt for prompt, _ in batch]), batch[0][1]
            mask = torch.ones_like(ids)
            made = model.generate(ids, attention_mask=mask, max_new_tokens=new, eos_token_id=None, **settings)
            answers += made[:, ids.shape[1] :].tolist()
        return answers

    def timed(function: Callable[[], Answers]) -> dict[str, Any]:
        began, processor = time.perf_counter(), time.process_time()
        answers = function()
        return {
            "seconds": time.perf_counter() - began,
            "processor": time.process_time() - processor,
            "answers": answers,
        }

    results = {}
    by_engine(Workload(2, [([5, 6, 7], 4)] * 2), [])
    for name, work in workloads(AutoTokenizer.from_pretrained(folder)).items():
        if only and not any(text in name for text in only):
            continue
        read: list[int] = []
        results[name] = {"engine": timed(lambda work=work, read=read: by_engine(work, read)), "read": sum(read)}
        if work.batches:
            with torch.inference_mode():
                results[name]["generate"] = timed(lambda work=work: by_generate(work))
        results[name]["greedy"] = not work.sampling["temperature"]
    print(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--other", type=Path, help="the other checkout (default: only this one is measured)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="workloads whose names contain a TEXT")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return measure(arguments.folder, arguments.only)
    trees = {"this": Path(__file__).parents[1]} | ({"other": arguments.other} if arguments.other else {})
    rounds: list[dict[str, dict[str, Any]]] = []
    for turn in range(arguments.rounds):
        rounds.append({})
        for side, tree in trees.items():
            words = [sys.executable, __file__, str(arguments.folder), "--worker", "--only", *arguments.only]
            environment = os.environ | {"PYTHONPATH": str(tree)}
            out = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True).stdout
            rounds[-1][side] = json.loads(out.splitlines()[-1])
            print(f"round {turn + 1}: {side} is measured", file=sys.stderr)

    def ratio(pairs: list[tuple[float, float]]) -> str:
        ratios = [one / other for one, other in pairs]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    print("| requests | seconds | generate / engine | other / this | tokens read | equal to generate / other |")
    print("|:--|--:|--:|--:|--:|--:|")
    for name, row in rounds[0]["this"].items():
        this = [each["this"][name] for each in rounds]
        cells = [f"{statistics.median(each['engine']['seconds'] for each in this):.2f}"]
        others = [row["generate"]["answers"]] if "generate" in row else []
        pairs = [(each["generate"]["seconds"], each["engine"]["seconds"]) for each in this] if others else []
        cells.append(ratio(pairs) if pairs else "")
        read = [row["read"]]
        if arguments.other:
            pairs = [
                (each["other"][name]["engine"]["seconds"], each["this"][name]["engine"]["seconds"]) for each in rounds
            ]
            others.append(rounds[0]["other"][name]["engine"]["answers"])
            read.append(rounds[0]["other"][name]["read"])
        cells.append(ratio(pairs) if arguments.other else "")
        shares = [statistics.mean(map(list.__eq__, row["engine"]["answers"], other)) for other in others]
        equal = " / ".join(f"{share:.0%}" for share in shares) if row["greedy"] else ""
        cells += [" / ".join(map(str, read)), equal]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
