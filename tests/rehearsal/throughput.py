"""Published throughputs compared with predicted ones; run as a script, it writes the table of docs/throughput.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemo_ext.architecture.gpus import GPUS
from nemo_ext.job.config import compose
from nemo_ext.job.files import write_text
from nemo_ext.job.report import markdown_table
from nemo_ext.rehearsal.search import predict

PAGE = Path(__file__).parents[2] / "docs" / "throughput.md"
BEGIN, END = "<!-- made by tests/rehearsal/throughput.py -->", "<!-- end -->"

WHOLE = (
    "megatron.tensor_model_parallel_size=1",
    "megatron.sequence_parallel=false",
    "megatron.recompute_granularity=null",
    "megatron.recompute_modules=null",
)
"""A copy of the model on each GPU, without recomputation."""
PLAIN = (
    "data=mock",
    "megatron.bf16=true",
    "megatron.use_distributed_optimizer=true",
    "megatron.overlap_grad_reduce=true",
    "megatron.overlap_param_gather=true",
)
"""Training settings of models without a recipe."""
NANO = ("recipe=nemotron3_nano/pretrain", "phases=null", "megatron.moe_token_dispatcher_type=flex")
BRIDGE = "Megatron-Bridge, docs/performance-summary-archive.md"
AUTOMODEL = "NeMo AutoModel, docs/performance-summary.md"
FOUNDRY = "llm-foundry, scripts/train/benchmarking (MPT)"
HOURS = "GPU-hours of the whole run, with restarts, checkpoints and validation"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run.

    Attributes:
        name: model and precision; * if a rate was chosen to fit the run, † if parts of the model were chosen after it
            had been seen.
        gpu: name of the GPU.
        tokens_per_second: published tokens per second and GPU.
        source: where it is published.
        words: the run as arguments of `nemo-ext rehearse`.
        explained: reason why a prediction deviates by more than its error.
    """

    name: str
    gpu: str
    tokens_per_second: float
    source: str
    words: tuple[str, ...]
    explained: str = ""


def sizes(nodes: int, length: int, micro: int, batch: int) -> tuple[str, ...]:
    """Arguments for nodes of eight GPUs, and a sequence length, micro-batch and global batch."""
    return (
        f"launcher.nodes={nodes}",
        "launcher.nproc_per_node=8",
        f"megatron.seq_length={length}",
        f"megatron.micro_batch_size={micro}",
        f"megatron.global_batch_size={batch}",
    )


def large(model: str, nodes: int, batch: int, tensor: int, virtual: int, context: int) -> tuple[str, ...]:
    """Arguments of Megatron-Bridge's pipelined Llama recipes in FP8."""
    return (
        *(f"model=llama_nemotron_parent_{model}", *PLAIN, "precision=fp8_current", *sizes(nodes, 8192, 1, batch)),
        *(f"megatron.tensor_model_parallel_size={tensor}", "megatron.sequence_parallel=true"),
        *("megatron.pipeline_model_parallel_size=8", f"model.virtual_pipeline_stages={virtual}"),
        *(f"megatron.context_parallel_size={context}", "megatron.tp_comm_overlap=true"),
    )


def foundation(length: int) -> tuple[str, ...]:
    """Arguments of Domyn-Small's foundation training at a sequence length, in the layout of its continued one."""
    steps = (f"megatron.seq_length={length}", f"megatron.global_batch_size={4194304 // length}")
    return ("recipe=domyn_small/foundation", "phases=null", "megatron.context_parallel_size=2", *steps)


A100, H100 = "A100-80GB", "H100-80GB"
RUNS = (
    Run(
        name="Domyn-Small CPT, 32,768 tokens",
        gpu="A100-64GB",
        tokens_per_second=503e9 / 77_000 / 3600,
        source="paper, section 3.2: 503 B tokens in 77,000 GPU-hours",
        words=("recipe=domyn_small/cpt",),
    ),
    Run(
        name="Domyn-Small foundation, 16,384 tokens",
        gpu="A100-64GB",
        tokens_per_second=3e12 / 417_000 / 3600,
        source="paper, section 3.1: 3 T tokens in 417,000 GPU-hours, at 4,096 to 16,384 tokens",
        words=foundation(16384),
    ),
    Run(
        name="the same, 8,192 tokens",
        gpu="A100-64GB",
        tokens_per_second=3e12 / 417_000 / 3600,
        source="the same",
        words=foundation(8192),
        explained=f"{HOURS}; the part at each length is not published",
    ),
    Run(
        name="OLMo 1 7B, 2,048 tokens",
        gpu=A100,
        tokens_per_second=4641,
        source=FOUNDRY,
        words=("recipe=olmo1/7b", *WHOLE, *sizes(1, 2048, 6, 96)),
        explained="kernels of 2023; FlashAttention's README has 72 % MFU for GPTs on an A100, predicted are 72 %",
    ),
    Run(
        name="OLMo 1 7B, 2,048 tokens *",
        gpu=H100,
        tokens_per_second=10_643,
        source=FOUNDRY,
        words=("recipe=olmo1/7b", *WHOLE, *sizes(1, 2048, 6, 48)),
    ),
    Run(
        name="OLMo 1 7B, 4,096 tokens",
        gpu=H100,
        tokens_per_second=10_000,
        source="OLMo-core 1.3 to 1.5, README",
        words=("recipe=olmo1/7b", *WHOLE, *sizes(16, 4096, 2, 1024)),
    ),
    Run(
        name="OLMo 1 1B, 4,096 tokens",
        gpu=H100,
        tokens_per_second=46_000,
        source="OLMo-core, pull request 38",
        words=("recipe=olmo1/1b", *WHOLE, *sizes(8, 4096, 4, 1024)),
        explained="small kernels, whose launches and tails are not counted",
    ),
    Run(
        name="OLMo 3 7B",
        gpu=H100,
        tokens_per_second=5.93e12 / 234_000 / 3600,
        source="5.93 T tokens (model card) in 234,000 hours (muxup.com, Olmo 3 training cost)",
        words=("recipe=olmo3/7b_pretrain",),
        explained=f"{HOURS}; FSDP in place of this layout",
    ),
    Run(
        name="OLMo 3 32B",
        gpu=H100,
        tokens_per_second=5.5e12 / 1_050_000 / 3600,
        source="5.5 T tokens in 1.05 M hours (as above)",
        words=("recipe=olmo3/32b_pretrain",),
        explained=f"{HOURS}; FSDP in place of this layout",
    ),
    Run(
        name="Llama 3.1 8B, FP8 †",
        gpu=H100,
        tokens_per_second=14_451,
        source=f"{BRIDGE}, 25.11, with FSDP over the 8 GPUs",
        words=("model=llama_nemotron_nano_8b", *PLAIN, "precision=fp8_current", *sizes(1, 8192, 1, 128)),
    ),
    Run(
        name="Llama 3 70B, FP8 †",
        gpu=H100,
        tokens_per_second=1_664,
        source=f"{BRIDGE}, 26.04.01",
        words=large("70b", 8, 256, 4, 5, 1),
    ),
    Run(
        name="Llama 3.1 405B, FP8 †",
        gpu=H100,
        tokens_per_second=326,
        source=f"{BRIDGE}, 26.06",
        words=large("405b", 128, 1536, 8, 8, 2),
    ),
    Run(
        name="Nemotron 3 Nano *",
        gpu=H100,
        tokens_per_second=16_789,
        source=f"{AUTOMODEL}, 26.02",
        words=(*NANO, *WHOLE, *sizes(1, 4096, 4, 512)),
    ),
    Run(
        name="Nemotron 3 Nano, FP8 *",
        gpu=H100,
        tokens_per_second=14_719,
        source=f"{BRIDGE}, 26.06",
        words=(*NANO, "precision=fp8_current", *sizes(2, 8192, 1, 1024)),
    ),
    Run(
        name="Nemotron 3 Super †",
        gpu=H100,
        tokens_per_second=4_497,
        source=f"{AUTOMODEL}, 26.02",
        words=(
            *("recipe=nemotron3_super/pretrain", "phases=null", "megatron.moe_token_dispatcher_type=flex"),
            *(*WHOLE, *sizes(8, 4096, 2, 512)),
        ),
    ),
)


@cache
def predicted(run: Run) -> Mapping[str, Any]:
    """The prediction for a run, as `nemo-ext rehearse` reports it."""
    return predict(compose("rehearse", [*run.words, "run_dir=unused"]), run.gpu, GPUS[run.gpu])


def deviation(run: Run) -> float:
    """Relative deviation of the prediction from the published throughput."""
    return float(predicted(run)["tokens_per_second"]) / run.tokens_per_second - 1


def table() -> str:
    """Table of all runs."""
    heading = ("run", "GPUs", "published", "predicted", "", "MFU", "source", "explanation")
    rows = []
    for run in RUNS:
        found = predicted(run)
        rows.append(
            (
                run.name,
                f"{found['gpus']:,} {run.gpu}",
                f"{run.tokens_per_second:,.0f}",
                f"{found['tokens_per_second']:,.0f}",
                f"{deviation(run):+.0%}",
                f"{found['mfu']:.0%}",
                run.source,
                run.explained,
            )
        )
    return markdown_table(heading, rows)


def main() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    write_text(PAGE, f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    main()
