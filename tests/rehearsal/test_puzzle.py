"""Rehearsed Puzzle stages, compared with real tensors, and settings that are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_ext.architecture.cost import total_params
from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.pickles import METADATA
from nemo_ext.checkpoint.start import as_checkpoint
from nemo_ext.job.config import compose
from nemo_ext.puzzle.configs import stage_config
from nemo_ext.puzzle.settings import settings
from nemo_ext.rehearsal import puzzle as rehearsal
from nemo_ext.rehearsal.puzzle import rehearse_puzzle
from nemo_ext.rehearsal.ranks import run
from nemo_ext.rehearsal.settings import STAGES, rehearsed

TRUTH = Path(__file__).with_name("puzzle_truth.py")
WORDS = ("recipe=puzzle/hybrid", "data=mock", "precision=bf16", "run_dir=unused")


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=pytest.mark.deep if stage == "score" else pytest.mark.slow) for stage in STAGES]
)
def test_memory_and_flops_match_real_tensors(
    stage: str, fork_program: Callable[..., list[int]], tmp_path: Path
) -> None:
    config = compose("rehearse_puzzle", [*WORDS, "megatron.seq_length=64", "puzzle.calibration.sequences=16"])
    own, _ = rehearsed(stage_config(config, from_config(config), 1))
    asked = {"config": own, "puzzle": config["puzzle"], "stage": stage, "ranks": 1, "kernels": False}
    made = run("nemo_ext.rehearsal.puzzle_rank", asked, tmp_path, stage)

    assert fork_program([str(TRUTH), str(tmp_path / f"{stage}.asked.json")], tmp_path / "real") == [0]
    real = json.loads((tmp_path / "real").read_text().splitlines()[-1])

    assert (made["peak"], sum(made["flops"].values())) == (real["peak"], real["flops"])


@pytest.mark.deep
def test_a_compression_stage_by_stage(tmp_path: Path) -> None:
    (tmp_path / "parent").mkdir()
    parent = compose("train", ["recipe=nemotron3_nano/quickstart", "data=mock", "run_dir=unused"])
    (tmp_path / "parent" / "config.yaml").write_text(yaml.safe_dump(parent))

    def peaks(*words: str) -> dict[str, dict[str, Any]]:
        given = [*WORDS, f"puzzle.parent={tmp_path / 'parent'}", "puzzle.distill.together=4", *words]
        ranks = rehearse_puzzle(compose("rehearse_puzzle", given), tmp_path / "ranks")["ranks"]
        return {rank["name"]: rank for rank in ranks}

    whole = peaks()
    words = ("launcher.nproc_per_node=4", "puzzle.distill.inputs=unused", "puzzle.stages=[distill]")
    shared = peaks(*words, "puzzle.heal.tokens=0")
    more = peaks("puzzle.calibration.sequences=40", "puzzle.stages=[score]", "puzzle.heal.tokens=0")

    assert list(whole) == ["library", "distill", "score", "compare", "heal"], "no training of the parent, which exists"
    assert whole["heal"]["peak"]["teacher"] > 0
    peak, part = whole["distill"]["peak"], shared["distill"]["peak"]
    # Masters and two moments in FP32; some Mamba parameters are FP32 in any case.
    assert peak["optimizer"] / 6 == pytest.approx(peak["variants"], rel=1e-3)
    assert part["variants"] == peak["variants"] and part["optimizer"] == pytest.approx(peak["optimizer"] / 4, rel=0.01)
    sent = {each["operation"]: each["bytes"] for each in shared["distill"]["collectives"]}
    assert sent["reduce_scatter_base"] == pytest.approx(2 * sent["allgather_base"], rel=0.01), "FP32 one way, BF16 back"
    # The forward pass starts at the group's first block.
    assert shared["distill"]["flops"]["forward"] < whole["distill"]["flops"]["forward"] / 4
    hidden, length = parent["megatron"]["hidden_size"], 256
    one_more = 8 * length * hidden * 2  # of 8 sequences
    assert more["score"]["peak_bytes"] - whole["score"]["peak_bytes"] == 2 * one_more, "a block's inputs, last states"


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["null", "shard"])
def test_grouped_experts_of_a_parent_with_multi_token_prediction(fsdp: str, tmp_path: Path) -> None:
    words = ["recipe=puzzle/nemotron3_super_quickstart", *WORDS[1:], "puzzle.stages=[score]", f"puzzle.fsdp={fsdp}"]
    config = compose("rehearse_puzzle", [*words, "megatron.moe_grouped_gemm=true"])

    (rank,) = rehearse_puzzle(config, tmp_path)["ranks"]

    whole = from_config(config)
    main = whole.without_prediction()  # a stage runs without the depths
    smallest, largest = (2 * total_params(each.architecture) for each in (main, whole))
    assert smallest <= rank["peak"]["weights"] < largest


@pytest.mark.slow
def test_sharded_ranks_hold_their_part_of_the_parent(tmp_path: Path) -> None:
    def made(fsdp: str) -> dict[str, Any]:
        words = [*WORDS, "launcher.nproc_per_node=4", "puzzle.stages=[library]", f"puzzle.fsdp={fsdp}"]
        config = compose("rehearse_puzzle", [*words, "puzzle.parent=null"])
        return rehearse_puzzle(config, tmp_path / fsdp)

    whole, shared, on_hosts = (made(fsdp) for fsdp in ("null", "shard", "offload"))

    weights = [result["ranks"][0]["peak"]["weights"] for result in (whole, shared, on_hosts)]
    blocks = weights[0] - weights[2]
    assert 0.25 * blocks <= weights[1] - weights[2] < 0.28 * blocks, "padded to a multiple of the ranks"
    gathers = [each for each in shared["ranks"][0]["collectives"] if "gather" in each["operation"]]
    assert sum(each["bytes"] for each in gathers) >= blocks  # of one batch
    (work,) = shared["work"]
    assert work["gathered_bytes"] > 0 == whole["work"][0]["gathered_bytes"]
    assert work["written_bytes"] == whole["work"][0]["written_bytes"] > 0


def test_healing_has_the_depths_of_a_parent_rather_than_the_recipe_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    made = compose("describe", ["model=nemotron3_super_tiny", "model.pattern=MEM*EME-/*E"])
    made["megatron"].pop("mtp_use_repeated_layer")
    (tmp_path / "model" / "mine.yaml").write_text(yaml.safe_dump({name: made[name] for name in ("model", "megatron")}))
    words = ["recipe=puzzle/nemotron3_super_quickstart", *WORDS[1:], "puzzle.stages=[heal]"]
    config = compose("rehearse_puzzle", [*words, f"puzzle.parent={tmp_path}"])
    healed = []

    def kept(run: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        healed.append(run)
        return {"set_aside": [], "pipeline": 1, "ranks": []}

    monkeypatch.setattr(rehearsal, "rehearse", kept)
    rehearse_puzzle(config, tmp_path / "ranks")

    (tmp_path / METADATA).touch()
    job = as_checkpoint(config, tmp_path)
    assert healed[0]["model"]["pattern"] == job["model"]["pattern"] == "MEM*EME-/*E"
    flags = ({k: v for k, v in each["megatron"].items() if k.startswith("mtp_")} for each in (healed[0], job))
    assert next(flags) == next(flags) == {"mtp_loss_scaling_factor": 0.3}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["puzzle.parent=/nowhere"], "puzzle.parent=/nowhere: no such directory"),
        (
            ["puzzle.distill.batch=5", "launcher.nproc_per_node=2"],
            "puzzle.distill.batch=5 is not divisible by the 2 ranks",
        ),
        (["puzzle.calibration.sequences=8", "launcher.nproc_per_node=2"], "must be above "),
    ],
)
def test_invalid_settings_are_refused_before_a_process_starts(words: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        rehearse_puzzle(compose("rehearse_puzzle", [*WORDS, *words]), tmp_path / "ranks")
    assert not (tmp_path / "ranks").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["puzzle.stages=[search]", "puzzle.distill.batch=5", "launcher.nproc_per_node=2"],
        ["puzzle.stages=[distill]", "puzzle.distill.steps=0"],
        [
            "puzzle.stages=[distill]",
            *(f"puzzle.variants.{name}=[]" for name in ("kv", "ffn", "experts", "expert_ffn", "mamba_heads")),
            "puzzle.variants.linear=false",
        ],
    ],
)
def test_stages_without_a_model_are_not_rehearsed(words: list[str], tmp_path: Path) -> None:
    made = rehearse_puzzle(compose("rehearse_puzzle", [*WORDS, *words]), tmp_path / "ranks")
    assert made["ranks"] == []


def test_settings_match_those_of_puzzle() -> None:
    assert settings(compose("puzzle")["puzzle"]) == settings(compose("rehearse_puzzle")["puzzle"])
