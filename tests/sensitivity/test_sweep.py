"""Measurements on real models, and the complete job."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from nemo_ext import launch
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.blockwise.parent import Parent
from nemo_ext.data.tokenize import tokenize_blend
from nemo_ext.describe import describe
from nemo_ext.job.config import compose
from nemo_ext.megatron.fp8 import Precision
from nemo_ext.megatron.session import build_model
from nemo_ext.sensitivity import job
from nemo_ext.sensitivity.units import only, units


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Import Megatron, which takes seconds, when tests start rather than when they are collected."""
    global in_float8, Measurements, run
    from nemo_ext.megatron.float8_modules import in_float8
    from nemo_ext.sensitivity.sweep import Measurements, run


ATTENTION = "attention and what feeds it"


@pytest.fixture
def parent(megatron: None) -> Parent:
    torch.manual_seed(0)
    words = ["run_dir=unused", "data=mock", "precision=fp32", "model.pattern=M*E-"]
    return Parent(*build_model(compose("train", words)))


@torch.no_grad()
def test_measurements_match_direct_computation(parent: Parent, tmp_path: Path) -> None:
    architecture = Architecture.from_config(compose("describe", ["model=nemotron3_nano_tiny", "model.pattern=M*E-"]))
    plan = Plan.from_config({"default": "fp8", "rules": ["head bf16"]})
    every = units(plan, architecture, "block")
    batches = [torch.randint(0, 380, (2, 20)), torch.randint(0, 380, (1, 20))]
    precision = Precision(only(plan, every[:2], every), architecture)
    measurements = Measurements(parent, batches, tmp_path / "scores.jsonl")

    as_it_is, low = measurements.measure("as it is", None), measurements.measure("two", precision)

    kl = loss = 0.0
    for tokens in batches:
        exact = parent.logits(tokens)[:, :-1]
        with in_float8(parent.model, precision):
            found = parent.logits(tokens)[:, :-1]
        pair = log_softmax(found, -1), log_softmax(exact, -1)
        kl += float(kl_div(*pair, log_target=True, reduction="sum"))
        loss += float(cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))
    assert (as_it_is.kl, as_it_is.tokens) == (pytest.approx(0.0, abs=1e-9), 57)
    assert low.kl == pytest.approx(kl / 57, rel=1e-4)
    assert low.loss == pytest.approx(loss / 57, rel=1e-6)
    assert low.kl > 1e-7
    again = Measurements(parent, batches, tmp_path / "scores.jsonl")
    assert again.measure("two", None) == low  # from the file: the plan is not used


def words_of(run_dir: Path, model: Path, *words: str) -> list[str]:
    data = [] if any(word.startswith("data=") for word in words) else ["data=mock", "megatron.seq_length=64"]
    small = [*data, "sensitivity.attempts=3"]
    few = [f"sensitivity.{split}={{sequences: 8, batch: 4}}" for split in ("calibration", "evaluation")]
    return [f"sensitivity.model={model}", f"run_dir={run_dir}", *small, *few, *words]


@pytest.fixture
def sensitivity(megatron: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the job with its rank in this process, which has already imported Megatron."""

    def rank(command: Sequence[str], ranks: int, logs: Path, seconds_to_stop: float) -> int:
        run(command[-1])
        return 0

    monkeypatch.setattr("nemo_ext.job.rank.run_ranks", rank)
    return lambda *words: job.run(compose("sensitivity", words_of(*words)))


@pytest.mark.slow
def test_the_job(
    train_ranks: Callable[..., list[dict[str, Any]]],
    sensitivity: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "fp8"
    train_ranks(model, "model.pattern=M*E-")

    command = [sys.executable, "-m", "nemo_ext.cli", "sensitivity", *words_of(run_dir, model)]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr

    scores = (run_dir / "scores.jsonl").read_text()
    names = [json.loads(line)["name"] for line in scores.splitlines()]
    assert names[:6] == ["as it is", "given", "0", "1", "2", "3"]
    assert {"all M>*", "all *", "all E", "all -"} <= set(names)
    result = json.loads((run_dir / "plans.json").read_text())
    best, plans = result["tried"][-1], {row["name"]: row for row in result["plans"]}
    assert best["measured"] <= result["budget"]
    assert plans["as it is"]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert plans["given"]["bytes"]["bf16"] < plans["proposed"]["bytes"]["bf16"] < plans["as it is"]["bytes"]["bf16"]
    assert (run_dir / "scores.png").stat().st_size > 2_000
    words = ["--config-dir", str(run_dir), "model=nemotron3_nano_tiny", "model.pattern=M*E-", "precision=proposed"]
    describe(compose("describe", words))
    assert "precision plan" in capsys.readouterr().out

    sensitivity(run_dir, model, "sensitivity.share=0.01")  # with another budget units are not measured again
    assert (run_dir / "scores.jsonl").read_text().startswith(scores)
    tight = json.loads((run_dir / "plans.json").read_text())
    assert tight["budget"] == pytest.approx(result["budget"] / 50)
    assert set(tight["tried"][-1]["fp8"]) <= set(best["fp8"])

    for word, said in (
        ("precision=mxfp8", "was computed from other inputs .precision_plan"),
        ("megatron.seed=5", "was computed from other inputs .flags.seed: 1234 -> 5"),
        ("sensitivity.share=1.5", r"sensitivity.share=1\.5: input should be less than or equal to 1"),
        ("precision=fp8_delayed", r"precision_plan\.recipe=delayed needs Transformer Engine"),
    ):
        with pytest.raises(ValueError, match=said):
            sensitivity(run_dir, model, word)
    (weights,) = (model / "checkpoints").glob("iter_*10/__0_0.distcp")
    os.utime(weights)
    with pytest.raises(ValueError, match=r"checkpoint: another one.*choose another run_dir"):
        sensitivity(run_dir, model)


@pytest.mark.slow
def test_a_plan_within_a_budget_of_bits(
    train_ranks: Callable[..., list[dict[str, Any]]], sensitivity: Callable[..., None], tmp_path: Path
) -> None:
    from nemo_ext.megatron.fp8 import plan_flags

    model, run_dir = tmp_path / "model", tmp_path / "nvfp4"
    sizes = ["model.pattern=M*E-/*E", "megatron.mamba_num_heads=32", "megatron.mamba_head_dim=8"]
    train_ranks(model, *sizes)

    sensitivity(run_dir, model, "sensitivity.bits=6", "sensitivity.per=part")

    scores = (run_dir / "scores.jsonl").read_text()
    names = [json.loads(line)["name"] for line in scores.splitlines()]
    assert names[:4] == ["as it is", "given", "0.in_proj nvfp4", "0.in_proj fp8"]
    result = json.loads((run_dir / "plans.json").read_text())
    plans = {row["name"]: row for row in result["plans"]}
    lowest, best = plans["every unit in its lowest precision"], plans["proposed"]
    assert lowest["bits"] == 4.5
    assert lowest["bits"] < best["bits"] <= 6 + 1e-9
    assert best["kl"] < lowest["kl"]
    # After ten steps, a random plan may be as good on other data, but not all of them.
    assert best["kl"] <= max(plans[f"random {number}"]["kl"] for number in (1, 2, 3))
    report = (run_dir / "report.md").read_text()
    assert "within 6 bits" in report and "random 3" in report
    made = compose("train", ["--config-dir", str(run_dir), "data=mock", *sizes, "precision=proposed"])
    plan_flags(made)
    assert Plan.from_config(made["precision_plan"]).uses_nvfp4

    sensitivity(run_dir, model, "sensitivity.bits=4.75", "sensitivity.per=part")  # the same measurements
    assert (run_dir / "scores.jsonl").read_text().startswith(scores)
    for words, said in (
        (["sensitivity.bits=4.2"], r"sensitivity\.bits=4\.2: the weights .* need at least 4\.5 bits"),
        (["sensitivity.bits=5", "sensitivity.nats=1"], r"sensitivity\.bits and sensitivity\.nats are both set"),
        (["precision=nvfp4"], "needs a bit budget: set sensitivity.bits"),
        (["precision=nvfp4", "sensitivity.bits=5", "precision_plan.recipe=delayed"], "recipe=delayed needs"),
    ):
        with pytest.raises(ValueError, match=said):
            sensitivity(run_dir, model, *words)


CODE = "data.streams=[{name: code, weight: 1, source: {kind: python_stdlib, max_bytes: 400000}}]"


@pytest.mark.deep
@pytest.mark.parametrize("seed", [3])  # or 1 and 2, as once on another processor, where the effect of 1 was almost lost
def test_nanos_rule_loses_less_than_fp8_everywhere(
    fork_ranks: Callable[..., None], sensitivity: Callable[..., None], tmp_path: Path, seed: int
) -> None:
    """Nemotron 3 Nano's FP8 PTQ: attention and the Mamba blocks before it in BF16; data: code on this machine."""
    text = ["data=local_text", CODE, f"data_root={tmp_path}", "data.workers=1", "megatron.seq_length=64"]
    trained = ["model.pattern=MEM*EME", f"megatron.seed={seed}", "train.tokens=163840"]
    batch = ["megatron.micro_batch_size=4", "megatron.global_batch_size=8", "megatron.num_workers=0"]
    seldom = ["megatron.save_interval=1000", "megatron.eval_interval=1000", "megatron.eval_iters=1"]
    run_dir = tmp_path / "model"
    config = compose("train", [*text, *trained, *batch, *seldom, f"run_dir={run_dir}", "launcher.nproc_per_node=1"])
    tokenize_blend(config["data"], progress=False)
    fork_ranks(launch.prepare(config), 1)

    sensitivity(tmp_path / "fp8", run_dir, *text)

    plans = {row["name"]: row for row in json.loads((tmp_path / "fp8" / "plans.json").read_text())["plans"]}
    uniform, selective = plans["given"], plans[ATTENTION]
    assert selective["kl"] < uniform["kl"]
    assert sum(selective["bytes"].values()) < 1.15 * sum(uniform["bytes"].values())
    assert plans["proposed"]["kl"] < uniform["kl"]
