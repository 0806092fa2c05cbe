"""Configs of our formats by vLLM's names. Needs no vLLM."""

import pickle
from typing import Any

import pytest

from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import choose
from nemo_ext.job.config import compose


def written(model: str, pattern: str, architecture: str) -> dict[str, Any]:
    """config.json of a model in a format."""
    words = [f"model={model}", f"model.pattern='{pattern}'"]
    return choose(from_config(compose("describe", words)), architecture)[1]


def test_a_hybrid_says_what_vllm_sizes_its_caches_by() -> None:
    from nemo_ext.vllm.config import NemoExtBlocksConfig

    values = written("nemotron3_nano_tiny", "M*{kv=6}E{experts=4} M{linear} *-E{topk=3}", "NemoExtBlocksForCausalLM")
    config = NemoExtBlocksConfig.from_dict(values)

    assert config.architectures == ["NemoExtHybridBlocksForCausalLM"]
    assert config.layers_block_type == ["mamba", "attention", "moe", "linear", "attention", "mlp", "moe"]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 6, 32)
    assert (config.n_routed_experts, config.num_experts_per_tok) == (8, 3)


def test_a_model_without_mamba_is_no_hybrid() -> None:
    from nemo_ext.vllm.config import NemoExtBlocksConfig

    config = NemoExtBlocksConfig.from_dict(written("llama_nemotron_tiny", "- *- -{linear}", "NemoExtBlocksForCausalLM"))

    assert config.architectures == ["NemoExtBlocksForCausalLM"]
    assert config.n_routed_experts == 0


@pytest.mark.parametrize(
    ("pattern", "architecture", "kind"),
    [
        ("*- *{kv=2}- -", "DeciLMForCausalLM", "nemotron-nas"),
        ("- *{kv=2}-", "NemoExtBlocksForCausalLM", "nemo_ext_blocks"),
        ("*- *{linear}-", "NemoExtBlocksForCausalLM", "nemo_ext_blocks"),
        ("*- *{window=8}-", "NemoExtBlocksForCausalLM", "nemo_ext_blocks"),
    ],
)
def test_vllm_keeps_its_own_class_for_what_that_can(pattern: str, architecture: str, kind: str) -> None:
    from nemo_ext.vllm.config import DeciLMConfig

    config = DeciLMConfig.from_dict(written("llama_nemotron_tiny", pattern, "DeciLMForCausalLM"))

    assert (config.architectures, config.model_type) == ([architecture], kind)


@pytest.mark.parametrize(
    ("model", "pattern", "architecture"),
    [
        ("nemotron3_nano_tiny", "M*{kv=6}E M{linear}-", "NemoExtBlocksForCausalLM"),
        ("llama_nemotron_tiny", "- *{kv=2}- *{window=8}-{linear}", "DeciLMForCausalLM"),
    ],
)
def test_the_model_is_read_back_from_the_config(model: str, pattern: str, architecture: str) -> None:
    """In another process too, and with what vLLM adds for a quantised checkpoint."""
    from nemo_ext.vllm.config import CONFIGS, model_of

    values = written(model, pattern, architecture)
    (made,) = (each for each in CONFIGS if each.format == architecture)
    config = pickle.loads(pickle.dumps(made.from_dict({**values, "quantization_config": {"quant_method": "modelopt"}})))
    found, description = model_of(config)

    assert found.architecture == architecture
    assert (
        description.blocks == from_config(compose("describe", [f"model={model}", f"model.pattern='{pattern}'"])).blocks
    )


def test_vllms_own_class_gets_what_ours_cannot_read() -> None:
    from nemo_ext.vllm.config import DeciLMConfig

    values = written("llama_nemotron_tiny", "- *{kv=2}-", "DeciLMForCausalLM")
    values["block_configs"][0]["ffn"]["hidden_act"] = "gelu"
    config = DeciLMConfig.from_dict(values)

    assert (config.architectures, config.model_type) == (["DeciLMForCausalLM"], "nemotron-nas")
    assert config.block_configs[0].ffn.hidden_act == "gelu"


def test_puzzles_config_gives_vllm_each_block() -> None:
    """With blocks of multi-token prediction after those of the model, and maxima where vLLM asks for one number."""
    from nemo_ext.checkpoint.remote_code.configuration_nemotron_h_puzzle import NemotronHPuzzleConfig

    pattern = "ME{ffn=64,topk=1,latent=32}*{kv=6}-E{experts=4}/*E{ffn=96}"
    values = written("nemotron3_nano_tiny", pattern, "NemotronHPuzzleForCausalLM")
    config = pickle.loads(pickle.dumps(NemotronHPuzzleConfig.from_dict(values)))

    assert (config.hybrid_override_pattern, config.mtp_hybrid_override_pattern) == ("ME*-E", "*E")
    blocks = [config.get_nemotron_h_config_for_layer(index) for index in range(7)]
    moe = [blocks[index] for index in (1, 4, 6)]
    assert [block.moe_intermediate_size for block in moe] == [64, 128, 96]
    assert [block.num_experts_per_tok for block in moe] == [1, 2, 2]
    assert [block.norm_topk_prob for block in moe] == [False, True, True]
    assert [block.moe_latent_size for block in moe] == [32, None, None]
    assert [block.n_routed_experts for block in moe] == [8, 4, 8]
    assert [blocks[index].num_key_value_heads for index in (2, 5)] == [6, 2]
    assert (config.n_routed_experts, config.mtp_n_routed_experts, config.num_key_value_heads) == (8, 8, 6)
    assert config.moe_latent_size is None
    assert config.to_dict()["block_configs"] == values["block_configs"]
    assert NemotronHPuzzleConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    with pytest.raises(ValueError, match=r"mtp_block_configs\[0\].block_type: expected one of mamba, .*'gdn'"):
        NemotronHPuzzleConfig(block_configs=[{"block_type": "mamba"}], mtp_block_configs=[{"block_type": "gdn"}])


def test_puzzles_blocks_inherit_the_top_level_s_own_sizes() -> None:
    from nemo_ext.checkpoint.formats import read
    from nemo_ext.checkpoint.remote_code.configuration_nemotron_h_puzzle import NemotronHPuzzleConfig

    values = written("nemotron3_nano_tiny", "EE{topk=4}*/*E", "NemotronHPuzzleForCausalLM")
    for entry in (values["block_configs"][0], values["mtp_block_configs"][1]):
        for key in ("num_experts_per_tok", "n_routed_experts"):
            del entry[key]
    values |= {"num_experts_per_tok": 2, "n_routed_experts": 6}
    _, described = read(values)
    ours = [block for block in (*described.blocks, *described.prediction) if block.kind == "E"]

    config = NemotronHPuzzleConfig.from_dict(values)
    for each in (config, NemotronHPuzzleConfig.from_dict(config.to_dict())):
        moe = [each.get_nemotron_h_config_for_layer(index) for index in (0, 1, 4)]
        assert [block.num_experts_per_tok for block in moe] == [2, 4, 2] == [block.size("topk") for block in ours]
        assert [block.n_routed_experts for block in moe] == [6, 8, 6] == [block.size("experts") for block in ours]
        assert (each.num_experts_per_tok, each.n_routed_experts, each.mtp_n_routed_experts) == (4, 8, 6)
