"""The layer spec under the constructors of the next Megatron-Core, compared with the installed one."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from nemo_ext.job.config import compose

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
    """Function that replaces the installed Megatron-Core with the next one."""
    from tests.megatron import next_core

    with ExitStack() as stack:
        yield lambda: stack.enter_context(next_core.applied())


def stepped(network: torch.nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps and the parameters after them."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    destroy_moe_metrics_tracker()  # it has the number of layers of the first model in a process
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
def test_steps_are_identical_bit_for_bit(build: Build, next_core: Callable[[], None], words: str) -> None:
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


def test_configs_of_blocks_have_their_values(build: Build, next_core: Callable[[], None]) -> None:
    next_core()
    network = build("model.pattern=M{heads=4}*{kv=1}-E{ffn=64}M")
    configs = network.decoder.layer_config_list

    assert "".join(network.decoder.layer_type_list) == "M*-EM"
    assert [each.mamba_num_heads for each in configs] == [4, *[network.config.mamba_num_heads] * 4]
    assert configs[1].num_query_groups == 1 and configs[3].moe_ffn_hidden_size == 64
    assert network.config.num_query_groups != 1


def test_blocks_are_replaced_omitted_and_distributed(next_core: Callable[[], None]) -> None:
    from nemo_ext.blockwise.parent import Parent
    from nemo_ext.blockwise.sharded import SHARD, share_out
    from nemo_ext.megatron.session import build_model
    from nemo_ext.puzzle.stages.inference import open_inference

    config = compose("train", ["run_dir=unused", "data=mock", "model=nemotron3_nano_tiny", "model.pattern=M*-E"])
    tokens, hidden = torch.arange(24).reshape(2, 12), torch.randn(12, 2, 192)

    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        parent = Parent(*build_model(config))
        for layer in parent.layers:
            for place, weight in enumerate(layer.parameters()):
                torch.nn.init.normal_(weight, std=0.01 * (place + 1), generator=torch.Generator().manual_seed(place))
        for weight in (*parent.model.embedding.parameters(), *parent.model.output_layer.parameters()):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(9))
        with torch.no_grad():
            found = [parent.hidden(tokens), parent.hidden(tokens, {1: None}), parent.hidden_from(2, hidden)]
            found += [
                parent.hidden(tokens, {0: parent.layers[0], 3: None}),
                parent.block_output(2, hidden, parent.layers[2]),
            ]
            for layer in (parent.layers[1], None):
                with open_inference(parent, layer, batch=2, length=12) as run:
                    found.append(run(hidden, start=0))
        return found

    before = results()
    next_core()

    assert all(torch.equal(after, expected) for after, expected in zip(results(), before, strict=True))
    parent = Parent(*build_model(config, blocks=False))
    share_out(parent, SHARD)
    assert parent.model.decoder.layer_type_list == list("M*-E")
    assert parent.hidden(tokens).isfinite().all()


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
    with pytest.raises(ValueError, match="one of layer_type_list and layer_config_list"):
        BlockStack(config, options=options, pg_collection=groups)
    with pytest.raises(ValueError, match="'-' at block 1, but the layer spec was made for '\\*'"):
        BlockStack(config, options=options, layer_config_list=stack.layer_config_list, pg_collection=groups)
