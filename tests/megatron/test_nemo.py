"""Hook for NeMo 2's SSMConfig, called like by NeMo, without NeMo."""

import pickle
import sys
from typing import Any

import pytest
import torch

from nemo_ext.architecture.pattern import PatternError

PATTERN = "M*{kv=1}(-{ffn=96}-{linear})x2"


@pytest.fixture(autouse=True, scope="module")
def imported(megatron: None) -> None:
    """Modules that import Megatron, which takes seconds: imported when tests run, not during collection."""
    global mamba_stack_spec, override_pattern
    from nemo_ext.megatron.nemo import mamba_stack_spec, override_pattern


def configured(spec: Any, pattern: str) -> torch.nn.Module:
    """The model with the same arguments as in SSMConfig.configure_model of NeMo 2.7.3."""
    from megatron.core.models.mamba import MambaModel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=len(pattern),
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        mamba_num_heads=4,
        mamba_head_dim=32,
        mamba_state_dim=16,
        mamba_num_groups=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        transformer_impl="local",
        use_cpu_initialization=not torch.cuda.is_available(),
        persist_layer_norm=False,
        is_hybrid_model=True,
    )
    return MambaModel(
        config,
        mamba_stack_spec=spec(),
        vocab_size=128,
        max_sequence_length=32,
        hybrid_attention_ratio=0.0,
        hybrid_mlp_ratio=0.0,
        hybrid_override_pattern=pattern,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=10000,
        seq_len_interpolation_factor=None,
        pre_process=True,
        post_process=True,
    )


def test_the_callable_builds_the_same_model_as_ssmconfig(megatron: None) -> None:
    model = configured(mamba_stack_spec(PATTERN), override_pattern(PATTERN))
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(0))

    logits = model(tokens, torch.arange(32).expand(2, -1), None)

    layers = model.decoder.layers
    assert layers[1].self_attention.linear_qkv.weight.shape[0] == (4 + 2 * 1) * 16
    assert layers[2].mlp.linear_fc1.weight.shape[0] == 96
    assert layers[3].mlp.weight.shape == (64, 64)
    assert logits.shape == (2, 32, 128) and logits.isfinite().all()


def test_a_pattern_other_than_the_specs_is_refused(megatron: None) -> None:
    with pytest.raises(ValueError, match="the layer spec was made for 'M'"):
        configured(mamba_stack_spec(PATTERN), "**----")


@pytest.mark.parametrize("arguments", [(), (object(),)])
def test_it_is_called_with_or_without_a_config(arguments: tuple[object, ...]) -> None:
    assert mamba_stack_spec(PATTERN, norm_placement="output")(*arguments).params["options"].norm_placement == "output"


def test_it_can_be_saved_with_a_model() -> None:
    spec = mamba_stack_spec(PATTERN, qk_norm_scope="width")

    assert pickle.loads(pickle.dumps(spec))().params == spec().params


def test_a_mistake_is_reported_at_once() -> None:
    with pytest.raises(PatternError):
        mamba_stack_spec("*{kv=}")
    with pytest.raises(ValueError, match="norm_placement='after'"):
        mamba_stack_spec("*-", norm_placement="after")
    with pytest.raises(TypeError, match="norm_place"):
        mamba_stack_spec("*-", norm_place="output")


def test_the_override_pattern_is_plain() -> None:
    assert override_pattern(PATTERN) == "M*----"
    assert override_pattern("(*-)x2|(*-)x2") == "*-*-*-*-"


def test_nemo_is_not_imported() -> None:
    assert "nemo_ext.megatron.nemo" in sys.modules and "nemo" not in sys.modules
