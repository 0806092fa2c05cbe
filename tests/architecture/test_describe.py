"""The figures as a dictionary, JSON and tables."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nemo_ext.architecture.cost import Layout
from nemo_ext.architecture.describe import describe, flop, number, ranges, render_table, size, to_json
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pipeline import balance
from nemo_ext.architecture.precision_plan import Plan

ArchitectureOf = Callable[..., Architecture]


def test_figures_of_nemotron(architecture_of: ArchitectureOf) -> None:
    figures = describe(architecture_of("nemotron3_nano"))
    assert figures["total_params"] == 31_577_937_344
    assert figures["kv_bytes_per_token"] == 6 * 2 * 2 * 128 * 2
    assert figures["state_bytes_per_sequence"] == 23 * (3 * 6144 * 2 + 64 * 64 * 128 * 4)
    assert figures["train_flops_per_token"] == pytest.approx(3 * figures["forward_flops_per_token"], abs=3)
    assert {kind: each["count"] for kind, each in figures["kinds"].items()} == {"M": 23, "E": 23, "*": 6}
    assert [block["layer"] for block in figures["blocks"]] == list(range(1, 53))


def test_blocks_and_ends_add_up_to_the_model(architecture_of: ArchitectureOf) -> None:
    figures = describe(architecture_of("tiny_hybrid"))
    ends = figures["embedding_params"] + figures["head_params"]
    assert sum(block["params"] for block in figures["blocks"]) + ends == figures["total_params"]
    assert sum(each["params"] for each in figures["kinds"].values()) + ends == figures["total_params"]
    flops = sum(block["forward_flops_per_token"] for block in figures["blocks"])
    assert flops + figures["head_forward_flops_per_token"] == pytest.approx(
        figures["forward_flops_per_token"], abs=len(figures["blocks"])
    )


def test_a_block_has_its_own_values_and_its_sizes(architecture_of: ArchitectureOf) -> None:
    block = describe(architecture_of("tiny_hybrid"))["blocks"][5]
    assert (block["layer"], block["kind"], block["name"]) == (6, "*", "attention")
    assert block["values"] == {"kv": 1}
    assert block["sizes"] == {"heads": 4, "kv": 1, "head_dim": 8, "window": 0}


def test_sequence_length_changes_flops_and_caches_only(architecture_of: ArchitectureOf) -> None:
    model = architecture_of("tiny_hybrid")
    short, long = describe(model, seq_length=16), describe(model, seq_length=1024)
    assert short["forward_flops_per_token"] < long["forward_flops_per_token"]
    assert short["kv_cache_bytes"] * 64 == long["kv_cache_bytes"]
    assert short["total_params"] == long["total_params"]


def test_a_plan_counts_prediction_depths_in_bf16(architecture_of: ArchitectureOf) -> None:
    plan = Plan.from_config({"default": "fp8", "recipe": "tensorwise"})
    main = architecture_of("tiny_hybrid").with_pattern("*-")
    bytes_of = [describe(main.with_pattern(text), plan=plan)["precision"]["bytes"] for text in ("*-", "*-/-")]
    hidden = main.hidden_size
    depth = 2 * hidden * hidden + describe(main.with_pattern("-"))["blocks"][0]["params"] - hidden
    assert bytes_of[1]["fp8"] == bytes_of[0]["fp8"]
    assert bytes_of[1]["bf16"] - bytes_of[0].get("bf16", 0) == 2 * depth


def test_a_layout_adds_stages_and_gpus(architecture_of: ArchitectureOf) -> None:
    model = architecture_of("tiny_hybrid")
    model = model.with_pattern(balance(model, pipeline_parallel=2))
    figures = describe(model, layout=Layout(pipeline_parallel=2, tensor_parallel=2, micro_batches=4))
    assert [stage["rank"] for stage in figures["stages"]] == [0, 1]
    assert sum(len(stage["layers"]) for stage in figures["stages"]) == 8
    assert len(figures["gpus"]) == 2
    assert figures["layout"]["world_size"] == 4
    flops = [stage["forward_flops_per_token"] for stage in figures["stages"]]
    assert figures["layout"]["idle_share"] > 1 - sum(flops) / (2 * max(flops)) > 0
    assert f"idle for {figures['layout']['idle_share']:.1%} of a step" in " ".join(render_text(figures).split())
    assert "stages" not in describe(model)


def test_json_holds_every_figure(architecture_of: ArchitectureOf) -> None:
    model = architecture_of("tiny_hybrid")
    figures = describe(model, layout=Layout())
    read = json.loads(to_json(figures))
    figures["layout"]["recompute_modules"] = list(figures["layout"]["recompute_modules"])
    assert read == figures


def render_text(figures: dict[str, Any]) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(render_table(figures))
    return captured.get()


def test_tables_show_equal_blocks_once(architecture_of: ArchitectureOf) -> None:
    model = architecture_of("llama_nemotron_super_49b")
    text = render_text(describe(model))
    assert "49.87 B" in text
    assert text.count("-{ffn=5632}  ") == 1
    assert "MLP, ffn 5632" in text
    assert "KV cache (bf16)" in text
    assert "Mamba state" not in text
    layout = Layout(tensor_parallel=8)
    assert "one GPU of each pipeline rank (TP8 PP1 CP1 EP1 DP1, 8 GPUs" in render_text(describe(model, layout=layout))


def test_units() -> None:
    assert [number(value) for value in (7, 1234, 31_577_937_344)] == ["7", "1.234 K", "31.58 B"]
    assert [flop(value) for value in (12, 6.5e5, 2.076e10)] == ["12 FLOP", "650 KFLOP", "20.76 GFLOP"]
    assert [size(value) for value in (0, 512, 6144, 3 * 2**30)] == ["0 B", "512 B", "6 KiB", "3 GiB"]


def test_ranges_of_layers() -> None:
    assert ranges([1, 2, 3, 7, 9, 11, 20]) == "1-3, 7-11/2, 20"
    assert ranges([]) == ""


@given(st.sets(st.integers(1, 40)))
def test_ranges_keep_every_number(numbers: set[int]) -> None:
    found: list[int] = []
    for word in filter(None, ranges(sorted(numbers)).split(", ")):
        span, _, step = word.partition("/")
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    assert found == sorted(numbers)


def test_importing_is_fast() -> None:
    code = """
import importlib, sys
heavy = {"torch", "numpy", "matplotlib", "rich", "hydra", "omegaconf", "megatron"}
for module in ("pattern", "block_configs", "model", "cost", "pipeline", "describe", "draw"):
    importlib.import_module(f"nemo_ext.architecture.{module}")
    assert not heavy & sys.modules.keys(), module
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
