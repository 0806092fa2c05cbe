"""Variants of blocks and their initial weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.checkpoint.description import Description, from_config, to_config
from nemo_ext.checkpoint.parameters import rows
from nemo_ext.job.config import compose
from nemo_ext.puzzle.stages.initialise import Importance, initial_weights
from nemo_ext.puzzle.variants import Choices, Variant, variants

FAMILIES = [
    "nemotron3_nano_tiny",
    "nemotron3_super_tiny",
    "domyn_small_tiny",
    "llama_nemotron_tiny",
    "olmo1_tiny",
    "olmo3_tiny",
]
CHOICES = Choices(ffn_multiple=8, windows=(16,), top_k=(1,))
EVERY = replace(CHOICES, heads=(0.5,), mamba_state=(0.75,), combine=("*", "E", "M"))


def description(model: str, *overrides: str) -> Description:
    return from_config(compose("describe", [f"model={model}", *overrides]))


def tensors_of(model: Description, number: int) -> dict[str, torch.Tensor]:
    """Random tensors of one block, by their names in Megatron's checkpoint."""
    at = f"decoder.layers.{number}."
    pieces = [piece for row in rows(model, stacked_experts=True) for piece in row.pieces]
    return {p.key.removeprefix(at): torch.randn(p.whole) for p in pieces if p.key.startswith(at)}


def with_block(model: Description, variant: Variant) -> Description:
    assert variant.block is not None
    blocks = list(model.architecture.sizes)
    blocks[variant.number] = variant.block
    return replace(model, architecture=model.architecture.with_pattern(Pattern(tuple(blocks))))


def test_variants_of_each_kind() -> None:
    model = description("nemotron3_nano_tiny", 'model.pattern="M*E-"')
    mamba, attention, moe, mlp = variants(model.architecture, CHOICES)

    assert [v.name for v in mamba] == ["keep", "heads12", "heads8", "heads4", "linear", "no_op"]
    assert [v.name for v in attention] == ["keep", "kv1", "window16", "linear", "no_op"]
    assert [v.name for v in moe] == [
        *("keep", "experts6", "experts4", "experts2", "topk1", "ffn96", "ffn64", "linear", "no_op"),
    ]
    assert [v.name for v in mlp] == ["keep", "ffn448", "ffn384", "ffn256", "ffn128", "ffn56", "linear", "no_op"]
    assert attention[1].block == Block.from_values("*", heads=6, kv=1, head_dim=32, window=None)
    assert [v.number for v in mlp] == [3] * 8


def test_sizes_are_combined_where_the_user_says_so() -> None:
    model = description("nemotron3_nano_tiny", 'model.pattern="M*E"', "megatron.num_attention_heads=12")
    few = Choices(heads=(0.5,), kv=(0.5,), mamba_heads=(0.5,), mamba_state=(0.75,), experts=(0.25, 0.125), top_k=(1,))
    few = replace(few, expert_ffn=(0.5,), ffn_multiple=8, linear=False, no_op=False)

    apart, together = (
        [[v.name for v in each[1:]] for each in variants(model.architecture, replace(few, combine=kinds))]
        for kinds in ((), ("*", "E", "M"))
    )

    assert apart == [["heads8", "state24"], ["heads6", "kv1"], ["experts2", "topk1", "ffn64"]]
    assert [together[0][2:], together[1][2:]] == [["heads8_state24"], ["heads6_kv1"]]
    # A single expert is enough only for tokens that choose one.
    more = ["experts2_topk1", "experts1_topk1", "experts2_ffn64", "topk1_ffn64"]
    assert together[2][3:] == [*more, "experts2_topk1_ffn64", "experts1_topk1_ffn64"]


def test_latent_widths_are_variants_of_blocks_that_have_one() -> None:
    model = description("nemotron3_nano_tiny", 'model.pattern="E{latent=64}E"')
    latent, plain = variants(model.architecture, Choices(ffn_multiple=8, latent=(0.5, 0.3)))

    assert [v.name for v in latent if "latent" in v.name] == ["latent32", "latent24"]
    assert not [v.name for v in plain if "latent" in v.name]


def test_idle_latent_channels_are_removed_first(layer: Callable[..., torch.nn.Module]) -> None:
    """The experts' inputs and outputs have idle channels of their own."""
    parent = description("nemotron3_nano_tiny", 'model.pattern="E{latent=64}"')
    block, given = parent.blocks[0], tensors_of(parent, 0)
    given["mlp.fc1_latent_proj.weight"][torch.randperm(64)[:32]] = 0.0
    given["mlp.experts.experts.linear_fc2.weight"][:, torch.randperm(64)[:32]] = 0.0
    variant = Variant(0, "latent32", replaced(block, latent=32))

    made = initial_weights(block, replaced(block, latent=32), given, parent.architecture)

    hidden = torch.randn(6, 1, parent.architecture.hidden_size)
    before, after = outputs([layer(parent, 0, given), layer(with_block(parent, variant), 0, made)], hidden)
    assert (after - before).norm() <= 1e-5 * before.norm()
    assert (before - hidden).norm() > 0.1 * before.norm()
    for latent, message in ((0, "not none"), (96, "latent must not be larger")):
        with pytest.raises(ValueError, match=message):
            initial_weights(block, replaced(block, latent=latent), given, parent.architecture)


def test_the_linear_map_of_latent_experts_is_their_mean_product() -> None:
    parent = description("nemotron3_nano_tiny", 'model.pattern="E{latent=64,shared=none}"')
    given = tensors_of(parent, 0)
    linear = Block.from_values("E", linear=True)

    made = initial_weights(parent.blocks[0], linear, given, parent.architecture)["mlp.weight"]

    products = [
        second @ first
        for first, second in zip(*(given[f"mlp.experts.experts.linear_fc{n}.weight"] for n in (1, 2)), strict=True)
    ]
    expected = given["mlp.fc2_latent_proj.weight"] @ torch.stack(products).mean(0) @ given["mlp.fc1_latent_proj.weight"]
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-2)


def test_the_paper_s_widths_of_llama_3_3_70b() -> None:
    model = description("llama_nemotron_nano_8b", "megatron.hidden_size=8192", "megatron.ffn_hidden_size=28672")

    widths = [v.block.size("ffn") for v in variants(model.architecture)[1] if v.name.startswith("ffn") and v.block]

    assert widths == [25088, 21504, 14336, 7168, 3072]


def test_a_linear_block_can_only_be_removed() -> None:
    model = description("llama_nemotron_tiny", 'model.pattern="*{linear}-"')

    assert [v.name for v in variants(model.architecture, CHOICES)[0]] == ["keep", "no_op"]


@pytest.mark.parametrize(("name", "value"), [("kv", (1.0,)), ("ffn", (0.0,)), ("experts", (-0.5,))])
def test_shares_must_be_shares(name: str, value: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=name):
        Choices(**{name: value})


@pytest.mark.parametrize("model", FAMILIES)
def test_every_variant_has_exactly_the_tensors_of_its_block(model: str) -> None:
    parent = description(model)
    for number, found in enumerate(variants(parent.architecture, EVERY)):
        given = tensors_of(parent, number)
        for variant in found:
            block = parent.blocks[number]
            if variant.block is None or (block.is_linear and variant.block == block):
                continue
            made = initial_weights(block, variant.block, given, parent.architecture)
            wanted = tensors_of(with_block(parent, variant), number)
            assert {name: tensor.shape for name, tensor in made.items()} == {n: t.shape for n, t in wanted.items()}, (
                variant
            )
            if variant.name == "keep":
                assert all(made[name] is given[name] for name in given)


@pytest.fixture
def layer(build_sections: Callable[[Mapping[str, Any]], torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Megatron's layer of one block, with given tensors."""

    def make(model: Description, number: int, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        built = build_sections(to_config(model)).eval()
        return put(built, number, tensors)

    return make


def put(built: torch.nn.Module, number: int, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Set the weights of a layer without Mamba; parameters except norms and experts are named as in checkpoints."""
    found = built.decoder.layers[number]
    norms = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    state = {}
    for name, tensor in tensors.items():
        for saved, own in norms.items():
            name = own + name.removeprefix(saved) if name.startswith(saved) else name
        if name.startswith("mlp.experts.experts."):
            linear = name.removeprefix("mlp.experts.experts.")
            state |= {f"mlp.experts.local_experts.{expert}.{linear}": each for expert, each in enumerate(tensor)}
            continue
        state[name] = tensor
    missing, unexpected = found.load_state_dict(state, strict=False)
    assert not unexpected and all("_extra_state" in name for name in missing)
    return found


def outputs(layers: list[torch.nn.Module], hidden: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        made = [each(hidden, attention_mask=None) for each in layers]
    return [each[0] if isinstance(each, tuple) else each for each in made]


def test_pooled_kv_heads_compute_the_same_where_heads_were_equal(layer: Callable[..., torch.nn.Module]) -> None:
    parent = description("nemotron3_nano_tiny", 'model.pattern="*"', "megatron.num_query_groups=6")
    block = parent.blocks[0]
    given = tensors_of(parent, 0)
    fused = given["self_attention.linear_qkv.weight"].reshape(3, 2, 3, 32, -1)
    fused[:, 1, 1:] = fused[:, 0, 1:]  # each pair of groups has one key and one value
    variant = Variant(0, "kv3", Block("*", tuple({**dict(block.values), "kv": 3}.items())))
    assert variant.block is not None

    made = initial_weights(block, variant.block, given, parent.architecture)

    hidden = torch.randn(10, 2, parent.architecture.hidden_size)
    before, after = outputs([layer(parent, 0, given), layer(with_block(parent, variant), 0, made)], hidden)
    assert (after - before).norm() <= 1e-6 * before.norm()


@pytest.mark.parametrize(("name", "keeps"), [("heads8", 8), ("heads4_kv2", 4)])
def test_idle_heads_are_removed_first(
    name: str, keeps: int, build_sections: Callable[[Mapping[str, Any]], torch.nn.Module]
) -> None:
    sizes = ("megatron.num_attention_heads=12", "megatron.num_query_groups=4")
    parent = description("nemotron3_nano_tiny", 'model.pattern="*"', *sizes)
    given = tensors_of(parent, 0)
    used = torch.stack([torch.randperm(3)[: keeps // 4] for _ in range(4)])
    idle = torch.ones(4, 3, dtype=torch.bool).scatter(1, used, False).flatten()
    given["self_attention.linear_proj.weight"].reshape(192, 12, 32)[:, idle] = 0.0
    if "kv" in name:  # neighbours with equal keys and values, so that pooling them changes nothing
        fused = given["self_attention.linear_qkv.weight"].reshape(2, 2, 5, 32, -1)
        fused[:, 1, 3:] = fused[:, 0, 3:]

    compare_outputs(parent, name, given, replace(EVERY, heads=(2 / 3, 1 / 3)), build_sections)


def test_idle_states_are_removed_first(build_sections: Callable[[Mapping[str, Any]], torch.nn.Module]) -> None:
    parent = description("nemotron3_nano_tiny", 'model.pattern="M"')
    given = tensors_of(parent, 0)
    for group in range(2):
        for row in torch.randperm(32)[:8] + 32 * group:
            for name in ("in_proj.weight.B", "conv1d.bias.B"):
                given[f"mixer.{name}"][row] = 0.0

    compare_outputs(parent, "state24", given, EVERY, build_sections)


def compare_outputs(
    parent: Description,
    name: str,
    given: dict[str, torch.Tensor],
    choices: Choices,
    build_sections: Callable[[Mapping[str, Any]], torch.nn.Module],
) -> None:
    """Check that a variant of the parent's only block computes the same as the block with the tensors `given`."""
    from nemo_ext.megatron.session import put_tensors

    variant = next(v for v in variants(parent.architecture, choices)[0] if v.name == name)
    assert variant.block is not None
    made = initial_weights(parent.blocks[0], variant.block, given, parent.architecture)
    layers, at = [], "decoder.layers.0."
    for model, tensors in ((parent, given), (with_block(parent, variant), made)):
        layers.append(build_sections(to_config(model)).eval().decoder.layers[0])
        put_tensors(layers[-1], {at + key: tensor for key, tensor in tensors.items()}, at)
    before, after = outputs(layers, torch.randn(10, 2, parent.architecture.hidden_size))
    assert (after - before).norm() <= 1e-5 * before.norm()


@pytest.mark.parametrize("model", ["llama_nemotron_tiny", "domyn_small_tiny"])
def test_idle_channels_are_removed_first(model: str, layer: Callable[..., torch.nn.Module]) -> None:
    parent = description(model, 'model.pattern="-"')
    block, given = parent.blocks[0], tensors_of(parent, 0)
    idle = torch.randperm(512)[:256]
    given["mlp.linear_fc2.weight"][:, idle] = 0.0
    variant = next(v for v in variants(parent.architecture, CHOICES)[0] if v.name == "ffn256")
    assert variant.block is not None

    made = initial_weights(block, variant.block, given, parent.architecture)

    hidden = torch.randn(6, 1, parent.architecture.hidden_size)
    before, after = outputs([layer(parent, 0, given), layer(with_block(parent, variant), 0, made)], hidden)
    assert (after - before).norm() <= 1e-6 * before.norm()


def test_measured_importance_decides_what_is_kept() -> None:
    parent = description("nemotron3_nano_tiny", 'model.pattern="M{heads=8}E-"')
    mamba, moe, mlp = parent.blocks
    heads = torch.tensor([1.0, 9, 2, 8, 7, 1, 1, 6])  # two groups of four
    experts, channels = torch.tensor([0.0, 5, 1, 4, 2, 3, 0, 0]), torch.arange(512.0)
    given = [tensors_of(parent, number) for number in range(3)]

    fewer = initial_weights(mamba, replaced(mamba, heads=4), given[0], parent.architecture, Importance(heads=heads))
    smaller = initial_weights(moe, replaced(moe, experts=4), given[1], parent.architecture, Importance(experts=experts))
    narrow = initial_weights(mlp, replaced(mlp, ffn=8), given[2], parent.architecture, Importance(channels=channels))

    assert torch.equal(fewer["mixer.A_log"], given[0]["mixer.A_log"][[1, 3, 4, 7]])
    assert torch.equal(fewer["mixer.in_proj.weight.B"], given[0]["mixer.in_proj.weight.B"])
    assert torch.equal(smaller["mlp.router.weight"], given[1]["mlp.router.weight"][[1, 3, 4, 5]])
    assert torch.equal(smaller["mlp.router.expert_bias"], given[1]["mlp.router.expert_bias"][[1, 3, 4, 5]])
    assert torch.equal(narrow["mlp.linear_fc1.weight"], given[2]["mlp.linear_fc1.weight"][504:])


def replaced(block: Block, **values: int) -> Block:
    return Block(block.kind, tuple({**dict(block.values), **values}.items()))


def test_variants_that_are_not_smaller_are_refused() -> None:
    parent = description("llama_nemotron_tiny", 'model.pattern="*-"')
    attention, mlp = parent.blocks
    with pytest.raises(ValueError, match="ffn must not be larger"):
        initial_weights(mlp, replaced(mlp, ffn=1024), tensors_of(parent, 1), parent.architecture)
    with pytest.raises(ValueError, match="head_dim must not change"):
        initial_weights(attention, replaced(attention, head_dim=8), tensors_of(parent, 0), parent.architecture)
    with pytest.raises(ValueError, match="must have its parent's kind"):
        initial_weights(mlp, attention, tensors_of(parent, 1), parent.architecture)
