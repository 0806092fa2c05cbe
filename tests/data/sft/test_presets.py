"""SFT of a model family as a user runs it: packs from the preset, then training with the recipe."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext.data.sft.job import run
from nemo_ext.data.sft.settings import read_settings
from nemo_ext.job.config import compose

FAMILIES = {
    "nemotron3_nano": "nemotron3_nano/sft",
    "domyn": "domyn_small/sft",
    "llama_nemotron": "llama_nemotron/nano_sft_mixed",
    "olmo3": "olmo3/7b_think_sft",
}


TRAINED = ("nemotron3_nano", "olmo3")
"""A hybrid, whose Mamba blocks begin anew with every sample of a pack, and windowed attention with YaRN."""


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_presets_packs_are_as_long_as_its_recipes_sequences(preset: str) -> None:
    words = [f"preset={preset}", "output=o", "sources=[{name: chat, path: chat.jsonl}]"]
    settings = read_settings(compose("sft_data", words))
    recipe = compose("train", [f"recipe={FAMILIES[preset]}"])

    assert (settings.preset, settings.template) == (preset, preset)
    assert settings.packing.capacity == recipe["megatron"]["seq_length"]
    assert settings.packing.align % (2 * recipe["megatron"]["context_parallel_size"]) == 0
    assert recipe["data"]["packed"]["train"] == f"data/{FAMILIES[preset]}/train"


def test_the_command_line_wins_over_a_preset() -> None:
    words = ["preset=domyn", "packing.capacity=1024", "thinking_shares={math: 0.9}", "output=o"]
    config = compose("sft_data", [*words, "sources=[{name: chat, path: chat.jsonl}]"])

    assert config["packing"]["capacity"] == 1024
    assert config["thinking_shares"] == {"math": 0.9}


@pytest.mark.parametrize(
    "preset", [pytest.param(TRAINED[0], marks=pytest.mark.slow), pytest.param(TRAINED[1], marks=pytest.mark.deep)]
)
def test_a_recipe_trains_on_its_presets_packs(launched: Callable[..., str], tmp_path: Path, preset: str) -> None:
    recipe = FAMILIES[preset]
    family = recipe.split("/")[0]
    with (tmp_path / "chat.jsonl").open("w") as file:
        for number in range(60):
            trace = f"<think>\nwhat is {number}?\n</think>\n\n" if number % 2 else ""
            messages = [
                {"role": "user", "content": f"number {number}, please, in a few words"},
                {"role": "assistant", "content": f"{trace}It is {number} and not {number + 1}."},
            ]
            file.write(json.dumps({"id": str(number), "thinking": bool(number % 2), "messages": messages}) + "\n")
    sources = f"sources=[{{name: chat, path: {tmp_path / 'chat.jsonl'}, task: chat}}]"
    packs = (
        *(f"preset={preset}", f"output={tmp_path / 'data' / recipe}", sources),
        *("packing.capacity=256", "validation_share=0.1", "near_duplicates=null", "thinking_shares={}", "workers=1"),
    )
    run(compose("sft_data", packs))

    launched(
        *("train", f"recipe={recipe}", f"model={family}_tiny", "scale=laptop", "megatron.micro_batch_size=1"),
        *(f"data_root={tmp_path / 'data'}", f"run_dir={tmp_path / 'run'}", "megatron.global_batch_size=2"),
        *("train.tokens=1024", "megatron.eval_iters=1"),
    )

    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics if "loss" in entry] == [1, 2]
