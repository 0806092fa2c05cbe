"""The modelling code of our exports: it loads as remote code and computes the same as transformers' own models."""

import ast
import copy
import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_ext.checkpoint import remote_code


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Modules that take seconds to import, imported when a test runs rather than during collection."""
    global transformers
    import transformers


def code(kind: str) -> Any:
    """A module with a model and its configuration; transformers' models take seconds to import."""
    return import_module(f"nemo_ext.checkpoint.remote_code.modeling_{kind}")


FILES = sorted(Path(remote_code.__path__[0]).glob("[cm]*_*.py"))
SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "max_position_embeddings": 128}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def attention(group: int | None = 2, window: int | None = None, **flags: bool) -> dict[str, Any]:
    published_nulls = {"num_sink_tokens": None, "sparsify": None, "unshifted_sink": False}
    flags = {"no_op": False, "replace_with_linear": False} | flags
    return {"n_heads_in_group": group, "window_length": window} | published_nulls | flags


def ffn(**values: Any) -> dict[str, Any]:
    return {"no_op": False, "replace_with_linear": False, "sparsify": None} | values


NO_ATTENTION = attention(None, no_op=True)
LINEAR_ATTENTION = attention(None, replace_with_linear=True)
CHILD = [
    {"attention": NO_ATTENTION, "ffn": ffn(ffn_mult=0.5)},
    {"attention": attention(2, window=5), "ffn": ffn(ffn_mult=None, no_op=True)},
    {"attention": LINEAR_ATTENTION, "ffn": ffn(intermediate_size=48)},
    {"attention": attention(4), "ffn": ffn(ffn_mult=None, replace_with_linear=True)},
    {"attention": attention(1, window=3), "ffn": ffn(intermediate_size=80)},
]


def decilm(block_configs: list[dict[str, Any]], **values: Any) -> Any:
    values = SIZES | TOKENS | {"num_attention_heads": 8, "num_key_value_heads": None} | values
    config = code("decilm").DeciLMConfig(block_configs=block_configs, num_hidden_layers=len(block_configs), **values)
    torch.manual_seed(0)
    return randomised(code("decilm").DeciLMForCausalLM(config))


FULL = {"kind": "attention", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": None}
WINDOWED = FULL | {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": 5}
NARROW = WINDOWED | {"sliding_window": 3}
MLP = {"kind": "mlp", "intermediate_size": 80}
MAMBA = {"kind": "mamba", "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}
MOE = {
    "kind": "moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
}
HYBRID = [
    MLP,
    MAMBA,
    FULL,
    MOE | {"shared_intermediate_size": None},
    {"kind": "mamba", "linear": True},
    MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 4},
    NARROW,
    {"kind": "attention", "linear": True},
    WINDOWED,
    MOE,
]
CHILDREN: dict[str, dict[str, Any]] = {
    "hybrid": {"blocks": HYBRID, "hidden_act": "relu2", "gated_mlp": False},
    "dense": {
        "blocks": [{"kind": "mlp", "linear": True}, WINDOWED, FULL, MLP, MLP | {"intermediate_size": 32}, NARROW],
        "norm_placement": "output",
        "qk_norm": "head",
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
        "rope_scaling_on_windowed": False,
        "tie_word_embeddings": True,
    },
    "plain norms": {"blocks": [MAMBA, FULL, MLP], "norm_affine": False, "hidden_act": "gelu", "qk_norm": "width"},
    "no attention": {"blocks": [MLP, MAMBA, MOE], "norm_type": "layer_norm", "norm_affine": False},
    "mamba only": {"blocks": [MAMBA, MAMBA], "norm_type": "layer_norm_1p"},
}


def blocks(**values: Any) -> Any:
    torch.manual_seed(0)
    return randomised(
        code("nemo_ext_blocks").NemoExtBlocksForCausalLM(
            code("nemo_ext_blocks").NemoExtBlocksConfig(**SIZES | TOKENS | values)
        )
    )


def children() -> list[Any]:
    made = [pytest.param(lambda: decilm(CHILD), id="decilm")]
    made += [pytest.param(lambda name=name: blocks(**CHILDREN[name]), id=name) for name in CHILDREN]
    return made


def randomised(model: Any) -> Any:
    """The model with weights large enough that every sub-layer matters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.add_(torch.randn_like(value) * (0.2 if value.dim() < 2 or "conv1d" in name else 0.12))
            if name.endswith("dt_bias"):
                # Small steps, so that the state remembers more than a token.
                value.sub_(6)
    return model.eval()


def tokens(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(2, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor | None = None, **values: Any) -> torch.Tensor:
    return model(tokens() if ids is None else ids, **values).logits


PRE_NORM = {
    "input_layernorm": (0, "norm"),
    "self_attn": (0, "mixer"),
    "post_attention_layernorm": (1, "norm"),
    "mlp": (1, "mixer"),
}


def renamed(state: dict[str, torch.Tensor], names: dict[str, str], parts: dict[str, tuple[int, str]]) -> dict[str, Any]:
    """A decoder's weights under the names of the block list: part p of layer i is block 2 i + its offset."""
    result = {}
    for name, value in state.items():
        fields = name.split(".")
        if name.startswith("model.layers.") and fields[3] in parts:
            offset, new = parts[fields[3]]
            name = ".".join(["model.layers", str(2 * int(fields[2]) + offset), new, *fields[4:]])
        result[names.get(name, name)] = value
    return result


def assert_same_model(ours: Any, theirs: Any, state: dict[str, torch.Tensor]) -> None:
    ours.load_state_dict(state, strict=True)
    expected = logits(theirs)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits(ours), expected, atol=1e-5, rtol=0)


def export(model: Any, folder: Path) -> Path:
    """A checkpoint folder as the exporter writes it: config.json with auto_map, weights, and the code."""
    kind = model.config.model_type.replace("nemotron-nas", "decilm")
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": f"configuration_{kind}.{type(model.config).__name__}",
        "AutoModelForCausalLM": f"modeling_{kind}.{type(model).__name__}",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file in FILES:
        if file.stem.endswith(kind):
            shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("child", children())
def test_export_loads_as_remote_code_with_every_key_and_the_same_logits(
    child: Any, tmp_path: Path, modules_cache: None
) -> None:
    model = child()
    folder = export(model, tmp_path / "exported")

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )

    assert type(loaded).__module__.startswith("transformers_modules.")
    assert not any(report.values()), report
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)
    assert Path(str(sys.modules[type(loaded).__module__].__file__)).is_relative_to(tmp_path.parent)


def test_bfloat16_export_keeps_the_router_bias_in_fp32(tmp_path: Path, modules_cache: None) -> None:
    folder = export(blocks(**CHILDREN["hybrid"]), tmp_path / "exported")

    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)

    assert loaded.model.layers[9].mixer.gate.e_score_correction_bias.dtype == torch.float32
    assert loaded.model.layers[9].mixer.experts.up_proj.dtype == torch.bfloat16
    assert loaded.generate(tokens(), max_new_tokens=4).shape == (2, 28)


def test_files_import_nothing_but_torch_transformers_and_their_own_configuration() -> None:
    assert len(FILES) == 6
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.module == file.stem.replace("modeling", "configuration")
            elif isinstance(node, ast.ImportFrom | ast.Import):
                name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                root = str(name).split(".")[0]
                assert root in {"torch", "transformers"} | sys.stdlib_module_names, file.name


@pytest.mark.parametrize("rope", [LLAMA3, PLAIN], ids=["llama3", "default"])
@pytest.mark.parametrize("tied", [True, False])
def test_uniform_decilm_is_llama(rope: dict[str, Any], tied: bool) -> None:
    shared = SIZES | TOKENS | {"num_attention_heads": 8, "rope_parameters": rope, "tie_word_embeddings": tied}
    config = transformers.LlamaConfig(num_hidden_layers=3, num_key_value_heads=4, intermediate_size=80, **shared)
    llama = randomised(transformers.LlamaForCausalLM(config))
    ours = decilm([{"attention": attention(2), "ffn": ffn(intermediate_size=80)}] * 3, **shared)

    ours.load_state_dict(llama.state_dict(), strict=True)

    torch.testing.assert_close(logits(ours), logits(llama), atol=1e-6, rtol=0)


def test_qwen3_as_blocks() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shared = SIZES | TOKENS | {"rope_parameters": dict(LLAMA3), "tie_word_embeddings": True}
    config = transformers.Qwen3Config(num_hidden_layers=2, intermediate_size=80, rms_norm_eps=1e-5, **shared, **heads)
    theirs = randomised(transformers.Qwen3ForCausalLM(config))

    ours = blocks(blocks=[FULL, MLP] * 2, qk_norm="head", **shared)

    assert_same_model(ours, theirs, renamed(theirs.state_dict(), {}, PRE_NORM))


def test_windowed_blocks_keep_partial_rotary_without_scaling() -> None:
    partial = {"partial_rotary_factor": 0.5}
    scaled = blocks(blocks=[WINDOWED], rope_parameters=YARN | partial, rope_scaling_on_windowed=False)
    plain = blocks(blocks=[WINDOWED], rope_parameters=PLAIN | partial)
    whole = blocks(blocks=[WINDOWED], rope_parameters=dict(PLAIN))

    torch.testing.assert_close(logits(scaled), logits(plain))
    assert not torch.allclose(logits(plain), logits(whole), atol=1e-3)


def test_new_layer_norm_1p_neither_scales_nor_shifts() -> None:
    norm = (
        code("nemo_ext_blocks")
        .NemoExtBlocksForCausalLM(
            code("nemo_ext_blocks").NemoExtBlocksConfig(**SIZES, blocks=[MLP], norm_type="layer_norm_1p")
        )
        .model.norm
    )
    x = torch.randn(3, SIZES["hidden_size"])

    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5))


def projections(names: str, width: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Weights of the projections from the hidden size to `width`, and their biases."""
    shapes: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": (width, 64) for name in names.split()}
    return shapes | ({f"{name}_proj.bias": (width,) for name in names.split()} if bias else {})


def prefixed(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in shapes.items()}


def test_decilm_weight_names_and_shapes() -> None:
    state = decilm(CHILD).state_dict()

    norms = {"embed_tokens.weight": (96, 64), "norm.weight": (64,)}
    for layer, name in [(0, "post_attention"), (1, "input"), (2, "input"), (2, "post_attention"), (3, "input")]:
        norms[f"layers.{layer}.{name}_layernorm.weight"] = (64,)
    for layer, name in [(3, "post_attention"), (4, "input"), (4, "post_attention")]:
        norms[f"layers.{layer}.{name}_layernorm.weight"] = (64,)
    attentions: dict[str, tuple[int, ...]] = {"layers.2.self_attn.linear_attn.weight": (64, 64)}
    for layer, kv_width in [(1, 32), (3, 16), (4, 64)]:
        own = projections("q o", 64) | projections("k v", kv_width)
        attentions |= prefixed(f"layers.{layer}.self_attn.", own)
    mlps: dict[str, tuple[int, ...]] = {"layers.3.mlp.linear_mlp.weight": (64, 64)}
    for layer, width in [(0, 256), (2, 48), (4, 80)]:
        mlps |= prefixed(f"layers.{layer}.mlp.", projections("gate up", width) | {"down_proj.weight": (64, width)})
    expected = prefixed("model.", norms | attentions | mlps) | {"lm_head.weight": (96, 64)}
    assert {name: tuple(value.shape) for name, value in state.items()} == expected


ROUTED = {
    **{"gate.weight": (4, 64), "gate.e_score_correction_bias": (4,)},
    **{"experts.up_proj": (4, 32, 64), "experts.down_proj": (4, 64, 32)},
}
WEIGHTS = {
    "attention with biases and head norms": (
        FULL,
        {"attention_bias": True, "qk_norm": "head"},
        projections("q o", 64, bias=True)
        | projections("k v", 32, bias=True)
        | {"q_norm.weight": (16,), "k_norm.weight": (16,)},
    ),
    "attention with width norms": (
        WINDOWED | {"num_key_value_heads": 2},
        {"qk_norm": "width"},
        projections("q", 32)
        | projections("k v", 16)
        | {"o_proj.weight": (64, 32), "q_norm.weight": (32,), "k_norm.weight": (16,)},
    ),
    "gated": (MLP, {}, projections("gate up", 80) | {"down_proj.weight": (64, 80)}),
    "plain with biases": (
        MLP,
        {"gated_mlp": False, "mlp_bias": True},
        projections("up", 80, bias=True) | {"down_proj.weight": (64, 80), "down_proj.bias": (64,)},
    ),
    "mamba": (
        MAMBA,
        {"attention_bias": True, "mlp_bias": True},
        # in_proj makes z and x of 8 heads x 16, B and C of 2 groups x 16, and 8 dt; the convolution is over x, B and C.
        projections("in", 2 * 128 + 2 * 32 + 8)
        | {"conv1d.weight": (128 + 2 * 32, 1, 4), "conv1d.bias": (128 + 2 * 32,)}
        | {"dt_bias": (8,), "A_log": (8,), "D": (8,), "norm.weight": (128,), "out_proj.weight": (64, 128)},
    ),
    "moe": (
        MOE,
        {"mlp_bias": True},
        ROUTED | prefixed("shared_experts.", projections("up", 48) | {"down_proj.weight": (64, 48)}),
    ),
    "moe without shared experts": (MOE | {"shared_intermediate_size": None}, {}, ROUTED),
    "linear": ({"kind": "moe", "linear": True}, {"mlp_bias": True}, {"weight": (64, 64)}),
}


@pytest.mark.parametrize(("block", "values", "mixer"), WEIGHTS.values(), ids=WEIGHTS)
def test_block_weight_names_and_shapes(block: dict[str, Any], values: dict[str, Any], mixer: dict[str, Any]) -> None:
    state = blocks(blocks=[block], norm_type="layer_norm", **values).state_dict()

    ends = {"model.embed_tokens.weight": (96, 64), "lm_head.weight": (96, 64)}
    norms = {f"model.{place}.{name}": (64,) for place in ("norm", "layers.0.norm") for name in ("weight", "bias")}
    expected = ends | norms | prefixed("model.layers.0.mixer.", mixer)
    assert {name: tuple(value.shape) for name, value in state.items()} == expected


@pytest.mark.parametrize("norm_type", ["rms_norm", "layer_norm", "layer_norm_1p"])
def test_norms_without_affine_have_no_weights(norm_type: str) -> None:
    state = blocks(blocks=[MLP], norm_type=norm_type, norm_affine=False).state_dict()

    assert not [name for name in state if "norm" in name]


def test_decilm_reads_llamas_older_rope_keys() -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    old = decilm(CHILD, rope_theta=LLAMA3["rope_theta"], rope_scaling=scaling)
    new = decilm(CHILD, rope_parameters=LLAMA3)

    torch.testing.assert_close(logits(old), logits(new))


def test_nemotron_h_as_blocks() -> None:
    pattern = "M-E*M"
    config = transformers.NemotronHConfig(
        **SIZES | TOKENS,
        hybrid_override_pattern=pattern,
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 80},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        moe_shared_expert_intermediate_size=48,
        routed_scaling_factor=2.5,
    )
    theirs = randomised(transformers.NemotronHForCausalLM(config))
    for layer in theirs.model.layers:
        if layer.block_type == "linear_attention":
            # transformers clamps dt at time_step_min; Megatron, and so our format, does not.
            layer.mixer.time_step_limit = (0.0, float("inf"))
    kinds = {"M": MAMBA, "-": MLP, "E": MOE, "*": FULL}
    values = {"hidden_act": "relu2", "gated_mlp": False, "routed_scaling_factor": 2.5}

    ours = blocks(blocks=[kinds[symbol] for symbol in pattern], **values)

    names = {"model.embeddings.weight": "model.embed_tokens.weight", "model.norm_f.weight": "model.norm.weight"}
    assert_same_model(ours, theirs, renamed(theirs.state_dict(), names, {}))


def test_nemotron_as_blocks() -> None:
    rope = PLAIN | {"partial_rotary_factor": 0.5}
    shared = SIZES | TOKENS | {"attention_bias": True, "mlp_bias": True, "rope_parameters": rope}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.NemotronConfig(num_hidden_layers=2, intermediate_size=80, **shared, **heads)
    theirs = randomised(transformers.NemotronForCausalLM(config))

    values = {"norm_type": "layer_norm_1p", "hidden_act": "relu2", "gated_mlp": False}
    ours = blocks(blocks=[FULL, MLP] * 2, **shared, **values)

    assert_same_model(ours, theirs, renamed(theirs.state_dict(), {}, PRE_NORM))


def test_olmo3_as_blocks() -> None:
    config = transformers.Olmo3Config(
        **SIZES | TOKENS,
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": dict(YARN), "sliding_attention": dict(PLAIN)},
        sliding_window=5,
    )
    theirs = randomised(transformers.Olmo3ForCausalLM(config))

    windowed = FULL | {"sliding_window": 5}
    values = {"norm_placement": "output", "qk_norm": "width", "rope_parameters": dict(YARN)}
    ours = blocks(blocks=[windowed, MLP, FULL, MLP, windowed, MLP], rope_scaling_on_windowed=False, **values)

    parts = {
        "self_attn": (0, "mixer"),
        "post_attention_layernorm": (0, "norm"),
        "mlp": (1, "mixer"),
        "post_feedforward_layernorm": (1, "norm"),
    }
    assert_same_model(ours, theirs, renamed(theirs.state_dict(), {}, parts))


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("child", children())
def test_generation_with_a_cache_is_generation_without(child: Any, cache: dict[str, str]) -> None:
    model = child()
    arguments: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "output_logits": True}

    cached = model.generate(tokens(length=6), use_cache=True, return_dict_in_generate=True, **cache, **arguments)
    plain = model.generate(tokens(length=6), use_cache=False, return_dict_in_generate=True, **arguments)

    assert torch.equal(cached.sequences, plain.sequences)
    assert cached.sequences.unique().numel() > 8
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits), atol=1e-4, rtol=0)


def test_only_mamba_refuses_speculative_decoding() -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    for model in (decilm(CHILD), blocks(**CHILDREN["dense"])):
        guessed = model.generate(tokens(1, 7), prompt_lookup_num_tokens=2, **arguments)
        assert torch.equal(guessed, model.generate(tokens(1, 7), **arguments))
    with pytest.raises(ValueError, match="stateful"):
        blocks(**CHILDREN["hybrid"]).generate(tokens(1, 7), prompt_lookup_num_tokens=2, **arguments)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("child", children())
def test_left_padding_changes_nothing(child: Any, use_cache: bool) -> None:
    model = child()
    short, long = tokens(1, 5), tokens(1, 9)
    batch = torch.cat([torch.nn.functional.pad(short, (4, 0), value=0), long])

    arguments = {"max_new_tokens": 12, "do_sample": False, "use_cache": use_cache}
    padded = model.generate(batch, attention_mask=(batch != 0).long(), **arguments)

    assert torch.equal(padded[0, 9:], model.generate(short, **arguments)[0, 5:])
    assert torch.equal(padded[1], model.generate(long, **arguments)[0])


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("child", children())
def test_gradient_checkpointing_gives_the_same_loss_and_gradients(child: Any) -> None:
    model = child().train()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])

    assert len(results[0]) > 3
    torch.testing.assert_close(results[1], results[0])
    shifted = logits(model)[:, :-1].flatten(0, 1)
    torch.testing.assert_close(results[0][0], torch.nn.functional.cross_entropy(shifted, tokens()[:, 1:].flatten()))


@pytest.mark.parametrize("child", children())
def test_logits_to_keep_and_hidden_states(child: Any) -> None:
    model = child()

    torch.testing.assert_close(logits(model, logits_to_keep=3), logits(model)[:, -3:])
    hidden_states = model(tokens(), output_hidden_states=True).hidden_states
    assert len(hidden_states) == model.config.num_hidden_layers + 1


@pytest.mark.parametrize("child", children()[:2])
def test_attention_implementation_set_later_reaches_every_layer(child: Any) -> None:
    model = child()
    sdpa = logits(model)

    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True)

    assert len(output.attentions) == 3
    assert all(weights is not None for weights in output.attentions)
    torch.testing.assert_close(output.logits, sdpa, atol=1e-5, rtol=0)


@pytest.mark.parametrize("child", children())
def test_a_cache_is_continued_by_several_tokens(child: Any) -> None:
    model, name = child(), code("decilm").CACHE
    with torch.no_grad():
        start = model(tokens()[:, :5], use_cache=True)

    rest = logits(model, tokens()[:, 5:], **{name: start[name]})

    torch.testing.assert_close(rest, logits(model)[:, 5:], atol=1e-5, rtol=0)


def test_a_window_counts_the_token_itself() -> None:
    model = decilm([{"attention": attention(2, window=5), "ffn": ffn(intermediate_size=48)}])
    changed = tokens(1, 12)
    changed[0, 3] = (changed[0, 3] + 1) % SIZES["vocab_size"]

    reached = (logits(model, tokens(1, 12)) != logits(model, changed)).any(-1)[0]

    assert reached.nonzero().flatten().tolist() == [3, 4, 5, 6, 7]


def test_block_configs_are_read_by_attribute_as_vllm_does() -> None:
    parts = decilm(CHILD).config.block_configs

    assert parts[0].attention.no_op and not parts[1].attention.no_op
    assert parts[1].attention.n_heads_in_group == 2
    assert parts[0].ffn.ffn_mult == 0.5
    assert not hasattr(parts[2].ffn, "ffn_mult")
    assert parts[2].ffn.intermediate_size == 48


def test_ffn_mult_is_rounded_up_and_intermediate_size_is_not() -> None:
    model = decilm(CHILD)

    # int(2 * 0.5 * 64 / 3) is 21.
    assert model.model.layers[0].mlp.up_proj.out_features == 256
    assert model.model.layers[2].mlp.up_proj.out_features == 48


def test_intermediate_size_replaces_a_null_ffn_mult() -> None:
    config = code("decilm").DeciLMConfig(
        num_hidden_layers=1,
        block_configs=[{"attention": attention(2), "ffn": ffn(ffn_mult=None, intermediate_size=48)}],
    )

    assert not hasattr(config.block_configs[0].ffn, "ffn_mult")


@pytest.mark.parametrize("child", children()[:2])
def test_config_round_trips(child: Any, tmp_path: Path, modules_cache: None) -> None:
    config = child().config
    name = "blocks" if hasattr(config, "blocks") else "block_configs"
    given = {"blocks": HYBRID, "block_configs": CHILD}[name]

    folder = export(child(), tmp_path / "exported")
    loaded = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)

    assert json.loads((folder / "config.json").read_text())[name] == given
    assert config.to_dict()[name] == given == json.loads(config.to_json_string())[name]
    assert loaded.to_dict()[name] == given
    assert copy.deepcopy(config) == config
    assert type(config).from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert type(config).__name__ in repr(config)


def test_published_nulls_stay_null(tmp_path: Path) -> None:
    config = code("decilm").DeciLMConfig(
        num_key_value_heads=None, intermediate_size=None, num_hidden_layers=5, block_configs=CHILD
    )
    config.save_pretrained(tmp_path)

    written = json.loads((tmp_path / "config.json").read_text())
    assert written["num_key_value_heads"] is None and written["intermediate_size"] is None
    assert code("decilm").DeciLMConfig.from_pretrained(tmp_path).intermediate_size is None


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"attention": attention(3), "ffn": ffn(ffn_mult=1.0)}, r"block_configs\[0\].attention.n_heads_in_group"),
        ({"attention": attention(None), "ffn": ffn(ffn_mult=1.0)}, r"block_configs\[0\].attention.n_heads_in_group"),
        ({"attention": attention(2, window=0), "ffn": ffn(ffn_mult=1.0)}, r"\[0\].attention.window_length: expected"),
        ({"attention": attention(2) | {"num_sink_tokens": 4}, "ffn": ffn(ffn_mult=1.0)}, "num_sink_tokens: must be"),
        ({"attention": attention(2) | {"group": 4}, "ffn": ffn(ffn_mult=1.0)}, r"\[0\].attention.group: unknown key"),
        ({"attention": attention(2), "ffn": ffn()}, r"block_configs\[0\].ffn: expected either"),
        ({"attention": attention(2), "ffn": ffn(ffn_mult=1.0, intermediate_size=4)}, r"\[0\].ffn: expected either"),
        ({"attention": attention(2)}, r"block_configs\[0\].ffn: expected a mapping"),
    ],
)
def test_decilm_names_the_layer_and_key_that_is_wrong(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code("decilm").DeciLMConfig(num_attention_heads=8, num_hidden_layers=1, block_configs=[layer])


def test_decilm_counts_its_layers() -> None:
    with pytest.raises(ValueError, match="5 entries, num_hidden_layers is 4"):
        code("decilm").DeciLMConfig(num_hidden_layers=4, block_configs=CHILD)
    with pytest.raises(ValueError, match="expected 4 entries"):
        code("decilm").DeciLMForCausalLM(
            code("decilm").DeciLMConfig(**SIZES, num_attention_heads=8, num_hidden_layers=4)
        )


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"kind": "gated_delta_net"}, r"blocks\[1\].kind: expected one of attention, mlp, mamba, moe"),
        ({}, r"blocks\[1\].kind"),
        ({"kind": "mlp"}, r"blocks\[1\].intermediate_size: missing"),
        ({"kind": "mlp", "intermediate_size": 0}, r"blocks\[1\].intermediate_size: expected a positive"),
        (MLP | {"width": 3}, r"blocks\[1\].width: a mlp block has no such key"),
        (MLP | {"linear": True}, r"blocks\[1\].intermediate_size: a linear mlp block"),
        (FULL | {"num_key_value_heads": 3}, r"blocks\[1\].num_attention_heads: 4 is not a multiple"),
        (MAMBA | {"n_groups": 3}, r"blocks\[1\].num_heads: 8 is not a multiple"),
        (MOE | {"num_experts_per_tok": 5}, r"blocks\[1\].n_routed_experts"),
    ],
)
def test_blocks_name_the_block_and_key_that_is_wrong(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code("nemo_ext_blocks").NemoExtBlocksConfig(blocks=[FULL, block])


@pytest.mark.parametrize(
    "values",
    [{"hidden_act": "relu"}, {"norm_type": "l2"}, {"norm_placement": "both"}, {"qk_norm": "q"}],
    ids=lambda values: next(iter(values)),
)
def test_blocks_refuse_what_they_do_not_compute(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(values))}: expected one of"):
        code("nemo_ext_blocks").NemoExtBlocksConfig(blocks=[MLP], **values)


def test_blocks_are_counted() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers is 3, but there are 1 blocks"):
        code("nemo_ext_blocks").NemoExtBlocksConfig(blocks=[MLP], num_hidden_layers=3)
