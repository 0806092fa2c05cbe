"""The layer spec under the constructors of the next Megatron-Core, beside those of the one installed."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

MODELS = {
    "own sizes": "model.pattern='M{heads=4}*{kv=1}-{ffn=96}E{experts=4,ffn=64}M{linear}*{linear}-{linear}E{linear}*-E'",
    "nemotron3": "model=nemotron3_nano_tiny",
    "domyn": "model=domyn_small_tiny",
    "llama_nemotron": "model=llama_nemotron_tiny",
    "olmo1": "model=olmo1_tiny",
    "olmo3": "model=olmo3_tiny",
}
Build = Callable[..., torch.nn.Module]


@pytest.fixture
def next_core(megatron: None) -> Iterator[Callable[[], None]]:
    """Called, it puts the next Megatron-Core in the place of the one installed."""
    from tests.megatron import next_core

    with ExitStack() as stack:
        yield lambda: stack.enter_context(next_core.applied())


def stepped(network: torch.nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and the parameters after them."""
    optimizer, losses = torch.optim.AdamW(network.parameters(), lr=1e-3), list[float]()
    tokens = torch.randint(0, 257, (2, 33), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(32).expand(2, -1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = network(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("words", MODELS.values(), ids=MODELS)
def test_steps_are_the_same_to_the_last_bit(build: Build, next_core: Callable[[], None], words: str) -> None:
    network = build(words)
    start = {name: tensor.clone() for name, tensor in network.state_dict().items() if tensor is not None}
    before, expected = stepped(network)
    next_core()
    network = build(words)
    network.load_state_dict(start, strict=False)  # Megatron's `_extra_state` is None
    losses, parameters = stepped(network)

    assert losses == before and losses[-1] < losses[0]
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters.items())
    # Upstream enters a block's FP8 context by its config in this list.
    assert [layer.config for layer in network.decoder.layers] == network.decoder.layer_config_list


def test_configs_of_blocks_have_their_values(build: Build, next_core: Callable[[], None]) -> None:
    next_core()
    network = build("model.pattern=M{heads=4}*{kv=1}-E{ffn=64}M")
    configs = network.decoder.layer_config_list

    assert "".join(network.decoder.layer_type_list) == "M*-EM"
    assert [each.mamba_num_heads for each in configs] == [4, *[network.config.mamba_num_heads] * 4]
    assert configs[1].num_query_groups == 1 and configs[3].moe_ffn_hidden_size == 64
    assert network.config.num_query_groups != 1


def test_a_stack_of_symbols_is_built_without_a_warning(build: Build, next_core: Callable[[], None]) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from nemo_ext.megatron.specs import BlockStack, hybrid_stack

    next_core()
    config = build("model=llama_nemotron_tiny").config
    options = hybrid_stack("*{kv=1}-").params["options"]
    groups = ProcessGroupCollection.use_mpu_process_groups()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="layer_type_list")
        stack = BlockStack(config, options=options, layer_type_list=["-"], pp_layer_offset=1, pg_collection=groups)
    assert stack.layer_type_list == ["-"]
    with pytest.raises(ValueError, match="either layer_type_list or layer_config_list"):
        BlockStack(config, options=options, pg_collection=groups)
    with pytest.raises(ValueError, match="'-' at block 1, but the layer spec was made for '\\*'"):
        BlockStack(config, options=options, layer_config_list=stack.layer_config_list, pg_collection=groups)
