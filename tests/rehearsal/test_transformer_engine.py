"""Memory of the stand-ins, compared with figures computed by hand from the facts in their module."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_ext.job.config import compose
from nemo_ext.rehearsal.ranks import rehearse
from nemo_ext.rehearsal.settings import QUANTISED_WEIGHTS, rehearsed
from nemo_ext.rehearsal.tracker import Tracker

MIB = 2**20
TOKENS, WIDE, OUT = 256, 512, 1024
WORKSPACES = 64 * MIB + 1024
QUICKSTART = ("recipe=nemotron3_nano/quickstart", "run_dir=unused", "data=mock", "megatron.bf16=true")
DENSE = (*QUICKSTART, "model=domyn_small_tiny", "megatron.kv_channels=64")
ROWS, LAYERS = 8 * 256, 3
SAVED = LAYERS * (128 + 128 + 512) - 512
"""Numbers per row that are saved in FP8 rather than BF16; at the peak the last FFN's 512 are already freed."""


def passed(scaling: str | None, *, keeps_input: bool = False, **given: Any) -> tuple[Counter[str], Counter[str]]:
    """Live bytes after a forward pass of one layer, and after its backward pass."""
    from nemo_ext.rehearsal.transformer_engine import Engine, Product

    tracker = Tracker()
    with FakeTensorMode(), tracker:
        product = Product(Engine(tracker, **given), "fc1", scaling, keeps_input)
        weight = torch.nn.Parameter(torch.empty(OUT, WIDE, dtype=torch.bfloat16))
        weight.main_grad = torch.empty(OUT, WIDE)  # type: ignore[attr-defined]
        x = torch.empty(TOKENS, 1, WIDE, dtype=torch.bfloat16, requires_grad=True)
        tracker.label([x, weight, weight.main_grad], "given")
        with tracker.during("forward", "activations"):
            out = product(x, weight)
        tracker.label([out], "out")
        forward = Counter(tracker.live)
        with tracker.during("backward", "temporary"):
            out.backward(torch.empty_like(out))
        assert tracker.flops == {"forward": 2 * TOKENS * WIDE * OUT, "backward": 4 * TOKENS * WIDE * OUT}
        return forward, Counter(tracker.live)


@pytest.mark.parametrize(
    ("scaling", "weights", "saved"),
    [
        (None, 0, 0),
        ("tensorwise", 2 * OUT * WIDE + 4, TOKENS * WIDE),
        ("delayed", 2 * OUT * WIDE + 4 + 4 * 5 * 2, TOKENS * WIDE),  # with a history of one step and its scales
        ("blockwise", 2 * OUT * WIDE + 4 * (8 * 4 + 4 * 8), TOKENS * WIDE + 4 * (TOKENS // 128) * WIDE),
        ("mxfp8", 2 * (OUT * WIDE + OUT * WIDE // 32), TOKENS * WIDE + TOKENS * WIDE // 32),
        ("nvfp4", 2 * (OUT * WIDE * 9 // 16 + 4), TOKENS * WIDE * 9 // 16 + 4),  # with the maximum of each direction
    ],
)
def test_copies_of_a_layer(scaling: str | None, weights: int, saved: int) -> None:
    forward, backward = passed(scaling)
    assert forward[QUANTISED_WEIGHTS] == backward[QUANTISED_WEIGHTS] == weights
    assert forward["activations"] == saved  # the BF16 input does not belong to the layer
    assert forward["temporary"] == WORKSPACES
    assert backward["activations"] == 0
    # Gradient of the input, and the dummy gradient of the weight.
    assert backward["temporary"] == WORKSPACES + 2 * TOKENS * WIDE + 2 * OUT * WIDE


def test_an_input_that_is_saved_in_bf16_has_no_copy() -> None:
    assert passed("tensorwise", keeps_input=True)[0]["activations"] == 0


def test_copies_of_weights_that_are_not_kept_live_until_the_backward_pass() -> None:
    forward, backward = passed("tensorwise", keeps_weights=False)
    assert forward[QUANTISED_WEIGHTS] == 2 * OUT * WIDE + 4
    assert backward[QUANTISED_WEIGHTS] == 0


def test_scales_of_a_part_that_ends_within_a_block() -> None:
    from nemo_ext.rehearsal.transformer_engine import scale_bytes

    assert scale_bytes("blockwise", 130, 200) == 4 * 2 * 132
    assert scale_bytes("blockwise", 130, 200, columnwise=True) == 4 * 2 * 200
    assert scale_bytes("blockwise", 300, 700, weight=True) == 4 * 3 * 8
    assert scale_bytes("mxfp8", 96, 96) == 128 * 4
    assert scale_bytes("mxfp8", 96, 96, columnwise=True) == 4 * 128
    assert scale_bytes("nvfp4", 96, 160) == 128 * 12 + 4
    assert scale_bytes("nvfp4", 96, 160, columnwise=True, weight=True) == 256 * 8 + 4


def test_experts_are_one_product_with_a_copy_each() -> None:
    from nemo_ext.rehearsal.transformer_engine import Engine, Product

    tracker = Tracker()
    with FakeTensorMode(), tracker:
        product = Product(Engine(tracker), "experts", "mxfp8")
        weights = [torch.nn.Parameter(torch.empty(64, 96, dtype=torch.bfloat16)) for _ in range(3)]
        x = torch.empty(32 * 6, 96, dtype=torch.bfloat16)
        tracker.label([x, *weights], "given")
        with tracker.during("forward", "activations"):
            out = product(x, weights, counts=[32, 64, 96])
        assert out.shape == (192, 64)
        with pytest.raises(ValueError, match="experts: mxfp8 FP8 requires a multiple of 32 tokens, not 33"):
            product(x, weights, counts=[33, 63, 96])
        assert tracker.live["temporary"] == 5 * 32 * MIB + 4 * 1024
        # 128 rows and 4 columns, 4 rows and 128 columns of scales.
        assert tracker.live[QUANTISED_WEIGHTS] == 3 * (2 * 64 * 96 + 2 * 128 * 4)
    assert tracker.flops == {"forward": 2 * 192 * 96 * 64}


def test_experts_have_one_name_in_a_checkpoint() -> None:
    from nemo_ext.rehearsal.transformer_engine import Engine, GroupedLinear

    def group(rank: int, size: int) -> SimpleNamespace:
        return SimpleNamespace(rank=lambda: rank, size=lambda: size)

    groups = SimpleNamespace(expt_tp=group(0, 1), ep=group(1, 4), expt_dp=group(2, 3))
    config = SimpleNamespace(
        params_dtype=torch.bfloat16,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
        tensor_model_parallel_size=1,
    )
    engine = Engine(Tracker())
    layer = GroupedLinear(2, 8, 32, config=config, init_method=id, pg_collection=groups, column=True, engine=engine)
    found = layer.sharded_state_dict("linear_fc1.", (), {"dp_cp_group": group(0, 3)})
    for number in (0, 1):
        made = found[f"linear_fc1.weight{number}"]
        assert (made.key, made.replica_id) == ("linear_fc1.weight", (0, 0, 2))
        assert (made.global_shape, made.global_offset) == ((8, 32, 8), (2 + number, 0, 0))


def test_a_matrix_of_a_size_that_fp8_does_not_support() -> None:
    from nemo_ext.rehearsal.transformer_engine import Engine, Product

    tracker = Tracker()
    with FakeTensorMode(), tracker, pytest.raises(ValueError, match=r"block 3 fc1: .* multiples of 16, .* 1032 x 512"):
        Product(Engine(tracker), "block 3 fc1", "tensorwise")(torch.empty(8, 512), torch.empty(1032, 512))


def test_fused_permutation_saves_only_its_map() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    from nemo_ext.rehearsal.transformer_engine import _permutation

    tracker = Tracker()
    with FakeTensorMode(), tracker, _permutation():
        tokens = torch.empty(64, 32, dtype=torch.bfloat16, requires_grad=True)
        routing = torch.empty(64, 8, dtype=torch.bool)
        tracker.label([tokens, routing], "given")
        with tracker.during("forward", "activations"):
            moved, _, ids, *_ = token_dispatcher.permute(tokens, routing, None, 128)
            back = token_dispatcher.unpermute(moved, ids, tokens.shape)
            del moved
        assert back.shape == tokens.shape
        assert tracker.live["activations"] == 64 * (2 * 8 + 1) * 4 + back.nbytes


def test_a_width_that_fp8_does_not_support_is_refused() -> None:
    with pytest.raises(ValueError, match="block 1 fc1: out 500 is not a multiple of 16"):
        rehearsed(compose("rehearse", [*DENSE, "precision=fp8_current", "model.pattern='*-{ffn=500}'"]))
    with pytest.raises(ValueError, match=r"block 1 fc1: out 528 is not a multiple of 32 \(nvfp4\)"):
        rehearsed(compose("rehearse", [*DENSE, "precision=nvfp4", "model.pattern='*-{ffn=528}*-*-'"]))


def test_flags_of_fp8_are_rehearsed_as_a_plan() -> None:
    words = ("megatron.fp8_format=hybrid", "megatron.fp8_recipe=tensorwise", "megatron.first_last_layers_bf16=true")
    words = (*words, "megatron.num_layers_at_start_in_bf16=0", "megatron.fp8_param_gather=true")
    changed, aside = rehearsed(compose("rehearse", [*DENSE, *words]))
    assert changed["transformer_engine"]["precision_plan"] == {
        "default": "fp8",
        "recipe": "tensorwise",
        "format": "hybrid",
        "rules": ["head bf16", "last 1 bf16"],
    }
    assert changed["megatron"]["fp8_format"] is None
    assert aside == ["fp8_param_gather"]


def test_modules_that_only_transformer_engine_recomputes_are_set_aside() -> None:
    selective = [*DENSE, "megatron.recompute_granularity=selective"]
    changed, aside = rehearsed(compose("rehearse", [*selective, "megatron.recompute_modules=[moe_act,mlp,layernorm]"]))
    alone, _ = rehearsed(compose("rehearse", [*selective, "megatron.recompute_modules=[moe_act]"]))
    assert changed["megatron"]["recompute_modules"] == ["mlp"]
    assert aside == ["recompute_modules: layernorm, moe_act"]
    assert alone["megatron"]["recompute_granularity"] is None


def ranks(folder: Path, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rehearse(compose("rehearse", list(words)), "all", folder)["ranks"]
    return found


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A dense model in BF16."""
    return ranks(tmp_path_factory.mktemp("bf16"), *DENSE)[0]


@pytest.mark.parametrize(
    ("precision", "scales", "lost"),
    [
        pytest.param("fp8_current", 4 * 4, 0, marks=pytest.mark.deep),
        # Attention saves the projection's input in BF16 as well.
        pytest.param("fp8_delayed", 4 * 4 + 4 * 4 * 5 * 2, ROWS * LAYERS * 384, marks=pytest.mark.slow),
        pytest.param(
            *("fp8_blockwise", 4 * (20 + 8 + 4 + 12 + 16 + 4 + 4 + 16), 4 * ROWS // 128 * SAVED), marks=pytest.mark.deep
        ),
        pytest.param("mxfp8", 2 * 262144 // 32, ROWS // 32 * SAVED, marks=pytest.mark.slow),
    ],
)
def test_copies_of_a_model(precision: str, scales: int, lost: int, bf16: dict[str, Any], tmp_path: Path) -> None:
    """Hidden size 128: qkv to 640, projection from 384, FFN of 512."""
    rank = ranks(tmp_path, *DENSE, f"precision={precision}")[0]
    assert rank["peak"][QUANTISED_WEIGHTS] == LAYERS * (2 * 262144 + scales)
    saved = bf16["peak"]["activations"] - rank["peak"]["activations"]
    assert saved == ROWS * SAVED - lost
    for same in ("weights", "gradients", "optimizer"):
        assert rank["peak"][same] == bf16["peak"][same]
    assert rank["flops"] == bf16["flops"]


@pytest.mark.slow
def test_sequence_parallel_ranks_gather_in_fp8(tmp_path: Path) -> None:
    words = ("launcher.nproc_per_node=2", "megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true")
    high, low = (
        {
            (each["group"], each["operation"]): each["bytes"]
            for each in ranks(tmp_path / name, *DENSE, *words, f"precision={name}")[0]["collectives"]
        }
        for name in ("bf16", "fp8_current")
    )
    group = "TENSOR_MODEL_PARALLEL_GROUP"
    # Per micro-batch (of two) and layer: two inputs, both again in the backward pass, and two gradients.
    fewer = high[group, "allgather_base"] - low[group, "allgather_base"]
    assert fewer == 2 * LAYERS * 6 * ROWS * 128
    assert high[group, "reduce_scatter_base"] == low[group, "reduce_scatter_base"]


@pytest.mark.slow
def test_grouped_experts_match_sequential_ones(tmp_path: Path) -> None:
    words = (*QUICKSTART, "model.pattern=ME", "launcher.nproc_per_node=2", "megatron.expert_model_parallel_size=2")
    words = (*words, "megatron.moe_token_dispatcher_type=alltoall")
    one = ranks(tmp_path / "one", *words)[0]
    other = ranks(tmp_path / "other", *words, "megatron.moe_grouped_gemm=true", "megatron.moe_permute_fusion=true")[0]
    assert one["parameters"] == other["parameters"]
    assert one["flops"] == other["flops"]
    for kind in ("weights", "gradients", "optimizer"):
        assert one["peak"][kind] == other["peak"][kind]
    assert {each["operation"]: each["bytes"] for each in one["collectives"]} == {
        each["operation"]: each["bytes"] for each in other["collectives"]
    }


@pytest.mark.slow
def test_nvfp4_next_to_mxfp8(tmp_path: Path) -> None:
    """Super's plan; experts get 171 tokens, padded to 256."""
    from nemo_ext.architecture.model import Architecture
    from nemo_ext.architecture.precision_plan import Plan, assigned
    from nemo_ext.rehearsal.transformer_engine import scale_bytes

    words = [*QUICKSTART, "megatron.mamba_num_heads=32", "megatron.mamba_head_dim=8"]
    words += ["megatron.moe_grouped_gemm=true", "megatron.num_experts=24"]
    high = rehearse(compose("rehearse", words), "all", tmp_path / "high")["ranks"][0]
    config = compose("rehearse", [*words, "precision=nvfp4"])
    low = rehearse(config, "all", tmp_path / "low")["ranks"][0]

    copies = {"nvfp4": 0, "mxfp8": 0}
    for each in assigned(Plan.from_config(config["precision_plan"]), Architecture.from_config(config)):
        scaling = {"nvfp4": "nvfp4", "fp8": "mxfp8"}.get(each.precision)
        if scaling is not None:
            rows, columns = each.weight.rows, each.weight.columns
            scales = sum(scale_bytes(scaling, rows, columns, columnwise=way) for way in (False, True))
            numbers = rows * columns * (1 if scaling == "nvfp4" else 2)
            copies[scaling] += each.weight.count * (numbers + scales)
    assert min(copies.values()) > 0
    assert low["peak"][QUANTISED_WEIGHTS] == sum(copies.values())
    assert low["peak"]["activations"] < high["peak"]["activations"]
    for same in ("weights", "gradients", "optimizer"):
        assert low["peak"][same] == high["peak"][same]


@pytest.mark.slow
def test_a_plan_of_single_blocks(tmp_path: Path) -> None:
    """With 24 experts, whose 170 or 171 tokens are padded."""
    from nemo_ext.architecture.model import Architecture
    from nemo_ext.architecture.precision_plan import Plan, assigned

    words = [*QUICKSTART, "precision=nemotron3_selective", "megatron.moe_grouped_gemm=true", "megatron.num_experts=24"]
    config = compose("rehearse", words)
    rank = rehearse(config, "all", tmp_path)["ranks"][0]
    low = [
        each.weight
        for each in assigned(Plan.from_config(config["precision_plan"]), Architecture.from_config(config))
        if each.precision == "fp8"
    ]
    assert {weight.block for weight in low} == {0, 1, 4, 5, 6, 7}
    assert rank["peak"][QUANTISED_WEIGHTS] == sum(2 * each.parameters + 4 * each.count for each in low)
