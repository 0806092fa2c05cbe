"""`nemo-ext convert` from the command line: output, refusals and their messages, files other than weights."""

import gc
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from nemo_ext.chat.template import Template
from nemo_ext.checkpoint import convert, hf, writing
from nemo_ext.checkpoint.beside import extras_beside
from nemo_ext.checkpoint.convert import run
from nemo_ext.checkpoint.safetensors_files import INDEX, SafetensorsReader, shard_name, write_index
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.checkpoint.torch_dist import METADATA, TorchDistReader
from nemo_ext.job.config import USER_ERROR, compose

Sections = dict[str, dict[str, Any]]
Command = Callable[..., tuple[int, str]]
UP = "model.layers.1.mlp.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
}
LAYER = {
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
}
SHAPES = {name: (40, 16) for name in TABLES} | {"model.norm.weight": (16,)}
SHAPES |= {f"model.layers.{n}.{name}.weight": shape for n in range(2) for name, shape in LAYER.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small Llama with the files that accompany the weights of a published model."""
    folder = tmp_path / "source"
    folder.mkdir()
    random = torch.Generator().manual_seed(1)
    rewrite(folder, {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = SafetensorsReader(folder)
    return {name: reader.read(name) for name in reader.tensors}


def rewrite(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def converted(source: Path, to: Path, config: Mapping[str, Any] | None = None, **chosen: Any) -> Path:
    settings = hf.Settings(**chosen)
    return hf.convert(hf.plan(source, to, settings, config), settings, progress=False)


def assert_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]) and tensor.dtype == second[name].dtype, name


@pytest.fixture
def command(command: Callable[..., Any]) -> Command:
    """`nemo-ext convert` in this process: its exit code and stderr."""

    def call(*words: str) -> tuple[int, str]:
        code, _, err = command("convert", *words)
        return code, err

    return call


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """The error line of a refused conversion to `out`, which must leave no files."""

    def call(source: Path, *words: str) -> str:
        with pytest.raises(ValueError, match=r"\w") as told:
            # Words without the folders, so that equal words are composed once.
            run(
                compose("convert", [*words, "from=source", "to=out"])
                | {"from": str(source), "to": str(tmp_path / "out")}
            )
        assert not (tmp_path / "out").exists()
        said = str(told.value)
        assert "\n" not in said or said.startswith("the checkpoint does not match"), "which lists differences"
        return said

    return call


# Typical use


def test_there_and_back(source: Path, tmp_path: Path, command: Command) -> None:
    code, told = command(f"from={source}", f"to={tmp_path / 'mine'}")
    assert (code, told.splitlines()) == (
        0,
        [
            f"{source} LlamaForCausalLM -> Megatron: 15 tensors, 0.000 GB in 1 files to {tmp_path / 'mine'}",
            f"done: {tmp_path / 'mine'}",
            f"next: nemo-ext train --config-dir {tmp_path / 'mine'} model=mine "
            f"megatron.pretrained_checkpoint={tmp_path / 'mine'} ...",
        ],
    )
    code, told = command(f"from={tmp_path / 'mine'}", f"to={tmp_path / 'back'}")
    assert (code, told.splitlines()[-1]) == (0, f"done: {tmp_path / 'back'}")

    assert (tmp_path / "back" / "model.safetensors").read_bytes() != b""
    assert_same(weights_of(tmp_path / "back"), weights_of(source))
    again = command(f"from={source}", f"to={tmp_path / 'mine'}")
    assert again[0] == 0 and f"{tmp_path / 'mine'} is already complete\n" in again[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "mine", "source"]


def test_no_garbage_is_collected_while_a_plan_imports_torch(
    source: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting = []

    def plan(*words: Any) -> hf.Plan:
        collecting.append(gc.isenabled())
        return hf.plan(*words)

    monkeypatch.setattr(convert, "plan", plan)
    refused(source / "nowhere")

    assert [*collecting, gc.isenabled()] == [False, True]


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path, command: Command) -> None:
    code, _ = command(f"from={source}", f"to={tmp_path / 'out'}", "dry_run=true")

    assert code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    made = converted(source, tmp_path / "out")
    code, told = command(f"from={source}", f"to={made}", "dry_run=true")
    assert (code, told.splitlines()[0]) == (0, f"{made} is already complete")


def test_the_suggested_command_is_quoted_for_the_shell_and_for_hydra(
    source: Path, tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / "a b,c=d"
    _, told = command(f"from={source}", f"to='{folder}'")
    words = shlex.split(told.splitlines()[-1])
    assert words[:2] == ["next:", "nemo-ext"]

    composed = subprocess.run(
        [sys.executable, "-m", "nemo_ext.cli", *words[2:-1], "run_dir=x", "--cfg", "job"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )

    config = yaml.safe_load(composed.stdout)
    assert config["model"]["name"] == "a_b_c_d"
    assert config["megatron"]["pretrained_checkpoint"] == str(folder)


def test_files_other_than_weights_are_kept_through_training(source: Path, tmp_path: Path) -> None:
    """Hugging Face -> Megatron -> a run that started from it -> Hugging Face."""
    start = converted(source, tmp_path / "start")
    run = tmp_path / "run"
    (sections,) = (yaml.safe_load(file.read_text()) for file in (start / "model").glob("*.yaml"))
    sections["megatron"]["pretrained_checkpoint"] = str(start)
    (run / "checkpoints").mkdir(parents=True)
    (start / "release").rename(run / "checkpoints" / "iter_0000010")
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10")
    (run / "config.yaml").write_text(yaml.safe_dump(sections))

    export = converted(run, tmp_path / "export")

    beside = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    assert all((export / name).read_bytes() == (source / name).read_bytes() for name in beside)
    assert {key: config_of(export)[key] for key in CONFIG} == CONFIG
    assert_same(weights_of(export), weights_of(source))


def test_a_run_on_bytes_is_exported_with_the_byte_tokenizer(source: Path, tmp_path: Path) -> None:
    megatron, to = converted(source, tmp_path / "megatron"), tmp_path / "to"
    shutil.rmtree(megatron / "hf_files")
    (model,) = (megatron / "model").glob("*.yaml")
    data = {"tokenizer": {"kind": "byte"}}
    (megatron / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load(model.read_text()) | {"data": data}))

    converted(megatron, to)

    tokenizer = Tokenizer.from_file(str(to / "tokenizer.json"))
    assert tokenizer.encode("aé").ids == [97, 195, 169]
    assert config_of(to)["eos_token_id"] == tokenizer.token_to_id("<|endoftext|>") == 256


def test_files_from_another_folder_take_precedence(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text('{"version": "2.0"}')
    (other / "model.safetensors").write_text("never copied")
    (other / "config.json").write_text(json.dumps({"architectures": ["Other"], "bos_token_id": 7, "use_cache": False}))
    start = converted(source, tmp_path / "start")

    export = converted(start, tmp_path / "export", files_from=other)

    assert (export / "tokenizer.json").read_text() == '{"version": "2.0"}'
    assert not (export / "chat_template.jinja").exists()
    config = config_of(export)
    assert (config["bos_token_id"], config["eos_token_id"], config.get("use_cache")) == (7, None, None)
    assert_same(weights_of(export), weights_of(source))


# Shards


def test_a_named_chat_template_is_copied_in_both_directions(source: Path, tmp_path: Path) -> None:
    mine = Template.load("domyn").source

    start = converted(source, tmp_path / "start", template="domyn")
    export = converted(start, tmp_path / "export")
    other = converted(start, tmp_path / "other", template="olmo3")

    assert (start / "hf_files" / "chat_template.jinja").read_text() == mine
    assert (export / "chat_template.jinja").read_text() == mine
    assert (other / "chat_template.jinja").read_text() == Template.load("olmo3").source


def test_transformers_loads_the_shards(
    random_sections: Callable[[str, int], Sections], hf_folder: Callable[..., Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder, model = hf_folder(random_sections("LlamaForCausalLM", 1))
    sharded = converted(folder, tmp_path / "sharded", to_format="huggingface", shard_gigabytes=2e-5)

    index = json.loads((sharded / INDEX).read_text())
    files = sorted(file.name for file in sharded.glob("*.safetensors"))
    original = load_file(folder / "model.safetensors")
    assert files == [shard_name(number, len(files)) for number in range(len(files))] and len(files) > 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    assert index["weight_map"] == {name: file for file in files for name in load_file(sharded / file)}
    loaded = AutoModelForCausalLM.from_pretrained(sharded, dtype=torch.float32)
    assert_same(loaded.state_dict(), model.state_dict())

    back = converted(sharded, tmp_path / "back", to_format="huggingface")
    assert not (back / INDEX).exists()
    assert_same(load_file(back / "model.safetensors"), original)


def test_a_tensor_larger_than_a_shard_has_one_to_itself(source: Path, tmp_path: Path) -> None:
    megatron = converted(source, tmp_path / "megatron", shard_gigabytes=1e-9)
    back = converted(megatron, tmp_path / "back", shard_gigabytes=1e-9)

    rows = len(TorchDistReader(megatron / "release").tensors)
    assert len(list(back.glob("*.safetensors"))) == rows
    assert len(list((megatron / "release").glob("*.distcp"))) == rows + 1  # and Megatron's extra states
    assert_same(weights_of(back), weights_of(source))


# Vocabulary and types


@pytest.mark.parametrize("tied", [False, True])
def test_only_megatron_pads_the_vocabulary(source: Path, tmp_path: Path, tied: bool) -> None:
    weights = weights_of(source)
    if tied:
        del weights["lm_head.weight"]
        rewrite(source, weights)
        (source / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    sections = hf.to_config(hf.plan(source, tmp_path / "x", hf.Settings()).description)
    sections["model"]["vocab_size"] = 40
    sections["megatron"]["padded_vocab_size"] = 64

    megatron = converted(source, tmp_path / "megatron", sections)
    reader = TorchDistReader(megatron / "release")
    back = converted(megatron, tmp_path / "back")

    tables = {"embedding.word_embeddings.weight": TABLES[0]} | ({} if tied else {"output_layer.weight": TABLES[1]})
    assert ("output_layer.weight" in reader.tensors) != tied
    for key, name in tables.items():
        table = reader.read(key)
        assert table.shape == (64, 16)
        assert torch.equal(table[:40], weights[name]) and not table[40:].any()
    assert (config_of(back)["vocab_size"], config_of(back)["tie_word_embeddings"]) == (40, tied)
    assert_same(weights_of(back), weights)


def test_trained_padding_is_cut_off(source: Path, tmp_path: Path) -> None:
    """Megatron's optimizer may change the rows beyond the vocabulary; they are never read."""
    weights = weights_of(source)
    rewrite(source, weights | {name: torch.cat([weights[name], torch.ones(24, 16)]) for name in TABLES})
    (source / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 64}))
    megatron = converted(source, tmp_path / "megatron")
    (model,) = (megatron / "model").glob("*.yaml")
    sections = yaml.safe_load(model.read_text())
    sections["model"]["vocab_size"] = 40
    model.write_text(yaml.safe_dump(sections))

    assert_same(weights_of(converted(megatron, tmp_path / "back")), weights)


def test_bfloat16_does_not_convert_tensors_that_must_stay_fp32(
    random_sections: Callable[[str, int], Sections], hf_folder: Callable[..., Any], tmp_path: Path
) -> None:
    folder, _ = hf_folder(random_sections("NemotronHForCausalLM", 1))
    original = load_file(folder / "model.safetensors")
    kept = ("A_log", "D", "dt_bias", "e_score_correction_bias")

    megatron = converted(folder, tmp_path / "megatron", dtype="bfloat16")
    export = converted(megatron, tmp_path / "export")

    made = weights_of(export)
    stays = {name for name in made if name.rpartition(".")[2] in kept}
    assert {name.rpartition(".")[2] for name in stays} == set(kept)
    assert_same(made, {n: t if n in stays else t.to(torch.bfloat16) for n, t in original.items()})
    assert config_of(export)["dtype"] == config_of(export)["torch_dtype"] == "bfloat16"
    assert config_of(converted(megatron, tmp_path / "wide", dtype="float32"))["dtype"] == "float32"


def test_queries_keys_and_values_of_different_types_are_converted_to_one(
    source: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    weights = weights_of(source)
    key = next(name for name in weights if "k_proj" in name)
    rewrite(source, weights | {key: weights[key].to(torch.bfloat16)})

    assert "have the types bfloat16, float32: choose one with dtype=" in refused(source)
    made = weights_of(converted(converted(source, tmp_path / "megatron", dtype="bfloat16"), tmp_path / "export"))
    assert_same(made, {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})


def test_other_tensor_files_in_the_folder_are_ignored_with_a_note(
    source: Path, tmp_path: Path, command: Command
) -> None:
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, source / name)

    code, told = command(f"from={source}", f"to={tmp_path / 'out'}")

    assert code == 0
    assert (
        "note: ignored files that are not weights of this model: adapter_model.safetensors, consolidated.safetensors"
        in told
    )


def test_a_number_that_a_type_cannot_hold_is_refused(source: Path, refused: Callable[..., str]) -> None:
    weights = weights_of(source)
    weights[UP][3, 4] = 70_000
    rewrite(source, weights)

    assert "values up to 7e+04 overflow float16: choose another type with dtype=NAME" in refused(
        source, "dtype=float16"
    )


# RoPE


def test_single_keys_change_only_config_json(source: Path, tmp_path: Path, command: Command) -> None:
    words = (f"from={source}", f"to={tmp_path / 'out'}", "to_format=huggingface", "megatron.rotary_base=500000")

    code, told = command(*words)
    assert code == USER_ERROR
    assert "megatron.rotary_base: 10000 in the checkpoint, 500000 in the model config" in told
    assert "change_rope=true accepts its RoPE settings" in told

    code, told = command(*words, "change_rope=true")
    assert (code, told.splitlines()[0].partition(": ")[0]) == (0, "RoPE changes")
    before, after = config_of(source), config_of(tmp_path / "out")
    assert after["rope_theta"] == 500000.0
    assert {key for key in before if after[key] != before[key]} == {"rope_theta"}
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert_same(weights_of(tmp_path / "out"), weights_of(source))


def test_differences_from_the_model_config_are_named_key_by_key(source: Path, tmp_path: Path) -> None:
    sections = hf.to_config(hf.plan(source, tmp_path / "x", hf.Settings()).description)
    sections["megatron"] |= {"rotary_base": 500000, "norm_epsilon": 1e-6, "ffn_hidden_size": 32}

    for change_rope, rope in ((False, True), (True, False)):
        with pytest.raises(CheckpointError, match="the checkpoint does not match the model config") as caught:
            converted(source, tmp_path / "out", sections, change_rope=change_rope)
        told = str(caught.value)
        assert "\n  megatron.norm_epsilon: 1e-05 in the checkpoint, 1e-06 in the model config" in told
        assert "\n  model.pattern and block sizes: block 2:" in told
        assert ("\n  megatron.rotary_base: " in told) == ("change_rope=true" in told) == rope
    assert not (tmp_path / "out").exists()

    sections["megatron"] |= {"norm_epsilon": 1e-5, "ffn_hidden_size": 24}
    megatron = converted(source, tmp_path / "out", sections, change_rope=True)
    assert config_of(converted(megatron, tmp_path / "back"))["rope_theta"] == 500000.0


def test_a_megatron_checkpoint_is_compared_with_the_model_config_too(
    source: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    megatron = converted(source, tmp_path / "megatron")

    assert "the checkpoint does not match the model config" in refused(megatron, "megatron.norm_epsilon=1e-6")
    assert "the checkpoint does not match the model config" in refused(
        megatron, "megatron.norm_epsilon=1e-6", "change_rope=true"
    )  # of RoPE alone


# Refusals: Hugging Face


def shorten(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])


def shards(folder: Path) -> None:
    weights = weights_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for number, half in enumerate(halves):
        save_file({name: weights[name] for name in half}, folder / shard_name(number, 2))
    write_index(folder, {name: shard_name(n, 2) for n, half in enumerate(halves) for name in half}, 0)


def without_second_shard(folder: Path) -> None:
    shards(folder)
    (folder / shard_name(1, 2)).unlink()


def without_index(folder: Path) -> None:
    shards(folder)
    (folder / INDEX).unlink()


def with_wrong_index(folder: Path) -> None:
    shards(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][UP] = shard_name(0, 2)
    (folder / INDEX).write_text(json.dumps(index))


def with_a_tensor_twice(folder: Path) -> None:
    shards(folder)
    weights = load_file(folder / shard_name(0, 2))
    save_file(weights | {UP: torch.zeros(24, 16)}, folder / shard_name(0, 2))


def with_weights(**changed: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = weights_of(folder) | {name.replace("__", "."): tensor for name, tensor in changed.items()}
        rewrite(folder, {name: tensor for name, tensor in weights.items() if tensor is not None})

    return change


def with_config(text: bytes | None = None, **keys: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_bytes(text or json.dumps(CONFIG | keys).encode()) and None


UP_ = UP.replace(".", "__")
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "header cut": (lambda folder: shorten(folder / "model.safetensors", 100), "model.safetensors cannot be read"),
    "data cut": (lambda folder: shorten(folder / "model.safetensors", -1), "model.safetensors cannot be read"),
    "empty file": (lambda folder: shorten(folder / "model.safetensors", 0), "copy it again"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
    "missing shard": (without_second_shard, "names are missing (model-00002-of-00002.safetensors)"),
    "no index": (without_index, "download the index too"),
    "wrong index": (with_wrong_index, f"disagree on {UP}: copy both again"),
    "tensor twice": (with_a_tensor_twice, f"{UP} is also in model-00001-of-00002.safetensors"),
    "int8": (with_weights(**{UP_: torch.ones(24, 16, dtype=torch.int8)}), f"{UP} is I8"),
    "float8": (with_weights(**{UP_: torch.ones(24, 16).to(torch.float8_e4m3fn)}), f"{UP} is F8_E4M3"),
    "extra tensor": (with_weights(surplus=torch.ones(2)), "1 tensors are not part of this model: surplus"),
    "missing tensor": (with_weights(**{UP_: None}), f"1 tensors are missing: {UP}"),
    "wrong shape": (
        with_weights(**{UP_: torch.ones(16, 24)}),
        f"1 tensors are of a different shape: {UP} is [16, 24], expected [24, 16]",
    ),
    "config cut": (with_config(b'{"architectures": ['), "config.json cannot be read"),
    "config a list": (with_config(b"[]"), "config.json: expected a JSON object"),
    "config no text": (with_config(b"\xff\xfe\x00"), "config.json"),
    "unknown class": (with_config(architectures=["LamaForCausalLM"]), "did you mean 'LlamaForCausalLM'?"),
    "no class": (with_config(architectures=None), "architectures=[]: expected a list with one class name"),
    "quantised": (
        with_config(quantization_config={"bits": 4}),
        "the checkpoint is quantised (quantization_config): convert the original",
    ),
    "no size": (with_config(hidden_size="16"), "hidden_size='16': expected a positive whole number"),
    "unknown RoPE": (with_config(rope_scaling={"rope_type": "longrope"}), "rope_type='longrope' is not supported"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_hugging_face_checkpoint_is_refused(
    what: str, source: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    damage, said = BROKEN[what]
    damage(source)

    assert said in refused(source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_are_refused_by_default(
    number: float, source: Path, tmp_path: Path, refused: Callable[..., str], command: Command
) -> None:
    weights = weights_of(source)
    weights[Q][3, 4] = number
    rewrite(source, weights)
    assert Q in refused(source)
    assert "1 of 512 values are NaN or infinite" in refused(source)

    assert command(f"from={source}", f"to={tmp_path / 'out'}", "check_finite=false")[0] == 0
    said = "error: decoder.layers.0.self_attention.linear_qkv.weight: 1 of 256 values are NaN or infinite"
    assert said in refused_from(tmp_path / "out", command)
    back = weights_of(converted(tmp_path / "out", tmp_path / "back", check_finite=False))
    assert torch.equal(back[Q].nan_to_num(nan=9.0), weights[Q].nan_to_num(nan=9.0))


def refused_from(source: Path, command: Command) -> str:
    code, told = command(f"from={source}", f"to={source}_back")
    assert (code, Path(f"{source}_back").exists()) == (USER_ERROR, False)
    return told


# Refusals: Megatron, targets, settings


def distcp(megatron: Path) -> Path:
    return megatron / "release" / "__0_0.distcp"


def without_config(megatron: Path) -> None:
    for file in (megatron / "model").glob("*.yaml"):
        file.unlink()


BROKEN_MEGATRON: dict[str, tuple[Callable[[Path], None], str]] = {
    "metadata cut": (lambda made: shorten(made / "release" / METADATA, 200), "release/.metadata cannot be read"),
    "metadata missing": (
        lambda made: (made / "release" / METADATA).unlink(),
        "is not a complete checkpoint: choose a complete one",
    ),
    "file cut": (lambda made: shorten(distcp(made), -5), "release/__0_0.distcp is truncated at"),
    "file missing": (lambda made: distcp(made).unlink(), "release/__0_0.distcp is missing"),
    "no tracker": (
        lambda made: (made / "latest_checkpointed_iteration.txt").unlink(),
        "neither a Hugging Face checkpoint (config.json) nor a Megatron one",
    ),
    "broken config": (
        lambda made: (made / "model" / "megatron.yaml").write_text("model: [") and None,
        "model/megatron.yaml cannot be read",
    ),
    "config a list": (
        lambda made: (made / "model" / "megatron.yaml").write_text("- model") and None,
        "model/megatron.yaml: expected",
    ),
    "no config": (without_config, "name the model with model=NAME"),
}


@pytest.mark.parametrize("what", BROKEN_MEGATRON)
def test_a_broken_megatron_checkpoint_is_refused(
    what: str, source: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    megatron = converted(source, tmp_path / "megatron")
    damage, said = BROKEN_MEGATRON[what]
    damage(megatron)

    assert said in refused(megatron)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "source"]


def test_a_target_with_other_content_is_not_changed(source: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "out").mkdir()
    assert command(f"from={source}", f"to={tmp_path / 'out'}", "verify=false")[0] == 0  # an empty folder is accepted
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")

    for name, words in (("other", ()), ("file", ()), ("out", ("dtype=bfloat16",))):
        before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
        for dry in ("true", "false"):
            code, told = command(f"from={source}", f"to={tmp_path / name}", *words, f"dry_run={dry}")
            assert (code, told.splitlines()[-1]) == (
                USER_ERROR,
                f"error: to={tmp_path / name} exists and holds something else: remove it or choose another name",
            )
        assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_a_checkpoint_is_not_written_over_itself(source: Path, tmp_path: Path, command: Command) -> None:
    before = {file: file.read_bytes() for file in source.rglob("*")}

    for to in (source, source / ".." / "source"):
        code, told = command(f"from={source}", f"to={to}", "to_format=huggingface", "dtype=bfloat16")
        assert code == USER_ERROR
        assert told.splitlines()[-1].startswith("error: to=")
        assert "remove it" not in told  # it is the source
    assert {file: file.read_bytes() for file in source.rglob("*")} == before


def test_a_target_inside_the_source_does_not_change_the_source(source: Path, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in source.iterdir()}

    inside = converted(source, source / "megatron")
    assert_same(weights_of(converted(inside, inside / "exports" / "hf")), weights_of(source))
    assert {file: file.read_bytes() for file in source.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("shard_gigabytes=0",), "shard_gigabytes=0: expected a positive number"),
        (("to_format=safetensors",), "to_format='safetensors': expected huggingface or megatron"),
        (("files_from=nowhere",), "files_from=nowhere: expected an existing folder"),
        (("to_format=huggingface", "architecture=OlmoForCausalM"), "did you mean 'OlmoForCausalLM'?"),
        (
            ("to_format=huggingface", "architecture=OlmoForCausalLM"),
            "this model cannot be converted to OlmoForCausalLM",
        ),
        (("architecture=LlamaForCausalLM",), "applies to Hugging Face targets only"),
        (("change_rope=no",), "change_rope='no': input should be a valid boolean"),
        (("dry_run=maybe",), "dry_run='maybe': expected true or false"),
        (("shard_gigabytes=null",), "shard_gigabytes=None: input should be a valid number"),
        (("shard_gigabytes=some",), "shard_gigabytes='some': input should be a valid number"),
        (("files_from=3",), "files_from=3: expected an existing folder"),
        (("iteration=1.5",), "iteration=1.5: input should be a valid integer"),
        (("template=domino",), "'domino' is neither a chat template"),
        (("iteration=7",), "iteration=7 applies to Megatron runs only"),
    ],
)
def test_invalid_settings_are_refused(
    words: tuple[str, ...], said: str, source: Path, refused: Callable[..., str]
) -> None:
    assert said in refused(source, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("dtype=float8",), "dtype='float8': expected one of bfloat16, float16, float32"),
        (("megatron.rope_theta=1000000",), "megatron.rope_theta has no effect on the model in a checkpoint"),
        (("megatron.rotary_bas=1000000",), "did you mean megatron.rotary_base?"),
    ],
)
def test_a_refusal_is_one_line(
    words: tuple[str, ...], said: str, source: Path, tmp_path: Path, command: Command
) -> None:
    code, told = command(f"from={source}", f"to={tmp_path / 'out'}", *words)

    assert code == USER_ERROR
    (line,) = [line for line in told.splitlines() if line.startswith("error: ")]
    assert said in line and "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_a_missing_source_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert (
        refused(tmp_path / "nowhere")
        == f"from={tmp_path / 'nowhere'}: expected the folder of an existing checkpoint or run"
    )
    (tmp_path / "empty").mkdir()
    assert "neither a Hugging Face checkpoint" in refused(tmp_path / "empty")


def test_a_target_with_another_tokenizer_is_not_already_made(source: Path, tmp_path: Path) -> None:
    """Files next to the weights are part of the request."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(CONFIG))
    (other / "tokenizer.json").write_text('{"version": "2.0"}')
    megatron = converted(source, tmp_path / "megatron")
    converted(megatron, tmp_path / "export")

    with pytest.raises(CheckpointError, match="exists and holds something else"):
        converted(megatron, tmp_path / "export", files_from=other)


def test_a_source_that_changes_during_conversion_is_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished download or run: the result would mix two checkpoints."""
    write_shard_truly = writing.write_shard

    def write_and_change(*given: Any) -> None:
        write_shard_truly(*given)
        os.utime(source / "model.safetensors", (0, 0))

    monkeypatch.setattr(writing, "write_shard", write_and_change)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        converted(source, tmp_path / "out", to_format="huggingface")
    assert not (tmp_path / "out").exists()


# Older checkpoints, links and other sources


def test_frequencies_and_the_copy_of_a_tied_table_are_not_weights(source: Path, tmp_path: Path) -> None:
    weights = weights_of(source)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    (source / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    rewrite(source, weights)

    back = weights_of(converted(converted(source, tmp_path / "megatron"), tmp_path / "back"))

    assert weights.keys() - back.keys() == {"model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"}
    weights["lm_head.weight"][0] += 1
    rewrite(source, weights)
    with pytest.raises(CheckpointError, match=r"not part of this model: lm_head\.weight"):
        converted(source, tmp_path / "other")


def test_a_link_is_followed(source: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    assert command(f"from={source}", f"to={tmp_path / 'link'}")[0] == 0

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "release" / ".metadata").is_file()


@pytest.mark.parametrize(
    ("folder", "name"), [("olmo3_tiny", "olmo3_tiny_checkpoint"), ("a,b(c)", "a_b_c_"), ("1e5", "1e5_checkpoint")]
)
def test_the_model_file_has_a_unique_name(source: Path, tmp_path: Path, folder: str, name: str) -> None:
    """Hydra takes a packaged file before one of --config-dir."""
    made = converted(source, tmp_path / folder)
    assert [file.stem for file in (made / "model").iterdir()] == [name]


def test_a_yarn_export_has_the_length_that_its_factor_gives(source: Path, tmp_path: Path) -> None:
    yarn = {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 64,
    }
    made = converted(source, tmp_path / "long", {"megatron": yarn}, change_rope=True, to_format="huggingface")
    assert config_of(made)["max_position_embeddings"] == 256


def test_the_tokenizer_comes_from_the_first_of_several_runs(source: Path, tmp_path: Path) -> None:
    start = converted(source, tmp_path / "start")
    model = yaml.safe_load(next((start / "model").glob("*.yaml")).read_text())
    before = "start"
    for name in ("first", "second"):
        run = tmp_path / name
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("release")
        (run / "checkpoints" / "release").symlink_to(start / "release")
        begun = {"megatron": {**model["megatron"], "pretrained_checkpoint": before}}  # relative to where it was started
        (run / "config.yaml").write_text(yaml.safe_dump({**model, **begun}))
        before = f"{name}/checkpoints"

    assert (converted(tmp_path / "second", tmp_path / "out") / "tokenizer.json").is_file()


@pytest.mark.parametrize("begun", [("second", "first"), ("first/checkpoints", "first"), (".", "..")])
def test_runs_that_name_each_other_as_start_have_no_tokenizer(
    begun: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, before in zip(("first", "second"), begun, strict=True):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        text = yaml.safe_dump({"megatron": {"pretrained_checkpoint": before}})
        (tmp_path / name / "config.yaml").write_text(text)

    for name in ("first", "second"):
        assert extras_beside(tmp_path / name, tmp_path / name / "checkpoints" / "iter_0000001") is None
