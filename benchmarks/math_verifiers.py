"""The math verifier compared with NeMo Gym's math_with_judge (without judge) and TRL's accuracy_reward on one table.

    python benchmarks/math_verifiers.py [--cases tests/rl/verifiers/math_cases.csv] [--only math gym trl]

The table has the mathematically correct verdicts. Each boxed answer is passed to the verifiers' own functions, with
their time limits. Printed: false rewards, false negatives, 99th percentile and maximum of seconds per answer.
"""

import argparse
import csv
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.environments import make

Verifier = Callable[[str, str], bool]


def ours() -> Verifier:
    environment = make("math", {"workers": 1})

    def verify(reference: str, response: str) -> bool:
        assert environment.verify is not None
        verdict: Any = environment.verify(parse_response(response), environment.check({"answer": reference}))
        return bool(verdict.outcome == "correct")

    verify("1", r"\boxed{2}")  # the worker has started
    return verify


def gym() -> Verifier:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig
    from math_verify.metric import math_metric
    from resources_servers.math_with_judge.app import _run_math_verify

    latex = LatexExtractionConfig()
    library = math_metric(gold_extraction_target=(latex,), pred_extraction_target=(ExprExtractionConfig(), latex))
    return lambda reference, response: bool(_run_math_verify(library, reference, response)[0])


def trl() -> Verifier:
    from trl.rewards import accuracy_reward

    # None if it cannot parse the reference: the sample is not used.
    return lambda reference, response: bool(accuracy_reward([[{"content": response}]], [f"${reference}$"])[0])


def main() -> None:
    verifiers = {"math": ours, "gym": gym, "trl": trl}
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=Path, default=Path("tests/rl/verifiers/math_cases.csv"))
    options.add_argument("--only", nargs="+", choices=verifiers, default=list(verifiers))
    chosen = options.parse_args()
    with chosen.cases.open(newline="") as file:
        cases = list(csv.DictReader(file))
    logging.disable(logging.CRITICAL)
    print(f"{len(cases)} cases, {sum(case['expected'] == 'right' for case in cases)} of them right")
    print("| verifier | false rewards | false negatives | 99th percentile, s | maximum, s |\n|---|---|---|---|---|")
    for name in chosen.only:
        verify, said, seconds = verifiers[name](), [], []
        for case in cases:
            begin = time.perf_counter()
            right = verify(case["reference"], rf"\boxed{{{case['answer']}}}")
            seconds.append(time.perf_counter() - begin)
            said.append((right, case["expected"] == "right"))
        percentile = statistics.quantiles(seconds, n=100)[98]
        wrong = said.count((True, False)), said.count((False, True))
        print(f"| {name} | {wrong[0]} | {wrong[1]} | {percentile:.3f} | {max(seconds):.2f} |", flush=True)


if __name__ == "__main__":
    main()
