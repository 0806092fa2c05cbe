"""Small models as Hugging Face folders, their tokens by transformers, and the same folders in vLLM."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import choose
from nemo_ext.job.config import compose

PROMPTS = (7, 40, 61)
"""Lengths of the prompts that every model gets."""
NEW_TOKENS = 24


@dataclass(frozen=True)
class Reference:
    """A model folder and what transformers says of the prompts.

    Attributes:
        folder: the Hugging Face folder.
        prompts: token ids.
        tokens: greedy continuations.
        prompt: log-probabilities of the prompts' tokens but the first.
        new: log-probabilities of the continuations' tokens.
    """

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    prompt: list[list[float]]
    new: list[list[float]]


@pytest.fixture
def reference(tmp_path: Path) -> Callable[..., Reference]:
    """Writes the model of a composed config with random weights, and asks transformers."""

    def make(words: Sequence[str], architecture: str | None = None, lengths: Sequence[int] = PROMPTS) -> Reference:
        from transformers import AutoConfig, AutoModelForCausalLM

        found, config = choose(from_config(compose("describe", list(words))), architecture)
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for code in found.code:
            shutil.copyfile(str(files("nemo_ext.checkpoint.remote_code") / code), folder / code)
        torch.manual_seed(1)
        loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        loaded.eos_token_id = loaded.pad_token_id = None
        model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if tensor.dim() >= 2 and "conv1d" not in name:
                    tensor.mul_(3.0)  # else the residual stream, hardly changed, repeats one token
                elif "norm" in name:
                    tensor.add_(torch.randn_like(tensor) * 0.1)
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))  # as we write it
        prompts = [torch.randint(3, config["vocab_size"], (1, length)) for length in lengths]
        tokens, prompt, new = [], [], []
        for ids in prompts:
            whole = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
            with torch.no_grad():
                found_ = model(whole).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0].tolist()
            length = ids.shape[1]
            tokens.append(whole[0, length:].tolist())
            prompt.append(found_[: length - 1])
            new.append(found_[length - 1 :])
        assert len({each for row in tokens for each in row}) > 10, "a model that repeats itself shows nothing"
        return Reference(folder, [ids[0].tolist() for ids in prompts], tokens, prompt, new)

    return make


@pytest.fixture
def in_vllm(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What vLLM says of a reference's prompts, or the lines with which it ended."""

    def ask(
        reference: Reference, *, twice: bool = False, check: bool = True, plug_in: bool = True, **engine: Any
    ) -> dict[str, Any]:
        asked, answered = tmp_path / "asked.json", tmp_path / "answered.json"
        answered.unlink(missing_ok=True)
        asked.write_text(
            json.dumps(
                {
                    "folder": str(reference.folder),
                    "prompts": reference.prompts,
                    "new_tokens": NEW_TOKENS,
                    "twice": twice,
                    "engine": engine,
                }
            )
        )
        several = engine.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}
        ended = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "tokens.py"), str(asked), str(answered)],
            env={
                **os.environ,
                **({} if plug_in else {"VLLM_PLUGINS": ""}),
                "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(bool(several))),
                "VLLM_CPU_OMP_THREADS_BIND": "0|1" if several else "nobind",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if not check and ended.returncode:
            return {"said": ended.stdout + ended.stderr}
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
        return json.loads(answered.read_text())

    return ask
