"""Layouts found by a search, and their command-line arguments."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.architecture.gpus import GPUS
from nemo_ext.architecture.layout import Layout
from nemo_ext.job.config import compose
from nemo_ext.job.settings import checked
from nemo_ext.megatron.arguments import pattern_with_cuts, world_size
from nemo_ext.rehearsal.search import FILL, GIB, Candidate, Search, gpu_of, search
from nemo_ext.rehearsal.settings import Settings

BASE = ("recipe=nemotron3_nano/quickstart", "data=mock", "megatron.bf16=true", "run_dir=unused")
EIGHT = ("launcher.nodes=2", "launcher.nproc_per_node=4")
GPU = GPUS["A100-64GB"]
MODELS = ("nemotron3_nano_tiny", "domyn_small_tiny", "olmo3_tiny")


@cache
def composed(model: str) -> dict[str, Any]:
    return compose("rehearse", [*BASE, *EIGHT, f"model={model}"])


@cache
def searched(model: str) -> tuple[Search, list[Candidate]]:
    made = Search(composed(model), GPU)
    return made, made.ranked()


@pytest.mark.parametrize("model", MODELS)
def test_sizes_fit_the_machine(model: str) -> None:
    _, ranked = searched(model)
    assert len(ranked) > 100
    for one in ranked:
        how = one.layout
        assert how.world_size == 8
        assert how.tensor_parallel in (1, 2, 4), "within a node"
        assert 16 % (how.micro_batch_size * how.data_parallel) == 0, "the recipe's global batch"
    assert [one.time.total for one in ranked] == sorted(one.time.total for one in ranked)
    assert len({(one.layout, one.pattern) for one in ranked}) == len(ranked)


def test_a_model_that_fits_on_one_gpu_is_not_divided() -> None:
    made, ranked = searched("domyn_small_tiny")
    how = next(made.fitting(ranked, Counter())).layout
    assert (how.tensor_parallel, how.pipeline_parallel, how.context_parallel, how.data_parallel) == (1, 1, 1, 8)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_does_not_fit_on_one_gpu_is_divided(model: str) -> None:
    made, ranked = searched(model)
    whole = [one for one in ranked if one.layout.data_parallel == 8 and one.layout.expert_parallel == 1]
    least = min(made.bytes(one.layout, one.pattern) for one in whole)
    small = Search(composed(model), replace(GPU, memory_gib=0.7 * least / FILL / GIB))
    one = next(small.fitting(ranked, refused := Counter()))

    assert one.layout.tensor_parallel * one.layout.pipeline_parallel * one.layout.expert_parallel > 1
    assert one.bytes <= 0.7 * least
    assert refused["too much memory by the cost model"]


@pytest.mark.parametrize("model", MODELS)
def test_arguments_reproduce_the_timed_layout(model: str) -> None:
    made, ranked = searched(model)
    interleaved = next(one for one in ranked if one.layout.virtual_stages == 2 and one.layout.recompute == "full")
    divided = next(one for one in ranked if one.layout.recompute == "selective" and one.layout.tensor_parallel == 2)
    for one in (interleaved, divided):
        again = compose("train", [*BASE, *EIGHT, f"model={model}", *made.words(one)])
        cut = {**again, "model": {**again["model"], "pattern": pattern_with_cuts(again)}}
        read = Layout.from_config(cut, world_size=world_size(again))
        steps = 16 // (one.layout.micro_batch_size * one.layout.data_parallel)
        expert = read.expert_tensor if "E" in made.kinds else None
        asked = replace(one.layout, micro_batches=steps, expert_tensor_parallel=expert)
        if one.layout.recompute != "selective":
            asked = replace(asked, recompute_modules=read.recompute_modules)
        assert replace(read, expert_tensor_parallel=expert) == asked
        assert again["megatron"]["global_batch_size"] == 16


def test_prediction_depths_are_kept_and_counted() -> None:
    words = [
        "run_dir=unused",
        "data=mock",
        "model=nemotron3_super_tiny",
        "megatron.bf16=true",
        "launcher.nproc_per_node=2",
    ]
    with_depths = compose("train", [*words, "model.pattern=MEM*|EME-/*E/*E"])
    without = compose("train", [*words, "model.pattern=MEM*|EME-"])
    without["megatron"]["mtp_use_repeated_layer"] = False

    candidates = Search(with_depths, GPU).ranked()

    assert all(candidate.pattern.depths == 2 for candidate in candidates)
    one = next(candidate for candidate in candidates if candidate.layout.pipeline_parallel == 1)
    assert Search(with_depths, GPU).changes(one).get("model.pattern", "/*E/*E").endswith("/*E/*E")
    fastest, plain = candidates[0].time.total, Search(without, GPU).ranked()[0].time.total
    assert fastest > 1.1 * plain


def test_a_layout_that_does_not_fit_by_rehearsal_is_dropped_and_counted() -> None:
    rehearsed = []

    def rehearse(words: list[str], number: int) -> dict[str, Any]:
        rehearsed.append(words)
        if number == 1:
            raise ValueError("Megatron says no")
        return {"ranks": [{"peak_bytes": 60 * GIB if number == 2 else 50 * GIB}]}

    said, results = search(composed("domyn_small_tiny"), "A100-64GB", GPU, 2, rehearse)

    assert [line.get("fits") for line in said["tried"]] == [None, False, True, True]
    assert said["tried"][0]["error"] == "Megatron says no"
    assert len({tuple(words) for words in rehearsed}) == 4
    assert [result["number"] for result in results] == [2, 3, 4]


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match=r"no layout of 8 GPUs with 0.001 GiB fits .*too much memory by the cost"):
        search(composed("domyn_small_tiny"), "mine", replace(GPU, memory_gib=0.001), 1, lambda *_: {})


def test_gpus_by_name_and_by_memory() -> None:
    assert gpu_of(None, 64) == ("A100-64GB", GPU)
    assert gpu_of("H100-80GB", 40)[1] == replace(GPUS["H100-80GB"], memory_gib=40)
    with pytest.raises(ValueError, match=r"rehearse\.search needs a GPU"):
        gpu_of(None, None)
    with pytest.raises(ValueError, match=r"rehearse.gpu=H100: .*H100-80GB"):
        gpu_of("H100", None)
    with pytest.raises(ValueError, match="no known GPU has that much memory"):
        gpu_of(None, 500)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"search": True, "try": ["megatron.micro_batch_size=2"]}, "cannot be combined"),
        (
            {"try": ["megatron.bf16=true rehearse.imbalance=2"]},
            "rehearse.try has rehearse.imbalance=2: expected arguments",
        ),
        ({"try": ["++cluster.node.gpus=4"]}, r"rehearse.try has \+\+cluster.node.gpus=4: expected arguments"),
        ({"try": [""]}, "rehearse.try has an empty change"),
    ],
)
def test_settings_that_contradict_each_other(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        checked(Settings, given, "rehearse")


@pytest.mark.slow
def test_a_search_from_the_command_line_to_the_checks_of_training(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    site = "# @package cluster\nname: mine\nnode: {gpus: 4, gpu: A100-64GB, gpu_memory_gib: 9, fp8: [], cpus: 8}\n"
    (tmp_path / "cluster" / "mine.yaml").write_text(site)
    base = [f"--config-dir={tmp_path}", *BASE[:3], *EIGHT, "model=domyn_small_tiny"]
    command = [sys.executable, "-m", "nemo_ext", "rehearse", *base, f"run_dir={tmp_path}"]
    asked = ["rehearse.search=true", "rehearse.best=1", "cluster=mine", "cluster.node.gpu_memory_gib=0.2"]
    subprocess.run([*command, *asked], check=True, capture_output=True)

    found = json.loads((tmp_path / "rehearsal.json").read_text())
    fitting = [line for line in found["search"]["tried"] if line.get("fits")]
    assert fitting
    assert fitting[0]["peak_bytes"] <= FILL * 0.2 * GIB
    report = (tmp_path / "report.md").read_text()
    assert "| step (s) | compute (s) |" in report and "| bytes: cost model | bytes: rehearsal |" in report
    line = next(line for line in report.splitlines() if line.startswith("nemo-ext train "))
    assert line == f"nemo-ext train {' '.join(base)} {fitting[0]['words']}"

    from nemo_ext.megatron.check import check

    check(compose("train", line.split()[2:]))


@pytest.mark.slow
def test_an_invalid_change_is_reported_and_the_rest_rehearsed(launched: Callable[..., str], tmp_path: Path) -> None:
    change = "megatron.tensor_model_parallel_size=3"
    words = ["recipe=nemotron3_nano/quickstart", f"run_dir={tmp_path}", "format=json", f'rehearse.try=["{change}"]']
    found = json.loads(launched("rehearse", *words))

    assert [result["number"] for result in found["results"]] == [0]
    assert list(found["failed"]) == [change]
    assert f"{change}: " in (tmp_path / "report.md").read_text()
