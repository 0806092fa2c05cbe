"""Predicted throughputs compared with published ones, and the predictions of `describe` and `rehearse`."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemo_ext.architecture.gpus import GPUS
from nemo_ext.describe import model_figures
from nemo_ext.job.config import compose
from nemo_ext.rehearsal.search import gpu_of, predict, prediction_text


def script() -> ModuleType:
    """Module with the published runs, throughput.py."""
    name = "published_throughput"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("throughput.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.parametrize("number", range(len(script().RUNS)), ids=lambda number: script().RUNS[number].name)
def test_a_prediction_is_within_its_error_or_explained(number: int) -> None:
    run = script().RUNS[number]
    error = script().predicted(run)["error"] or 0.0

    assert (abs(script().deviation(run)) <= error) != bool(run.explained), "explain a deviation beyond the error only"
    row = next(line for line in script().PAGE.read_text().splitlines() if f"| {run.name} |" in line and run.gpu in line)
    figures = f"| {script().predicted(run)['tokens_per_second']:,.0f} | {script().deviation(run):+.0%} |"
    assert figures in row, "python tests/rehearsal/throughput.py"


def test_throughput_is_the_batch_over_the_predicted_time() -> None:
    config = compose("rehearse", ["recipe=domyn_small/cpt", "run_dir=unused"])
    found = predict(config, "A100-64GB", GPUS["A100-64GB"])

    per_step = 128 * 32768 / 256
    assert found["tokens_per_second"] == pytest.approx(per_step / found["seconds"]["total"], rel=1e-5)
    assert found["seconds"]["total"] == pytest.approx(sum(list(found["seconds"].values())[1:]), rel=1e-5)
    assert found["mfu_6n"] == pytest.approx(found["tokens_per_second"] * 6 * 9.81e9 / 312e12, rel=0.01)
    text = prediction_text(found)
    assert f"{found['tokens_per_second']:,.0f} tokens/s per GPU within 15%" in text
    assert "by 6N, of 312 TFLOP/s (" in text


@pytest.mark.parametrize(
    ("words", "gpu", "error"),
    [
        (("recipe=olmo3/7b_pretrain",), "H100-80GB", 0.15),
        (("recipe=olmo3/7b_pretrain",), "B200-180GB", None),
        (("recipe=olmo1/1b",), "H100-80GB", None),
        (("recipe=nemotron3_nano/pretrain",), "H100-80GB", 0.2),
        (("recipe=nemotron3_nano/pretrain", "model.family=qwen3"), "H100-80GB", None),
    ],
)
def test_an_error_is_stated_only_for_models_and_gpus_like_the_compared_ones(
    words: tuple[str, ...], gpu: str, error: float | None
) -> None:
    found = predict(compose("rehearse", [*words, "run_dir=unused"]), gpu, GPUS[gpu])

    assert found["error"] == error
    assert ("without a known error, as no similar run was compared" in prediction_text(found)) == (error is None)


def test_a_teacher_s_forward_passes_are_predicted(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy("hydra_conf/model/nemotron3_super_120b.yaml", tmp_path / "model")
    main = compose("train", ["model=nemotron3_super_120b", "run_dir=unused"])["model"]["pattern"].partition("/")[0]
    gpu, recipe = GPUS["H100-80GB"], "recipe=nemotron3_super/puzzle_kd"
    with_it, without, alone = (
        predict(compose("rehearse", [recipe, "run_dir=unused", *words]), "H100-80GB", gpu)
        for words in (
            (f"distillation.teacher={tmp_path}",),
            ("distillation=null",),
            (
                "distillation=null",
                "model=nemotron3_super_120b",
                f"model.pattern={main}",
                "megatron.freeze_all_layers=true",
            ),
        )
    )
    seconds = [found["seconds"]["total"] for found in (with_it, without, alone)]

    assert seconds[0] == pytest.approx(seconds[1] + seconds[2], rel=1e-5)
    assert "by 6N without the teacher's FLOPs" in prediction_text(with_it)
    assert "teacher" not in prediction_text(without)


def describe(*words: str) -> dict[str, Any]:
    return model_figures(compose("describe", list(words)))


def test_describe_predicts_a_recipe_on_a_gpu(tmp_path: Path) -> None:
    found = describe("recipe=nemotron3_nano/pretrain", "gpu=H100-80GB")["prediction"]

    assert (found["gpus"], found["error"]) == (1024, 0.2)
    assert "grouped" in found["estimates"]
    file = tmp_path / "mine.yaml"
    text = Path("hydra_conf/rates/H100-80GB.yaml").read_text()
    file.write_text(text.replace("scan: 3.18e+13", "scan: 1.59e+13"))
    slower = describe("recipe=nemotron3_nano/pretrain", f"gpu={file}")["prediction"]
    assert slower["tokens_per_second"] < found["tokens_per_second"]
    assert "prediction" not in describe("recipe=nemotron3_nano/pretrain")


def test_predictions_that_lack_something(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gpu=H100-80GB: a prediction requires launcher.nodes.*set them, or recipe"):
        describe("model=olmo3_7b", "gpu=H100-80GB")
    with pytest.raises(ValueError, match="gpu=H100: unknown GPU: did you mean 'H100-80GB'"):
        describe("recipe=olmo3/7b_pretrain", "gpu=H100")
    with pytest.raises(ValueError, match=r"none.yaml: no such file; write it with benchmarks/gpu_rates.py"):
        gpu_of(str(tmp_path / "none.yaml"), None)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary.yaml cannot be read \(.*write it with benchmarks"):
        gpu_of(str(tmp_path / "binary.yaml"), None)
    in_fp8 = compose("rehearse", ["recipe=olmo3/7b_pretrain", "precision=fp8_current", "run_dir=unused"])
    with pytest.raises(ValueError, match="the GPU's file has no matmul rates in fp8"):
        predict(in_fp8, "A100-80GB", GPUS["A100-80GB"])
    for words, why in (
        ("precision=nvfp4", "precision_plan has NVFP4, for which GPUs' files have no rates; use a plan in FP8 or BF16"),
        ("megatron.fp8=hybrid", "megatron.fp8 is not supported by predictions; set precision=fp8_current instead"),
        ("precision=fp32", "the step time in FP32 cannot be predicted"),
        ("megatron.global_batch_size=500", "not divisible by micro-batch x DP"),
        ("distillation.teacher=none", "distillation.teacher=none: no such directory"),
    ):
        config = compose("rehearse", ["recipe=nemotron3_nano/pretrain", "run_dir=unused", words])
        with pytest.raises(ValueError, match=why):
            predict(config, "H100-80GB", GPUS["H100-80GB"])
