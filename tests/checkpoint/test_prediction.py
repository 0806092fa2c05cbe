"""Conversion of hybrids with latent experts, multi-token prediction and blocks of different sizes, both ways."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_ext.checkpoint import hf
from nemo_ext.checkpoint import merge as merging
from nemo_ext.checkpoint.description import differences, from_config, to_config
from nemo_ext.checkpoint.formats import choose, ignored, read
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.data.text.indexed_dataset import Ids
from nemo_ext.job.config import compose

SMALL = ["model=nemotron3_nano_tiny", "++megatron.moe_latent_size=48", "megatron.norm_epsilon=1e-5"]
Command = Callable[..., Any]


@pytest.fixture
def convert(megatron: None, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the job `convert`, and returns its output."""
    from nemo_ext import parity

    def run(*words: str) -> str:
        parity.convert(compose("convert", list(words)))
        return "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("model", "tensors", "elements", "prediction"),
    [
        # The published checkpoints' own numbers of tensors and elements.
        ("nemotron35_lightning_30b", 6_513, 32_913_266_240, 270),
        ("nemotron3_super_120b", 42_683, 123_611_033_088, 1_040),
    ],
)
def test_published_checkpoints_have_the_tensors_that_are_expected(
    model: str, tensors: int, elements: int, prediction: int
) -> None:
    description = from_config(compose("describe", [f"model={model}"]))

    hf_format, facts = choose(description)
    sizes = {
        name: torch.Size(shape).numel()
        for entry in hf_format.entries(description)
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    }

    assert hf_format.architecture == "NemotronHForCausalLM"
    assert (facts["num_nextn_predict_layers"], facts["mtp_layers_block_type"]) == (1, ["attention", "moe"])
    assert (len(sizes), sum(sizes.values())) == (tensors, elements)
    assert sum(name.startswith("mtp.") for name in sizes) == prediction
    assert sizes["mtp.layers.0.eh_proj.weight"] == 2 * facts["hidden_size"] ** 2
    assert {"mtp.layers.0.mixer.q_proj.weight", "mtp.layers.1.mixer.gate.weight"} < sizes.keys()
    assert "mtp.layers.1.final_layernorm.weight" in sizes
    assert read(facts)[1].architecture.pattern == description.architecture.pattern
    written = to_config(description)
    assert from_config(written) == description


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers=1000000000 makes more than 2048 blocks"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers='1'"),
        ({"num_nextn_predict_layers": False}, "num_nextn_predict_layers=False"),
        (
            {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": [["attention"]]},
            "mtp_layers_block_type=.*expected",
        ),
        ({"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": []}, "mtp_layers_block_type=.*expected"),
        ({"mtp_hybrid_override_pattern": "*E/*E"}, "mtp_hybrid_override_pattern=.* only the letters"),
        ({"hybrid_override_pattern": "ME*|-"}, "hybrid_override_pattern=.* only the letters"),
        ({"moe_latent_size": 0}, "moe_latent_size=0"),
        (
            {"num_hidden_layers": 5},
            "num_hidden_layers=5 does not match the 4 entries of the pattern: correct one of them",
        ),
        (
            {"layers_block_type": ["mamba", "moe", "attention"]},
            "layers_block_type does not match hybrid_override_pattern=",
        ),
        ({"mtp_layers_block_type": ["moe"]}, r"mtp_layers_block_type does not match mtp_hybrid_override_pattern='\*E'"),
    ],
)
def test_an_invalid_config_is_one_error(change: dict[str, Any], message: str) -> None:
    facts = choose(from_config(compose("describe", [*SMALL, "model.pattern=ME*-/*E"])))[1]

    with pytest.raises(ValueError, match=message):
        read({**facts, **change})


def test_depths_with_one_set_of_weights_are_one_depth_in_a_checkpoint() -> None:
    repeated = compose("describe", [*SMALL, "model.pattern=ME*-/*E/*E", "+megatron.mtp_use_repeated_layer=true"])
    once = compose("describe", [*SMALL, "model.pattern=ME*-/*E"])

    assert from_config(repeated) == from_config(once)


def test_there_and_back_and_without(tmp_path: Path, train_ranks: Command, convert: Command) -> None:
    """A trained model's Hugging Face folder loads in transformers, which ignores MTP, and its way back is exact."""
    from nemo_ext.parity import compare

    words = (*SMALL, "model.pattern=ME*-/*E/*E", "train.tokens=512", "train.warmup_tokens=0")
    train_ranks(tmp_path / "run", *words)

    convert(f"from={tmp_path / 'run'}", f"to={tmp_path / 'hf'}")
    convert(f"from={tmp_path / 'hf'}", f"to={tmp_path / 'back'}")
    convert(f"from={tmp_path / 'back'}", f"to={tmp_path / 'again'}")
    dropped = convert(f"from={tmp_path / 'back'}", f"to={tmp_path / 'without'}", "mtp=drop")

    first, again, without = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again", "without"))
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert without.keys() == {name for name in first if not name.startswith("mtp.")}
    assert re.search(r"mtp=drop: \d+ tensors are not converted", dropped)
    ids: Ids = np.random.default_rng(1).integers(0, 257, 40).astype(np.int32)
    for name in ("hf", "without"):
        compared = compare(tmp_path / name, tmp_path / "run", [ids])
        assert compared.largest < 1e-4 < 0.1 < compared.deviation, name


def test_prediction_is_averaged_in_both_formats(tmp_path: Path) -> None:
    found, config = choose(from_config(compose("describe", ["model=nemotron3_super_tiny"])))
    made = []
    for seed, name in enumerate(("first", "second")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        torch.manual_seed(seed)
        entries = found.entries(read(config)[1])
        tensors = {
            name: torch.randn(shape) for each in entries for name, shape in zip(each.names, each.shapes, strict=True)
        }
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        made.append(tensors)
        plan = hf.plan(tmp_path / name, tmp_path / f"{name}_megatron", hf.Settings())
        hf.convert(plan, hf.Settings(), progress=False)
    for ending in ("", "_megatron"):
        sources = [tmp_path / f"first{ending}", tmp_path / f"second{ending}"]
        merging.merge(merging.plan(sources, tmp_path / f"mean{ending}", merging.Settings()), progress=False)
    hf.convert(hf.plan(tmp_path / "mean_megatron", tmp_path / "back", hf.Settings()), hf.Settings(), progress=False)

    mean, back = (load_file(tmp_path / name / "model.safetensors") for name in ("mean", "back"))
    assert sum(name.startswith("mtp.") for name in mean) == 32
    for name, tensor in mean.items():
        expected = ((made[0][name].double() + made[1][name].double()) / 2).float()
        assert torch.equal(tensor, expected) and torch.equal(back[name], expected), name


def test_missing_tensors_name_the_way_out(tmp_path: Path, train_ranks: Command, convert: Command) -> None:
    train_ranks(tmp_path / "run", *SMALL, "model.pattern=ME*-", "train.tokens=512", "train.warmup_tokens=0")
    convert(f"from={tmp_path / 'run'}", f"to={tmp_path / 'hf'}")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))

    with pytest.raises(ValueError, match=r"no tensors mtp\.\*: set mtp=drop"):
        convert(f"from={tmp_path / 'hf'}", f"to={tmp_path / 'back'}")
    convert(f"from={tmp_path / 'hf'}", f"to={tmp_path / 'back'}", "mtp=drop")


@pytest.mark.parametrize("pattern", ["ME*-E{latent=32}", "ME*-E{latent=none}", "ME*-/*E{latent=32}"])
def test_latent_widths_that_differ_need_puzzles_class(pattern: str) -> None:
    description = from_config(compose("describe", [*SMALL, f"model.pattern='{pattern}'"]))

    with pytest.raises(ValueError, match=r"NemotronHForCausalLM .* MoE blocks with different values of latent \("):
        choose(description, "NemotronHForCausalLM")
    assert choose(description)[0].architecture == "NemotronHPuzzleForCausalLM"
    assert from_config(to_config(description)) == description


def published_75b() -> dict[str, Any]:
    """config.json of Nemotron 3 Puzzle 75B in the published form as far as it is known: the file was not seen."""
    widths = [1280] * 10 + [2688, 1536, 2688, 1536, 1536, 2688, 2688, 2688, 1536, 2688, 2688, 1792, 1792]
    widths += [1280] * 15 + [1792, 2048]
    top_k = [
        4,
        8,
        10,
        8,
        8,
        8,
        12,
        8,
        10,
        8,
        12,
        14,
        12,
        12,
        12,
        12,
        12,
        12,
        10,
        12,
        12,
        12,
        14,
        10,
        10,
        12,
        8,
        12,
        10,
        8,
    ]
    top_k += [8, 10, 10, 10, 12, 12, 14, 16, 18, 18]
    letters = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    every = {"n_routed_experts": 512, "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376}
    moe = [{"moe_intermediate_size": width, "num_experts_per_tok": k} for width, k in zip(widths, top_k, strict=True)]
    types = [{"M": "mamba", "*": "attention", "E": "moe"}[letter] for letter in letters]
    left = iter(moe)
    blocks = [{"block_type": kind} | (every | next(left) if kind == "moe" else {}) for kind in types]
    depth = every | {"block_type": "moe", "moe_intermediate_size": 2688, "num_experts_per_tok": 22}
    return {
        **{"architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle", "vocab_size": 131072},
        **{"auto_map": {"AutoConfig": "configuration_nemotron_h_puzzle.NemotronHPuzzleConfig"}, "hidden_size": 4096},
        **{
            "block_configs": blocks,
            "mtp_block_configs": [{"block_type": "attention"}, depth],
            "layers_block_type": types,
        },
        **{"mtp_layers_block_type": ["attention", "moe"], "num_nextn_predict_layers": 1, "num_hidden_layers": None},
        **{
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "sliding_window": None,
            "mlp_bias": False,
        },
        **{"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 96, "n_groups": 8, "conv_kernel": 4},
        **{"use_conv_bias": True, "mamba_proj_bias": False, "mamba_hidden_act": "silu", "chunk_size": 128, "expand": 2},
        **{"mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "tie_word_embeddings": False},
        **{"n_shared_experts": 1, "routed_scaling_factor": 5.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        **{"attention_bias": False, "use_bias": False, "max_position_embeddings": 262144, "rope_theta": 10000},
        **{"time_step_limit": [0.0, float("inf")], "time_step_min": 0.001, "mamba_ssm_cache_dtype": "float32"},
    }


def test_puzzle_75b_is_read_from_the_published_form() -> None:
    hf_format, description = read(published_75b())

    assert ignored(published_75b()) == []
    assert differences(description, from_config(compose("describe", ["model=nemotron3_puzzle_75b"]))) == {}
    shapes = {
        name: shape
        for entry in hf_format.entries(description)
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    }
    # As many as Super's, of which it is a child; one expert of the first and the last MoE block has its own width.
    assert len(shapes) == 42_683
    assert sum(name.startswith("mtp.") for name in shapes) == 1_040
    tensors = [torch.empty(shape, device="meta") for shape in shapes.values()]
    assert sum(tensor.numel() for tensor in tensors) == 78_295_670_272
    assert shapes["model.layers.1.mixer.experts.511.up_proj.weight"] == (1280, 1024)
    assert shapes["model.layers.87.mixer.experts.0.down_proj.weight"] == (1024, 2048)
    assert shapes["mtp.layers.1.mixer.experts.0.up_proj.weight"] == (2688, 1024)
    assert choose(description)[1]["block_configs"] == published_75b()["block_configs"]


def puzzle_folder(folder: Path, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Writes a small child with multi-token prediction in Puzzle's format; returns its tensors."""
    pattern = "model.pattern='ME{ffn=64,topk=1,latent=32}*{kv=6}-E{experts=3}/*E{ffn=96}'"
    description = from_config(compose("describe", [*SMALL, pattern]))
    hf_format, facts = choose(description)
    assert hf_format.architecture == "NemotronHPuzzleForCausalLM"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts))
    torch.manual_seed(1)
    tensors = {
        re.sub("^model[.]", prefix, name): torch.randn(shape)
        for entry in hf_format.entries(description)
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("prefix", ["model.", "backbone."])
def test_puzzles_format_there_and_back_is_exact(tmp_path: Path, prefix: str) -> None:
    tensors = puzzle_folder(tmp_path / "hf", prefix)

    for source, to in (("hf", "megatron"), ("megatron", "back")):
        plan = hf.plan(tmp_path / source, tmp_path / to, hf.Settings())
        hf.convert(plan, hf.Settings(), progress=False)

    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == {re.sub("^backbone[.]", "model.", name) for name in tensors}
    assert all(torch.equal(tensor, back[re.sub("^backbone[.]", "model.", name)]) for name, tensor in tensors.items())
    first, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    assert {key: again[key] for key in first} == first
    assert {file.name for file in (tmp_path / "back").glob("*.py")} == {
        "configuration_nemotron_h_puzzle.py",
        "modeling_nemotron_h_puzzle.py",
    }


@pytest.mark.parametrize(
    ("depths", "removed", "message"),
    [
        (0, [], r"has 32 mtp.\* tensors, but the model's config has no multi-token prediction: .*mtp=drop"),
        (1, ["mtp.layers.0.eh_proj.weight"], "1 tensors are missing: mtp.layers.0.eh_proj.weight"),
        (2, [], "32 tensors are missing: mtp.layers.2.enorm.weight"),
    ],
)
def test_tensors_of_prediction_too_many_or_too_few(
    tmp_path: Path, depths: int, removed: list[str], message: str
) -> None:
    tensors = puzzle_folder(tmp_path / "hf")
    facts = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(facts | {"num_nextn_predict_layers": depths}))
    save_file({name: t for name, t in tensors.items() if name not in removed}, tmp_path / "hf/model.safetensors")

    with pytest.raises(CheckpointError, match=message) as caught:
        hf.plan(tmp_path / "hf", tmp_path / "to", hf.Settings())
    assert "\n" not in str(caught.value)
    plan = hf.plan(tmp_path / "hf", tmp_path / "to", hf.Settings(mtp="drop"))
    assert not plan.description.prediction


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, {"moe_width": 3}, r"block_configs\[1\].moe_width=3: unknown key of a moe block"),
        (0, {"moe_intermediate_size": 3}, r"block_configs\[0\].moe_intermediate_size=3: unknown key of a mamba block"),
        (1, {"moe_intermediate_size": 0}, r"block_configs\[1\].moe_intermediate_size=0: expected a positive"),
        (1, {"num_experts_per_tok": None}, r"block_configs\[1\].num_experts_per_tok is missing"),
        (1, {"n_group": 2}, r"block_configs\[1\].n_group=2"),
        (1, {"norm_topk_prob": True}, r"block_configs\[1\].norm_topk_prob=True with \[1\]"),
        (4, {"routed_scaling_factor": 9.0}, r"block_configs\[4\].routed_scaling_factor=9.0 differs from 2.5"),
        (2, {"sliding_window": -1}, r"block_configs\[2\].sliding_window=-1: expected a positive"),
        (2, {"block_type": "gdn"}, r"block_configs\[2\].block_type='gdn': expected one of mamba, attention"),
        (2, {"block_type": "mlp", "num_key_value_heads": None}, "hybrid_override_pattern='ME.-E' does not match"),
    ],
)
def test_an_invalid_block_of_puzzles_format_is_named(index: int, change: dict[str, Any], message: str) -> None:
    pattern = "model.pattern='ME{ffn=64,topk=1,latent=32}*{kv=6}-E{experts=3}'"
    facts = choose(from_config(compose("describe", [*SMALL, pattern])))[1]
    facts["layers_block_type"] = None
    facts["block_configs"][index] |= change

    with pytest.raises(ValueError, match=message):
        read(facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_configs": None}, "block_configs=None: expected a list"),
        ({"block_configs": [1]}, r"block_configs\[0\]: expected a mapping with block_type, got 1"),
        ({"mtp_block_configs": []}, r"mtp_block_configs=\[\]: expected a list"),
        ({"layers_block_type": 3}, "layers_block_type does not match the block_type of block_configs"),
        ({"layers_block_type": ["mamba"]}, "layers_block_type does not match the block_type of block_configs"),
        ({"num_nextn_predict_layers": 10**9}, "makes more than 2048 blocks"),
        ({"block_configs": [{"attention": {"no_op": True}, "ffn": {}}]}, "anymodel form of ModelOpt's Puzzletron"),
        ({"architectures": ["AnyModel"]}, "anymodel form of ModelOpt's Puzzletron"),
    ],
)
def test_an_invalid_config_in_puzzles_format_is_one_error(change: dict[str, Any], message: str) -> None:
    facts = choose(from_config(compose("describe", [*SMALL, "model.pattern='ME{ffn=64}*/*E'"])))[1]

    with pytest.raises(ValueError, match=message):
        read(facts | change)


def test_puzzletrons_form_of_a_nemotron_h_is_named() -> None:
    facts = choose(from_config(compose("describe", [*SMALL, "model.pattern='ME*'"])))[1]
    pair = {"attention": {"no_op": True}, "ffn": {"moe": {"num_local_experts": 4}}}

    with pytest.raises(ValueError, match="anymodel form of ModelOpt's Puzzletron"):
        read(facts | {"block_configs": [pair] * 3})


@pytest.mark.parametrize(
    ("model", "pattern", "reason"),
    [
        (
            "nemotron3_nano_tiny",
            "MM{state=16}*E",
            "NemotronHPuzzleForCausalLM, .* Mamba-2 blocks with different values",
        ),
        ("nemotron3_nano_tiny", "M*{linear}*E", "NemotronHPuzzleForCausalLM, .* a block replaced by a linear map"),
        ("nemotron3_nano_tiny", "M*{window=8}E", "NemotronHPuzzleForCausalLM, .* sliding windows"),
        ("llama_nemotron_tiny", "*-*{heads=2,kv=1}-", "DeciLMForCausalLM, .* attention blocks with different numbers"),
    ],
)
def test_the_own_class_comes_with_the_reason(model: str, pattern: str, reason: str) -> None:
    description = from_config(compose("describe", [f"model={model}", f"model.pattern='{pattern}'"]))
    hf_format, _ = choose(description)

    assert hf_format.architecture == "NemoExtBlocksForCausalLM"
    (remark,) = hf_format.remarks(description)
    assert re.search(reason, remark)
