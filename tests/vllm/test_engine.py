"""What the engine does around our models changes no token: caches, chunks, preemption, ranks."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_ext.checkpoint.formats import read

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (tests/vllm/requirements.txt)"),
]

DENSE = [
    *("model=llama_nemotron_tiny", "megatron.kv_channels=32", "megatron.num_attention_heads=4"),
    *(
        "megatron.num_query_groups=2",
        "model.pattern='-{ffn=96} *{kv=4} - *{linear} *{kv=2,window=24} -{linear} *{heads=8} -'",
    ),
]
HYBRID = ["model=nemotron3_nano_tiny", "model.pattern='M-M*{kv=2} -{ffn=96} M -{ffn=100} M{linear} *{kv=6} -{ffn=40}'"]
DECI = [*DENSE[:-1], "model.pattern='- *{kv=1}-{ffn=256} *- *{linear}-'"]
WAYS = {
    "chunks of 16 tokens": {"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    "one sequence at once": {"max_num_seqs": 1},
    "compiled": {"enforce_eager": False},
    "two tensor ranks": {"tensor_parallel_size": 2},
    "two pipeline ranks": {"pipeline_parallel_size": 2, "enforce_eager": False},  # vLLM's CPU runner cannot otherwise
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_no_token_changes(model: str, way: str, reference: Callable[..., Any], in_vllm: Callable[..., Any]) -> None:
    made = reference({"dense": DENSE, "hybrid": HYBRID}[model], "NemoExtBlocksForCausalLM")

    assert in_vllm(made, **WAYS[way])["tokens"] == made.tokens


# Without hybrids: on a CPU vLLM 0.32 takes prompts of one chunk of their scan, 128 tokens, for its own NemotronH too,
# so that no block of their cache is ever full.
def test_what_the_prefix_cache_gives_changes_no_token(
    reference: Callable[..., Any], in_vllm: Callable[..., Any]
) -> None:
    made = reference(DENSE, "NemoExtBlocksForCausalLM", lengths=(7, 40, 161))

    found = in_vllm(made, enable_prefix_caching=True, block_size=32, twice=True)

    assert found["tokens"] == made.tokens
    assert found["cached"] > 0


def test_preemption_changes_no_token(reference: Callable[..., Any], in_vllm: Callable[..., Any]) -> None:
    made = reference(DENSE, "NemoExtBlocksForCausalLM")

    found = in_vllm(made, num_gpu_blocks_override=12, block_size=32, max_model_len=96)

    assert found["tokens"] == made.tokens
    assert found["preemptions"] > 0


# Without a prefix cache, whose Mamba-2 states vLLM 0.32 copies by a kernel of Triton's.
def test_drafts_change_no_token(reference: Callable[..., Any], in_vllm: Callable[..., Any]) -> None:
    """A depth that repeats the last token: some of its drafts are accepted, others are not."""
    made = reference(["model=nemotron3_super_tiny"], "NemotronHForCausalLM")
    found, description = read(json.loads((made.folder / "config.json").read_text()))
    tensors = load_file(made.folder / "model.safetensors")
    for entry in found.entries(description):
        for name, shape in zip(entry.names, entry.shapes, strict=True):
            if name.startswith("mtp."):
                tensors[name] = torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.01
                if name.endswith("eh_proj.weight"):
                    tensors[name] = torch.cat([torch.zeros(shape[0], shape[0]), torch.eye(shape[0])], dim=1)
    save_file(tensors, made.folder / "model.safetensors", metadata={"format": "pt"})

    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    answered = in_vllm(made, speculative_config=drafts, enable_prefix_caching=False)

    assert answered["tokens"] == made.tokens
    assert 0 < answered["accepted"] < answered["drafted"]


def test_mamba_blocks_have_states_of_their_own_sizes(
    reference: Callable[..., Any], in_vllm: Callable[..., Any]
) -> None:
    pattern = "M *- M{heads=8} - M{heads=20,state=64,groups=4} *{kv=6}-"
    made = reference(["model=nemotron3_nano_tiny", f"model.pattern='{pattern}'"], "NemoExtBlocksForCausalLM")

    assert in_vllm(made)["tokens"] == made.tokens


@pytest.mark.parametrize(("words", "architecture"), [(HYBRID, "NemoExtBlocksForCausalLM"), (DECI, "DeciLMForCausalLM")])
def test_transformers_loads_the_folder_beside_the_plug_in(
    words: list[str], architecture: str, reference: Callable[..., Any]
) -> None:
    made = reference(words, architecture)
    code = (
        "from nemo_ext.vllm import register; register()\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(made.folder)!r}, trust_remote_code=True)\n"
        f"ids = model.dummy_inputs['input_ids'].new_tensor([{made.prompts[1]}])\n"
        f"print(model.generate(ids, max_new_tokens={len(made.tokens[1])}, do_sample=False, pad_token_id=0)[0].tolist())"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.splitlines()[-1] == str(made.prompts[1] + made.tokens[1])


def test_no_code_of_the_folder_runs(reference: Callable[..., Any], in_vllm: Callable[..., Any], tmp_path: Path) -> None:
    made = reference(DENSE, "NemoExtBlocksForCausalLM")
    for code in made.folder.glob("*.py"):
        code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + code.read_text())

    assert in_vllm(made, trust_remote_code=True)["tokens"] == made.tokens
    assert not (tmp_path / "ran").exists()
