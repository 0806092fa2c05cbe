"""Low-rank adapters with TRL on models of several classes: merged at the end, and resumed exactly."""

import json
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_ext.checkpoint import remote_code
from nemo_ext.job.config import compose
from nemo_ext.rl.job import run
from nemo_ext.rl.lora import adapters
from nemo_ext.rl.settings import Lora
from nemo_ext.rl.tasks.job import run as make_tasks

pytestmark = pytest.mark.skipif(find_spec("trl") is None or find_spec("peft") is None, reason="peft is not installed")

BLOCKS = [
    {"kind": "mamba", "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 2},
    {"kind": "attention", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": None},
    {"kind": "attention", "linear": True},
    {"kind": "mlp", "intermediate_size": 24},
]


@pytest.fixture
def puzzle(random_llama: Path, tmp_path: Path) -> Path:
    """A hybrid Puzzle model with a linear block, as exported: weights, code, and the Llama's tokenizer."""
    module = import_module("nemo_ext.checkpoint.remote_code.modeling_nemo_ext_blocks")
    sizes = {
        "vocab_size": 261,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "hidden_act": "relu2",
        "gated_mlp": False,
    }
    ends = {"bos_token_id": 0, "eos_token_id": 3, "pad_token_id": 4}
    torch.manual_seed(0)
    shutil.copytree(random_llama, folder := tmp_path / "puzzle")
    module.NemoExtBlocksForCausalLM(module.NemoExtBlocksConfig(blocks=BLOCKS, **sizes, **ends)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    name = "modeling_nemo_ext_blocks.NemoExtBlocks"
    config["auto_map"] = {
        "AutoConfig": "configuration_nemo_ext_blocks.NemoExtBlocksConfig",
        "AutoModelForCausalLM": f"{name}ForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file in Path(remote_code.__path__[0]).glob("*_nemo_ext_blocks.py"):
        shutil.copy(file, folder)
    return folder


def train(model: Path, folder: Path, *words: str) -> Path:
    make_tasks(compose("rl_tasks", ["generator=arithmetic", "count=8", "level=1", f"output={folder}/tasks.jsonl"]))
    config = (
        *("preset=rl_zero", f"model={model}", f"run_dir={folder}/run", f"tasks.train.path={folder}/tasks.jsonl"),
        *("environments={math: {}}", "rl.prompts_per_step=2", "rl.generations_per_prompt=2", "rl.batch=4"),
        *("rl.lengths.response=8", "rl.schedule={kind: constant, steps: 4}", "on_inexpressible=warn", "save_every=2"),
        *("rl.optimizer.learning_rate=0.01", "lora={rank: 4, alpha: 8}", *words),
    )
    run(compose("rl", config))
    return folder / "run" / "model"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that depend on the response's tokens, since random answers earn nothing."""
    rollouts = import_module("nemo_ext.rl.trl.rollouts").Rollouts
    monkeypatch.setattr(rollouts, "rewards", lambda self, made: [float(sum(each.tokens) % 7) for each in made])


@pytest.mark.parametrize("name", ["random_llama", "puzzle"])
def test_adapters_are_merged_and_a_run_resumes(
    name: str, noisy: None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    peft, transformers = import_module("peft"), import_module("transformers")
    model: Path = request.getfixturevalue(name)
    (whole := tmp_path / "whole").mkdir()
    trust = {"trust_remote_code": True}

    merged = train(model, whole)

    before, after = tensors(model), tensors(merged)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert before.keys() == after.keys()
    assert changed and not [
        key for key in changed if any(word in key for word in ("embed", "norm", "out_proj", "lm_head"))
    ]
    base = transformers.AutoModelForCausalLM.from_pretrained(model, **trust)
    wrapped = peft.PeftModel.from_pretrained(base, whole / "run" / "checkpoints" / "checkpoint-4")
    ids = torch.arange(5, 25)[None]
    plain = transformers.AutoModelForCausalLM.from_pretrained(merged, **trust)
    torch.testing.assert_close(plain(ids).logits, wrapped(ids).logits, atol=1e-5, rtol=1e-4)

    (half := tmp_path / "half").mkdir()
    shutil.copytree(whole / "run", half / "run", ignore=shutil.ignore_patterns("model", "checkpoint-4"))
    config = half / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(whole), str(half)))
    again = tensors(train(model, half))
    assert all(torch.equal(after[key], again[key]) for key in after)


def test_what_cannot_have_adapters(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="out_proj cannot have adapters"):
        adapters(Lora(targets=("out_proj",)))
    with pytest.raises(ValueError, match="reprofile cannot be combined with lora"):
        train(model, tmp_path, "tasks.train.reprofile={every: 2}")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install 'nemo_ext\[lora\]'"):
        adapters(Lora())
