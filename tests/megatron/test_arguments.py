"""The pattern and words that Megatron gets from a composed config."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from nemo_ext.architecture.pattern import parse
from nemo_ext.checkpoint.description import from_config
from nemo_ext.job.config import compose
from nemo_ext.megatron.arguments import command_line, megatron_parser, parse_arguments, pattern_with_cuts, world_size


@pytest.mark.parametrize(("virtual", "stages"), [(None, 2), (2, 4)])
def test_a_pattern_without_cuts_is_divided_into_the_requested_stages(virtual: int | None, stages: int) -> None:
    overrides = ["model=domyn_small_tiny", "megatron.pipeline_model_parallel_size=2"]
    config = compose("train", overrides + ([] if virtual is None else [f"model.virtual_pipeline_stages={virtual}"]))

    cut = parse(pattern_with_cuts(config))

    assert len(cut.stages) == stages
    assert cut.blocks == parse(config["model"]["pattern"]).blocks


def test_cuts_in_a_pattern_are_kept() -> None:
    config = compose("train", ["model.pattern=ME|M*EME-", "megatron.pipeline_model_parallel_size=2"])

    assert parse(pattern_with_cuts(config)).cuts == (2,)


@pytest.mark.parametrize("pattern", ["-", "--", "---", "-*-"])
def test_leading_mlp_blocks_are_not_an_option(pattern: str, megatron: None) -> None:
    from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern

    config = compose("train", ["run_dir=unused", "data=mock", "model=domyn_small_tiny", f"model.pattern={pattern}"])

    arguments = parse_arguments(command_line(config), world_size=1)

    read = parse_hybrid_pattern(arguments.hybrid_layer_pattern)
    assert (read.main_pattern, read.mtp_num_depths) == (pattern, 0)
    assert arguments.num_layers == len(pattern)


def test_the_parser_is_built_once_and_keeps_its_defaults(monkeypatch: pytest.MonkeyPatch, megatron: None) -> None:
    from megatron.training import arguments

    def build(parser: object) -> NoReturn:
        raise AssertionError("built again")

    line = command_line(compose("train", ["run_dir=unused", "data=mock"]))
    megatron_parser()
    monkeypatch.setattr(arguments, "add_megatron_arguments", build)

    parse_arguments(line, world_size=1).iterations_to_skip.append(5)

    assert parse_arguments(line, world_size=1).iterations_to_skip == []


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("megatron.lr=x", "rejected megatron.lr='x': argument --lr: invalid float value: 'x'"),
        ("megatron.num_workers=1.5", "megatron.num_workers=1.5: argument --num-workers: invalid int value: .1.5."),
        ("megatron.lr_decay_style=foo", "parser rejected megatron.lr_decay_style='foo': .* invalid choice: 'foo'"),
        ("megatron.recompute_modules=[]", r"megatron.recompute_modules=\[\]: .* expected at least one argument"),
        ("megatron.data_path=[1,-x]", r"megatron.data_path=\[1, '-x'\]: --data-path does not take the values -x"),
    ],
)
def test_an_invalid_value_is_named_with_its_key(word: str, error: str, megatron: None) -> None:
    with pytest.raises(ValueError, match=error):
        command_line(compose("train", ["run_dir=unused", "data=mock", word]))


def test_two_mlp_blocks_are_two_layers(build: Callable[..., torch.nn.Module]) -> None:
    model: Any = build("model=domyn_small_tiny", "model.pattern=--")
    assert [type(layer).__name__ for layer in model.decoder.layers] == ["MLPBlock", "MLPBlock"]


@pytest.mark.parametrize("virtual", [0, -1, 1.5, "x", True])
def test_virtual_stages_are_positive_integers(virtual: object) -> None:
    config = compose("train", ["model=domyn_small_tiny"])
    with pytest.raises(ValueError, match=r"model\.virtual_pipeline_stages must be .* at least 1"):
        pattern_with_cuts({**config, "model": {**config["model"], "virtual_pipeline_stages": virtual}})


@pytest.mark.parametrize("size", [0, -1, 1.5, None, True])
def test_ranks_are_positive_integers(size: object) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        world_size({"launcher": {"nodes": 1, "nproc_per_node": size}})


def test_a_model_without_ddp_has_no_fused_gradients(monkeypatch: pytest.MonkeyPatch, megatron: None) -> None:
    """Puzzle's stages and the sweep of precisions differentiate it without a `main_grad`."""
    from nemo_ext.megatron import arguments, session
    from nemo_ext.puzzle.configs import stage_config

    def parse(words: list[str], *, world_size: int) -> NoReturn:
        raise ValueError(" ".join(words))

    monkeypatch.setattr(arguments, "backend_of", lambda config: "transformer_engine")
    monkeypatch.setattr(arguments, "parse_arguments", parse)
    config = compose("puzzle", ["run_dir=unused", "data=mock"])

    for built in (config, stage_config(config, from_config(config), 1)):
        with pytest.raises(ValueError, match=r"transformer_engine .* --no-gradient-accumulation-fusion"):
            session.build_model(built)


def test_a_model_has_no_more_ids_than_rows() -> None:
    """`convert` would refuse it after training."""
    from nemo_ext.megatron.check import check_keys

    words = ["run_dir=unused", "data=mock", "model=olmo3_7b", "megatron.padded_vocab_size=50304"]
    with pytest.raises(ValueError, match=r"model.vocab_size=100278 is above megatron.padded_vocab_size=50304"):
        check_keys(compose("train", words))
    for more in ("++model.vocab_size=null", "model.vocab_size=50280"):
        check_keys(compose("train", [*words, more]))
