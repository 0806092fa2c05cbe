"""Export of a finished run: selection of the checkpoint, atomic output, and NeMo-RL's own converters."""

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_ext.chat.template import Template
from nemo_ext.rl.job import SAVE_BY
from nemo_ext.rl.nemo_rl import compat
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.export import chosen, finished_step, has_model, leave_model, saved_in

METRIC = "val:accuracy"


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Import slow modules when a test runs, not when tests are collected."""
    global AutoModelForCausalLM, AutoTokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer


def checkpoint(run: Path, step: int, **info: Any) -> Path:
    """Write a checkpoint that looks like DTensor's; returns the folder of its weights."""
    folder = run / "checkpoints" / f"step_{step}"
    weights = folder / "policy" / "weights"
    weights.mkdir(parents=True)
    (folder / "training_info.json").write_text(json.dumps({"current_step": step, **info}))
    (weights / ".metadata").write_text("")
    return weights


def master_of(run: Path, model: Path | str = "-", *, steps: int = 3, **policy: Any) -> dict[str, Any]:
    return {
        "dpo": {"max_num_steps": steps, "max_num_epochs": 1},
        "checkpointing": {"checkpoint_dir": str(run / "checkpoints"), "metric_name": None, "keep_top_k": 1_000_000},
        "policy": {"model_name": str(model), "tokenizer": {"name": str(model)}, **policy},
    }


def same_weights(folder: Path, model: torch.nn.Module) -> bool:
    found, wanted = AutoModelForCausalLM.from_pretrained(folder).state_dict(), model.state_dict()
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def trained(folder: Path) -> Any:
    """Model with other weights than in its folder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def test_an_incomplete_checkpoint_is_ignored(tmp_path: Path) -> None:
    for step in (10, 2, 9):
        checkpoint(tmp_path, step)
    for name in ("tmp_step_12", "old_step_13", "step_14", "step_15"):
        (tmp_path / "checkpoints" / name / "policy" / "weights").mkdir(parents=True)
    (tmp_path / "checkpoints/step_15/training_info.json").write_text("{}")

    assert [saved.step for saved in saved_in(tmp_path / "checkpoints")] == [2, 9, 10]
    assert saved_in(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("accuracy", "checkpointing", "step"),
    [
        ((0.1, 0.9, 0.5), {}, 3),
        ((0.1, 0.9, 0.5), {"metric_name": METRIC, "keep_top_k": 1_000_000, "higher_is_better": True}, 3),
        ((0.1, 0.9, 0.5), {"metric_name": METRIC, "keep_top_k": 2, "higher_is_better": True}, 2),
        ((0.1, 0.9, 0.5), {"metric_name": METRIC, "keep_top_k": 2, "higher_is_better": False}, 1),
        ((0.9, 0.9, 0.5), {"metric_name": METRIC, "keep_top_k": 2, "higher_is_better": True}, 2),
        ((0.5, 0.5, 0.9), {"metric_name": METRIC, "keep_top_k": 2, "higher_is_better": False}, 2),
        ((0.9, 0.1, None), {"metric_name": METRIC, "keep_top_k": 2, "higher_is_better": True}, 1),
        ((float("nan"), 0.1, None), {"metric_name": METRIC, "keep_top_k": 2, "higher_is_better": True}, 2),
        ((None, None, None), {"metric_name": METRIC, "keep_top_k": 2, "higher_is_better": True}, 3),
    ],
)
def test_the_best_checkpoint_if_best_ones_are_kept_else_the_last(
    accuracy: tuple[float | None, ...], checkpointing: dict[str, Any], step: int, tmp_path: Path
) -> None:
    for number, value in enumerate(accuracy, start=1):
        checkpoint(tmp_path, number, **({} if value is None else {METRIC: value}))

    found = chosen(saved_in(tmp_path / "checkpoints"), checkpointing)

    assert found is not None and found.step == step


def test_when_a_run_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master = master_of(tmp_path)
    assert finished_step(tmp_path, master, "dpo") is None
    checkpoint(tmp_path, 2)
    assert finished_step(tmp_path, master, "dpo") is None  # stopped before its end

    monkeypatch.setattr(compat, "convert_dcp", failing)
    leave_model(tmp_path, 2, master, "dpo", tmp_path)  # ended by its epochs, before its number of steps
    assert finished_step(tmp_path, master, "dpo") == 2
    assert finished_step(tmp_path, master_of(tmp_path, steps=4), "dpo") is None  # more steps are another plan
    checkpoint(tmp_path, 3)
    assert finished_step(tmp_path, master, "dpo") == 3
    assert not has_model(tmp_path, 3, master, "dpo")


def failing(weights: Path, to: Path, *arguments: Any) -> None:
    to.mkdir()
    (to / "pytorch_model.bin").write_text("half")
    raise RuntimeError("no space\nor such")


def test_a_failed_conversion_leaves_no_model_and_names_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run"
    weights = checkpoint(run, 3)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("of fewer steps")
    monkeypatch.setattr(compat, "convert_dcp", failing)

    leave_model(run, 3, master_of(run), "dpo", tmp_path / "checkout")

    assert not (run / "model").exists() and not (run / ".model").exists()
    said = capsys.readouterr().err
    assert "model: no space." in said and "or such" not in said
    assert f"cd {tmp_path / 'checkout'} && uv run python examples/converters/convert_dcp_to_hf.py" in said
    for option in (f"--config={weights.parents[1]}/config.yaml", f"--dcp-ckpt-path={weights}", "--hf-ckpt-path="):
        assert f"'{option}" in said
    assert finished_step(run, master_of(run), "dpo") == 3


@pytest.mark.parametrize("raised", [KeyboardInterrupt, type("CheckpointException", (BaseException,), {})])
def test_only_the_user_interrupts(
    raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(weights: Path, to: Path, *arguments: Any) -> None:
        to.mkdir()
        raise raised

    checkpoint(tmp_path, 3)
    monkeypatch.setattr(compat, "convert_dcp", convert)

    with pytest.raises(KeyboardInterrupt) if raised is KeyboardInterrupt else nullcontext():
        leave_model(tmp_path, 3, master_of(tmp_path), "dpo", tmp_path)

    assert not (tmp_path / ".model").exists() and not (tmp_path / "model").exists()
    assert ("model: CheckpointException." in capsys.readouterr().err) == (raised is not KeyboardInterrupt)


@pytest.mark.parametrize(
    ("file", "policy", "message"),
    [
        ("model/shard-00001-model-00001-of-00001.safetensors", {}, "save_consolidated=true"),
        (
            "adapter.bin",
            {"megatron_cfg": {"enabled": True, "peft": {"enabled": True}}},
            "convert_lora_to_hf.py",
        ),
    ],
)
def test_checkpoints_that_no_converter_reads(
    file: str, policy: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = checkpoint(tmp_path, 3)
    (weights / ".metadata").unlink()
    (weights / file).parent.mkdir(exist_ok=True)
    (weights / file).write_text("")

    leave_model(tmp_path, 3, master_of(tmp_path, **policy), "dpo", tmp_path)

    assert message in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_adapters_of_dtensor_are_merged(tiny_llama: Path, tmp_path: Path) -> None:
    """Automodel saves them in peft's format."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    weights = checkpoint(tmp_path, 3)
    (weights / ".metadata").unlink()
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.save_pretrained(weights / "model")

    leave_model(tmp_path, 3, master_of(tmp_path, tiny_llama), "dpo", tmp_path)

    assert not same_weights(tmp_path / "model", AutoModelForCausalLM.from_pretrained(tiny_llama))
    assert same_weights(tmp_path / "model", model.merge_and_unload())


def test_a_consolidated_checkpoint_is_a_model_already(tiny_llama: Path, tmp_path: Path) -> None:
    model = trained(tiny_llama)
    weights = checkpoint(tmp_path, 3)
    (weights / ".metadata").unlink()
    model.save_pretrained(weights / "model" / "consolidated")
    (tiny_llama / "modeling_own.py").write_text("")
    master = master_of(tmp_path, tiny_llama)

    leave_model(tmp_path, 3, master, "dpo", tmp_path)

    assert same_weights(tmp_path / "model", model)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert (tmp_path / "model" / "modeling_own.py").is_file()
    assert has_model(tmp_path, 3, master, "dpo")
    assert not has_model(tmp_path, 4, master, "dpo")


SCRIPT = """
import argparse, pathlib, shutil
parser = argparse.ArgumentParser()
for name in ("config", "megatron-ckpt-path", "hf-ckpt-path"):
    parser.add_argument("--" + name)
given = parser.parse_args()
weights = pathlib.Path(given.megatron_ckpt_path)
assert pathlib.Path(given.config).is_file() and weights.name == "iter_0000000", "wrong paths"
shutil.copytree(weights / "model", given.hf_ckpt_path)
print("done")
"""


@pytest.mark.parametrize("whole", [True, False])
def test_megatron_is_converted_by_the_script_in_a_separate_process(
    whole: bool, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "checkout" / "examples" / "converters" / "convert_megatron_to_hf.py"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT)
    weights = checkpoint(tmp_path, 3)
    model = trained(tiny_llama)
    model.save_pretrained(weights / "iter_0000000" / "model")
    if whole:
        (weights.parents[1] / "config.yaml").write_text("")
    monkeypatch.setattr(compat, "_megatron_python", lambda: sys.executable)
    monkeypatch.chdir(tmp_path)

    leave_model(Path(), 3, master_of(Path(), tiny_llama), "dpo", tmp_path / "checkout", "domyn")

    said = capsys.readouterr().err
    assert (tmp_path / "model").exists() == whole
    if whole:
        assert same_weights(tmp_path / "model", model)
        assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == Template.load("domyn").source
    else:
        assert "failed with exit code 1: AssertionError: wrong paths" in said
        assert "uv run --extra mcore python examples/converters/convert_megatron_to_hf.py" in said
        assert f"--megatron-ckpt-path={weights / 'iter_0000000'}" in said


def save_dcp(model: torch.nn.Module, weights: Path, *, v2: bool) -> None:
    """Save as DTensor's workers do: the first version under a key, the second flat and in a folder."""
    if not v2:
        importlib.import_module("nemo_rl.utils.native_checkpoint").save_checkpoint(model, str(weights))
        return
    dcp = importlib.import_module("torch.distributed.checkpoint")
    dcp.save(model.state_dict(), checkpoint_id=str(weights / "model"))


@pytest.mark.nemo_rl
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_a_dtensor_checkpoint_by_its_own_converter(
    v2: bool, nemo_rl: ModuleType, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained(tiny_llama)
    weights = checkpoint(tmp_path, 3)
    (weights / ".metadata").unlink()
    save_dcp(model, weights, v2=v2)
    own = AutoTokenizer.from_pretrained(tiny_llama)
    own.chat_template = "of this run"
    own.save_pretrained(weights.parent / "tokenizer")
    master = master_of(tmp_path, tiny_llama)
    checkout = Checkout()

    leave_model(tmp_path, 3, master, "dpo", checkout.root)

    if v2 and not checkout.converts_dtensor_v2:
        assert "only converts checkpoints of DTensor's first version" in capsys.readouterr().err
        assert not (tmp_path / "model").exists()
        return
    left = tmp_path / "model"
    assert same_weights(left, model)
    assert not (left / "pytorch_model.bin").exists() and (left / "model.safetensors").is_file()
    assert AutoTokenizer.from_pretrained(left).chat_template == "of this run"
    assert (left / "generation_config.json").is_file()


@pytest.mark.nemo_rl
def test_conversion_without_megatron_bridge_fails_cleanly(
    nemo_rl: ModuleType, ray_cluster: None, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("megatron.bridge") is not None:
        pytest.skip("Megatron-Bridge is there")
    weights = checkpoint(tmp_path, 3)
    (weights / "iter_0000000").mkdir()
    (weights.parents[1] / "config.yaml").write_text("{}")

    leave_model(tmp_path, 3, master_of(tmp_path, tiny_llama), "dpo", Checkout().root)

    said = capsys.readouterr().err
    assert "convert_megatron_to_hf.py failed with" in said and "Error" in said
    assert not (tmp_path / "model").exists() and not (tmp_path / ".model").exists()


class Clock:
    """Stand-in for NeMo-RL's TimeoutChecker."""

    def __init__(self, timeout: str | None) -> None:
        self.last_save_time = float("inf") if timeout is None else 60.0
        self.start_time = 1000.0


@pytest.mark.parametrize(
    ("timeout", "by", "seconds"), [(None, "1500", 500.0), ("00:00:01:00", "1500", 60.0), (None, None, float("inf"))]
)
def test_a_job_on_slurm_saves_before_its_limit(
    monkeypatch: pytest.MonkeyPatch, timeout: str | None, by: str | None, seconds: float
) -> None:
    module = ModuleType("grpo")
    module.TimeoutChecker = Clock  # type: ignore[attr-defined]
    if by is not None:
        monkeypatch.setenv(SAVE_BY, by)

    with compat.clocks(module) as made:
        module.TimeoutChecker(timeout=timeout)

    assert [clock.last_save_time for clock in made] == [seconds]
    assert module.TimeoutChecker is Clock
