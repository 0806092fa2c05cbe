"""Rehearsed ranks of small jobs, compared with the cost model and with real ranks."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job.config import compose
from nemo_ext.rehearsal.ranks import rehearse
from nemo_ext.rehearsal.settings import rehearsed

TRUTH = Path(__file__).with_name("truth.py")
REAL = ("nemotron3_nano, TP2 SP", "llama_nemotron, PP2", "nemotron3_nano, EP2", "olmo3, DP2")
TINY = ("recipe=nemotron3_nano/quickstart", "run_dir=unused", "data=mock", "megatron.bf16=true")


def rehearsed_ranks(*words: str, stages: Any = "all", folder: Path) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = rehearse(compose("rehearse", [*TINY, *words]), stages, folder)["ranks"]
    return ranks


def test_unknown_pipeline_ranks(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"rehearse.stages=\[0, 3\]: expected pipeline ranks of the layout, from 0 to 0"
    ):
        rehearsed_ranks(stages=[0, 3], folder=tmp_path)


def test_the_phase_with_the_longest_sequences_is_rehearsed() -> None:
    config, _ = rehearsed(compose("rehearse", ["recipe=domyn_small/foundation"]))
    flags = config["megatron"]
    assert (flags["seq_length"], flags["global_batch_size"]) == (16384, 256)
    assert flags["max_position_embeddings"] >= 16384


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a multiple of tensor_parallel=3"):
        rehearsed_ranks("launcher.nproc_per_node=3", "megatron.tensor_model_parallel_size=3", folder=tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("launcher.nproc_per_node=2", "megatron.use_distributed_optimizer=true"), marks=pytest.mark.deep, id="data"
        ),
        pytest.param(
            (
                "launcher.nproc_per_node=4",
                "megatron.tensor_model_parallel_size=2",
                "megatron.sequence_parallel=true",
                "megatron.pipeline_model_parallel_size=2",
            ),
            marks=pytest.mark.slow,
            id="tensor_pipeline",
        ),
        pytest.param(
            (
                "launcher.nproc_per_node=8",
                "megatron.micro_batch_size=2",
                "megatron.expert_model_parallel_size=4",
                "megatron.moe_token_dispatcher_type=alltoall",
            ),
            marks=pytest.mark.slow,
            id="expert",
        ),
        pytest.param(
            ("model=llama_nemotron_tiny", "launcher.nproc_per_node=2", "megatron.context_parallel_size=2"),
            marks=pytest.mark.slow,
            id="context",
        ),
        pytest.param(
            (
                "model=olmo3_tiny",
                "launcher.nproc_per_node=2",
                "megatron.pipeline_model_parallel_size=2",
                "model.pattern=*-|*-|*-|*-",
            ),
            marks=pytest.mark.deep,
            id="interleaved",
        ),
    ],
)
def test_parameters_and_states_match_the_cost_model(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in rehearsed_ranks(*words, folder=tmp_path):
        guess = rank["estimate"]
        assert rank["parameters"] == guess["parameters"]
        for kind in ("weights", "gradients", "optimizer"):
            assert rank["peak"][kind] == pytest.approx(guess[kind], rel=0.02), kind
        assert sum(rank["flops"].values()) == pytest.approx(guess["flops"], rel=0.1)
        assert rank["peak"]["activations"] > 0
    assert not (tmp_path / "unused").exists(), "nothing is written to the run directory"


@pytest.mark.deep
@pytest.mark.parametrize("case", REAL)
def test_real_ranks_match_their_rehearsal(
    case: str, fork_program: Callable[..., list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, buffers, optimizer states and collectives exactly; peak memory approximately (see truth.py)."""
    monkeypatch.chdir(tmp_path)
    codes = fork_program([str(TRUTH), case, "--json", str(tmp_path / "found.json")], tmp_path / "log")
    assert codes == [0], (tmp_path / "log").read_text()[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())[case]

    assert len(found) == 2
    for rank in found:
        assert rank["differences"] == []
        assert sum(calls for *_, calls, _ in rank["real"]["collectives"]) > 10
        assert rank["said"]["micro_batches"] > rank["said"]["rehearsed_micro_batches"], "and scaled"
        whole, rest = rank["ratios"]
        assert whole == pytest.approx(1, abs=0.05)
        assert rest == pytest.approx(1, abs=0.1)  # gloo's threads hold some tensors longer


@pytest.mark.slow
def test_imbalance_adds_work_of_experts(tmp_path: Path) -> None:
    words = ("launcher.nproc_per_node=4", "megatron.expert_model_parallel_size=4", "megatron.global_batch_size=32")
    words += ("megatron.moe_token_dispatcher_type=alltoall", "model.pattern=*E")
    (even,), (uneven,) = (
        rehearse(compose("rehearse", [*TINY, *words]), "all", tmp_path / str(number), imbalance=number)["ranks"]
        for number in (1, 2)
    )
    hidden, ffn, copies = 192, 128, 8 * 256 * 2
    more = sum(uneven["flops"].values()) - sum(even["flops"].values())
    assert more == 3 * 2 * 2 * hidden * ffn * copies * even["micro_batches"]
    assert uneven["peak_bytes"] - even["peak_bytes"] > 2 * hidden * copies


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "model=domyn_small_tiny megatron.context_parallel_size=4 megatron.cp_comm_type=a2a",
            "block 1 (*) has 6 heads per tensor-parallel rank, but cp_comm_type=a2a requires a multiple of "
            "context_parallel_size=4: set megatron.cp_comm_type=p2p or all_gather",
        ),
        (
            "model=olmo3_tiny megatron.context_parallel_size=4",
            "block 1 (*): a window of 64 with context_parallel_size=4 requires megatron.cp_comm_type=all_gather or "
            "a2a, not p2p",
        ),
        (
            "model.pattern=*E{ffn=120} precision=fp8_current",
            "precision_plan.recipe=tensorwise does not support some sizes (block 1 fc1: out 120 is not a multiple of "
            "16 (tensorwise); use 112 or 128",
        ),
        (
            "model=domyn_small_tiny megatron.context_parallel_size=4 megatron.seq_length=252",
            "megatron.seq_length=252 is not a multiple of 2 x context_parallel_size 4 = 8: set 248 or 256",
        ),
        (
            "model=domyn_small_tiny megatron.tensor_model_parallel_size=2 megatron.sequence_parallel=true "
            "megatron.seq_length=255",
            "megatron.seq_length=255 is not a multiple of tensor_model_parallel_size 2 (sequence_parallel) = 2: set "
            "254 or 256",
        ),
        (
            "model=domyn_small_tiny megatron.tensor_model_parallel_size=2 megatron.padded_vocab_size=385",
            "vocab_size=385 must be a multiple of tensor_parallel=2",
        ),
        (
            "model=domyn_small_tiny megatron.global_batch_size=12",
            "global_batch_size=12 must be a multiple of 32 (micro_batch_size 8 x 4 data-parallel ranks)",
        ),
        (
            "model=olmo3_tiny megatron.pipeline_model_parallel_size=2 model.pattern=*-|*-|*-|*- "
            "megatron.micro_batch_size=1 megatron.global_batch_size=6",
            "global_batch_size=6 makes 3 micro-batches, but 4 interleaved stages on 2 pipeline ranks require a "
            "multiple of 2",
        ),
        (
            "model=domyn_small_tiny megatron.pipeline_model_parallel_size=4 model.pattern=*-||*|-",
            "stage 1 (of 0 to 3) of model.pattern has no block, and Megatron-Core's gradients become NaN after an "
            "empty stage: move a cut `|`",
        ),
    ],
    ids=["heads", "window", "fp8", "sequence", "sequence_parallel", "vocabulary", "batch", "interleaved", "empty"],
)
def test_mistakes_are_found_before_a_rank_starts(words: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        rehearsed_ranks("launcher.nproc_per_node=4", *words.split(), folder=tmp_path)


@pytest.mark.slow
def test_context_parallel_attention_communicates_by_its_type() -> None:
    """With 4 ranks, 2 MiB of queries, and 1 MiB each of keys and values."""
    import torch

    from nemo_ext.rehearsal.kernels import _sent

    query, key = (torch.empty(256, 1, heads, 128, dtype=torch.bfloat16) for heads in (32, 16))
    unit = 2**20
    assert _sent("p2p", 1, query, key, key) == ([], [])
    assert _sent("p2p", 4, query, key, key) == ([("send_recv", 3, 6 * unit)], [("send_recv", 3, 12 * unit)])
    gathered = ("allgather_base", 2, 8 * unit)
    assert _sent("all_gather", 4, query, key, key) == ([gathered], [gathered, ("reduce_scatter_base", 2, 8 * unit)])
    assert _sent("a2a", 4, query, key, key) == ([("alltoall_base", 4, 6 * unit)], [("alltoall_base", 5, 8 * unit)])


@pytest.mark.slow
def test_an_assertion_of_megatron_names_the_block(tmp_path: Path) -> None:
    words = ("megatron.moe_router_load_balancing_type=sinkhorn", "megatron.moe_aux_loss_coeff=0.01")
    with pytest.raises(ValueError, match="stage 0 cannot") as caught:
        rehearsed_ranks("model=nemotron3_nano_tiny", "model.pattern=MEM*", *words, folder=tmp_path)
    assert "block 2 (E): AssertionError: Sinkhorn routing does not support aux loss" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_fp16_has_moments_too(tmp_path: Path) -> None:
    """Fake gradients must not count as overflow, which would skip the step and create no moments."""
    (rank,) = rehearsed_ranks("model=domyn_small_tiny", "megatron.bf16=false", "megatron.fp16=true", folder=tmp_path)
    assert rank["peak"]["optimizer"] == pytest.approx(12 * rank["parameters"], rel=0.01)
    assert rank["peak"]["gradients"] == pytest.approx(rank["estimate"]["gradients"], rel=0.01)
