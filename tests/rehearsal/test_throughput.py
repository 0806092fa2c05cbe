"""Predicted throughputs compared with published ones, and the predictions of `describe` and `rehearse`."""

import importlib.util
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
    error = script().predicted(run)["error"]

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
    assert f"{found['tokens_per_second']:,.0f} tokens/s per GPU within 15%" in prediction_text(found)


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
    in_fp8 = compose("rehearse", ["recipe=olmo3/7b_pretrain", "precision=fp8_current", "run_dir=unused"])
    with pytest.raises(ValueError, match="the GPU's file has no matmul rates in fp8"):
        predict(in_fp8, "A100-80GB", GPUS["A100-80GB"])
