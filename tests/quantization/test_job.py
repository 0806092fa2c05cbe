"""`nemo-ext quantize` as a user meets it: checkpoints in FP8, held against ModelOpt's own fake quantisation."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_ext.checkpoint import hf
from nemo_ext.checkpoint.safetensors_files import SafetensorsReader
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.checkpoint.torch_dist import checkpoint_folder
from nemo_ext.job.config import USER_ERROR, compose
from nemo_ext.megatron.nvfp4 import packed, quantise_nvfp4
from nemo_ext.quantization import export, job
from nemo_ext.quantization.calibration import CalibrationData
from nemo_ext.quantization.modelopt import parameters

pytestmark = [
    pytest.mark.ptq,
    pytest.mark.skipif(find_spec("modelopt") is None, reason="needs ModelOpt: pip install 'nemo_ext[ptq]'"),
]

SCALES = export.SCALES
FEW = ["calibration.samples=12", "calibration.held_out=4", "calibration.max_length=48", "device=cpu"]
FP8 = ["precision=fp8_current"]
SOME = [*FP8, "precision_plan.rules=['1 bf16', '2.in_proj bf16', '3.qkv bf16', 'head bf16', '.latent_fc1 fp8']"]
NANO = ["precision=nemotron3_selective"]
CASES = {
    "hybrid": ("nemotron3_nano_tiny", "ME{latent=64}M*E{latent=64}-", NANO, {"0", "1", "4", "5"}),
    "dense": ("domyn_small_tiny", "*-*-", FP8, {"0", "1"}),
    "deci_no_op_first": (
        "llama_nemotron_tiny",
        "-*{kv=1,head_dim=32}-{ffn=96}*{linear}*{head_dim=32}",
        FP8,
        {"0", "1", "3"},
    ),
    "own": (
        "llama_nemotron_tiny",
        "-*{kv=1,head_dim=32}-{ffn=96}*{linear}*{heads=4,kv=2,head_dim=32}",
        FP8,
        {"0", "1", "2", "4"},
    ),
    "own_mixed": ("nemotron3_nano_tiny", "ME{latent=32}M{heads=4}*E{latent=64}-", SOME, {"0", "2", "3", "4", "5"}),
    "own_hybrid": ("nemotron3_nano_tiny", "MEM{heads=4}*-", FP8, {"0", "1", "2", "3", "4"}),
}


@pytest.fixture
def quantize(command: Callable[..., Any]) -> Callable[..., tuple[int, str]]:
    """`nemo-ext quantize` in this process; returns its exit code and stderr."""

    def run(*words: object) -> tuple[int, str]:
        code, _, err = command("quantize", *words)
        return code, err

    return run


def dequantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.float() * tensors[f"{name.removesuffix('.weight')}.weight_scale"]
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in tensors.items()
        if name.rpartition(".")[2] not in SCALES
    }


def exported(folder: Path, work: job.Work) -> dict[str, torch.Tensor]:
    """What was written; experts that the checkpoint stacks are stacked again, and their scales."""
    tensors = load_file(folder / "model.safetensors")
    for matrix in work.listed:
        if not matrix.tensor.endswith(".weight"):
            above, _, last = matrix.tensor.rpartition(".")
            experts = [f"{above}.{number}.{last}" for number in range(matrix.shape[0])]
            tensors[matrix.tensor] = torch.stack([tensors.pop(f"{each}.weight") for each in experts])
            for scale in ("weight_scale", "input_scale"):
                parts = [tensors.pop(f"{each}.{scale}") for each in experts if f"{each}.{scale}" in tensors]
                if parts:
                    tensors[f"{matrix.tensor}.{scale}"] = torch.stack(parts)[:, None, None]
    return tensors


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as vLLM has them: matrices that it multiplies as one have the largest of their scales."""
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for first in [
            name.removesuffix(f"{group[0]}.weight") for name in tensors if name.endswith(f"{group[0]}.weight")
        ]:
            parts = [f"{first}{part}" for part in group]
            if f"{parts[0]}.weight_scale" not in tensors:
                continue
            largest = torch.stack([tensors[f"{part}.weight_scale"] for part in parts]).amax()
            for part in parts:
                values = tensors[f"{part}.weight"].float() * tensors[f"{part}.weight_scale"] / largest
                tensors |= {f"{part}.weight": values.to(torch.float8_e4m3fn), f"{part}.weight_scale": largest}
    return tensors


def with_exported_scales(scales: dict[str, torch.Tensor], source: Path, work: job.Work) -> Any:
    """The model of an exported folder: dequantised weights, and quantizers of inputs and caches with its scales."""
    from modelopt.torch.quantization.conversion import replace_quant_module, set_quantizer_by_cfg

    from nemo_ext.quantization.modelopt import quantize_config

    model: Any = job.load_model(source, work.conversion.format, "cpu")
    names = parameters(model, work.tensors)
    weights = dequantised(scales)
    stacked: dict[str, list[torch.Tensor]] = {}
    for tensor, name in names.items():
        stacked.setdefault(name, []).append(weights[tensor])
    state = {name: parts[0] if len(parts) == 1 else torch.stack(parts) for name, parts in stacked.items()}
    model.load_state_dict(state, strict=False)
    replace_quant_module(model)
    config = quantize_config(work.plan, work.listed, names)
    entries = [entry for entry in config["quant_cfg"] if not entry["quantizer_name"].endswith("weight_quantizer")]
    set_quantizer_by_cfg(model, entries)
    for matrix in work.listed:
        module, name = matrix.module, names[matrix.tensor]
        above = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        if f"{module}.input_scale" in scales:
            model.get_submodule(f"{above}input_quantizer").amax = scales[f"{module}.input_scale"].max() * 448
        attention = name.removesuffix(".weight").rpartition(".")[0]
        for what in "kv":
            if f"{module}.{what}_scale" in scales:
                model.get_submodule(f"{attention}.{what}_bmm_quantizer").amax = scales[f"{module}.{what}_scale"] * 448
    return model


def fake_quantised(model: Any, work: job.Work) -> dict[str, torch.Tensor]:
    """The weights in FP8 as ModelOpt's fake quantisation computes with them, by their names in the checkpoint."""
    names, found = parameters(model, work.tensors), {}
    numbers: dict[str, int] = {}
    for matrix in work.listed:
        name = names[matrix.tensor]
        above, _, last = name.rpartition(".")
        module, numbers[name] = model.get_submodule(above), numbers.get(name, -1) + 1
        if matrix.precision == "fp8" and last == "weight":
            found[matrix.tensor] = module.weight_quantizer(module.weight)
        elif matrix.precision == "fp8":
            quantizers, weights = getattr(module, f"{last}_weight_quantizers"), getattr(module, last)
            each = [quantizer(weight) for quantizer, weight in zip(quantizers, weights, strict=True)]
            alone = matrix.tensor.endswith(".weight")
            found[matrix.tensor] = each[numbers[name]] if alone else torch.stack(each)
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ("hybrid", "dense", "own") else pytest.mark.deep) for case in CASES]
)
def test_the_exported_checkpoint_is_the_fake_quantised_model(
    case: str,
    folder_of: Callable[..., Path],
    conversations: Callable[[int], Path],
    quantize: Callable[..., tuple[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, pattern, precision, low_layers = CASES[case]
    source, to, data = folder_of(name, pattern, torch.float32), tmp_path / "fp8", conversations(40)
    words = [f"from={source}", f"to={to}", *precision, f"calibration.data={data}", *FEW]
    words += ["precision_plan.kv_cache=fp8"]
    work = job.prepare(compose("quantize", ["++precision_plan.kv_cache=fp8", *words[:-1]]))
    kept: dict[str, Any] = {}
    ids = torch.arange(40)[None] * 7 % 256

    def keeps_logits(model: Any, *arguments: Any, **given: Any) -> None:
        with torch.inference_mode():
            kept["logits"] = model(ids, use_cache=False).logits
            kept["weights"] = fake_quantised(model, work)
        exporting(model, *arguments, **given)

    exporting = export.export
    monkeypatch.setattr(export, "export", keeps_logits)
    code, told = quantize(*words)

    assert code == 0, told
    with torch.inference_mode():
        before = job.load_model(source, work.conversion.format, "cpu")(ids, use_cache=False).logits
        after = with_exported_scales(exported(to, work), source, work)(ids, use_cache=False).logits
    values = dequantised(exported(to, work))
    for tensor, wanted in kept["weights"].items():
        other = ~torch.isclose(values[tensor], wanted, rtol=1e-6, atol=1e-7)
        assert other.float().mean() < 1e-4, tensor  # halfway between two FP8 numbers a last bit decides
    changed = (kept["logits"] - before).abs().mean()
    assert changed > 1e-3
    # Where an input lies between two FP8 numbers, a last bit decides; Mamba carries that on to all later tokens.
    same = (after - kept["logits"]).abs().amax(-1) < 1e-4
    assert same.all() if "M" not in pattern else same[:, :8].all()

    made, old = exported(to, work), load_file(source / "model.safetensors")
    low = {tensor for tensor, value in made.items() if value.dtype == torch.float8_e4m3fn}
    assert low == {matrix.tensor for matrix in work.listed if matrix.precision == "fp8"}
    assert {tensor.split(".")[2] for tensor in low} == low_layers
    for tensor in low:
        module = tensor.removesuffix(".weight")
        assert made[f"{module}.weight_scale"].shape == made[f"{module}.input_scale"].shape
        assert made[f"{module}.weight_scale"].numel() == (1 if tensor != module else len(made[tensor]))
    rest = {tensor for tensor in made if tensor not in low and tensor.rpartition(".")[2] not in SCALES}
    assert low | rest == set(old)
    for tensor in rest:
        assert made[tensor].dtype == old[tensor].dtype and torch.equal(made[tensor], old[tensor]), tensor
    caches = {tensor for tensor in made if tensor.endswith(("k_scale", "v_scale"))}
    assert len(caches) == 2 * (pattern.count("*") - pattern.count("*{linear}"))
    attention = [tensor for tensor in old if tensor.endswith("k_proj.weight")]
    assert {f"{tensor.removesuffix('weight')}k_scale" for tensor in attention} <= caches


@pytest.mark.parametrize("case", ["dense", "hybrid"])
def test_quantisation_aware_training_computes_with_the_checkpoints_numbers(
    case: str, build_sections: Callable[..., Any], folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    """With NVFP4 weights; inputs have the scale of their batch in training, and of the calibration in checkpoints."""
    from nemo_ext.checkpoint.description import to_config
    from nemo_ext.megatron.float8_modules import use_float8
    from nemo_ext.megatron.fp8 import Precision
    from nemo_ext.megatron.session import load_weights

    name, pattern, *_ = CASES[case]
    words = ["precision=nvfp4", "precision_plan.nvfp4=w4a16", "precision_plan.rules=['head bf16']"]
    source, checkpoint = folder_of(name, pattern, torch.float32), tmp_path / "megatron"
    work = job.prepare(
        compose("quantize", [f"from={source}", f"to={tmp_path / 'low'}", *words, "calibration.data=none"])
    )
    description = work.conversion.description
    hf.convert(hf.plan(source, checkpoint, hf.Settings()), hf.Settings())
    ids = torch.randint(3, 250, (2, 48), generator=torch.Generator().manual_seed(1))

    model = build_sections(to_config(description)).eval()
    load_weights(model, checkpoint_folder(checkpoint))
    precision = Precision(work.plan, description.architecture, aware=True)
    assert use_float8(model, precision, range(len(description.blocks)))
    with torch.inference_mode():
        aware = model(ids, torch.arange(48).expand(2, 48), None)[..., : description.vocab_size]
        theirs: Any = job.load_model(source, work.conversion.format, "cpu")
        before = theirs(ids, use_cache=False).logits
        data = CalibrationData(samples=list(ids.numpy()), held_out=[], available=2)
        job.calibrate(theirs, work, parameters(theirs, work.tensors), data)
        quantised = theirs(ids, use_cache=False).logits

    def rms(difference: torch.Tensor) -> float:
        return difference.square().mean().sqrt().item()

    assert rms(quantised - before) > 0.01
    assert rms(aware - quantised) < 0.01 * rms(quantised - before)


def test_types_stay_and_what_vllm_reads_is_there(
    folder_of: Callable[..., Path],
    conversations: Callable[[int], Path],
    quantize: Callable[..., tuple[int, str]],
    tmp_path: Path,
) -> None:
    source, to = folder_of("nemotron3_nano_tiny", "MEM*E-"), tmp_path / "fp8"
    words = [
        f"from={source}",
        f"to={to}",
        "precision=nemotron3_selective",
        f"calibration.data={conversations(40)}",
        *FEW,
    ]

    code, told = quantize(*words)

    assert code == 0, told
    made = SafetensorsReader(to)
    assert made.tensors["backbone.layers.0.mixer.A_log"].dtype == "float32"
    assert made.tensors["backbone.layers.2.mixer.in_proj.weight"].dtype == "bfloat16"
    config, quantization = (json.loads((to / name).read_text()) for name in ("config.json", export.QUANT_CONFIG))
    assert {key: value for key, value in config.items() if key != "quantization_config"} == json.loads(
        (source / "config.json").read_text()
    )
    details = quantization["quantization"]
    assert details["quant_algo"] == details["kv_cache_quant_algo"] == "FP8"
    assert details["exclude_modules"] == config["quantization_config"]["ignore"]
    assert config["quantization_config"]["quant_method"] == "modelopt"
    # Every module with a weight of two dimensions is either in FP8 or excluded by its name.
    high = {name for name, stored in made.tensors.items() if stored.dtype != "F8_E4M3" and len(stored.shape) > 1}
    assert {name.removesuffix(".weight") for name in high} == set(details["exclude_modules"])
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (to / name).read_bytes() == (source / name).read_bytes()
    report = json.loads((to / "quantization.json").read_text())
    assert (
        report["bytes"]["after"]["fp8"] == report["bytes"]["predicted"]["fp8"] == report["bytes"]["before"]["fp8"] / 2
    )
    assert report["bytes"]["after"]["bf16"] == report["bytes"]["predicted"]["bf16"]
    held_out = report["held_out"]
    assert 0 < held_out["divergence"] < 0.5 and held_out["agreement"] > 0.5
    assert abs(held_out["loss_after"] - held_out["loss_before"]) < 0.5
    assert report["serve"] == ["vllm", "serve", str(to), "--kv-cache-dtype", "fp8"]
    assert "perplexity" in (to / "quantization.md").read_text()

    again, told = quantize(*words)
    assert again == 0 and "already finished" in told
    other, told = quantize(*words, "calibration.seed=7")
    assert other == USER_ERROR and "holds something else" in told


@pytest.mark.parametrize("form", ["w4a4", "w4a16"])
def test_nvfp4_next_to_fp8_and_prediction_written_through(
    form: str,
    described: Callable[..., Any],
    folder_of: Callable[..., Path],
    conversations: Callable[[int], Path],
    quantize: Callable[..., tuple[int, str]],
    tmp_path: Path,
) -> None:
    pattern = "ME*/*E" if form == "w4a4" else "*-"
    name, precision = ("nemotron3_super_tiny", "nvfp4_experts") if form == "w4a4" else ("llama_nemotron_tiny", "nvfp4")
    source, to = folder_of(name, pattern), tmp_path / "nvfp4"
    old = load_file(source / "model.safetensors")
    description, found, _ = described(name, pattern)
    for row in found.entries(description):  # transformers has no prediction depths
        for tensor, shape in zip(row.names, row.shapes, strict=True):
            old.setdefault(tensor, torch.randn(*shape, dtype=torch.bfloat16))
    save_file(old, source / "model.safetensors", metadata={"format": "pt"})
    rules = ['precision_plan.rules=["*.proj bf16", "head bf16"]', "precision_plan.nvfp4=w4a16"]
    words = [f"precision={precision}", *(rules if form == "w4a16" else [])]

    code, told = quantize(f"from={source}", f"to={to}", *words, f"calibration.data={conversations(20)}", *FEW)

    assert code == 0, told
    made = load_file(to / "model.safetensors")
    low = {tensor.removesuffix(".weight") for tensor, value in made.items() if value.dtype == torch.uint8}
    experts = [f"backbone.layers.1.mixer.experts.{n}.{which}_proj" for n in range(8) for which in ("up", "down")]
    others = [f"model.layers.0.{module}" for module in ("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj")]
    others += [f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv"]
    assert low == set(experts if form == "w4a4" else others)
    for module in low:
        double = made[f"{module}.weight_scale_2"]
        wanted = quantise_nvfp4(old[f"{module}.weight"], amax=double * 2688)
        assert torch.equal(made[f"{module}.weight_scale"].view(torch.uint8), wanted.scale.view(torch.uint8))
        values = packed(wanted.values)
        same = (made[f"{module}.weight"] == values) | (wanted.values == 0).view(len(values), -1, 2).any(-1)
        assert same.all(), module  # a zero may have a sign
        assert (f"{module}.input_scale" in made) == (form == "w4a4")
    details = json.loads((to / export.QUANT_CONFIG).read_text())["quantization"]
    inside = json.loads((to / "config.json").read_text())["quantization_config"]
    report = json.loads((to / "quantization.json").read_text())
    assert report["bytes"]["after"]["nvfp4"] == report["bytes"]["predicted"]["nvfp4"]
    assert 0 < report["held_out"]["divergence"] < 0.5
    if form == "w4a16":  # vLLM multiplies them as one
        doubles = [made[f"model.layers.0.self_attn.{letter}_proj.weight_scale_2"] for letter in "qkv"]
        assert doubles[0] == doubles[1] == doubles[2]
        assert (details["quant_algo"], details["group_size"]) == ("W4A16_NVFP4", 16)
        return
    assert details["quant_algo"] == inside["quant_algo"] == "MIXED_PRECISION"
    assert details["quantized_layers"] == inside["quantized_layers"]
    layers = {module: layer["quant_algo"] for module, layer in details["quantized_layers"].items()}
    fp8 = [f"backbone.layers.0.mixer.{way}_proj" for way in ("in", "out")]
    fp8 += [f"backbone.layers.1.mixer.shared_experts.{way}_proj" for way in ("up", "down")]
    assert layers == dict.fromkeys(experts, "NVFP4") | dict.fromkeys(fp8, "FP8")
    assert "mtp*" in inside["ignore"] and "backbone.layers.1.mixer.fc1_latent_proj" in inside["ignore"]
    prediction = [tensor for tensor in old if tensor.startswith("mtp.")]
    assert len(prediction) > 20
    assert all(torch.equal(made[tensor], old[tensor]) for tensor in prediction)
    assert report["bytes"]["after"]["mtp"] == report["bytes"]["before"]["mtp"] > 0
    assert "in NVFP4 and FP8" in (to / "quantization.md").read_text()


@pytest.mark.parametrize("precision", ["fp8_blockwise", "mxfp8"])
def test_scales_of_blocks(
    precision: str,
    folder_of: Callable[..., Path],
    conversations: Callable[[int], Path],
    quantize: Callable[..., tuple[int, str]],
    tmp_path: Path,
) -> None:
    source, to = folder_of("llama_nemotron_tiny", "*{kv=8}-"), tmp_path / "fp8"
    words = [f"from={source}", f"to={to}", f"precision={precision}", f"calibration.data={conversations(20)}", *FEW]
    refused, told = quantize(*words) if precision == "mxfp8" else (USER_ERROR, "calibration.held_out=0")
    assert refused == USER_ERROR and "calibration.held_out=0" in told

    code, told = quantize(*words, *(["calibration.held_out=0"] if precision == "mxfp8" else []))

    assert code == 0, told
    made = load_file(to / "model.safetensors")
    up, scale = (made[f"model.layers.0.mlp.up_proj.{name}"] for name in ("weight", "weight_scale"))
    old = load_file(source / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float()
    assert up.dtype == torch.float8_e4m3fn
    if precision == "mxfp8":
        assert scale.dtype == torch.uint8
        whole = torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)
    else:
        whole = scale.reshape(up.shape[0] // 128, up.shape[1] // 128)
        whole = whole.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    assert (up.float() * whole - old).abs().max() <= old.abs().max() / 14  # half a step of E4M3
    assert "model.layers.0.mlp.up_proj.input_scale" not in made


def test_a_run_of_megatron_is_converted_first(
    folder_of: Callable[..., Path],
    conversations: Callable[[int], Path],
    quantize: Callable[..., tuple[int, str]],
    tmp_path: Path,
) -> None:
    source, megatron = folder_of("llama_nemotron_tiny"), tmp_path / "megatron"
    hf.convert(hf.plan(source, megatron, hf.Settings()), hf.Settings(), progress=False)
    words = ["precision=fp8_current", f"calibration.data={conversations(20)}", *FEW]

    told = [
        quantize(f"from={place}", f"to={tmp_path / name}", *words) for place, name in ((source, "a"), (megatron, "b"))
    ]

    assert [code for code, _ in told] == [0, 0], told
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one if one[name].dim())
    assert not list(tmp_path.glob(".b.*"))
    # Of DeciLM our modelling file was run, and the folder's own files went along.
    assert (tmp_path / "b" / "modeling_decilm.py").is_file()


@pytest.mark.parametrize(
    ("name", "pattern", "words", "message"),
    [
        ("domyn_small_tiny", "*-", [], "precision_plan=null"),
        ("domyn_small_tiny", "*-", ["precision=bf16"], "precision_plan=null"),
        ("domyn_small_tiny", "*-", ["precision=fp8_current", "precision_plan.default=bf16"], "puts nothing in FP8"),
        ("domyn_small_tiny", "*-", ["precision=fp8_current", "device=tpu9"], "device=tpu9"),
        ("domyn_small_tiny", "*-", ["precision=fp8_current", "device=mps"], "device=mps: expected auto, cpu"),
        ("domyn_small_tiny", "*-", ["precision=fp8_current", "precision_plan.rules=[]"], "add the rule 'head bf16'"),
        ("domyn_small_tiny", "*-", ["precision=fp8_current", "calibration.samples=0"], "samples=0"),
        ("domyn_small_tiny", "*-", ["precision=fp8_current", "calibration.sample=3"], "sample"),
        ("domyn_small_tiny", "*-", ["precision=fp8_current", "calibration.samples=90"], "20 distinct samples.*94"),
        ("domyn_small_tiny", "*-", ["precision=fp8_current", "calibration.data=no.jsonl"], "calibration.data=no.jsonl"),
        ("nemotron3_nano_tiny", "ME*-", ["precision=fp8_blockwise"], "recipe=blockwise: vLLM does not support experts"),
        (
            "nemotron3_nano_tiny",
            "ME*-",
            ["precision=fp8_current", 'precision_plan.rules=["E.fc2 bf16", "head bf16"]'],
            "the experts' fc1 and fc2 of block 1",
        ),
        (
            "nemotron3_nano_tiny",
            "M{heads=16,head_dim=8,state=56,groups=1}M{heads=8}*-",
            ["precision=fp8_blockwise"],
            r"in_proj.weight is 384 \(128 \+ 128 \+ 56 \+ 56 \+ 16\)x",
        ),
        (
            "llama_nemotron_tiny",
            "*-{ffn=40}",
            ["precision=nvfp4", 'precision_plan.rules=["head bf16"]'],
            "NVFP4 does not support the shape of 3 .*40x",
        ),
        ("domyn_small_tiny", "*-", ["precision=fp8_blockwise"], "q_proj.weight is 192x128, not a multiple of 128"),
    ],
)
def test_what_cannot_be_served_or_done_is_refused_before_any_work(
    name: str,
    pattern: str,
    words: list[str],
    message: str,
    folder_of: Callable[..., Path],
    conversations: Callable[[int], Path],
    quantize: Callable[..., tuple[int, str]],
    tmp_path: Path,
) -> None:
    import re

    source = folder_of(name, pattern)
    given = [f"from={source}", f"to={tmp_path / 'fp8'}", f"calibration.data={conversations(20)}", *FEW, *words]

    code, told = quantize(*given)

    assert code == USER_ERROR
    assert re.search(message, told), told
    assert not (tmp_path / "fp8").exists()


def test_a_tensor_that_changed_is_found(
    folder_of: Callable[..., Path], conversations: Callable[[int], Path], tmp_path: Path
) -> None:
    source = folder_of("domyn_small_tiny", "*-")
    words = [
        f"from={source}",
        f"to={tmp_path / 'fp8'}",
        "precision=fp8_current",
        f"calibration.data={conversations(20)}",
    ]
    work = job.prepare(compose("quantize", words))
    reader = SafetensorsReader(source)

    with pytest.raises(CheckpointError, match=r"down_proj.*is bfloat16, but the plan requires FP8"):
        export.check(source, source=reader, listed=work.listed, tensors=work.tensors)
    none = [matrix for matrix in work.listed if matrix.precision != "fp8"]
    sizes = export.check(source, source=reader, listed=none, tensors=work.tensors)
    assert sizes["before"] == sizes["after"]

    other = folder_of("domyn_small_tiny", "*-")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    changed = tmp_path / "changed"
    changed.mkdir()
    save_file(weights, changed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight differs"):
        export.check(changed, source=reader, listed=none, tensors=work.tensors)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (tests/vllm/requirements.txt)")
@pytest.mark.parametrize("case", ["dense", "deci_no_op_first", "own", "own_hybrid", "own_mixed"])
def test_vllm_computes_what_the_fake_quantised_model_computes(
    case: str,
    folder_of: Callable[..., Path],
    conversations: Callable[[int], Path],
    quantize: Callable[..., tuple[int, str]],
    tmp_path: Path,
) -> None:
    name, pattern, precision, _ = CASES[case]
    source, to = folder_of(name, pattern, torch.float32), tmp_path / "fp8"
    words = [f"from={source}", f"to={to}", *precision, f"calibration.data={conversations(40)}", *FEW]
    work = job.prepare(compose("quantize", words))
    code, told = quantize(*words)
    assert code == 0, told
    prompts = [[(step * 7 + first) % 256 for step in range(40)] for first in (0, 100)]
    asked, answered = tmp_path / "asked.json", tmp_path / "answered.json"
    asked.write_text(json.dumps({"folder": str(to), "prompts": prompts, "new_tokens": 4, "engine": {}}))

    command = [sys.executable, "tests/vllm/tokens.py", str(asked), str(answered)]
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    ended = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    found = json.loads(answered.read_text())["prompt"]
    distances = []
    for model in (
        with_exported_scales(fused(exported(to, work)), source, work),
        job.load_model(source, work.conversion.format, "cpu"),
    ):
        with torch.inference_mode():
            likely = model(torch.tensor(prompts), use_cache=False).logits[:, :-1].log_softmax(-1)
        wanted = likely.gather(-1, torch.tensor(prompts)[:, 1:, None])[..., 0]
        distances.append((torch.tensor(found) - wanted).abs())
    # Where an input lies between two FP8 numbers, a last bit decides.
    assert distances[0].median() < 1e-5 and distances[0].mean() < 0.1 * distances[1].mean()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (tests/vllm/requirements.txt)")
@pytest.mark.parametrize(
    ("name", "pattern", "precision"),
    [
        ("domyn_small_tiny", "*-*-", ["precision=nvfp4", "precision_plan.rules=['head bf16']"]),
        ("nemotron3_nano_tiny", "ME*E", ["precision=nvfp4_experts", "precision_plan.kv_cache=bf16"]),
    ],
    ids=["dense", "hybrid with FP8"],
)
def test_vllms_own_classes_run_nvfp4(
    name: str,
    pattern: str,
    precision: list[str],
    folder_of: Callable[..., Path],
    conversations: Callable[[int], Path],
    quantize: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """By its emulation, without our plug-in; next to the model that `quantize` compares with the original."""
    source, to = folder_of(name, pattern, torch.float32), tmp_path / "nvfp4"
    words = [f"from={source}", f"to={to}", *precision, f"calibration.data={conversations(40)}", *FEW]
    prompts = [[(step * 7 + first) % 256 for step in range(40)] for first in (0, 100)]
    work, likely = job.prepare(compose("quantize", words)), dict[str, torch.Tensor]()
    exporting = export.export

    def measured(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor(prompts), use_cache=False).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, torch.tensor(prompts)[:, 1:, None])[..., 0]

    def keeps_logits(model: Any, *arguments: Any, **given: Any) -> None:
        likely["quantised"] = measured(model)
        exporting(model, *arguments, **given)

    monkeypatch.setattr(export, "export", keeps_logits)
    code, told = quantize(*words)
    assert code == 0, told
    likely["original"] = measured(job.load_model(source, work.conversion.format, "cpu"))
    asked, answered = tmp_path / "asked.json", tmp_path / "answered.json"
    asked.write_text(json.dumps({"folder": str(to), "prompts": prompts, "new_tokens": 4, "engine": {}}))

    command = [sys.executable, "tests/vllm/tokens.py", str(asked), str(answered)]
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": ""}
    ended = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    found = json.loads(answered.read_text())
    assert found["model"].startswith("vllm.model_executor.models.nemotron")
    distances = {kind: (torch.tensor(found["prompt"]) - values).abs() for kind, values in likely.items()}
    # Where a number lies between two of NVFP4 or FP8, a last bit decides.
    assert distances["original"].mean() > 1e-3
    assert distances["quantised"].mean() < 0.1 * distances["original"].mean()
