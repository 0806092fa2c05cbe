"""Puzzle children compared with their parent in vLLM: tokens per second, measured and predicted by the cost model.

    python benchmarks/vllm_children.py [--batch 8] [--prompt 128] [--new-tokens 64] [--rounds 3] [--json FILE]

Requires vLLM and nemo_ext in one environment (`make vllm` makes one for CPUs). A Llama of 130 M parameters with random
weights and its children, all as NemoExtBlocksForCausalLM of our plug-in, run in float32 without compilation,
alternately in separate processes. The cost model (`nemo_ext.puzzle.cost`) gets the FLOP/s of a matrix product and the
bandwidth of reading a large tensor, both measured before, and counts every new token at full context, as in Puzzle's
search. Measured and predicted speed-ups over the parent are compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = {
    **{"hidden_size": 1024, "ffn_hidden_size": 3584, "num_attention_heads": 16, "num_query_groups": 4},
    **{"kv_channels": 64, "padded_vocab_size": 8192},
}
PARENT = "*-" * 8
CHILDREN = {
    "1 KV head": "*{kv=1}-" * 8,
    "half of the attention": "*--" * 4,
    "FFNs of half the width": "*-{ffn=1792}" * 8,
    "as Super's: no-ops, narrow FFNs": "*- *-{ffn=1792} - *-{ffn=1792} *{kv=2}-{ffn=896} -{ffn=1792} *- -",
    "the same, FFNs fused": "*- *-{ffn=5376} *-{ffn=1792} *{kv=2}-{ffn=2688} *-{ffn=7168}",
    "attention replaced by a linear": "*- *{linear}-" * 4,
}


def described(pattern: str) -> Any:
    """Description of a model with this pattern."""
    from nemo_ext.checkpoint.description import from_config
    from nemo_ext.job.config import compose

    sizes = [f"megatron.{name}={size}" for name, size in SIZES.items()]
    words = ["model=llama_nemotron_tiny", f"model.pattern='{pattern}'", *sizes]
    return from_config(compose("describe", words))


def write_model(pattern: str, folder: Path) -> None:
    """Write a Hugging Face folder with random weights."""
    import torch
    from safetensors.torch import save_file

    from nemo_ext.checkpoint.formats import choose

    description = described(pattern)
    found, config = choose(description, "NemoExtBlocksForCausalLM")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)
        for row in found.entries(description)
        for name, shape in zip(row.names, row.shapes, strict=True)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def machine_rates() -> tuple[float, float]:
    """Measure FLOP/s of a float32 matrix product, and bytes/s of reading a large tensor."""
    import torch
    from torch.utils.benchmark import Timer

    def seconds(statement: str, **names: Any) -> float:
        timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=2).median

    weight, inputs, one = torch.randn(4096, 4096), torch.randn(1024, 4096), torch.randn(4096)
    flops = 2 * inputs.numel() * weight.shape[0] / seconds("inputs @ weight", inputs=inputs, weight=weight)
    large = torch.randn(4 * 4096, 4096)
    return flops, large.nbytes / seconds("large @ one", large=large, one=one)


def predicted(pattern: str, arguments: argparse.Namespace, rates: tuple[float, float]) -> dict[str, float]:
    """Seconds of a batch's prompts, and of one new token per sequence, by the cost model."""
    from nemo_ext.puzzle.cost import Serving, block_costs, outside_costs, request_seconds

    context = arguments.prompt + arguments.new_tokens
    sizes = {"batch": arguments.batch, "prompt": arguments.prompt, "context": context}
    precision = {"precision": "fp32", "cache_precision": "fp32"}
    serving = Serving(**sizes, **precision, flops=rates[0], bandwidth=rates[1])
    description = described(pattern)
    costs = [block_costs(description.architecture, block, serving) for block in description.blocks]
    costs.append(outside_costs(description.architecture, serving))
    found = {name: sum(cost[name] for cost in costs) for name in ("parameters", "prefill_seconds", "decode_seconds")}
    return found | {"request_seconds": request_seconds(found, new_tokens=arguments.new_tokens)}


def serve(folder: str, arguments: argparse.Namespace) -> None:
    """Print median seconds of the prompts and of a token over rounds, as JSON."""
    from vllm import LLM, SamplingParams

    context = arguments.prompt + arguments.new_tokens
    engine = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "max_model_len": context}
    engine |= {"max_num_seqs": arguments.batch, "max_num_batched_tokens": arguments.batch * arguments.prompt}
    model = LLM(folder, skip_tokenizer_init=True, disable_log_stats=True, **engine)
    prompts = [
        {"prompt_token_ids": [(step * 7 + row * 131) % 8000 for step in range(arguments.prompt)]}
        for row in range(arguments.batch)
    ]

    def seconds(tokens: int) -> float:
        asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        model.generate(prompts, asked, use_tqdm=False)
        return time.perf_counter() - began

    seconds(2)
    prompt, whole = (statistics.median(seconds(tokens) for _ in range(3)) for tokens in (1, arguments.new_tokens))
    found = {
        "prefill_seconds": prompt,
        "decode_seconds": (whole - prompt) / (arguments.new_tokens - 1),
        "request_seconds": whole,
    }
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("batch", 8), ("prompt", 128), ("new-tokens", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        return serve(arguments.folder, arguments)

    patterns = {"parent": PARENT, **CHILDREN}
    rates = machine_rates()
    print(f"{rates[0] / 1e9:.0f} GFLOP/s, {rates[1] / 1e9:.1f} GB/s", file=sys.stderr)
    predictions = {name: predicted(pattern, arguments, rates) for name, pattern in patterns.items()}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in patterns}
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with tempfile.TemporaryDirectory() as made:
        for number, pattern in enumerate(patterns.values()):
            write_model(pattern, Path(made) / str(number))
        for turn in range(arguments.rounds):
            for number, name in enumerate(patterns):
                words = [sys.executable, __file__, *sys.argv[1:], "--folder", f"{made}/{number}"]
                ended = subprocess.run(words, env={**os.environ, **quiet}, capture_output=True, text=True, check=False)
                if ended.returncode:
                    sys.exit(f"{name}: {ended.stderr[-3000:]}")
                measured[name].append(json.loads(ended.stdout.splitlines()[-1]))
                print(f"round {turn + 1}: {name}: {measured[name][-1]}", file=sys.stderr)
    seconds = {
        name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        for name, rounds in measured.items()
    }
    print(table(predictions, seconds))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"rates": rates, "foretold": predictions, "rounds": measured}, indent=2) + "\n"
        )


def table(told: dict[str, Any], found: dict[str, Any]) -> str:
    """Markdown table of parameters relative to the parent, and speed-ups over it, measured / predicted."""
    lines = ["| child | parameters | prompts | new tokens | tokens per second |", "|:--|--:|--:|--:|--:|"]
    for name in list(told)[1:]:
        cells = [f"{told[name]['parameters'] / told['parent']['parameters']:.2f}"]
        for key in ("prefill_seconds", "decode_seconds", "request_seconds"):
            cells.append(" / ".join(f"{side['parent'][key] / side[name][key]:.2f}" for side in (found, told)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
