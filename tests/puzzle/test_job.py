"""`nemo-ext puzzle` as users run it: all stages, repeated, other children, mistakes, kill -9, ranks."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open

from nemo_ext.job.config import compose
from nemo_ext.job.run_directory import CONFIG, read_config
from nemo_ext.puzzle.job import Job

SMALL = (
    "data=mock",
    'model.pattern="(*-)x3"',
    "megatron.hidden_size=64",
    "megatron.ffn_hidden_size=96",
    "megatron.seq_length=32",
    "megatron.micro_batch_size=4",
    "megatron.global_batch_size=4",
    "megatron.save_interval=4",
    "megatron.eval_interval=50",
    "megatron.num_workers=1",
    "train.tokens=1024",
    "puzzle.calibration={sequences: 8, batch: 2}",
    "puzzle.evaluation={sequences: 8, batch: 2}",
    "puzzle.distill={steps: 12, batch: 2, together: 8, save_interval: 4}",
    "puzzle.distill.inputs=${run_dir}/inputs",
    "puzzle.heal.tokens=1024",
    "puzzle.heal.warmup_tokens=0",
    "puzzle.heal.continue_tokens=512",
    "puzzle.heal.top_k=16",
    "puzzle.search.shares={parameters: 0.7, attention_blocks: 0.34}",
    "puzzle.search.pool=2",
    "puzzle.search.sweep.points=4",
    "puzzle.fuse.keep_last=false",
    "puzzle.export=true",
)
"""Every stage, on a model of six blocks that has hardly learnt anything."""


def command(run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "nemo_ext.cli", "puzzle", *SMALL, f"run_dir={run_dir}", *overrides]


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command(run_dir, *overrides), stdout=pipe, stderr=pipe, text=True)


def run(run_dir: Path, *overrides: str) -> tuple[int, str, str]:
    # Also ends it if it takes too long.
    ended = subprocess.run(command(run_dir, *overrides), capture_output=True, text=True, timeout=900, check=False)
    return ended.returncode, ended.stdout, ended.stderr


def here(run_dir: Path, *overrides: str) -> None:
    """Run a command that starts no rank in this process."""
    Job(compose("puzzle", [*SMALL, f"run_dir={run_dir}", *overrides])).run()


def wait_for(moment: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait until a condition that the process fulfils holds."""
    deadline = time.monotonic() + 300
    while not moment():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, in_process: Callable[..., str]) -> tuple[Path, str]:
    """An uninterrupted run and its output."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return run_dir, in_process(*SMALL, f"run_dir={run_dir}")


def results(run_dir: Path) -> dict[str, str]:
    """Results of the stages by file, except times, logs and Megatron's runs."""
    files = [*run_dir.glob("blocks/**/*"), *run_dir.glob("child/**/*")]
    found = {}
    for file in sorted(files):
        inside = file.relative_to(run_dir)
        assert not file.name.endswith(".begun.json"), file
        if not file.is_file() or {"heal", "pretrain", "huggingface", "stages"} & set(inside.parts):
            continue
        if file.suffix in (".jsonl", ".csv", ".safetensors", ".distcp") or file.name in (
            "choices.json",
            "comparison.json",
            "baselines.json",
            "choice.json",
            "child.json",
            "problem.json",
        ):
            # The order of metadata in library files is arbitrary.
            content = tensors(file) if file.suffix == ".safetensors" else file.read_bytes()
            found[str(inside)] = hashlib.sha256(content).hexdigest()
    return found


def tensors(file: Path) -> bytes:
    with safe_open(file, "numpy") as opened:
        notes = json.dumps(opened.metadata(), sort_keys=True).encode()
        return notes + b"".join(name.encode() + opened.get_tensor(name).tobytes() for name in sorted(opened.keys()))


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in json.loads((run_dir / "child" / "evaluation.json").read_text())]


@pytest.mark.slow
def test_all_stages_write_their_results(whole: tuple[Path, str]) -> None:
    run_dir, said = whole
    child = run_dir / "child"
    for name in ("report.md", "pareto.png", "pareto.csv", "dependency.png", "blocks_parent.png", "blocks_child.png"):
        assert (child / name).stat().st_size > 200, name
    assert "report:" in said and "Traceback" not in said
    report = (child / "report.md").read_text()
    assert "bits per byte" in report and "p = " in report and (child / "losses.png").is_file()
    for picture in ("pareto.png", "dependency.png", "blocks_parent.png", "blocks_child.png"):
        assert f"]({picture})" in report
    evaluation = json.loads((child / "evaluation.json").read_text())
    assert [row["name"] for row in evaluation] == ["parent", "child", "fused", "healed", "trained on"]
    by_name = {row["name"]: row for row in evaluation}
    assert by_name["fused"]["blocks"] < by_name["child"]["blocks"] < by_name["parent"]["blocks"]
    comparison = json.loads((child / "comparison.json").read_text())
    assert [row["name"] for row in comparison] == ["parent", "choice 1", "choice 2"]
    baselines = json.loads((child / "baselines.json").read_text())
    alone = "search with parameters limited alone"
    chance = [f"random choice {seed}" for seed in (1, 2, 3)]
    pruned = ["uniform width pruning", "greedy dropping", "last blocks dropped"]
    assert [row["name"] for row in baselines] == [alone, *pruned, *chance]
    own = next(row for row in comparison if row["name"] == json.loads((child / "choice.json").read_text())["name"])
    for row in baselines:
        if "cannot" not in row:
            assert row["loss"] == pytest.approx(sum(row["losses"]) / len(row["losses"]))
            assert row["from_child"]["mean"] == pytest.approx(row["loss"] - own["loss"], abs=1e-9)
    best = json.loads((child / "choice.json").read_text())
    assert best["calibration_loss"] == min(row["calibration_loss"] for row in comparison[1:])
    # The written checkpoint computes the same as the parent with replaced blocks.
    assert by_name["child"]["loss"] == pytest.approx(best["loss"], rel=1e-6)
    assert by_name["child"]["costs"]["parameters"] <= 0.7 * by_name["parent"]["costs"]["parameters"]


@pytest.mark.slow
def test_the_child_is_the_same_in_transformers(
    whole: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    # One folder for all tests of a process: modules are only found in the first one.
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.getbasetemp() / "hf_modules"))
    folder = whole[0] / "child" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    row = json.loads((whole[0] / "child" / "evaluation.json").read_text())[-1]
    assert row["costs"]["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_the_same_command_again_does_nothing(whole: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, _ = whole
    before = {
        file: file.stat().st_mtime_ns for file in run_dir.rglob("*") if file.suffix in (".safetensors", ".distcp")
    }
    here(run_dir)
    err = capsys.readouterr().err
    assert all(f"{stage}: finished before" in err for stage in ("parent", "library", "distill", "search", "heal"))
    assert before == {file: file.stat().st_mtime_ns for file in before}


@pytest.mark.deep
def test_another_child_uses_the_same_library(whole: tuple[Path, str], in_process: Callable[..., str]) -> None:
    run_dir, _ = whole
    err = in_process(
        *(*SMALL, f"run_dir={run_dir}"),
        "puzzle.child=half",
        "puzzle.search.shares={parameters: 0.5}",
        "puzzle.heal.tokens=0",
        "puzzle.heal.continue_tokens=0",
        "puzzle.baselines=false",
        "puzzle.search.pool=1",
        "puzzle.export=false",
    )
    assert "distill: finished before" in err
    # A stage that had nothing to do may be enabled later; pictures and losses are then made again.
    err = in_process(
        *(*SMALL, f"run_dir={run_dir}"),
        "puzzle.child=half",
        "puzzle.search.shares={parameters: 0.5}",
        "puzzle.heal.continue_tokens=0",
        "puzzle.search.pool=1",
        "puzzle.search.sweep.points=3",
        "puzzle.export=false",
    )
    assert "realise: finished before" in err and "baselines: done" in err and "heal: done" in err
    rows = json.loads((run_dir / "half" / "evaluation.json").read_text())
    assert rows[-1]["costs"]["parameters"] <= 0.5 * rows[0]["costs"]["parameters"]
    with pytest.raises(ValueError, match="search was done with other settings"):
        here(run_dir, "puzzle.search.shares={parameters: 0.5}")


MOMENTS: dict[str, Callable[[Path], object]] = {
    "variants in training": lambda run_dir: (run_dir / "blocks" / "trained" / "in_training.pt").is_file(),
    "scores": lambda run_dir: (run_dir / "blocks" / "scores.jsonl").is_file(),
    "comparing, realising or fusing": lambda run_dir: (
        (run_dir / "child" / "stages" / "front.json").is_file() and any(run_dir.glob("child/stages/*.begun.json"))
    ),
    "healing": lambda run_dir: any((run_dir / "child" / "heal" / "checkpoints").glob("iter_*")),
}


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(["variants in training", "comparing, realising or fusing"], marks=pytest.mark.slow, id="twice"),
        pytest.param([*MOMENTS], marks=pytest.mark.deep, id="at every moment"),
    ],
)
def test_killed_at_any_moment_it_resumes_with_the_same_result(
    whole: tuple[Path, str], in_process: Callable[..., str], tmp_path: Path, moments: list[str]
) -> None:
    run_dir, parent = tmp_path / "run", f"puzzle.parent={whole[0] / 'parent'}"
    random = Random(3)
    for moment in moments:
        process = start(run_dir, parent)
        try:
            wait_for(lambda moment=moment: MOMENTS[moment](run_dir), process)
            time.sleep(random.uniform(0, 0.3))
        finally:
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for member in family:
                member.kill()
            process.communicate()
            psutil.wait_procs(family, timeout=120)
        assert not (run_dir / "child" / "report.md").exists()
    in_process(*SMALL, f"run_dir={run_dir}", parent)
    assert results(run_dir) == results(whole[0])
    assert losses(run_dir) == pytest.approx(losses(whole[0]), rel=1e-6)


@pytest.mark.slow
def test_ctrl_c_ends_quietly_and_the_same_command_resumes(whole: tuple[Path, str], tmp_path: Path) -> None:
    given = (f"puzzle.parent={whole[0] / 'parent'}", "puzzle.stages=[parent,library,distill]")
    process = start(tmp_path / "run", *given, "puzzle.distill.steps=2000")
    wait_for((tmp_path / "run" / "blocks" / "trained" / "in_training.pt").exists, process)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "interrupted: the same command resumes" in err and "Traceback" not in err
    assert not (tmp_path / "run" / "blocks" / "stages" / "distill.json").exists()


@pytest.mark.deep
def test_ranks_end_with_the_command_that_started_them(whole: tuple[Path, str], tmp_path: Path) -> None:
    process = start(
        tmp_path / "run",
        f"puzzle.parent={whole[0] / 'parent'}",
        "puzzle.stages=[parent,library,distill]",
        "puzzle.distill.steps=2000",
        "launcher.nproc_per_node=2",
    )
    wait_for((tmp_path / "run" / "blocks" / "trained" / "in_training.pt").exists, process)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(ranks, timeout=120)[1]


@pytest.mark.slow
def test_a_mistake_on_two_ranks_is_one_line(whole: tuple[Path, str], tmp_path: Path) -> None:
    scores = tmp_path / "run" / "blocks" / "scores.jsonl"
    scores.parent.mkdir(parents=True)
    scores.write_text("no score\nanother\n")

    code, _, err = run(
        tmp_path / "run",
        f"puzzle.parent={whole[0] / 'parent'}",
        "puzzle.stages=[parent,library,distill,score]",
        "puzzle.distill.steps=0",
        "launcher.nproc_per_node=2",
    )
    assert code == 2
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert line.startswith(f"error: {scores}")
    assert "Traceback" not in err and len(err.splitlines()) < 12


@pytest.mark.deep
def test_two_ranks_get_the_same_results_as_one(whole: tuple[Path, str], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run_dir = tmp_path / "run"
    code, _, err = run(
        run_dir,
        f"puzzle.parent={whole[0] / 'parent'}",
        "puzzle.stages=[parent,library,distill,score,cost,search,compare,baselines]",
        "puzzle.measure.enabled=true",
        "puzzle.serving={precision: fp32, cache_precision: fp32, batch: 1, prompt: 8, context: 16}",
        "launcher.nproc_per_node=2",
        "puzzle.fsdp=shard",
    )
    assert code == 0, err
    assert len((run_dir / "child" / "measured.jsonl").read_text().splitlines()) > 3
    for file in (whole[0] / "blocks" / "trained").rglob("*.safetensors"):
        one, two = load_file(file), load_file(run_dir / file.relative_to(whole[0]))
        for name, tensor in one.items():
            assert (tensor - two[name]).norm() <= 1e-4 * tensor.norm(), (file, name)
    scores = [
        {(line["block"], line["variant"]): line["kl"] for line in map(json.loads, path.read_text().splitlines())}
        for path in (whole[0] / "blocks" / "scores.jsonl", run_dir / "blocks" / "scores.jsonl")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3, abs=1e-7)


@pytest.mark.deep
def test_a_cached_teacher_heals_like_an_online_one(whole: tuple[Path, str], in_process: Callable[..., str]) -> None:
    run_dir, losses = whole[0], {}
    in_process(
        *(*SMALL, f"run_dir={run_dir}"),
        "puzzle.child=cached",
        "puzzle.heal.teacher=cached",
        "puzzle.heal.continue_tokens=0",
        "puzzle.heal.megatron={logits_save_dtype: fp32}",
        "puzzle.search.sweep.resource=null",
        "puzzle.baselines=false",
        "puzzle.export=false",
    )
    for child in ("child", "cached"):
        rows = json.loads((run_dir / child / "evaluation.json").read_text())
        losses[child] = {row["name"]: row["loss"] for row in rows}
    assert losses["cached"]["fused"] == pytest.approx(losses["child"]["fused"], rel=1e-6)
    assert losses["cached"]["healed"] == pytest.approx(losses["child"]["healed"], rel=1e-5)
    assert losses["cached"]["healed"] != pytest.approx(losses["cached"]["fused"], rel=1e-3)


SUPER = (
    *("recipe=puzzle/nemotron3_super_quickstart", "data=mock", "train.tokens=1024"),
    *(f"megatron.{name}" for name in ("seq_length=32", "micro_batch_size=4", "global_batch_size=4", "num_workers=1")),
    "puzzle.calibration={sequences: 4, batch: 2}",
    "puzzle.evaluation={sequences: 4, batch: 2}",
    "puzzle.distill={steps: 2, batch: 2}",
    *("puzzle.heal.tokens=512", "puzzle.heal.warmup_tokens=0"),
    *("puzzle.search.sweep.resource=null", "puzzle.baselines=false"),
)
"""The recipe for Nemotron 3 Super's blocks, with two depths of the same weights, in few steps."""


@pytest.mark.slow
def test_a_child_keeps_the_parent_s_multi_token_prediction(tmp_path: Path, in_process: Callable[..., str]) -> None:
    from nemo_ext.checkpoint.torch_dist import TorchDistReader, checkpoint_folder

    def depths(checkpoint: Path) -> dict[str, torch.Tensor]:
        reader = TorchDistReader(checkpoint_folder(checkpoint))
        return {name: reader.read(name) for name in reader.tensors if name.startswith("mtp.") and "/shard" not in name}

    run_dir = tmp_path / "run"
    words = (*SUPER, f"run_dir={run_dir}", f"data_root={tmp_path / 'data'}")
    said = in_process(*words, "puzzle.export=true")

    parent, child = depths(run_dir / "parent"), depths(run_dir / "child" / "weights")
    assert len(child) == 16 and all(torch.equal(tensor, parent[name]) for name, tensor in child.items())
    rows = {row["name"]: row for row in json.loads((run_dir / "child" / "evaluation.json").read_text())}
    assert rows["child"]["costs"]["memory_bytes"] <= 0.65 * rows["parent"]["costs"]["memory_bytes"]
    choice = json.loads((run_dir / "child" / "choice.json").read_text())
    assert rows["child"]["loss"] == pytest.approx(choice["loss"], rel=1e-5)  # the checkpoint computes as the search did
    healed = run_dir / "child" / "heal"
    assert read_config(healed / CONFIG)["model"]["pattern"].count("/") == 2
    (line, *_) = [json.loads(each) for each in (healed / "metrics.jsonl").read_text().splitlines() if "mtp_" in each]
    assert line["mtp_1_loss"] > 0 and line["mtp_2_loss"] > 0 and line["kl_to_teacher"] > 0
    after = depths(healed)
    assert not torch.equal(after["mtp.layers.0.eh_proj.weight"], child["mtp.layers.0.eh_proj.weight"])
    exported = json.loads((run_dir / "child" / "huggingface" / "config.json").read_text())
    assert ("exported without multi-token prediction" in said) == (not exported.get("num_nextn_predict_layers"))

    in_process(*words, "puzzle.child=without", "puzzle.mtp=drop")

    assert not depths(run_dir / "without" / "weights") and not depths(run_dir / "without" / "heal")
    assert json.loads((run_dir / "without" / "choice.json").read_text())["variants"] == choice["variants"]


@pytest.mark.deep
def test_the_quickstart_is_as_documented(tmp_path: Path) -> None:
    """As in the README: better than both baselines, and healing recovers half of the loss.

    With sequences of half the length, and the same number of them.
    """
    run_dir = tmp_path / "run"
    words = [f"run_dir={run_dir}", f"data_root={tmp_path / 'data'}", "megatron.seq_length=128"]
    subprocess.run([sys.executable, "-m", "nemo_ext.cli", "puzzle", *words], check=True, timeout=1800)

    rows = {row["name"]: row for row in json.loads((run_dir / "child" / "comparison.json").read_text())}
    parent, child = rows["parent"], rows["choice 1"]
    assert child["costs"]["memory_bytes"] <= 0.6 * parent["costs"]["memory_bytes"]
    rows |= {row["name"]: row for row in json.loads((run_dir / "child" / "baselines.json").read_text())}
    alone = rows["search with memory_bytes limited alone"]
    for name in ("uniform width pruning", "greedy dropping"):
        assert rows[name]["costs"]["memory_bytes"] <= 0.6 * parent["costs"]["memory_bytes"]
        assert alone["loss"] < rows[name]["loss"]
    loss = {row["name"]: row["loss"] for row in json.loads((run_dir / "child" / "evaluation.json").read_text())}
    assert loss["fused"] - loss["healed"] >= 0.5 * (loss["fused"] - loss["parent"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_stages_on_the_device(tmp_path: Path) -> None:
    code, _, err = run(
        tmp_path / "run", "model.backend=local", "precision=bf16", "puzzle.measure.enabled=true", "puzzle.export=false"
    )
    assert code == 0, err
    rows = json.loads((tmp_path / "run" / "child" / "evaluation.json").read_text())
    assert [row["name"] for row in rows] == ["parent", "child", "fused", "healed", "trained on"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("puzzle.parent=nowhere",), "puzzle.parent=nowhere: no such run"),
        (("puzzle.stages=[serch]",), "unknown stage 'serch' in puzzle.stages: did you mean 'search'"),
        (("puzzle.stages=[search]",), "search needs the unfinished output of score and cost; add it"),
        (("puzzle.child=blocks",), "this folder holds other results"),
        (("puzzle.distill.steps=many",), "puzzle.distill.steps='many'"),
        (("launcher.nodes=2",), "launcher.nodes=2: this command runs on one machine only"),
        (("data=packed", "data.packed.valid=null"), "data.packed.valid=null, but puzzle compares models"),
        (("+puzzle.serch=1",), "puzzle: unknown key 'serch': did you mean 'search'"),
    ],
)
def test_mistakes_are_reported(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        here(tmp_path / "run", *overrides)


def test_a_mistake_is_one_line(tmp_path: Path, command: Callable[..., Any]) -> None:
    code, _, err = command("puzzle", *SMALL, f"run_dir={tmp_path / 'run'}", "puzzle.stages=[search]")

    assert code == 2, err
    assert err.startswith("error: puzzle.stages: search needs") and len(err.splitlines()) == 1
