"""config.json in both directions, the choice of a format, and a mapping that names every parameter exactly once."""

import json
import re
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from importlib.resources import files
from math import log, prod
from random import Random
from typing import Any

import pytest
import torch

from nemo_ext.architecture.block_configs import ffn_width
from nemo_ext.checkpoint.description import differences, from_config, to_config
from nemo_ext.checkpoint.formats import FORMATS, choose, named, read
from nemo_ext.checkpoint.formats.rope import rope_parameters
from nemo_ext.job.config import compose

Sections = dict[str, dict[str, Any]]
FAMILIES = [
    *("NemotronForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "LlamaForCausalLM"),
    *(
        "DeciLMForCausalLM",
        "OlmoForCausalLM",
        "Olmo3ForCausalLM",
        "NemoExtBlocksForCausalLM",
        "NemoExtBlocksForCausalLM dense",
    ),
]
MODELS = {
    "domyn_small_10b": "NemotronForCausalLM",
    "nemotron3_nano_30b": "NemotronHForCausalLM",
    "nemotron3_puzzle_75b": "NemotronHPuzzleForCausalLM",
    "llama_nemotron_nano_8b": "LlamaForCausalLM",
    "llama_nemotron_super_49b": "DeciLMForCausalLM",
    "llama_nemotron_ultra_253b": "DeciLMForCausalLM",
    "olmo1_1b": "OlmoForCausalLM",
    "olmo1_7b": "OlmoForCausalLM",
    "olmo3_7b": "Olmo3ForCausalLM",
    "olmo3_32b": "Olmo3ForCausalLM",
}


def through_json(config: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_descriptions_survive_config_json_and_our_config(
    family: str, random_sections: Callable[[str, int], Sections]
) -> None:
    for seed in range(12):
        description = from_config(random_sections(family, seed))
        found, config = choose(description)
        assert found.architecture == family.split()[0]
        assert differences(read(through_json(config))[1], description) == {}
        assert differences(from_config(to_config(description)), description) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_mapped_exactly_once(family: str, random_sections: Callable[[str, int], Sections]) -> None:
    for seed in range(6):
        description = from_config(random_sections(family, seed))
        entries = list(choose(description)[0].entries(description))
        names = [name for entry in entries for name in entry.names]
        pieces = [piece for entry in entries for piece in entry.pieces]
        assert len(names) == len(set(names))
        assert len({(piece.key, piece.offset) for piece in pieces}) == len(pieces)
        covered: dict[str, int] = {}
        for piece in pieces:
            covered[piece.key] = covered.get(piece.key, 0) + prod(piece.shape)
        assert covered == {piece.key: prod(piece.whole) for piece in pieces}
        for entry in entries:
            assert sum(map(prod, entry.shapes)) == sum(prod(piece.shape) for piece in entry.pieces)


@pytest.mark.parametrize("model", MODELS)
def test_full_size_models_have_their_published_class_and_parameter_count(model: str) -> None:
    from nemo_ext.architecture.cost import parameters

    description = from_config(compose("describe", [f"model={model}"]))
    found, config = choose(description)

    assert found.architecture == MODELS[model]
    assert differences(read(through_json(config))[1], description) == {}
    count = sum(prod(shape) for entry in found.entries(description) for shape in entry.shapes)
    biases = sum(prod(e.shapes[0]) for e in found.entries(description) if "e_score_correction_bias" in e.names[0])
    unpadded = replace(description.architecture, vocab_size=description.vocab_size)
    assert count - biases == parameters(unpadded).total  # the bias is a buffer, not a parameter


@pytest.mark.parametrize(("model", "factor"), [("llama_nemotron_super_49b", 8.0), ("llama_nemotron_ultra_253b", 16.0)])
def test_puzzle_models_are_read_from_their_published_config(model: str, factor: float) -> None:
    facts = json.loads((files("hydra_conf") / "model" / "block_configs" / f"{model}.json").read_text())
    config = facts | {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "hidden_act": "silu"}

    found, description = read(config)

    assert differences(description, from_config(compose("describe", [f"model={model}"]))) == {}
    assert description.rope is not None
    assert description.rope.factor == factor
    # Layers without any block keep their number, so that names go back to where they came from.
    _, written = choose(description)
    assert len(written["block_configs"]) == facts["num_hidden_layers"]
    for ours, theirs in zip(written["block_configs"], facts["block_configs"], strict=True):
        assert {key: value for key, value in ours["attention"].items() if value} == theirs["attention"]
        widths = [
            layer["ffn"].get("ffn_mult") and ffn_width(layer["ffn"]["ffn_mult"], facts["hidden_size"])
            for layer in (ours, theirs)
        ]
        assert widths[0] == widths[1]
    first, last = (list(found.entries(each)) for each in (description, read(through_json(written))[1]))
    assert [entry.names for entry in first] == [entry.names for entry in last]


def test_nemotron3_nano_is_read_from_its_published_config() -> None:
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        **{"vocab_size": 131072, "hidden_size": 2688, "num_hidden_layers": 52, "tie_word_embeddings": False},
        **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": False},
        **{"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
        **{"time_step_limit": [0.0, float("inf")], "time_step_min": 0.001, "use_conv_bias": True, "chunk_size": 128},
        **{"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1},
        **{"moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        **{"n_group": 1, "topk_group": 1, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "rope_theta": 10000},
    }

    _, description = read(config)

    assert differences(description, from_config(compose("describe", ["model=nemotron3_nano_30b"]))) == {}


def test_olmo3_is_read_from_older_and_newer_keys() -> None:
    """transformers 4 wrote rope_theta and rope_scaling, transformers 5 rope_parameters for each kind of layer."""
    sizes = {"vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    common = {
        "architectures": ["Olmo3ForCausalLM"],
        **sizes,
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "sliding_window": 4096},
        "tie_word_embeddings": False,
    }
    yarn = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
    }
    older = common | {"rope_theta": 500000, "rope_scaling": {**yarn, "beta_fast": 32.0, "beta_slow": 1.0}}
    first_of_5 = common | {"rope_parameters": yarn | {"rope_theta": 500000.0}}
    newer = common | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {**yarn, "rope_theta": 500000.0},
        }
    }
    ours = from_config(compose("describe", ["recipe=olmo3/7b_long_context"]))

    assert differences(read(older)[1], ours) == {}
    assert differences(read(first_of_5)[1], ours) == {}
    assert differences(read(newer)[1], ours) == {}
    plain = {"rope_parameters": {kind: {"rope_type": "default"} for kind in ("sliding_attention", "full_attention")}}
    assert differences(read(older | plain)[1], ours) == {}  # transformers scales full attention with it


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


def _random_rope(random: Random) -> dict[str, Any]:
    """RoPE keys as in published config.json files, in any of the places where transformers looks."""

    def sometimes(**keys: list[Any]) -> dict[str, Any]:
        return {name: random.choice(values) for name, values in keys.items() if random.random() < 0.3}

    def parameters() -> dict[str, Any]:
        kind = random.choice(["default", "linear", "llama3", "yarn"])
        made = {"rope_type" if random.random() < 0.8 else "type": kind}
        made |= sometimes(rope_theta=[5e5, 1e6], partial_rotary_factor=[0.5, 1.0])
        if kind != "default" and random.random() < 0.9:
            made["factor"] = random.choice([2.0, 8.0])
        if kind == "llama3":
            made |= {key: value for key, value in LLAMA3.items() if key not in made and random.random() < 0.9}
        if kind == "yarn":
            made |= sometimes(
                original_max_position_embeddings=[1024, 2048],
                attention_factor=[None, 1.25],
                beta_fast=[None, 0, 16.0],
                beta_slow=[None, 2.0],
                mscale=[1.0],
                mscale_all_dim=[0.5],
                truncate=[None, True, False],
            )
        return made

    keys = sometimes(
        rope_theta=[10000.0, 7e5], partial_rotary_factor=[0.25, 1.0], original_max_position_embeddings=[8192]
    )
    for name in ("rope_scaling", "rope_parameters"):
        if random.random() < 0.6:
            keys[name] = random.choice([None, {}, parameters(), parameters()])
    return keys


@pytest.mark.parametrize("model", ["Llama", "Nemotron", "Olmo"])
def test_rotary_embeddings_are_those_of_transformers(
    model: str, random_sections: Callable[[str, int], Sections]
) -> None:
    """Equal frequencies and concentration for each config that both read; other configs are refused."""
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip(f"transformers.models.{model.lower()}.modeling_{model.lower()}")
    _, config = choose(from_config(random_sections(f"{model}ForCausalLM", 3)))
    plain = {key: value for key, value in through_json(config).items() if "rope" not in key and "rotary" not in key}

    def rotation(keys: dict[str, Any]) -> tuple[Any, float]:
        config = getattr(transformers, f"{model}Config")(**deepcopy(plain | keys))
        embedding = getattr(modeling, f"{model}RotaryEmbedding")(config)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if model != "Nemotron" and 2 * len(embedding.inv_freq) != head:
            raise ValueError("the queries are wider than the rotation")
        return embedding.inv_freq, embedding.attention_scaling

    outcomes: Counter[str] = Counter()
    for seed in range(200):
        keys = _random_rope(Random(seed))
        try:
            theirs = rotation(keys)
        except (KeyError, RuntimeError, TypeError, ValueError):
            theirs = None
        try:
            rope = read(plain | keys)[1].rope
        except ValueError as error:
            rope, refusal = None, str(error)
        if rope is None:
            lacks_original = "original_max_position_embeddings" in refusal  # transformers takes another key's value
            assert theirs is None or lacks_original, (keys, refusal)
            outcomes["refused"] += 1
            continue
        assert theirs is not None, keys
        frequencies, concentration = rotation(
            {"rope_parameters": {"partial_rotary_factor": rope.percent} | rope_parameters(rope)}
        )
        assert torch.equal(frequencies, theirs[0]), keys
        assert concentration == pytest.approx(theirs[1]), keys
        outcomes[rope.scaling] += 1
    assert min(outcomes[kind] for kind in ("none", "linear", "yarn", "refused")) >= 10, outcomes


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("OlmoForCausalLM", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "attention_bias=False with mlp_bias=True"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ("LlamaForCausalLM", {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}},
            "without original_max_position_embeddings",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn' without factor"),
        ("LlamaForCausalLM", {"rope_scaling": YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("Olmo3ForCausalLM", {"rope_parameters": None, "rope_scaling": YARN | {"truncate": None}}, "truncate=false"),
        ("LlamaForCausalLM", {"rope_theta": 10000.5}, "rope_theta=10000.5"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "odd": 1}}, "odd"),
        ("LlamaForCausalLM", {"vocab_size": "many"}, "vocab_size='many'"),
        ("NemotronHForCausalLM", {"n_group": 2}, "n_group=2"),
        ("NemotronHForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("NemotronHForCausalLM", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MX"}, "X"),
        ("DeciLMForCausalLM", {"num_hidden_layers": 3}, "num_hidden_layers"),
        ("Olmo3ForCausalLM", {"layer_types": ["sliding"]}, "layer_types"),
        ("NemoExtBlocksForCausalLM", {"norm_type": "batch_norm"}, "norm_type='batch_norm'"),
        ("NemoExtBlocksForCausalLM", {"blocks": [{"kind": "rnn"}]}, "block 1 has kind='rnn'"),
    ],
)
def test_keys_that_megatron_cannot_compute_are_refused(
    architecture: str, changes: dict[str, Any], message: str, random_sections: Callable[[str, int], Sections]
) -> None:
    _, config = choose(from_config(random_sections(architecture, 3)))

    with pytest.raises(ValueError, match=r"config\.json") as caught:
        read(through_json(config) | changes)

    assert message in str(caught.value)


def test_yarns_attention_factor_is_mscale_over_mscale_all_dim(random_sections: Callable[[str, int], Sections]) -> None:
    """As in transformers' modeling_rope_utils.py; each is 0.1 x scale x ln(factor) + 1."""
    _, config = choose(from_config(random_sections("LlamaForCausalLM", 3)))
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5, "finetuned": True}

    _, found = read(through_json(config) | {"rope_scaling": yarn})

    assert found.rope is not None
    assert found.rope.attention_factor == pytest.approx((0.1 * log(40) + 1) / (0.05 * log(40) + 1))


def test_blocks_without_an_activation_have_silu(random_sections: Callable[[str, int], Sections]) -> None:
    _, config = choose(from_config(random_sections("NemoExtBlocksForCausalLM dense", 3)))
    del config["hidden_act"]

    assert read(through_json(config))[1].activation == "silu"


def test_an_unknown_class_suggests_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'LlamaForCausalLM'"):
        named("LLamaForCausalLM")
    with pytest.raises(ValueError, match="quantised"):
        read({"architectures": ["LlamaForCausalLM"], "quantization_config": {"bits": 4}})


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model=nemotron3_nano_tiny", "megatron.moe_router_score_function=softmax"], "router with softmax scores"),
        (["model=nemotron3_nano_tiny", "megatron.moe_router_enable_expert_bias=false"], "expert bias"),
        (["model=llama_nemotron_tiny", "megatron.add_qkv_bias=true"], "biases on q, k and v only"),
    ],
)
def test_a_model_that_no_format_can_express_gets_the_reasons(overrides: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match="cannot be converted to any Hugging Face class") as caught:
        choose(from_config(compose("describe", overrides)))

    assert reason in str(caught.value)
    for architecture in FORMATS:
        assert architecture in str(caught.value)


@pytest.mark.parametrize(("flag", "value"), [("attention_output_gate", True), ("rotary_interleaved", True)])
def test_flags_without_a_counterpart_are_refused(flag: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"megatron.{flag}"):
        from_config(compose("describe", ["model=domyn_small_tiny", f"++megatron.{flag}={value}"]))


def test_a_changed_block_is_named_in_the_difference() -> None:
    ours = from_config(compose("describe", ["model=llama_nemotron_tiny"]))
    other = from_config(compose("describe", ["model=llama_nemotron_tiny", "megatron.rotary_base=10000"]))
    shorter = from_config(compose("describe", ["model=llama_nemotron_tiny", 'model.pattern="*-*-"']))

    assert list(differences(other, ours)) == ["rope.base"]
    assert "10000 in the checkpoint, 500000 in the model config" in differences(other, ours)["rope.base"]
    assert "block 5: none in the checkpoint" in differences(shorter, ours)["pattern"]


def test_remarks_name_settings_that_vllm_ignores() -> None:
    description = from_config(
        compose("describe", ["model=llama_nemotron_tiny", 'model.pattern="-*{window=8}-{linear}"'])
    )
    found, _ = choose(description)

    told = " ".join(found.remarks(description))

    assert found.architecture == "DeciLMForCausalLM"
    for word in ("linear-replaced", "window_length", "first layer"):
        assert word in told


def with_gaps() -> Any:
    """A Puzzle child as published ones are: a layer without any block."""
    layers = [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 3.0}},
        {"attention": {"no_op": True}, "ffn": {"no_op": True}},
        {"attention": {"no_op": True}, "ffn": {"intermediate_size": 100}},
    ]
    return read(
        {
            **{"architectures": ["DeciLMForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96},
            **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "block_configs": layers, "num_hidden_layers": 3},
        }
    )[1]


def test_layer_numbers_are_refused_by_formats_without_them() -> None:
    description = with_gaps()
    assert description.hf_layers == (0, 0, 2)
    for architecture in ("DeciLMForCausalLM", "NemoExtBlocksForCausalLM"):
        found, config = choose(description, architecture)
        names = [name for entry in found.entries(description) for name in entry.names]
        assert len(names) == len(set(names))
        again, same = read(through_json(config))
        assert [name for entry in again.entries(same) for name in entry.names] == names


@pytest.mark.parametrize(
    ("layers", "count", "message"),
    [
        ((0, 0), 3, "2 numbers for 3 blocks"),
        ((0, 0, 2), None, "hf_layer_count"),
        ((0, 0, 3), 3, "cannot be in layer 3 of 3"),
        ((0, 0, 0), 3, "block 3"),
        ((2, 2, 1), 3, "block 3"),
        ((-1, 0, 1), 3, "block 1"),
    ],
)
def test_invalid_layer_numbers_are_refused(layers: tuple[int, ...], count: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(with_gaps(), hf_layers=layers, hf_layer_count=count)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": None}, "norm_topk_prob=True"),
    ],
)
def test_hybrid_settings_that_are_fixed_in_megatron_are_refused(changes: dict[str, Any], message: str) -> None:
    _, config = choose(from_config(compose("describe", ["model=nemotron3_nano_tiny"])))
    with pytest.raises(ValueError, match=re.escape(message)):
        read(through_json(config) | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "yarn", "factor": "2"}},
        {"rope_theta": "5e5"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": True}},
    ],
)
def test_the_wrong_kind_of_rope_is_named(changes: dict[str, Any], random_sections: Callable[..., Sections]) -> None:
    _, config = choose(from_config(random_sections("LlamaForCausalLM", 3)))
    with pytest.raises(ValueError, match=r"config\.json: .*rope|RoPE"):
        read(through_json(config) | changes)


@pytest.mark.parametrize(
    "flag",
    ["use_mup", "activation_func_clamp_value", "glu_linear_offset", "no_rope_freq", "qk_l2_norm", "softmax_type"],
)
def test_settings_that_silently_change_the_function_are_refused(flag: str) -> None:
    with pytest.raises(ValueError, match=f"megatron.{flag}"):
        from_config(compose("describe", ["model=llama_nemotron_tiny", f"++megatron.{flag}=1"]))


def test_a_hybrid_without_attention_gets_the_class_that_can_run_it() -> None:
    found, _ = choose(from_config(compose("describe", ["model=nemotron3_nano_tiny", 'model.pattern="MEM-"'])))
    assert found.architecture == "NemoExtBlocksForCausalLM"
