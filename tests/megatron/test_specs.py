"""The four families as Megatron modules: sizes, structure, forward and backward, on one rank."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from nemo_ext.architecture.cost import total_params
from nemo_ext.architecture.model import Architecture
from nemo_ext.job.config import compose

TINY = ("nemotron3_nano_tiny", "domyn_small_tiny", "llama_nemotron_tiny", "olmo1_tiny", "olmo3_tiny")
Build = Callable[..., torch.nn.Module]


@pytest.fixture(scope="module")
def family(megatron: None) -> Callable[[str], torch.nn.Module]:
    """A family's tiny model, made once."""
    from nemo_ext.megatron.session import build_model

    @cache
    def make(model: str) -> torch.nn.Module:
        made: torch.nn.Module = build_model(compose("train", ["run_dir=unused", "data=mock", f"model={model}"]))[0]
        return made

    return make


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of `tokens` `[batch, seq + 1]`."""
    length = tokens.shape[1] - 1
    positions = torch.arange(length).expand(tokens.shape[0], -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()


def some_tokens(batch: int = 2, length: int = 48) -> torch.Tensor:
    return torch.randint(0, 257, (batch, length + 1), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("model", TINY)
def test_a_family_has_the_parameters_that_the_cost_model_counts(
    family: Callable[[str], torch.nn.Module], model: str
) -> None:
    architecture = Architecture.from_config(compose("train", [f"model={model}"]))

    parameters = sum(p.numel() for p in family(model).parameters())

    assert parameters == total_params(architecture)


@pytest.mark.parametrize("model", TINY)
def test_a_family_computes_a_loss_and_a_gradient_for_every_parameter(
    family: Callable[[str], torch.nn.Module], model: str
) -> None:
    network = family(model).train()
    tokens = some_tokens(batch=4, length=64)

    loss = loss_of(network, tokens)
    loss.backward()

    assert loss.item() == pytest.approx(torch.log(torch.tensor(384.0)).item(), rel=0.15)
    without = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    assert not without


@pytest.mark.parametrize("model", TINY)
def test_a_family_is_causal(family: Callable[[str], torch.nn.Module], model: str) -> None:
    network = family(model).eval()
    tokens = some_tokens(batch=1, length=40)
    changed = tokens.clone()
    changed[0, 25] = (changed[0, 25] + 1) % 257
    positions = torch.arange(41)[None]

    with torch.no_grad():
        before, after = (network(t, positions, None) for t in (tokens, changed))

    assert torch.allclose(before[:, :25], after[:, :25], atol=1e-5)
    assert not torch.allclose(before[:, 25:], after[:, 25:], atol=1e-5)


def test_every_block_has_its_own_sizes(build: Build) -> None:
    network = build("model.pattern='M{heads=4}*{kv=1}-{ffn=96}E{experts=4,ffn=64}M*-E'")
    layers = network.decoder.layers

    assert layers[0].mixer.nheads == 4 and layers[4].mixer.nheads == 16
    assert layers[1].self_attention.linear_qkv.weight.shape[0] == (6 + 2 * 1) * 32
    assert layers[5].self_attention.linear_qkv.weight.shape[0] == (6 + 2 * 2) * 32
    assert layers[2].mlp.linear_fc1.weight.shape[0] == 96 and layers[6].mlp.linear_fc1.weight.shape[0] == 512
    assert len(layers[3].mlp.experts.local_experts) == 4 and len(layers[7].mlp.experts.local_experts) == 8
    assert layers[3].mlp.experts.local_experts[0].linear_fc1.weight.shape[0] == 64


def test_a_linear_replaced_block_is_the_norm_and_one_linear_map(build: Build) -> None:
    network = build("model.pattern='*{linear}-{linear}M{linear}E{linear}'")
    hidden = torch.randn(5, 2, 192)

    for layer, norm, linear in zip(
        network.decoder.layers,
        ("input_layernorm", "pre_mlp_layernorm", "norm", "pre_mlp_layernorm"),
        ("self_attention", "mlp", "mixer", "mlp"),
        strict=True,
    ):
        output = layer(hidden, attention_mask=None)
        output = output[0] if isinstance(output, tuple) else output
        expected = hidden + getattr(layer, norm)(hidden) @ getattr(layer, linear).weight.T
        assert torch.allclose(output, expected, atol=1e-5)


def test_olmo3_normalises_the_output_of_each_sub_layer(build: Build) -> None:
    network = build("model=olmo3_tiny").eval()
    layer = network.decoder.layers[1]
    hidden = torch.randn(6, 1, network.config.hidden_size)

    with torch.no_grad():
        inner, _ = layer.mlp.linear_fc1(hidden)
        gate, up = inner.chunk(2, dim=-1)
        projected = (torch.nn.functional.silu(gate) * up) @ layer.mlp.linear_fc2.weight.T
        expected = hidden + torch.nn.functional.rms_norm(projected, projected.shape[-1:], eps=1e-6)
        output = layer(hidden, attention_mask=None)

    output = output[0] if isinstance(output, tuple) else output
    assert torch.allclose(output, expected, atol=1e-5)


def test_olmo3_attends_in_windows_except_in_every_fourth_block(build: Build) -> None:
    network = build("model=olmo3_tiny")
    windows = [
        layer.self_attention.core_attention.window
        for layer, symbol in zip(network.decoder.layers, network.decoder.layer_type_list, strict=True)
        if symbol == "*"
    ]

    assert windows[-1] is None
    assert [w is None for w in windows] == [(i + 1) % 4 == 0 for i in range(len(windows))]


def test_olmo3_applies_yarn_to_the_full_attention_blocks_only(build: Build) -> None:
    yarn = ("position_embedding_type=yarn", "rotary_scaling_factor=8", "yarn_original_max_position_embeddings=64")
    network = build("model=olmo3_tiny", "+model.yarn_on_windowed=false", *(f"megatron.{word}" for word in yarn))
    attention = [layer.self_attention for layer in network.decoder.layers if hasattr(layer.self_attention, "rotary")]

    for module in attention:
        windowed = module.core_attention.window is not None
        assert (module.rotary is not None) == windowed
        # YaRN scales the cosine and sine by 0.1 ln(factor) + 1 (Peng et al. 2023, eq. 22); plain RoPE does not.
        expected = 1.0 if windowed else 0.1 * torch.log(torch.tensor(8.0)).item() + 1.0
        assert module._yarn_concentration_factor == pytest.approx(expected)


def test_llama_frequencies_are_scaled_as_llama_3_does(build: Build) -> None:
    network = build("model=llama_nemotron_tiny")
    rotary = next(
        layer.self_attention.rotary for layer in network.decoder.layers if hasattr(layer.self_attention, "rotary")
    )
    dim = network.config.kv_channels
    plain = 1.0 / 500000.0 ** (torch.arange(0, dim, 2).float() / dim)
    wavelength = 2 * torch.pi / plain
    smooth = ((8192 / wavelength - 1.0) / (4.0 - 1.0)).clamp(0, 1)

    assert torch.allclose(rotary.inv_freq, (1 - smooth) * plain / 8.0 + smooth * plain)


def test_domyn_rotates_half_of_each_head(build: Build) -> None:
    network = build("model=domyn_small_tiny")

    assert network.rotary_pos_emb.inv_freq.numel() * 2 == network.config.kv_channels // 2


def test_olmo1_norms_have_no_weights(build: Build) -> None:
    assert not [name for name, _ in build("model=olmo1_tiny").named_parameters() if "norm" in name]


def test_transformer_engine_is_refused_when_the_model_is_built(build: Build) -> None:
    if torch.cuda.is_available():
        pytest.skip("Transformer Engine may be installed where there is a GPU")

    with pytest.raises(ValueError, match="Transformer Engine is not installed"):
        build("model.backend=transformer_engine", "megatron.no_rope_fusion=true")


def test_a_spec_made_for_another_pattern_is_refused(megatron: None) -> None:
    from nemo_ext.megatron.specs import check_pattern, hybrid_stack

    options = hybrid_stack("*{kv=2}-M").params["options"]

    check_pattern(options, ["M"], 2)
    with pytest.raises(ValueError, match="'-' at block 3, but the layer spec was made for 'M'"):
        check_pattern(options, ["*", "-", "-"], 0)


def test_a_spec_of_more_blocks_than_the_model_has_is_refused(megatron: None) -> None:
    from megatron.core.transformer import TransformerConfig

    from nemo_ext.megatron.specs import BlockStack, check_pattern, hybrid_stack

    options = hybrid_stack("(*{kv=1}-{ffn=512})x2M").params["options"]
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4)

    said = r"hybrid_layer_pattern has 4 blocks, but the layer spec was made for 5 \(\*-\*-M\): pass the same pattern"
    with pytest.raises(ValueError, match=said):
        BlockStack(config, options=options, layer_type_list=list("*-*-"))
    with pytest.raises(ValueError, match=said):
        BlockStack(config, options=options, layer_type_list=list("*-"), pp_layer_offset=2)
    check_pattern(options, list("*-"), 0)  # of a stage before the last
    check_pattern(options, list("*-M"), 2, last=True)


def test_the_advice_without_transformer_engine_fits_the_caller(monkeypatch: pytest.MonkeyPatch, megatron: None) -> None:
    from nemo_ext.megatron import check, specs

    monkeypatch.setattr(specs.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ValueError, match="set transformer_impl=local, or install it"):
        specs.backend("transformer_engine")
    with pytest.raises(ValueError, match=r"set model\.backend=local, or install it"):
        check.check_machine(compose("train", ["model.backend=transformer_engine"]))


def test_local_checkpoints_have_the_keys_of_the_upstream_spec(build: Build) -> None:
    keys = {saved.key for saved in build("model.pattern=M*-E").sharded_state_dict().values()}

    for key in (
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.final_norm.weight",
    ):
        assert key in keys


def test_a_plain_megatron_run_takes_the_spec_from_its_command_line(megatron: None) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import hybrid_config_from_args
    from megatron.training.models.hybrid import HybridModelBuilder

    from nemo_ext.megatron.arguments import parse_arguments
    from nemo_ext.megatron.specs import BlockStack

    line = (
        "--spec nemo_ext.megatron.specs hybrid_stack_spec --hybrid-layer-pattern M*-E --transformer-impl local "
        "--hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --squared-relu --disable-bias-linear "
        "--normalization RMSNorm --mamba-num-heads 4 --mamba-head-dim 32 --mamba-state-dim 16 --mamba-num-groups 2 "
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type allgather "
        "--seq-length 32 --max-position-embeddings 32 --position-embedding-type none --micro-batch-size 1 "
        "--padded-vocab-size 384 --train-iters 1 --lr 1e-3 --no-persist-layer-norm --no-masked-softmax-fusion "
        "--no-rope-fusion --no-gradient-accumulation-fusion --no-bias-dropout-fusion --use-cpu-initialization "
        "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 257"
    )
    config = hybrid_config_from_args(parse_arguments(line.split(), world_size=1))
    model = HybridModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())

    assert isinstance(model.decoder, BlockStack)
    loss_of(model, some_tokens(length=32)).backward()


def test_norms_of_transformer_engine_have_the_keys_of_local_ones(megatron: None) -> None:
    """Transformer Engine's norms have an `_extra_state`, which checkpoints of the local back end do not have."""
    from nemo_ext.megatron.specs import _without_extra_state

    class Norm(torch.nn.LayerNorm):
        def get_extra_state(self) -> torch.Tensor:
            return torch.zeros(0)

        def set_extra_state(self, state: object) -> None:
            raise AssertionError("asked for")

    norm = _without_extra_state(Norm, 4, eps=1e-3)

    assert isinstance(norm, Norm) and norm.eps == 1e-3
    assert "_extra_state" in Norm(4).state_dict()
    assert set(norm.state_dict()) == {"weight", "bias"}
    norm.load_state_dict(torch.nn.LayerNorm(4).state_dict())
