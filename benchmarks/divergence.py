"""Time of the KL divergence in parts that stay in the CPU's cache, compared with all tokens at once.

    python benchmarks/divergence.py

Forward and backward pass, on two threads, in rounds of both. Needs 2 GB of memory.
"""

import argparse
import statistics
import time

import torch

from nemo_ext.megatron import divergence


def seconds(student: torch.Tensor, teacher: torch.Tensor, at_once: int, top_k: int | None) -> float:
    """Compute the divergence and its gradient with `at_once` logits at a time, and return the seconds taken."""
    divergence._IN_CACHE = at_once
    student.grad = None
    begin = time.perf_counter()
    divergence.kl_divergence(student, teacher, top_k=top_k).mean().backward()
    return time.perf_counter() - begin


def main() -> None:
    """Print seconds and ratios for both types of logits, with and without `top_k`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    shape, in_cache = (arguments.tokens, arguments.vocabulary), divergence._IN_CACHE
    print("| logits | top_k | at once, s | in parts, s | ratio |\n|:--|--:|--:|--:|--:|")
    for dtype in (torch.float32, torch.bfloat16):
        student, teacher = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
        for top_k in (None, 20):
            pairs = [
                tuple(seconds(student, teacher, at_once, top_k) for at_once in (student.numel(), in_cache))
                for _ in range(1 + arguments.rounds)
            ][1:]  # without the first, which allocates memory
            whole, parts = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(part / time for time, part in pairs)
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {top_k or 'all'} | {whole:.2f} | {parts:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
