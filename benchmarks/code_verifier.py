"""The code verifier compared with NeMo Gym's code_gen on the same programs and tests, in one run: answers per second.

    python benchmarks/code_verifier.py [--answers 64] [--tests 10] [--rounds 3] [--concurrency 2]

Answers are right and wrong solutions of our small tasks, in both styles. Gym's side
is its server's work after reading a request: the Ray function `check_correctness_remote`, with the same concurrency.
Both stop at an answer's first failing test; verdicts are compared before timing. Gym's side has no sandbox.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.sandbox.sandbox import Sandbox
from nemo_ext.rl.tasks import programs
from nemo_ext.rl.verifiers import code


@dataclass(frozen=True)
class Case:
    """An answer with its tests."""

    answer: str
    reference: code.Reference
    unit_tests: dict[str, Any]


def cases(answers: int, tests: int) -> list[Case]:
    """Right solutions of small tasks; every fourth one fails on its last test."""
    made = []
    for index, task in enumerate(programs.tasks(answers, seed=1, tests=tests)):
        reference = json.loads(json.dumps(task.reference))
        if index % 4 == 3:
            last = reference["tests"][-1]
            last["output" if "output" in last else "expected"] = "another"
        made.append(Case(programs.solution(task), code.check(reference, max_tests=tests), for_gym(reference)))
    return made


def for_gym(reference: dict[str, Any]) -> dict[str, Any]:
    """Reference in LiveCodeBench's format."""
    tests = reference["tests"]
    if reference["style"] == "stdin":
        return {
            "inputs": [test["input"] for test in tests],
            "outputs": [test["output"] for test in tests],
            "fn_name": None,
        }
    inputs = ["\n".join(json.dumps(argument) for argument in test["args"]) for test in tests]
    outputs = [json.dumps(test["expected"]) for test in tests]
    return {"inputs": inputs, "outputs": outputs, "fn_name": reference["function"]}


def gyms_side(concurrency: int) -> Callable[[Sequence[Case]], list[bool]]:
    """Verify with Gym's verifier, including Ray."""
    import nemo_gym
    import ray

    sys.path.insert(0, str(Path(nemo_gym.__file__).parents[1] / "resources_servers" / "code_gen"))
    ray.init(num_cpus=concurrency, include_dashboard=False, log_to_driver=False, logging_level="error")
    from lcb_integration.compute_code_generation_metrics import check_correctness_remote
    from lcb_integration.extraction_utils import LMStyle, extract_code

    async def one(case: Case, gate: asyncio.Semaphore) -> bool:
        source = extract_code(case.answer, LMStyle.OpenAIChat)
        async with gate:
            sample = {"input_output": json.dumps(case.unit_tests)}
            result, _ = await check_correctness_remote.remote(sample, source, 10, False)
        return all(passed is True or passed == 1 for passed in result)

    async def every(cases: Sequence[Case]) -> list[bool]:
        gate = asyncio.Semaphore(concurrency)
        return list(await asyncio.gather(*(one(case, gate) for case in cases)))

    return lambda cases: asyncio.run(every(cases))


def our_side(concurrency: int) -> Callable[[Sequence[Case]], list[bool]]:
    """Verify with our verifier."""
    sandbox = Sandbox(concurrency=concurrency)
    print(sandbox.describe())

    async def every(cases: Sequence[Case]) -> list[bool]:
        responses = [parse_response(case.answer) for case in cases]
        verdicts = await asyncio.gather(
            *(
                code.verify_async(response, case.reference, sandbox=sandbox)
                for response, case in zip(responses, cases, strict=True)
            )
        )
        assert all(verdict.outcome != "error" for verdict in verdicts), verdicts
        return [verdict.score == 1 for verdict in verdicts]

    return lambda cases: asyncio.run(every(cases))


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--tests", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=2)
    options = parser.parse_args()
    arguments = cases(options.answers, options.tests)
    sides = {"ours": our_side(options.concurrency), "Gym": gyms_side(options.concurrency)}
    verdicts = {name: side(arguments) for name, side in sides.items()}
    assert verdicts["ours"] == verdicts["Gym"], "the verdicts differ"
    print(f"{sum(verdicts['ours'])} of {len(arguments)} answers are right, says either")
    ratios = []
    for number in range(options.rounds):
        rates = {}
        for name, side in sides.items():
            began = time.perf_counter()
            side(arguments)
            rates[name] = len(arguments) / (time.perf_counter() - began)
        ratios.append(rates["ours"] / rates["Gym"])
        print(f"round {number}: ours {rates['ours']:.1f}/s, Gym {rates['Gym']:.1f}/s, ratio {ratios[-1]:.2f}")
    print(f"median ratio {statistics.median(ratios):.2f} ({options.answers} answers, {options.tests} tests each)")


if __name__ == "__main__":
    main()
