"""Tokens and log-probabilities of a model folder in vLLM, in a process of its own: an engine leaves state behind.

python tokens.py ASKED.json ANSWERED.json

ASKED has `folder`, `prompts`, `new_tokens`, `twice` and `engine`, which are vLLM's arguments.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main() -> None:
    import kernels
    from vllm import LLM, SamplingParams

    kernels.install()
    asked = json.loads(Path(sys.argv[1]).read_text())
    given = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "disable_log_stats": False}
    given |= asked["engine"]
    model = LLM(asked["folder"], skip_tokenizer_init=True, **given)

    def greedy(**more: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=asked["new_tokens"], ignore_eos=True, detokenize=False, **more)

    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    answers = model.generate(prompts, greedy(prompt_logprobs=0, logprobs=0), use_tqdm=False)
    if asked.get("twice"):  # the second time from the prefix cache
        again = model.generate(prompts, greedy(), use_tqdm=False)
        assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in answers]
        cached = sum(each.num_cached_tokens or 0 for each in again)
    Path(sys.argv[2]).write_text(
        json.dumps(
            {
                "tokens": [list(each.outputs[0].token_ids) for each in answers],
                "prompt": [[value_of(one) for one in each.prompt_logprobs[1:]] for each in answers],
                "new": [[value_of(one) for one in each.outputs[0].logprobs] for each in answers],
                "cached": cached if asked.get("twice") else 0,
                "preemptions": counted(model, "vllm:num_preemptions"),
                "drafted": counted(model, "vllm:spec_decode_num_draft_tokens"),
                "accepted": counted(model, "vllm:spec_decode_num_accepted_tokens"),
                "model": type(model.llm_engine.model_executor.driver_worker.worker.model_runner.model).__module__
                if not asked["engine"].keys() & {"tensor_parallel_size", "pipeline_parallel_size"}
                else "",
            }
        )
    )


def counted(model: "LLM", name: str) -> int:
    """The value of one of the engine's counters."""
    return sum(each.value for each in model.get_metrics() if each.name == name)


def value_of(found: dict) -> float:
    """The log-probability of the only token of a position."""
    (one,) = found.values()
    return one.logprob


if __name__ == "__main__":
    main()
