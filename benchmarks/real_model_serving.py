"""A real model and its Puzzle child in `nemo-ext serve`: our engine compared with vLLM, on the CPU and in one run.

    python benchmarks/real_model_serving.py FOLDER [CHILD ...] [--dtypes float32 bfloat16] [--rounds 3] [--json FILE]

Needs vLLM and nemo_ext in one environment (`make vllm` sets one up for CPUs). Every folder is served by both engines,
which are up during the whole run. Prompts are docstrings of the standard library, half continued as plain text and half
explained in a chat. Greedy answers are compared token by token; at the first difference both have the same context, so
the log-probabilities of both candidates show how close the choice was. The error is the largest difference of
log-probabilities before that. Speeds are new tokens per second, without early ends, with new prompts each time, as vLLM
caches them; sides alternate, ratios are taken within a round, and their median and range reported.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from serve import ours, post

AT_A_TIME = (1, 8)
Answer = list[tuple[str, dict[str, float]]]
"""Tokens, each with the log-probabilities of the most likely tokens at its position."""


def requests(count: int, seed: int, **more: Any) -> list[dict[str, Any]]:
    """Request bodies, plain and chat."""
    from nemo_ext.evaluation.generators.sources import python_sources

    texts = [row["text"].strip() for row in python_sources(count, seed=seed, part="docstrings", characters=600)]
    ask = "Explain in one sentence what this text says:\n\n"
    chats = [{"messages": [{"role": "user", "content": ask + text}]} | more for text in texts[count // 2 :]]
    if most := more.get("logprobs"):
        chats = [chat | {"logprobs": True, "top_logprobs": most} for chat in chats]
    return [{"prompt": text} | more for text in texts[: count // 2]] + chats


def tokens_of(response: dict[str, Any], names: Any) -> Answer:
    """Tokens of an answer by the names of our server; vLLM returns ids."""
    found = response["choices"][0]["logprobs"]

    def name(token: str) -> str:
        return names.text(int(token.removeprefix("token_id:"))) if token.startswith("token_id:") else token

    rows = [(row["token"], {x["token"]: x["logprob"] for x in row["top_logprobs"]}) for row in found.get("content", [])]
    rows = rows or list(zip(found["tokens"], found["top_logprobs"], strict=True))
    return [(name(token), {name(key): value for key, value in top.items()}) for token, top in rows]


def compared(one: list[Answer], other: list[Answer]) -> dict[str, Any]:
    """Fraction of equal answers, and for the rest the position of the first difference and how close the choice was."""
    places, gaps, errors = [], [], [0.0]
    for pair in zip(one, other, strict=True):
        for place, ((a, a_top), (b, b_top)) in enumerate(itertools.zip_longest(*pair, fillvalue=("", {}))):
            if a != b:
                places.append(place)
                gaps.append(max(top.get(x, 99.0) - top.get(y, -99.0) for top, x, y in ((a_top, a, b), (b_top, b, a))))
                break
            errors.append(abs(a_top[a] - b_top[a]))
    return {"equal": 1 - len(places) / len(one), "places": places, "gaps": gaps, "largest_error": max(errors)}


def measure(
    models: list[Path], dtype: str, arguments: argparse.Namespace
) -> tuple[dict[str, Any], dict[Any, list[float]]]:
    """Comparisons of answers, and tokens per second by model, engine and concurrency, for all rounds."""
    from transformers import PreTrainedTokenizerFast

    from nemo_ext.serving.text import TokenBytes

    answers: dict[tuple[str, str, int], list[Answer]] = {}
    rates, servers = defaultdict(list), {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for model, engine in itertools.product(models, ("ours", "vLLM")):
            words = [f"serving.dtype={dtype}", "serving.max_length=1024"]
            words += ["serving.engine=vllm", f"serving.vllm={arguments.vllm}"] if engine == "vLLM" else []
            start = ours(model, Path(folder), f"{engine}-{model.name}", *words)
            servers[model.name, engine] = stack.enter_context(start)
        names = TokenBytes(PreTrainedTokenizerFast.from_pretrained(models[0]))
        for (model, engine), at_a_time in itertools.product(servers, AT_A_TIME):
            more = {"max_tokens": arguments.new_tokens, "logprobs": 5}
            more |= {"return_tokens_as_token_ids": True} if engine == "vLLM" else {}
            _, made = asyncio.run(post(servers[model, engine], requests(arguments.prompts, 0, **more), at_a_time))
            answers[model, engine, at_a_time] = [tokens_of(each, names) for each in made]
        for turn, at_a_time in itertools.product(range(arguments.rounds + 1), AT_A_TIME):
            asked = requests(arguments.prompts, 10 * turn + at_a_time, max_tokens=arguments.new_tokens, ignore_eos=True)
            for key, server in servers.items():
                seconds, made = asyncio.run(post(server, asked, at_a_time))
                rate = sum(each["usage"]["completion_tokens"] for each in made) / seconds
                print(f"{dtype}, {key}, {at_a_time} at a time: {rate:.1f} tokens/s", file=sys.stderr)
                rates[*key, at_a_time] += [rate] if turn else []  # the first round is warm-up
    pairs = {}
    for model, number in itertools.product([model.name for model in models], AT_A_TIME):
        pairs[f"{model}, ours and vLLM, {number} at a time"] = [
            answers[model, side, number] for side in ("ours", "vLLM")
        ]
    for model, engine in servers:
        pairs[f"{model}, {engine}, 1 and 8 at a time"] = [answers[model, engine, number] for number in AT_A_TIME]
    return {name: compared(*pair) for name, pair in pairs.items()}, rates


def tables(comparisons: dict[str, Any], rates: dict[Any, list[float]], models: list[str]) -> str:
    """Comparisons and speeds as Markdown."""
    lines = ["| greedy answers | equal | differ first at | gap of logits there | error |\n|:--|--:|--:|--:|--:|"]
    for name, row in comparisons.items():
        places = ", ".join(map(str, sorted(row["places"]))) or "-"
        gap = f"up to {max(row['gaps']):.1g}" if row["gaps"] else "-"
        lines.append(f"| {name} | {row['equal']:.0%} | {places} | {gap} | {row['largest_error']:.1g} |")
    lines += ["", "| tokens/s | at a time | | | ratio |", "|:--|--:|--:|--:|--:|"]
    sides = [((model, "ours"), (model, "vLLM")) for model in models]
    sides += [((model, engine), (models[0], engine)) for model in models[1:] for engine in ("ours", "vLLM")]
    for (one, other), at_a_time in itertools.product(sides, AT_A_TIME):
        pair = rates[*one, at_a_time], rates[*other, at_a_time]
        ratios = [a / b for a, b in zip(*pair, strict=True)]
        speeds = " | ".join(f"{statistics.median(side):.1f}" for side in pair)
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {', '.join(one)} / {', '.join(other)} | {at_a_time} | {speeds} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="FOLDER", help="the parent first")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    for name, size in (("prompts", 16), ("new-tokens", 64), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    parser.add_argument("--vllm", default="{}", help="serving.vllm, such as '{enforce_eager: true}'")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    # By default, vLLM reserves a core for its HTTP server and takes much of the memory.
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{arguments.threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # also ends the servers
    results = {}
    for dtype in arguments.dtypes:
        comparisons, rates = measure(arguments.models, dtype, arguments)
        results[dtype] = {"compared": comparisons, "rates": {", ".join(map(str, key)): x for key, x in rates.items()}}
        print(f"\n{dtype}, load at the end {os.getloadavg()[0]:.1f}\n")
        print(tables(comparisons, rates, [model.name for model in arguments.models]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
