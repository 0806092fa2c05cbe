"""Blocks compute the same in Megatron's inference as without it; measurements are taken once per condition."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_ext.architecture.blocks import Block
from nemo_ext.blockwise.parent import Parent
from nemo_ext.checkpoint.description import Description, from_config
from nemo_ext.job.config import compose
from nemo_ext.megatron.session import build_model
from nemo_ext.puzzle.choice.problem import Candidate, Problem
from nemo_ext.puzzle.cost import Serving, block_costs, outside_costs, throughput_limit, with_request_seconds
from nemo_ext.puzzle.stages.inference import open_inference
from nemo_ext.puzzle.stages.measure import (
    NOTHING,
    OUTSIDE,
    Measured,
    block_key,
    distinct_blocks,
    initial_layer,
    measure_blocks,
    measured_costs,
)
from nemo_ext.puzzle.variants import Choices, Variant, variants

SERVING = Serving(batch=2, prompt=8, context=12, precision="fp32")
FAST = 1e-4
CHOICES = Choices(ffn=(0.5,), ffn_multiple=8, kv=(0.5,), experts=(), expert_ffn=(), mamba_heads=())

Opened = Callable[..., tuple[Parent, Description]]


@pytest.fixture
def opened(megatron: None) -> Opened:
    def make(model: str, pattern: str, *overrides: str, precision: str = "fp32") -> tuple[Parent, Description]:
        chosen = [f"model={model}", f'model.pattern="{pattern}"', f"precision={precision}", *overrides]
        config = compose("train", ["run_dir=unused", "data=mock", *chosen])
        torch.manual_seed(0)
        return Parent(*build_model(config)), from_config(config)

    return make


YARN = (
    "megatron.position_embedding_type=yarn",
    "+megatron.rotary_scaling_factor=4.0",
    "+megatron.yarn_original_max_position_embeddings=8",
    "+megatron.yarn_beta_fast=32.0",
    "+megatron.yarn_beta_slow=1.0",
)

CASES = {
    "without positions": ("nemotron3_nano_tiny", "*{kv=1}*{kv=2,window=5}*{kv=6,window=1}"),
    "RoPE on half of a head": ("domyn_small_tiny", "*{kv=1}*{window=5}*{linear}"),
    "Llama 3's RoPE": ("llama_nemotron_tiny", "*{kv=2}*{kv=1,window=5}"),
    "norm on the output": ("olmo3_tiny", "*{window=5}*-"),
    "YaRN": ("olmo3_tiny", "*{window=5}*", *YARN),
    "YaRN on full attention alone": ("olmo3_tiny", "*{window=5}*", *YARN, "+model.yarn_on_windowed=false"),
    "Mamba-2": ("nemotron3_nano_tiny", "MM{groups=1}M{heads=2,groups=2,head_dim=16,state=8}M{linear}"),
    "FFN and experts": ("nemotron3_nano_tiny", "-E-{linear}E{linear}E{topk=1,shared=none}"),
}


@pytest.mark.parametrize("case", CASES)
def test_decoding_step_by_step_is_the_forward_pass(opened: Opened, case: str) -> None:
    parent, _ = opened(*CASES[case])
    hidden = torch.randn(20, 3, parent.model_config.transformer.hidden_size)
    for number, layer in enumerate(parent.layers):
        with torch.no_grad():
            whole = parent.block_output(number, hidden, layer)

        with open_inference(parent, layer, batch=3, length=20) as run:
            prompt = run(hidden[:7], start=0)
            steps = [run(hidden[t : t + 1], start=t) for t in range(7, 20)]

        made = torch.cat([prompt, *steps])
        assert (made - whole).norm() <= 1e-5 * (whole - hidden).norm(), number
        assert len(parent.layers) == len(parent.model.decoder.layers)


@pytest.mark.parametrize("window", ["none", "5"])
def test_a_prompt_may_be_processed_in_parts(opened: Opened, window: str) -> None:
    parent, _ = opened("llama_nemotron_tiny", f"*{{window={window}}}")
    hidden = torch.randn(12, 2, parent.model_config.transformer.hidden_size)
    with torch.no_grad():
        whole = parent.block_output(0, hidden, parent.layers[0])

    with open_inference(parent, parent.layers[0], batch=2, length=12) as run:
        parts = [run(hidden[a:b], start=a) for a, b in ((0, 3), (3, 9), (9, 12))]

    assert (torch.cat(parts) - whole).norm() <= 1e-5 * (whole - hidden).norm()


@pytest.mark.parametrize("kind", ["*", "M", "-", "E"])
def test_decoding_in_bf16(opened: Opened, kind: str) -> None:
    parent, _ = opened("nemotron3_nano_tiny", kind, precision="bf16")
    hidden = torch.randn(12, 2, parent.model_config.transformer.hidden_size).bfloat16()
    with torch.no_grad():
        whole = parent.block_output(0, hidden, parent.layers[0])

    with open_inference(parent, parent.layers[0], batch=2, length=12) as run:
        made = torch.cat([run(hidden[:6], start=0), *(run(hidden[t : t + 1], start=t) for t in range(6, 12))])

    assert made.dtype == torch.bfloat16
    assert (made - whole).norm() <= 0.02 * (whole - hidden).norm()


def measure(parent: Parent, description: Description, file: Path, **changes: Any) -> tuple[dict[str, Measured], list]:
    """Measure the variants of a parent; returns measurements and the blocks that were built."""
    built: list[str] = []

    def layer_of(variant: Variant) -> torch.nn.Module | None:
        built.append(block_key(variant.block))
        return initial_layer(parent, description, variant)

    arguments = {"found": variants(description.architecture, CHOICES), "serving": SERVING, "file": file, **changes}
    found, serving = arguments.pop("found"), arguments.pop("serving")
    made = measure_blocks(parent, found, layer_of, serving, arguments.pop("file"), min_seconds=FAST, **arguments)
    return made, built


def test_every_block_is_measured_once(opened: Opened, tmp_path: Path) -> None:
    parent, description = opened("nemotron3_nano_tiny", "-*-M-E")
    advanced: list[int] = []

    first, built = measure(parent, description, tmp_path / "measured.jsonl", advance=advanced.append)
    written = (tmp_path / "measured.jsonl").read_bytes()
    again, built_again = measure(parent, description, tmp_path / "measured.jsonl")

    kinds = {"-": "-{ffn=512}", "*": "*{heads=6,kv=2,head_dim=32,window=none}"}
    assert built == [
        *(kinds["-"], "-{ffn=256}", "-{linear}", kinds["*"], kinds["*"].replace("kv=2", "kv=1"), "*{linear}"),
        *("M{heads=16,head_dim=16,state=32,groups=2}", "M{linear}", str(description.blocks[5]), "E{linear}"),
    ]
    assert set(first) == {*built, OUTSIDE, "no_op"}
    assert sum(advanced) == len(distinct_blocks(variants(description.architecture, CHOICES))) + 1 == len(built) + 1
    assert again == first and built_again == [] and (tmp_path / "measured.jsonl").read_bytes() == written
    for key, measured in first.items():
        assert (measured.prefill_seconds > 0) == (measured.decode_seconds > 0) == (key != "no_op")
        assert measured.block == key and measured.prefill_spread >= 0 and measured.decode_spread >= 0
    assert first["no_op"] is NOTHING


def test_bytes_of_layer_and_cache(opened: Opened, tmp_path: Path) -> None:
    parent, description = opened("nemotron3_nano_tiny", "*-ME")
    architecture = description.architecture

    measured, _ = measure(parent, description, tmp_path / "measured.jsonl")

    for key, variant in distinct_blocks(variants(architecture, CHOICES)).items():
        assert measured[key].weight_bytes == block_costs(architecture, variant.block, SERVING)["weight_bytes"], key
        assert measured[key].activation_bytes is None or torch.cuda.is_available()
    assert measured[OUTSIDE].weight_bytes == outside_costs(architecture, SERVING)["weight_bytes"]
    attention = description.blocks[0]
    halved = str(attention).replace("kv=2", "kv=1")
    assert measured[str(attention)].cache_bytes == 2 * 2 * 12 * 2 * 32 * 4  # k and v, batch, context, kv, dim, fp32
    assert measured[halved].cache_bytes == measured[str(attention)].cache_bytes // 2
    assert measured[halved].weight_bytes < measured[str(attention)].weight_bytes
    assert measured["-{ffn=256}"].weight_bytes < measured["-{ffn=512}"].weight_bytes
    # Convolution: inner + 2 groups x state channels x 4 inputs; scan: heads x head_dim x state; both in fp32.
    assert measured[str(description.blocks[2])].cache_bytes == 2 * 4 * ((256 + 2 * 2 * 32) * 4 + 8 * 32 * 32)
    without = [OUTSIDE, "no_op", "-{ffn=512}", "*{linear}", "M{linear}", str(description.blocks[3])]
    assert all(measured[key].cache_bytes == 0 for key in without)


def test_tied_embeddings_are_counted_once(opened: Opened, tmp_path: Path) -> None:
    parent, description = opened("olmo1_tiny", "-", "megatron.untie_embeddings_and_output_weights=false")

    measured, _ = measure(parent, description, tmp_path / "measured.jsonl")

    assert description.architecture.tied_embeddings
    assert measured[OUTSIDE].weight_bytes == outside_costs(description.architecture, SERVING)["weight_bytes"]


def test_a_killed_measurement_resumes(opened: Opened, tmp_path: Path) -> None:
    parent, description = opened("llama_nemotron_tiny", "*-")
    file = tmp_path / "measured.jsonl"
    told: list[int] = []

    def killed(count: int) -> None:
        told.append(count)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(parent, description, file, advance=killed)
    file.write_text(file.read_text() + '{"block": "-{ffn')  # as after a kill in the middle of a write
    kept = file.read_text().splitlines()[:4]
    measured, built = measure(parent, description, file)

    assert len(built) == len(distinct_blocks(variants(description.architecture, CHOICES))) - 3
    assert file.read_text().splitlines()[:4] == kept
    assert len(file.read_text().splitlines()) == 1 + len(measured) - 1  # the line of conditions; a no-op has no line
    assert [path.name for path in tmp_path.iterdir()] == ["measured.jsonl"]


def test_other_conditions_are_refused(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, description = opened("llama_nemotron_tiny", "-{linear}")
    file = tmp_path / "measured.jsonl"
    measure(parent, description, file)
    before = file.read_bytes()

    for change, message in (
        ({"batch": 3}, "batch: 2 -> 3"),
        ({"prompt": 7, "context": 13}, "prompt: 8 -> 7; context: 12 -> 13"),
    ):
        with pytest.raises(ValueError, match=message):
            measure(parent, description, file, serving=replace(SERVING, **change))
    other, wider = opened("olmo1_tiny", "-{linear}")
    with pytest.raises(ValueError, match=r"model\.norm_affine: true -> false"):
        measure(other, wider, file)
    monkeypatch.setattr("nemo_ext.puzzle.stages.measure._processor", lambda: "another")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r'device: .* -> "another"'):
            measure(parent, description, file)
    assert file.read_bytes() == before


def test_other_files_are_refused(opened: Opened, tmp_path: Path) -> None:
    parent, description = opened("llama_nemotron_tiny", "-{linear}")
    file = tmp_path / "measured.jsonl"
    measure(parent, description, file)
    lines = file.read_text().splitlines()

    for line, text, message in (
        (1, '{"block": 1}', r"measured\.jsonl:1: expected the conditions"),
        (1, "", r"measured\.jsonl:1: expected the conditions"),
        (2, '{"block": "-"}', r"measured\.jsonl:2: expected a measurement"),
    ):
        file.write_text("\n".join([*lines[: line - 1], text, *lines[line:]]) + "\n")
        with pytest.raises(ValueError, match=message):
            measure(parent, description, file)


def test_precisions_that_cannot_be_measured_are_refused(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, description = opened("llama_nemotron_tiny", "-{linear}")
    with pytest.raises(ValueError, match=r"serving\.precision=bf16, but the parent is in fp32"):
        measure(parent, description, tmp_path / "file", serving=replace(SERVING, precision="bf16"))
    monkeypatch.setattr("nemo_ext.puzzle.stages.measure.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="fp8 needs Transformer Engine"):
        measure(parent, description, tmp_path / "file", serving=replace(SERVING, precision="fp8"))
    with pytest.raises(ValueError, match="context=1 must be at least 2"):
        measure(parent, description, tmp_path / "file", serving=replace(SERVING, prompt=1, context=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_16_bits_take_half_the_bytes(opened: Opened, half: str, tmp_path: Path) -> None:
    weights = {}
    for precision in ("fp32", half):
        word = f"megatron.{half}={str(precision == half).lower()}"
        parent, description = opened("llama_nemotron_tiny", "*-", word)
        serving = replace(SERVING, precision=precision)
        weights[precision], _ = measure(parent, description, tmp_path / precision, serving=serving)

    for key, measured in weights[half].items():
        assert 2 * measured.weight_bytes == weights["fp32"][key].weight_bytes
        assert 2 * measured.cache_bytes == weights["fp32"][key].cache_bytes


def test_layers_are_freed_after_measuring(opened: Opened, tmp_path: Path) -> None:
    parent, description = opened("llama_nemotron_tiny", "*-")
    alive: list[weakref.ref] = []
    most = 0

    def layer_of(variant: Variant) -> torch.nn.Module | None:
        nonlocal most
        gc.collect()
        layer = initial_layer(parent, description, variant)
        assert layer is not None
        if variant.name != "keep":
            most = max(most, sum(each() is not None for each in alive))
            alive.append(weakref.ref(layer))
        return layer

    found = variants(description.architecture, CHOICES)
    measure_blocks(parent, found, layer_of, SERVING, tmp_path / "file", min_seconds=FAST)

    assert len(alive) > 2 and most == 0


def test_measured_seconds_replace_the_roofline_s() -> None:
    analytic = {"weight_bytes": 5.0, "prefill_seconds": 1.0, "decode_seconds": 2.0}
    measured = replace(NOTHING, prefill_seconds=3.0, decode_seconds=4.0)

    assert measured_costs(analytic, measured) == {"weight_bytes": 5.0, "prefill_seconds": 3.0, "decode_seconds": 4.0}


def test_a_throughput_is_a_limit_on_request_seconds() -> None:
    costs = [{"prefill_seconds": 1.0, "decode_seconds": 0.01}, {"prefill_seconds": 0.5, "decode_seconds": 0.004}]
    blocks: Sequence = [[Candidate(name, 0.0, cost) for name, cost in zip(("keep", "half"), costs, strict=True)]] * 2
    outside = {"prefill_seconds": 0.25, "decode_seconds": 0.001}
    scenario = partial(throughput_limit, serving=Serving(batch=8, prompt=900, context=1000), outside=outside)

    limit = scenario(200.0, new_tokens=100)
    problem = with_request_seconds(Problem(blocks, outside=outside), new_tokens=100).with_limits(
        {"request_seconds": limit}
    )

    assert limit.upper == 4.0 and problem.outside["request_seconds"] == pytest.approx(0.35)
    assert problem.costs((0, 1))["request_seconds"] == pytest.approx(0.35 + 2.0 + 0.9)
    with pytest.raises(ValueError, match=r"exceed puzzle\.serving\.context=1000"):
        scenario(200.0, new_tokens=101)
    with pytest.raises(ValueError, match="embedding and output layer alone"):
        scenario(1e6, new_tokens=100)
    with pytest.raises(ValueError, match="new_tokens=0"):
        with_request_seconds(Problem(blocks, outside=outside), new_tokens=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prefill_is_no_faster_than_the_device(opened: Opened, tmp_path: Path) -> None:
    from nemo_ext.megatron.trainer import peak_flops

    peak = peak_flops()
    if peak is None:
        pytest.skip(f"no peak FLOP/s is known for {torch.cuda.get_device_name()}")
    sizes = ("megatron.hidden_size=4096", "megatron.ffn_hidden_size=16384")
    parent, description = opened("llama_nemotron_tiny", "-", *sizes, precision="bf16")
    serving = Serving(batch=4, prompt=2048, context=4096, flops=peak, bandwidth=1e15)
    block: Block = description.blocks[0]

    measured, _ = measure(
        parent, description, tmp_path / "file", serving=serving, by_block=[[Variant(0, "keep", block)]]
    )

    bound = block_costs(description.architecture, block, serving)["prefill_seconds"]
    assert measured[str(block)].prefill_seconds >= bound > 0
    assert (measured[str(block)].activation_bytes or 0) > 0
