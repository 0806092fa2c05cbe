"""Random small models of every family, as config sections and as Hugging Face folders that transformers wrote."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import choose

Sections = dict[str, dict[str, Any]]
VOCABULARY = 96


def _attention(random: Random, *, wide: bool = False, prefix: str = "") -> dict[str, Any]:
    heads = random.choice([2, 4, 6])
    kv = random.choice([number for number in (1, 2, 3, 6) if heads % number == 0])
    return {
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": kv,
        "kv_channels": random.choice([8, 12, 16] if wide else [8, 16]),
    }


def _base(random: Random, name: str, pattern: str, **model: Any) -> Sections:
    megatron = {
        "hidden_size": random.choice([40, 56, 72]),
        "padded_vocab_size": VOCABULARY,
        "disable_bias_linear": True,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "untie_embeddings_and_output_weights": True,
        "max_position_embeddings": 128,
    }
    return {
        "model": {"name": name, "family": name, "pattern": pattern, "backend": "local", **model},
        "megatron": megatron,
    }


def _rope(random: Random, *, kinds: tuple[str, ...], base: int | None = None) -> dict[str, Any]:
    kind = random.choice(kinds)
    flags = {"position_embedding_type": "rope", "rotary_base": base or random.choice([10000, 500000, 1000000])}
    if kind == "llama3":
        flags |= {"use_rope_scaling": True, "rope_scaling_factor": random.choice([8.0, 16.0])}
    if kind == "yarn":
        flags |= {
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": random.choice([2.0, 8.0]),
            "yarn_original_max_position_embeddings": 16,  # the sequences here are three times as long
            "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0,
        }
    return flags


def _llama_sizes(random: Random, sections: Sections) -> None:
    attention = _attention(random)
    sections["megatron"] |= attention | {
        # transformers wants heads that divide the hidden size
        "hidden_size": attention["num_attention_heads"] * random.choice([8, 12, 20]),
        "ffn_hidden_size": random.choice([48, 88, 100]),
        "swiglu": True,
    }


def domyn(random: Random) -> Sections:
    sections = _base(random, "domyn", f"(*-)x{random.choice([2, 3])}")
    sections["megatron"] |= _attention(random, wide=True) | _rope(random, kinds=("default", "yarn"))
    sections["megatron"] |= {
        "normalization": "LayerNorm",
        "apply_layernorm_1p": True,
        "squared_relu": True,
        "ffn_hidden_size": random.choice([48, 92]),
        "rotary_percent": random.choice([0.5, 1.0]),
        "kv_channels": random.choice([8, 16]),
        "disable_bias_linear": random.choice([True, False]),
        "untie_embeddings_and_output_weights": random.choice([True, False]),
    }
    return sections


def llama(random: Random) -> Sections:
    sections = _base(random, "llama", f"(*-)x{random.choice([2, 3])}")
    _llama_sizes(random, sections)
    sections["megatron"] |= _rope(random, kinds=("default", "llama3", "yarn"))
    sections["megatron"] |= {
        "disable_bias_linear": random.choice([True, False]),
        "untie_embeddings_and_output_weights": random.choice([True, False]),
    }
    return sections


def puzzle(random: Random) -> Sections:
    """A child of Llama: no-ops, linear-replaced blocks, own KV heads, windows and widths, fused neighbours."""
    blocks = ["*", "*{kv=1}", "*{window=5}", "*{linear}", "-", "-{ffn=40}", "-{ffn=256}", "-{ffn=231}", "-{linear}"]
    chosen = [random.choice(blocks) for _ in range(7)]
    sections = _base(random, "puzzle", "".join(chosen) + "*-{ffn=60}-")
    _llama_sizes(random, sections)
    sections["megatron"] |= _rope(random, kinds=("default", "llama3", "yarn"))
    return sections


def nano(random: Random) -> Sections:
    pattern = "".join(random.choice("MME*-") for _ in range(4)) + random.choice(["M*E", "E*M-", "*ME"])
    sections = _base(random, "nano", pattern)
    sections["megatron"] |= _attention(random, wide=True) | _hybrid_sizes(random)
    sections["megatron"]["moe_latent_size"] = random.choice([None, 12, 20])
    return sections


def _hybrid_sizes(random: Random) -> dict[str, Any]:
    groups = random.choice([1, 2])
    return {
        "position_embedding_type": "none",
        "squared_relu": True,
        "ffn_hidden_size": random.choice([48, 92]),
        "mamba_num_heads": groups * random.choice([2, 3]),
        "mamba_head_dim": random.choice([8, 16]),
        "mamba_state_dim": random.choice([8, 16]),
        "mamba_num_groups": groups,
        "num_experts": random.choice([4, 5]),
        "moe_router_topk": random.choice([1, 2, 3]),
        "moe_ffn_hidden_size": random.choice([24, 36]),
        "moe_shared_expert_intermediate_size": random.choice([40, 52]),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": random.choice([1.0, 2.5]),
        "moe_router_dtype": "fp32",
    }


def hybrid_puzzle(random: Random) -> Sections:
    """A child of Nemotron 3 Nano: all kinds of blocks with different sizes, windows, linear-replaced blocks."""
    blocks = ["M", "M{heads=4,groups=1}", "M{linear}", "E", "E{experts=3,ffn=20}", "E{shared=none}", "E{linear}"]
    blocks += ["E{latent=12}", "E{latent=none}"]
    blocks += ["*{kv=1,heads=3}", "*{window=7}", "-{ffn=33}", "-{linear}"]
    sections = _base(random, "hybrid_puzzle", "".join(random.choice(blocks) for _ in range(6)) + "M*{linear}E-")
    sections["megatron"] |= _attention(random, wide=True) | _hybrid_sizes(random)
    sections["megatron"] |= {"moe_router_topk": 2, "moe_latent_size": random.choice([None, 20])}
    return sections


def dense_puzzle(random: Random) -> Sections:
    """A child of Domyn-Small, with fused FFNs and omitted blocks."""
    sections = domyn(random)
    sections["model"] |= {"name": "dense_puzzle", "pattern": "*-{ffn=80}--{ffn=24}*{kv=1}*{linear}-*{window=6}"}
    return sections


def olmo1(random: Random) -> Sections:
    sections = _base(random, "olmo1", f"(*-)x{random.choice([2, 3])}", norm_affine=False)
    _llama_sizes(random, sections)
    _square(sections)
    sections["megatron"] |= _rope(random, kinds=("default", "yarn")) | {
        "normalization": "LayerNorm",
        "untie_embeddings_and_output_weights": random.choice([True, False]),
    }
    return sections


def olmo3(random: Random) -> Sections:
    pattern = random.choice(["(*{window=7}-)x3*-", "(*{window=16}-)x2", "*-*{window=9}-*-", "(*-)x2"])
    sections = _base(random, "olmo3", pattern, norm_placement="output", qk_norm_scope="width", yarn_on_windowed=False)
    _llama_sizes(random, sections)
    _square(sections)
    # rope_theta of windowed layers: transformers 5 reads it from the newer keys alone
    sections["megatron"] |= _rope(random, kinds=("default", "yarn")) | {"qk_layernorm": True, "norm_epsilon": 1e-6}
    return sections


def _square(sections: Sections) -> None:
    """Heads whose total width equals the hidden size, as OLMo's classes assume."""
    megatron = sections["megatron"]
    megatron["kv_channels"] = random_even(megatron["hidden_size"] // megatron["num_attention_heads"])
    megatron["hidden_size"] = megatron["kv_channels"] * megatron["num_attention_heads"]


def random_even(size: int) -> int:
    return size + size % 2


FAMILIES: dict[str, Callable[[Random], Sections]] = {
    "NemotronForCausalLM": domyn,
    "NemotronHForCausalLM": nano,
    "LlamaForCausalLM": llama,
    "DeciLMForCausalLM": puzzle,
    "OlmoForCausalLM": olmo1,
    "Olmo3ForCausalLM": olmo3,
    "NemoExtBlocksForCausalLM": hybrid_puzzle,
    "NemoExtBlocksForCausalLM dense": dense_puzzle,
}


@pytest.fixture(scope="session", autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modelling files that tests load are cached in a folder of the tests, not in the user's home."""
    import transformers.dynamic_module_utils

    # One folder in all of a process's tests: modules are found in the first alone.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.getbasetemp() / "hf_modules")
        )
        yield


@pytest.fixture
def random_sections() -> Callable[[str, int], Sections]:
    """A random small model of a family, as the sections `model` and `megatron` of a config."""
    return lambda family, seed: FAMILIES[family](Random(seed))


@pytest.fixture
def hf_folder(tmp_path: Path) -> Callable[..., tuple[Path, torch.nn.Module]]:
    """Writes a model with random weights by transformers itself, from the config.json that we write for it."""

    def write(sections: Mapping[str, Any], name: str = "hf", seed: int = 0) -> tuple[Path, torch.nn.Module]:
        from transformers import AutoConfig, AutoModelForCausalLM

        found, config = choose(from_config(sections))
        folder = tmp_path / name
        folder.mkdir()
        config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        (folder / "config.json").write_text(json.dumps(config))
        for code in found.code:
            shutil.copyfile(str(files("nemo_ext.checkpoint.remote_code") / code), folder / code)
        torch.manual_seed(seed)
        loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True, dtype=torch.float32).eval()
        with torch.no_grad():
            for name_, tensor in [*model.named_parameters(), *model.named_buffers()]:
                spread_out(name_, tensor)
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))  # as we write it, not as transformers does
        return folder, model

    return write


def spread_out(name: str, tensor: torch.Tensor) -> None:
    """Weights under which a wrong mapping cannot hide: no norm is one, no bias zero, logits of order one."""
    if "inv_freq" in name:
        return
    if "dt_bias" in name:
        tensor[0] = -9.0  # a time step of 1e-4, which no implementation may clamp
        return
    if tensor.dim() == 1:
        tensor.add_(torch.randn_like(tensor) * 0.3)
    elif "in_proj" not in name:  # time steps far beyond any trained ones would cost transformers' scan its precision
        tensor.mul_(4.0)


@pytest.fixture
def small_files() -> Callable[[], AbstractContextManager[None]]:
    """Inside it no file may grow beyond 4096 bytes, as if the disk were full; pytest's own log is written outside."""

    @contextmanager
    def limited() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
