"""Tiny models of every Hugging Face class with random weights, written by transformers, and a tokenizer beside them."""

import json
import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from nemo_ext.chat.template import Template
from nemo_ext.checkpoint.description import Description, from_config
from nemo_ext.checkpoint.formats import Format, choose
from nemo_ext.job.config import compose

TEMPLATE = "nemotron3_nano"
VOCABULARY = 384


@pytest.fixture(scope="session", autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modelling files that tests load are cached in a folder of the tests, not in the user's home."""
    import transformers.dynamic_module_utils

    # One folder in all of a process's tests: modules are found in the first alone.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.getbasetemp() / "hf_modules")
        )
        yield


@pytest.fixture(scope="session")
def described() -> Callable[[str, str], tuple[Description, Format, dict[str, Any]]]:
    """A packaged tiny model with a pattern of one's own: its description, its format, its config.json."""
    composed: dict[str, dict[str, Any]] = {}

    def of(name: str, pattern: str = "") -> tuple[Description, Format, dict[str, Any]]:
        if name not in composed:
            composed[name] = compose("describe", [f"model={name}"])
        config = composed[name]
        if pattern:
            config = {**config, "model": {**config["model"], "pattern": pattern}}
        description = from_config(config)
        found, values = choose(description)
        return description, found, values | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))

    return of


def random_model(found: Format, values: dict[str, Any], folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The class's own model with random weights; config.json and modelling files are left in the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    for code in found.code:
        shutil.copyfile(str(files("nemo_ext.checkpoint.remote_code") / code), folder / code)
    torch.manual_seed(0)
    loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True, dtype=dtype)
    return model.eval()


@pytest.fixture
def model_of(
    tmp_path: Path, described: Callable[..., Any]
) -> Callable[[str, str], tuple[torch.nn.Module, Description, Format]]:
    """A tiny model that transformers built, its description and its format."""

    def build(name: str, pattern: str = "") -> tuple[torch.nn.Module, Description, Format]:
        description, found, values = described(name, pattern)
        return random_model(found, values, tmp_path / found.architecture, torch.float32), description, found

    return build


@pytest.fixture
def folder_of(tmp_path: Path, described: Callable[..., Any]) -> Callable[..., Path]:
    """A Hugging Face folder in BF16, with Mamba's numbers a head in float32 as published, and a tokenizer."""

    def write(name: str, pattern: str = "", dtype: torch.dtype = torch.bfloat16) -> Path:
        from safetensors.torch import load_file, save_file

        _, found, values = described(name, pattern)
        folder = tmp_path / f"{name}.hf"
        model = random_model(found, {**values, "dtype": str(dtype).removeprefix("torch.")}, folder, dtype)
        with torch.no_grad():
            for parameter, tensor in model.named_parameters():
                if tensor.dim() > 1:
                    tensor.mul_(4.0)  # logits of order one, with which differences can be seen
                elif "norm" in parameter:
                    tensor.add_(torch.randn_like(tensor) * 0.2)
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({**values, "dtype": str(dtype).removeprefix("torch.")}))
        weights = load_file(folder / "model.safetensors")
        for key in weights:
            if key.endswith(("A_log", "dt_bias", ".D")):
                weights[key] = weights[key].float() + 1e-4  # no BF16 number
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(folder)
        return folder

    return write


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes with the template's control tokens, and the template."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a number and another number are a sum"], trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(Template.load(TEMPLATE).source)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))


@pytest.fixture
def conversations(tmp_path: Path) -> Callable[[int], Path]:
    """A JSONL file of short conversations of different lengths."""

    def write(count: int) -> Path:
        path = tmp_path / f"chat_{count}.jsonl"
        with path.open("w") as file:
            for number in range(count):
                messages = [
                    {"role": "user", "content": f"What is {number} and {number * 7}?" + " Please." * (number % 5)},
                    {"role": "assistant", "content": f"It is {number * 8}."},
                ]
                file.write(json.dumps({"id": f"sum-{number}", "messages": messages}) + "\n")
        return path

    return write
