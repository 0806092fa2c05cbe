"""Keys of a config.json that a conversion refuses or ignores, and the files it leaves when it refuses a tensor."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nemo_ext.checkpoint import hf
from nemo_ext.checkpoint.formats import ignored, read
from nemo_ext.checkpoint.output import RECORD, unfinished
from nemo_ext.checkpoint.storage import CheckpointError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
NANO: dict[str, Any] = {
    **{"architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "chunk_size": 128},
    **{"conv_kernel": 4, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688, "n_group": 1},
    **{"hybrid_override_pattern": "MEMEM*E", "initializer_range": 0.02, "intermediate_size": 1856, "n_groups": 8},
    **{"layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64},
    **{"mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144},
    **{"mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856},
    **{"moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "n_shared_experts": 1},
    **{"norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6},
    **{"num_hidden_layers": 7, "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0},
    **{"partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False, "rope_theta": 10000},
    **{"routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False},
    **{"time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001},
    **{"topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.55.4", "use_bias": False},
    **{"use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072},
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
}


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Modules that take seconds to import, imported when a test runs rather than during collection."""
    global transformers
    import transformers


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("NemotronForCausalLM", "NemotronConfig"),
        ("NemotronHForCausalLM", "NemotronHConfig"),
        ("LlamaForCausalLM", "LlamaConfig"),
        ("OlmoForCausalLM", "OlmoConfig"),
        ("Olmo3ForCausalLM", "Olmo3Config"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_all_keys_that_transformers_writes_are_known(architecture: str, kind: str, whole: bool) -> None:
    config = getattr(transformers, kind)(architectures=[architecture])

    assert ignored(json.loads(config.to_json_string(use_diff=not whole))) == []


def test_a_config_of_transformers_4_is_known() -> None:
    assert ignored(NANO) == []
    fewer = {"hybrid_override_pattern": "M*M*", "num_hidden_layers": 4}  # sizes of experts that it no longer has
    assert ignored({**NANO, **fewer}) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("logit_softcapping", 30.0), ("final_logit_softcapping", 30.0), ("attn_sink", True), ("attention_sinks", 4)),
        *(("logit_scale", 0.0625), ("embedding_multiplier", 12.0), ("residual_multiplier", 0.22), ("q_lora_rank", 512)),
        *(("sliding_window", 4096), ("use_qk_norm", True), ("qkv_bias", True), ("num_local_experts", 8)),
        *(("rope_local_base_freq", 1e4), ("norm_type", "layer"), ("layer_types", ["full_attention"]), ("mystery", 1)),
        *(("logit_scale", 0), ("num_nextn_predict_layers", 1), ("alibi", True), ("parallel_attn", True)),
    ],
)
def test_unsupported_settings_of_a_model_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {key}=.*ignoring it could change the model") as refusal:
        read({**CONFIG, key: value})
    # A key that determines a shape has an effect on the model.
    assert ("delete it" in str(refusal.value)) == (not re.search("^num_|rank$", key))


def test_every_unsupported_setting_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"logit_softcapping=30\.0, attn_sink=True is not supported for LlamaForCausalLM"
    ):
        read({**CONFIG, "logit_softcapping": 30.0, "attn_sink": True})


def test_settings_that_are_switched_off_are_listed() -> None:
    off = {"final_logit_softcapping": None, "attn_sink": False, "q_lora_rank": 0, "logit_scale": 1.0, "layer_types": []}

    assert ignored({**CONFIG, **off}) == list(off)


@pytest.mark.parametrize(
    "key", ["image_token_id", "_experiment", "torchao_version", "unsloth_fixed", "resid_dropout", "is_llama_config"]
)
def test_keys_that_trainers_add_are_accepted(key: str) -> None:
    assert ignored({**CONFIG, key: 1}) == []


NEMOTRON = {key: value for key, value in CONFIG.items() if key != "rms_norm_eps"}
NEMOTRON |= {"architectures": ["NemotronForCausalLM"], "hidden_act": "relu2", "norm_eps": 1e-5}
ATTENTION = {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False, "window_length": None}
FFN = {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False, "sparsify": None}
DECILM = CONFIG | {"architectures": ["DeciLMForCausalLM"], "num_hidden_layers": 1, "hidden_act": "silu"}
DECILM |= {"num_key_value_heads": None, "intermediate_size": None}


@pytest.mark.parametrize(
    ("published", "other", "message"),
    [
        (
            {**NANO, "head_dim": None, "attention_head_dim": 64},
            {**NANO, "attention_head_dim": 64},
            "attention_head_dim=64 .* expected 128",
        ),
        (
            {**NANO, "rms_norm_eps": 1e-5, "num_query_groups": NANO["num_key_value_heads"], "time_step_rank": 256},
            {**NANO, "rms_norm_eps": 1e-6},
            "rms_norm_eps=1e-06 .* expected 1e-05",
        ),
        ({**NANO, "num_query_groups": None}, {**NANO, "num_query_groups": 1}, "num_query_groups=1 .* expected"),
        (
            {**NEMOTRON, "kv_channels": 8, "rope_percent": 0.5},
            {**NEMOTRON, "rope_percent": 1.0},
            r"rope_percent=1\.0 .* expected 0\.5",
        ),
        ({**NEMOTRON, "kv_channels": None}, {**NEMOTRON, "kv_channels": 16}, "kv_channels=16 .* expected 8"),
        (
            {
                **DECILM,
                "block_configs": [
                    {
                        "attention": {**ATTENTION, "llama4": None, "mamba": None, "unshifted_sink": False},
                        "ffn": {**FFN, "gated": True, "hidden_act": "silu", "intermediate_size": None, "moe": None},
                        "parallel_blocks": None,
                    }
                ],
            },
            {**DECILM, "block_configs": [{"attention": ATTENTION, "ffn": {**FFN, "gated": False}}]},
            r"block_configs\[0\]\.ffn\.gated: expected True, the only supported value, got False",
        ),
        (
            {**DECILM, "block_configs": [{"attention": ATTENTION, "ffn": {**FFN, "intermediate_size": 256}}]},
            {**DECILM, "block_configs": [{"attention": ATTENTION, "ffn": {**FFN, "intermediate_size": 512}}]},
            r"ffn_mult=1\.0 means a width of 256, but intermediate_size=512",
        ),
    ],
)
def test_redundant_keys_are_read(published: dict[str, Any], other: dict[str, Any], message: str) -> None:
    assert set(ignored(published)) <= {"intermediate_size", "num_key_value_heads"}  # null in DeciLM
    if "attention_head_dim" in published:
        assert next(block for block in read(published)[1].blocks if block.kind == "*").size("head_dim") == 64
    with pytest.raises(ValueError, match=message):
        read(other)


def test_a_block_of_our_own_format_has_no_other_settings() -> None:
    block = {"kind": "mlp", "intermediate_size": 24, "multiplier": 2.0}
    config = {"architectures": ["NemoExtBlocksForCausalLM"], "vocab_size": 40, "hidden_size": 16, "blocks": [block]}

    with pytest.raises(ValueError, match=r"block 1 \(mlp\): remove the unknown keys multiplier"):
        read(config)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Llama, with a key that is switched off."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "attn_sink": False}))
    weights = {}
    for entry in (found := read(CONFIG))[0].entries(found[1]):
        weights |= {name: torch.ones(shape) for name, shape in zip(entry.names, entry.shapes, strict=True)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("to_format", ["megatron", "huggingface"])
def test_ignored_keys_are_reported_and_recorded(to_format: str, model: Path, tmp_path: Path) -> None:
    settings = hf.Settings(to_format=to_format)
    plan = hf.plan(model, tmp_path / "out", settings)

    hf.convert(plan, settings, progress=False)

    told = "config.json: ignored unknown keys that are switched off: attn_sink"
    assert told in plan.remarks
    assert told in json.loads((tmp_path / "out" / RECORD).read_text())["remarks"]
    assert hf.is_made(hf.plan(model, tmp_path / "out", settings), settings)


def spoil(model: Path, name: str) -> None:
    from safetensors.torch import load_file

    weights = load_file(model / "model.safetensors")
    weights[name][0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("to_format", ["megatron", "huggingface"])
def test_nan_in_the_first_part_leaves_no_files(to_format: str, model: Path, tmp_path: Path) -> None:
    spoil(model, "model.norm.weight")
    settings = hf.Settings(to_format=to_format)

    with pytest.raises(CheckpointError, match=r"NaN or infinite.*check_finite=false to accept them$"):
        hf.convert(hf.plan(model, tmp_path / "out", settings), settings, progress=False)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("to_format", ["megatron", "huggingface"])
def test_nan_in_a_later_part_names_the_folder_of_finished_parts(to_format: str, model: Path, tmp_path: Path) -> None:
    spoil(model, "model.layers.1.mlp.down_proj.weight")
    settings = hf.Settings(to_format=to_format, shard_gigabytes=1e-9)
    left = unfinished(tmp_path / "out")

    with pytest.raises(CheckpointError, match=r"finished files are in \S+: .* again to resume") as said:
        hf.convert(hf.plan(model, tmp_path / "out", settings), settings, progress=False)

    assert str(left) in str(said.value) and left.is_dir()
    settings = hf.Settings(to_format=to_format, shard_gigabytes=1e-9, check_finite=False)
    hf.convert(hf.plan(model, tmp_path / "out", settings), settings, progress=False)
    assert not left.exists()
