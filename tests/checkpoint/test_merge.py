"""Averages of checkpoints: values, both formats, refusals, resuming, and the command."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nemo_ext.checkpoint import hf
from nemo_ext.checkpoint import merge as merging
from nemo_ext.checkpoint.merge import Settings, average, merge, plan, table
from nemo_ext.checkpoint.safetensors_files import SafetensorsReader
from nemo_ext.checkpoint.torch_dist import TorchDistReader
from nemo_ext.job.config import compose

HIDDEN, FFN, VOCABULARY, LAYERS = 16, 24, 40, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
}
LAYER = {
    "self_attn.q_proj": (16, HIDDEN),
    "self_attn.k_proj": (8, HIDDEN),
    "self_attn.v_proj": (8, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 16),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "lm_head.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    **{f"model.layers.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in LAYER.items()},
}
ONE_TENSOR_A_PART = 1e-9
"""shard_gigabytes that no tensor fits into."""


def hugging_face(folder: Path, seed: int, *, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A small Llama with random weights, a tokenizer and a modelling file."""
    folder.mkdir()
    random = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": str(dtype).removeprefix("torch."), **config}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "modeling_own.py").write_text("# code\n")
    return folder


def megatron(folder: Path, source: Path) -> Path:
    """The same checkpoint, converted."""
    chosen = hf.Settings()
    return hf.convert(hf.plan(source, folder, chosen), chosen, progress=False)


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Add, replace or remove a tensor of a Hugging Face folder."""
    weights = load_file(folder / "model.safetensors")
    weights.pop(name, None)
    save_file(weights if tensor is None else {**weights, name: tensor}, folder / "model.safetensors")


def made(sources: Sequence[Path], to: Path, **chosen: Any) -> list[Path]:
    return merge(plan(sources, to, Settings(**chosen)), progress=False)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face folder or a release, through our readers, without copying."""
    is_hf = (folder / "config.json").is_file()
    reader = SafetensorsReader(folder) if is_hf else TorchDistReader(folder / "release")
    return {name: reader.read(name).clone() for name in reader.tensors}


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(a.dtype == b.dtype and bits(a) == bits(b) for a, b in ((one[name], other[name]) for name in one))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def loader_arguments(checkpoint: Path) -> dict[str, Any]:
    """Arguments of the saving run that Megatron's loader reads from a release."""
    return vars(torch.load(checkpoint / "release" / "common.pt", weights_only=False)["args"])


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [hugging_face(tmp_path / name, seed) for seed, name in enumerate("abc")]


# Numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [None, [0.5, 0.3, 0.2], [1.5, -0.75, 0.25]])
def test_a_soup_is_the_average_in_fp64_rounded_once(
    dtype: torch.dtype, weights: list[float] | None, tmp_path: Path
) -> None:
    sources = [hugging_face(tmp_path / name, seed, dtype=dtype) for seed, name in enumerate("abc")]

    (soup,) = made(sources, tmp_path / "soup", weights=weights)

    found, given_ = weights_of(soup), [weights_of(source) for source in sources]
    assert found.keys() == SHAPES.keys()
    for name, tensor in found.items():
        shares = weights or [1 / 3] * 3
        expected = sum(w * each[name].double() for w, each in zip(shares, given_, strict=True))
        assert tensor.dtype == dtype
        # Half a step of the stored type, and the rounding of the terms where fp32 adds them.
        adding = 1e-14 if dtype == torch.float32 else 4e-6
        allowed = torch.finfo(dtype).eps / 2 * expected.abs() + adding
        assert ((tensor.double() - expected).abs() <= allowed).all(), name


NUMBERS = st.floats(-1e3, 1e3, width=32)


@given(
    rows=st.integers(1, 40).flatmap(
        lambda size: st.lists(st.lists(NUMBERS, min_size=size, max_size=size), min_size=2, max_size=5)
    ),
    shares=st.lists(st.floats(-1, 3), min_size=5, max_size=5),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_any_weights_average_and_equal_tensors_stay_unchanged(
    rows: list[list[float]], shares: list[float], dtype: torch.dtype
) -> None:
    weights = [*shares[: len(rows) - 1], 1 - sum(shares[: len(rows) - 1])]
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]

    found = average(tensors, weights)
    expected = sum(w * tensor.double() for w, tensor in zip(weights, tensors, strict=True))
    size = sum(abs(w) * tensor.double().abs() for w, tensor in zip(weights, tensors, strict=True))

    assert found.dtype == dtype
    half_step = torch.finfo(dtype).eps / 2 * expected.abs() + torch.finfo(dtype).smallest_normal
    wide = torch.finfo(torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32).eps
    assert ((found.double() - expected).abs() <= half_step + 8 * wide * size).all()
    assert bits(average([tensors[0]] * len(rows), weights)) == bits(tensors[0])


def test_tensors_larger_than_a_chunk_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "CHUNK", 4)
    first, second = torch.arange(30.0).view(2, 3, 5), torch.arange(30.0).view(2, 3, 5) + 1

    assert torch.equal(average([first, second], [0.25, 0.75]), first + 0.75)
    assert torch.equal(average([first.mT, second.mT], [0.25, 0.75]), first.mT + 0.75)  # not contiguous
    assert average([torch.tensor(1.0), torch.tensor(2.0)], [0.5, 0.5]) == 1.5
    assert average([torch.empty(0, 3)] * 2, [0.5, 0.5]).shape == (0, 3)


def test_tensors_that_all_checkpoints_share_stay_bit_for_bit(tmp_path: Path) -> None:
    sources = [hugging_face(tmp_path / name, 0, dtype=torch.bfloat16) for name in "abc"]
    for source in sources:
        change(source, "model.norm.weight", torch.tensor([-0.0, 1e-40] * 8, dtype=torch.bfloat16))

    for number, weights in enumerate((None, [0.5, 0.3, 0.2], [0.3333333, 0.3333333, 0.3333333], [40.5, -39, -0.5])):
        (soup,) = made(sources, tmp_path / f"soup{number}", weights=weights)
        assert same_bits(weights_of(soup), weights_of(sources[0]))


def test_points_are_on_the_line_and_its_ends_are_copies(three: list[Path], tmp_path: Path) -> None:
    first, second = three[:2]
    change(first, "model.norm.weight", torch.full((HIDDEN,), -0.0))

    folders = made([first, second], tmp_path / "line", points=[-0.0, 0.25, 1, 1.5])

    assert [str(folder.relative_to(tmp_path)) for folder in folders] == [
        "line/t0",
        "line/t0.25",
        "line/t1",
        "line/t1.5",
    ]
    assert same_bits(weights_of(folders[0]), weights_of(first))
    assert same_bits(weights_of(folders[2]), weights_of(second))
    a, b = weights_of(first)["lm_head.weight"], weights_of(second)["lm_head.weight"]
    torch.testing.assert_close(weights_of(folders[1])["lm_head.weight"], 0.75 * a + 0.25 * b)
    torch.testing.assert_close(weights_of(folders[3])["lm_head.weight"], 1.5 * b - 0.5 * a)


def test_a_checkpoint_without_weight_is_not_read(three: list[Path], tmp_path: Path) -> None:
    change(three[2], "lm_head.weight", torch.full((VOCABULARY, HIDDEN), torch.nan))

    (soup,) = made(three, tmp_path / "soup", weights=[1, 0, 0])

    assert same_bits(weights_of(soup), weights_of(three[0]))


def test_negative_weights_and_repeated_checkpoints_are_reported(three: list[Path], tmp_path: Path) -> None:
    first, second, _ = three
    soup = tmp_path / "soup"

    assert plan([first, second], soup, Settings()).remarks == []
    assert plan([first, second], soup, Settings(weights=[1.25, -0.25])).remarks == [
        f"{soup}: weights [1.25,-0.25] extrapolate, as one is negative"
    ]
    assert plan([first, second], soup, Settings(points=[0, 2])).remarks == [
        f"{soup / 't2'}: weights [-1,2] extrapolate, as one is negative"
    ]
    twice = plan([first, second, tmp_path / "b" / ".." / "a"], soup, Settings())
    assert twice.remarks == [f"{first} is listed 2 times"]


# Hugging Face


def test_a_hugging_face_soup_has_the_files_of_the_first(three: list[Path], tmp_path: Path) -> None:
    (three[1] / "tokenizer.json").write_text("{}")
    planned = plan(three, tmp_path / "soup", Settings())

    (soup,) = merge(planned, progress=False)

    assert planned.remarks == [f"{three[1] / 'tokenizer.json'} differs from the tokenizer of {three[0]}, which is used"]
    files = ("config.json", "tokenizer.json", "modeling_own.py")
    assert {file.name for file in soup.iterdir()} == {*files, "model.safetensors", "conversion.json"}
    assert all((soup / name).read_bytes() == (three[0] / name).read_bytes() for name in files)
    record = json.loads((soup / "conversion.json").read_text())
    assert record["weights"] == [1 / 3] * 3
    assert [path for path, _ in record["average_of"]] == [str(source.resolve()) for source in three]


def test_shards_are_read_and_written(three: list[Path], tmp_path: Path) -> None:
    chosen = hf.Settings(to_format="huggingface", shard_gigabytes=4e-6)
    sharded = [
        hf.convert(hf.plan(source, tmp_path / f"sharded_{source.name}", chosen), chosen, progress=False)
        for source in three[:2]
    ]
    assert len(list(sharded[0].glob("*.safetensors"))) > 1

    (soup,) = made(sharded, tmp_path / "soup", shard_gigabytes=8e-6)
    (whole,) = made(three[:2], tmp_path / "whole")

    assert 1 < len(list(soup.glob("*.safetensors"))) < len(list(sharded[0].glob("*.safetensors")))
    assert (soup / "model.safetensors.index.json").is_file()
    assert not (whole / "model.safetensors.index.json").exists()
    assert same_bits(weights_of(soup), weights_of(whole))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_theta": 500000.0}, "rope.base"),
        ({"rms_norm_eps": 1e-6}, "norm_epsilon"),
        ({"num_key_value_heads": 2, "head_dim": 4}, "pattern"),
        ({"architectures": ["NemotronForCausalLM"], "hidden_act": "relu2"}, "architectures=.*Nemotron.*, not"),
        ({"architectures": ["OtherForCausalLM"]}, "architectures="),
    ],
)
def test_configs_of_different_models_are_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    sources = [hugging_face(tmp_path / "a", 0), hugging_face(tmp_path / "b", 1, **config)]

    with pytest.raises(ValueError, match=rf"b holds a different model than .*/a \(.*{said}"):
        plan(sources, tmp_path / "soup", Settings())


def test_configs_of_an_unknown_model_are_compared_key_by_key(tmp_path: Path) -> None:
    own = {"architectures": ["OwnForCausalLM"], "own_setting": 3}
    a = hugging_face(tmp_path / "a", 0, **own, transformers_version="4.57", torch_dtype="float32")
    b = hugging_face(tmp_path / "b", 1, **own, transformers_version="5.0", _name_or_path="elsewhere")
    c = hugging_face(tmp_path / "c", 2, **{**own, "own_setting": 4})

    assert len(made([a, b], tmp_path / "soup")) == 1
    with pytest.raises(ValueError, match=r"config.json: own_setting=4, not 3\): average"):
        plan([a, c], tmp_path / "other", Settings())


def test_keys_that_do_not_define_the_model_may_differ(tmp_path: Path) -> None:
    a = hugging_face(tmp_path / "a", 0)
    b = hugging_face(tmp_path / "b", 1, max_position_embeddings=128, bos_token_id=3, transformers_version="5.0")

    (soup,) = made([a, b], tmp_path / "soup")

    assert json.loads((soup / "config.json").read_text())["bos_token_id"] == 1


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("lm_head.weight", None, "1 tensors are missing: lm_head.weight"),
        ("extra.weight", torch.zeros(3), "1 tensors are additional: extra.weight"),
        ("lm_head.weight", torch.zeros(3, 4), r"of a different shape: lm_head.weight is \[3, 4\], not \[40, 16\]"),
        ("model.norm.weight", torch.zeros(HIDDEN).half(), "different type: model.norm.weight is float16, not float32"),
    ],
)
def test_tensors_that_differ_are_named(
    name: str, tensor: torch.Tensor | None, said: str, three: list[Path], tmp_path: Path
) -> None:
    change(three[2], name, tensor)

    with pytest.raises(ValueError, match=f"/c does not hold the same tensors as .*/a, so they cannot.*: .*{said}"):
        plan(three, tmp_path / "soup", Settings())


def test_multi_token_prediction_of_one_checkpoint_is_to_be_dropped(three: list[Path], tmp_path: Path) -> None:
    change(three[2], "mtp.layers.0.norm.weight", torch.zeros(3))

    with pytest.raises(ValueError, match=r"same multi-token prediction \(mtp.layers.0.norm.weight\): .* mtp=drop$"):
        plan(three, tmp_path / "soup", Settings())


def test_integers_are_refused(three: list[Path], tmp_path: Path) -> None:
    for source in three:
        change(source, "lm_head.weight", torch.zeros(VOCABULARY, HIDDEN, dtype=torch.int8))

    with pytest.raises(ValueError, match=r"a: 1 tensors are of an unsupported type .*: lm_head.weight is I8"):
        plan(three, tmp_path / "soup", Settings())


def test_nan_is_refused_and_its_checkpoint_named(three: list[Path], tmp_path: Path) -> None:
    broken = torch.zeros(VOCABULARY, HIDDEN)
    broken[0, :2] = torch.nan
    change(three[1], "lm_head.weight", broken)

    with pytest.raises(ValueError, match=r"/b: lm_head.weight: 2 of 640 values are NaN"):
        made(three, tmp_path / "soup")
    assert not (tmp_path / "soup").exists()

    (soup,) = made(three, tmp_path / "soup", check_finite=False)
    assert weights_of(soup)["lm_head.weight"].isnan().sum() == 2


def test_a_checkpoint_that_changes_during_averaging_is_noticed(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(three, tmp_path / "soup", Settings())

    def average_and_touch(*arguments: Any) -> torch.Tensor:
        os.utime(three[1] / "model.safetensors", (1, 1))
        return average(*arguments)

    monkeypatch.setattr(merging, "average", average_and_touch)
    with pytest.raises(ValueError, match="a source changed while it was being read"):
        merge(planned, progress=False)
    assert not (tmp_path / "soup").exists()


# Megatron


def test_averaging_and_converting_commute(three: list[Path], tmp_path: Path) -> None:
    soup = made(three, tmp_path / "soup", weights=[0.5, 0.3, 0.2])[0]
    converted = [megatron(tmp_path / f"{source.name}_megatron", source) for source in three]

    (own,) = made(converted, tmp_path / "soup_megatron", weights=[0.5, 0.3, 0.2])

    assert (own / "latest_checkpointed_iteration.txt").read_text() == "release"
    expected = megatron(tmp_path / "expected", soup)
    assert same_bits(weights_of(own), weights_of(expected))
    assert loader_arguments(own) == loader_arguments(expected)
    back = hf.convert(hf.plan(own, tmp_path / "back", hf.Settings()), hf.Settings(), progress=False)
    assert same_bits(weights_of(back), weights_of(soup))
    first = converted[0]
    ours, theirs = (yaml.safe_load(next((each / "model").glob("*.yaml")).read_text()) for each in (own, first))
    assert (ours["model"].pop("name"), theirs["model"].pop("name")) == ("soup_megatron", "a_megatron")
    assert ours == theirs
    for name in ("tokenizer.json", "config.json", "modeling_own.py"):
        assert (own / "hf_files" / name).read_bytes() == (three[0] / name).read_bytes()


@pytest.mark.parametrize(
    "family", ["NemotronHForCausalLM", pytest.param("NemoExtBlocksForCausalLM", marks=pytest.mark.deep)]
)
def test_megatron_loads_an_average_of_hybrid_models(
    family: str,
    random_sections: Callable[..., Any],
    hf_folder: Callable[..., Any],
    build_sections: Callable[..., torch.nn.Module],
    tmp_path: Path,
) -> None:
    """Megatron's own loader, for experts that were converted one by one and are averaged together."""
    from megatron.core import dist_checkpointing

    sections = random_sections(family, 2)
    folders = [hf_folder(sections, name, seed)[0] for seed, name in enumerate("ab")]
    sources = [megatron(tmp_path / f"{folder.name}_megatron", folder) for folder in folders]

    (soup,) = made(sources, tmp_path / "soup", weights=[0.75, 0.25])

    model = build_sections(sections)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(soup / "release"))
    model.load_state_dict(state["model"])
    a, b, found = (weights_of(folder) for folder in (*sources, soup))
    assert any("experts.experts" in name for name in found)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, 0.75 * a[name] + 0.25 * b[name])
    loaded = dict(model.named_parameters())["decoder.final_norm.weight"]
    assert torch.equal(loaded, found["decoder.final_norm.weight"])


def run_directory(folder: Path, first: Path, second: Path, **megatron_section: Any) -> Path:
    """A run with two iterations as written by training, without the optimizer."""
    for number, source in ((10, first), (20, second)):
        converted = megatron(folder / "converted" / str(number), source)
        (folder / "checkpoints").mkdir(exist_ok=True)
        (converted / "release").rename(folder / "checkpoints" / f"iter_{number:07d}")
        config = yaml.safe_load(next((converted / "model").glob("*.yaml")).read_text())
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    config["megatron"] |= {"lr": 1e-3, **megatron_section}
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "run_dir": str(folder)}))
    return folder


def test_iterations_of_a_run_are_averaged(three: list[Path], tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", *three[:2])

    (soup,) = made([run, run], tmp_path / "soup", iterations=[10, None])
    (same,) = made(
        [run / "checkpoints", run / "checkpoints" / "iter_0000020"], tmp_path / "same", iterations=[10, None]
    )

    expected = megatron(tmp_path / "expected", made(three[:2], tmp_path / "plain")[0])
    assert same_bits(weights_of(soup), weights_of(expected))
    assert same_bits(weights_of(same), weights_of(expected))
    assert "lr" not in yaml.safe_load(next((soup / "model").glob("*.yaml")).read_text())["megatron"]
    assert not (soup / "hf_files").exists()


def test_runs_of_different_models_are_refused(three: list[Path], tmp_path: Path) -> None:
    a = run_directory(tmp_path / "run_a", *three[:2])
    b = run_directory(tmp_path / "run_b", *three[:2], rotary_base=77)

    with pytest.raises(ValueError, match=r"run_b/.* and .*run_a/.* are different models, .* differ in rope.base"):
        plan([a, b], tmp_path / "soup", Settings())


@pytest.mark.parametrize("number", [0, 1])
def test_one_config_is_enough(number: int, three: list[Path], tmp_path: Path) -> None:
    sources = [megatron(tmp_path / f"{source.name}_megatron", source) for source in three[:2]]
    shutil.rmtree(sources[number] / "model")
    planned = plan(sources, tmp_path / "soup", Settings())

    (soup,) = merge(planned, progress=False)

    assert planned.remarks == [
        f"{sources[number] / 'release'}: only names, shapes and types are compared, as its config cannot be used ("
        "there is no config next to it)"
    ]
    assert loader_arguments(soup)["hybrid_layer_pattern"] == "*-*-"
    assert [file.stem for file in (soup / "model").iterdir()] == ["soup"]


def test_without_any_config_it_is_refused(three: list[Path], tmp_path: Path) -> None:
    sources = [megatron(tmp_path / f"{source.name}_megatron", source) for source in three[:2]]
    for source in sources:
        shutil.rmtree(source / "model")

    with pytest.raises(ValueError, match=r"a_megatron/release: .*put the run's config.yaml or the model's model/NAME"):
        plan(sources, tmp_path / "soup", Settings())


def test_models_that_no_format_describes_are_averaged_by_their_shapes(three: list[Path], tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", *three[:2], attention_output_gate=True)
    planned = plan([run, run], tmp_path / "soup", Settings(iterations=[10, 20]))

    (soup,) = merge(planned, progress=False)

    assert len(planned.remarks) == 3
    assert "attention_output_gate" in planned.remarks[0]
    assert planned.remarks[2] == "no model file is written: name the model as in the original run"
    assert loader_arguments(soup) == loader_arguments(megatron(tmp_path / "expected", three[0]))
    assert not (soup / "model").exists()


# Refusals before anything is opened


@pytest.mark.parametrize(
    ("count", "chosen", "said"),
    [
        (0, {}, r"from=\[\]: expected at least two"),
        (1, {}, "expected at least two checkpoints"),
        (3, {"weights": [0.5, 0.5]}, r"weights=\[0.5,0.5\] has 2 weights for 3 checkpoints"),
        (2, {"weights": [1, 2]}, r"must sum to 1, not 3; did you mean weights=\[0.333333333,0.666666667\]\?"),
        (2, {"weights": [1, -1]}, "must sum to 1, not 0$"),
        (2, {"weights": [0.5, 0.500002]}, "must sum to 1, not 1.000002"),
        (2, {"weights": [float("nan"), 1]}, "weights=.*expected a list of finite numbers"),
        (2, {"weights": [float("inf"), 1]}, "weights=.*expected a list of finite numbers"),
        (2, {"weights": ["a", 1]}, "weights=.*expected a list of finite numbers"),
        (2, {"weights": [True, 0]}, "weights=.*expected a list of finite numbers"),
        (2, {"weights": 0.5}, "weights=0.5: expected a list"),
        (2, {"weights": []}, r"weights=\[\]: expected a list"),
        (2, {"points": []}, r"points=\[\]: expected a list"),
        (2, {"points": [0, 0.1, 0.1000000001]}, "some points share a folder \\(t0, t0.1\\): remove duplicates$"),
        (3, {"points": [0, 1]}, "requires exactly two checkpoints, but `from` lists 3"),
        (2, {"points": [0, 1], "weights": [0.5, 0.5]}, "weights and points are both set"),
        (2, {"iterations": [1, 2]}, r"iterations=\[1, 2\] applies to Megatron checkpoints only"),
        (2, {"iterations": ["x", 2]}, "iterations=.*: expected a list of whole numbers"),
        (2, {"shard_gigabytes": 0}, "shard_gigabytes=0: expected a positive number"),
    ],
)
def test_invalid_settings_give_one_clear_message(
    count: int, chosen: dict[str, Any], said: str, three: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        plan(three[:count], tmp_path / "soup", Settings(**chosen))


def test_suggested_weights_are_accepted(three: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean") as refused:
        plan(three, tmp_path / "soup", Settings(weights=[1, 1, 1]))

    suggested = json.loads(str(refused.value).partition("did you mean weights=")[2].rstrip("?"))

    assert plan(three, tmp_path / "soup", Settings(weights=suggested)).targets[0].weights == pytest.approx([1 / 3] * 3)


def test_weights_that_nearly_sum_to_1_are_normalized(three: list[Path], tmp_path: Path) -> None:
    planned = plan(three, tmp_path / "soup", Settings(weights=[0.3333333, 0.3333333, 0.3333333]))

    assert planned.targets[0].weights == pytest.approx([1 / 3] * 3, abs=1e-15)


def test_missing_folders_and_mixed_formats_are_refused(three: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    other = megatron(tmp_path / "b_megatron", three[1])

    with pytest.raises(ValueError, match=r"from=.*/nowhere: expected the folder of an existing checkpoint"):
        plan([three[0], tmp_path / "nowhere"], tmp_path / "soup", Settings())
    with pytest.raises(ValueError, match=r"/a is a Hugging Face checkpoint, .*/b_megatron is not: .*nemo-ext convert"):
        plan([three[0], other], tmp_path / "soup", Settings())
    with pytest.raises(ValueError, match="neither a Hugging Face checkpoint"):
        plan([other, tmp_path / "empty"], tmp_path / "soup", Settings())
    with pytest.raises(ValueError, match="is a single checkpoint, not a run with iteration 7"):
        plan([other, other / "release"], tmp_path / "soup", Settings(iterations=[None, 7]))
    with pytest.raises(ValueError, match="iterations has 1 entries for 2 checkpoints"):
        plan([other, other], tmp_path / "soup", Settings(iterations=[7]))


def test_space_for_all_points_is_checked_before_the_first(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(three[:2], tmp_path / "line", Settings(points=[0, 0.5, 1]))
    usage = SimpleNamespace(free=2.5 * planned.bytes)
    monkeypatch.setattr("nemo_ext.checkpoint.output.shutil.disk_usage", lambda path: usage)

    with pytest.raises(ValueError, match="free disk space, or choose another disk"):
        merge(planned, progress=False)

    assert not (tmp_path / "line").exists()


# Resuming


def counted(monkeypatch: pytest.MonkeyPatch, stop: int | None = None) -> list[None]:
    """List with an item for each tensor that is averaged; Ctrl-C arrives at number `stop`."""
    calls: list[None] = []

    def count(*arguments: Any) -> torch.Tensor:
        calls.append(None)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return average(*arguments)

    monkeypatch.setattr(merging, "average", count)
    return calls


@pytest.mark.parametrize("is_hf", [True, False])
def test_an_interrupted_average_resumes(
    is_hf: bool, three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = three if is_hf else [megatron(tmp_path / f"{source.name}_megatron", source) for source in three]
    whole = made(sources, tmp_path / "whole", shard_gigabytes=ONE_TENSOR_A_PART)[0]
    count, calls = len(weights_of(whole)), counted(monkeypatch, stop=6)
    with pytest.raises(KeyboardInterrupt):
        made(sources, tmp_path / "soup", shard_gigabytes=ONE_TENSOR_A_PART)
    assert not (tmp_path / "soup").exists()
    (soup,) = made(sources, tmp_path / "soup", shard_gigabytes=ONE_TENSOR_A_PART)

    assert len(calls) == 6 + count - 5
    assert same_bits(weights_of(soup), weights_of(whole))
    assert {file.name for file in soup.rglob("*")} == {
        file.name if file.name != "whole.yaml" else "soup.yaml" for file in whole.rglob("*")
    }
    made(sources, tmp_path / "soup", shard_gigabytes=ONE_TENSOR_A_PART)
    assert len(calls) == 6 + count - 5


def test_other_weights_do_not_resume_an_interrupted_average(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, stop=6)
    with pytest.raises(KeyboardInterrupt):
        made(three, tmp_path / "soup", shard_gigabytes=ONE_TENSOR_A_PART)
    (soup,) = made(three, tmp_path / "soup", weights=[0.5, 0.3, 0.2], shard_gigabytes=ONE_TENSOR_A_PART)

    assert len(calls) == 6 + len(SHAPES)
    assert same_bits(weights_of(soup), weights_of(made(three, tmp_path / "whole", weights=[0.5, 0.3, 0.2])[0]))


def test_existing_points_are_not_made_again(three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    made(three[:2], tmp_path / "line", points=[0.25, 0.5])
    assert len(calls) == 2 * len(SHAPES)
    made(three[:2], tmp_path / "line", points=[0.25, 0.75, 0.5])

    assert len(calls) == 3 * len(SHAPES)
    assert {folder.name for folder in (tmp_path / "line").iterdir()} == {"t0.25", "t0.5", "t0.75"}


def test_a_folder_with_other_content_is_not_changed(three: list[Path], tmp_path: Path) -> None:
    before = weights_of(three[2])

    with pytest.raises(ValueError, match="exists and holds something else"):
        made(three[:2], three[2])

    assert same_bits(weights_of(three[2]), before)


# The job


@pytest.fixture
def job(command: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`nemo-ext merge` in this process, in the folder `tmp_path`: its exit code, stdout and stderr."""
    return functools.partial(command, "merge", cwd=tmp_path)


def test_the_job_averages_and_reports_it(
    three: list[Path], job: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, err = job("from=[a,b]", "to=line", "points=[0,0.5]")

    assert (code, out) == (0, "")
    told = err.splitlines()
    assert told[-2:] == ["done: line/t0: 21 tensors, 0.000 GB", "done: line/t0.5: 21 tensors, 0.000 GB"]
    assert same_bits(weights_of(tmp_path / "line" / "t0"), weights_of(three[0]))


def test_a_mistake_is_one_line_and_code_2(three: list[Path], job: Callable[..., tuple[int, str, str]]) -> None:
    message = "error: weights=[1,1] must sum to 1, not 2; did you mean weights=[0.5,0.5]?\n"
    assert job("from=[a,b]", "to=soup", "weights=[1,1]") == (2, "", message)


def test_a_dry_run_lists_everything_and_writes_nothing(
    three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"from=[{three[0]},{three[1]}]", f"to={tmp_path / 'line'}", "points=[0.25,0.5]", "dry_run=true")
    merging.run(compose("merge", words))

    lines = capsys.readouterr().out.splitlines()
    assert lines == table(plan(three[:2], tmp_path / "line", Settings(points=[0.25, 0.5]))).splitlines()
    assert [line.split(maxsplit=2) for line in lines[:3]] == [
        ["lm_head.weight", "float32", "[40, 16]"],
        ["model.embed_tokens.weight", "float32", "[40, 16]"],
        ["model.layers.0.input_layernorm.weight", "float32", "[16]"],
    ]
    assert lines[21:26] == ["", f"{tmp_path}/line/t0.25:", f"  0.75      {three[0]}", f"  0.25      {three[1]}", ""]
    assert lines[-1] == "21 tensors, 0.000 GB each; nothing written"
    assert not (tmp_path / "line").exists() and not (tmp_path / ".line.unfinished").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("from=null",), "expected at least two"),
        (("from=a",), r"from=\[a\]: expected at least two"),
        (("from=[a,b]", "to=null"), "to=None: expected the path of the target folder"),
        (("from=[a,b]", "verify=perhaps"), "verify='perhaps': expected true or false"),
    ],
)
def test_the_job_refuses_unknown_settings(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        merging.run(compose("merge", ["to=soup", *words]))


@pytest.mark.parametrize(("word", "said"), [("--help", "points=[0,0.25,0.5,0.75,1]"), ("--cfg=job", "dry_run: false")])
def test_help_and_config_need_no_torch(word: str, said: str, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom nemo_ext.cli import main\n"
        f"try: main(['merge', '{word}'])\nfinally: print('torch' in sys.modules)"
    )
    alone = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert alone.returncode == 0
    assert said in alone.stdout
    assert alone.stdout.splitlines()[-1] == "False"


def test_an_interruption_ends_with_130_and_explains_how_to_resume(
    job: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(merging, "run", run)

    code, _, err = job("from=[a,b]", "to=soup")

    assert (code, err) == (130, "interrupted: the same command resumes\n")
