"""Every family computes in Megatron what transformers computes: logits, loss, gradients, greedy text."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_ext.checkpoint import hf
from nemo_ext.checkpoint.torch_dist import TorchDistReader

Sections = dict[str, dict[str, Any]]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2, 3))]
LENGTH = 48
SETTINGS = hf.Settings()


def families() -> list[str]:
    return [
        *("NemotronForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "LlamaForCausalLM"),
        "DeciLMForCausalLM",
        *("OlmoForCausalLM", "Olmo3ForCausalLM", "NemoExtBlocksForCausalLM", "NemoExtBlocksForCausalLM dense"),
    ]


def convert(source: Path, to: Path, sections: Mapping[str, Any] | None = None) -> hf.Plan:
    plan = hf.plan(source, to, SETTINGS, sections)
    hf.convert(plan, SETTINGS, progress=False)
    return plan


def load(model: torch.nn.Module, checkpoint: Path) -> torch.nn.Module:
    """Megatron's own loader; a key on only one side is an error."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    keys = model.sharded_state_dict()
    apply_factories(keys)
    tensors = {value.key: value.global_shape for value in nested_values(keys) if isinstance(value, ShardedTensor)}
    stored = TorchDistReader(checkpoint / "release").tensors
    assert tensors == {key: tensor.shape for key, tensor in stored.items()}
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint / "release"))
    model.load_state_dict(state["model"])
    return model.eval()


def megatron_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, positions(tokens), None)


def positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


@pytest.fixture
def pair(
    hf_folder: Callable[..., Any], build_sections: Callable[..., torch.nn.Module], tmp_path: Path
) -> Callable[[Sections], tuple[Path, torch.nn.Module, torch.nn.Module]]:
    """The folder that transformers wrote, its model, and the same model converted to Megatron through files."""

    def make(sections: Sections) -> tuple[Path, torch.nn.Module, torch.nn.Module]:
        folder, reference = hf_folder(sections)
        convert(folder, tmp_path / "megatron", sections)
        return folder, reference, load(build_sections(sections), tmp_path / "megatron")

    return make


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", families())
def test_logits_loss_and_gradients_agree_and_the_round_trip_is_exact(
    family: str, seed: int, random_sections: Callable[..., Sections], pair: Callable[..., Any], tmp_path: Path
) -> None:
    sections = random_sections(family, seed)
    folder, reference, model = pair(sections)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [family.split()[0]]
    tokens = torch.randint(0, reference.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(seed))

    expected = reference(tokens, labels=tokens)
    logits = megatron_logits(model, tokens)
    assert (logits - expected.logits).abs().max() <= 1e-4
    assert torch.equal(logits.argmax(-1), expected.logits.argmax(-1))
    assert expected.logits.std() > 0.1  # else everything agrees

    expected.loss.backward()
    loss = model(tokens[:, :-1], positions(tokens)[:, :-1], None, labels=tokens[:, 1:]).mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-3)
    assert_gradients_agree(reference, model, sections, tmp_path)

    convert(tmp_path / "megatron", tmp_path / "back")
    first, second = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first)
    before, after = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "back"))
    assert {key: after[key] for key in before} == before


def assert_gradients_agree(reference: torch.nn.Module, model: torch.nn.Module, sections: Sections, tmp: Path) -> None:
    """Megatron's gradients, saved by Megatron as weights and converted, compared with transformers'."""
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in reference.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    (tmp / "gradients").mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(tmp / "gradients"))
    convert(tmp / "gradients", tmp / "gradients_hf", sections)
    reference.save_pretrained(tmp / "expected")
    got, expected = (load_file(tmp / name / "model.safetensors") for name in ("gradients_hf", "expected"))
    assert got.keys() == expected.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        if "e_score_correction_bias" in name:
            continue  # not a parameter in either: it changes with the load, not by a gradient
        # Some gradients are zero except for rounding (e.g. a key's bias): they are compared with the largest.
        assert (got[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6 * largest, name


@pytest.mark.parametrize("family", families())
def test_greedy_decoding_gives_the_same_tokens(
    family: str, random_sections: Callable[..., Sections], pair: Callable[..., Any], tmp_path: Path
) -> None:
    """transformers' model of our export, with its cache, compared with the complete prefix in Megatron."""
    from transformers import AutoModelForCausalLM

    sections = random_sections(family, 11)
    sections["megatron"]["untie_embeddings_and_output_weights"] = True  # tied random weights repeat one token for ever
    _, _, model = pair(sections)
    convert(tmp_path / "megatron", tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True, dtype=torch.float32)
    prompt = torch.randint(0, exported.config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(1))

    generated = exported.eval().generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
    )

    tokens = prompt
    with torch.no_grad():
        for _ in range(16):
            tokens = torch.cat([tokens, megatron_logits(model, tokens)[:, -1:].argmax(-1)], dim=1)
    assert generated.tolist() == tokens.tolist()
    assert len(set(tokens[0, 8:].tolist())) > 1  # not one token over and over
