"""Loading a model for this package's engine."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nemo_ext.serving.settings import ServingSettings


def test_mamba_goes_in_shorter_chunks_on_a_cpu(
    served_folder: Path, model_of: Callable[[str], Any], tmp_path: Path
) -> None:
    from nemo_ext.serving.load import CHUNK, load

    model = model_of("nemotron_h")
    model.config.chunk_size = 128
    model.save_pretrained(tmp_path)
    for file in served_folder.glob("*token*"):
        shutil.copy(file, tmp_path)
    ids = torch.arange(100)[None]
    whole = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()

    served = load(tmp_path, ServingSettings(device="cpu"), {})

    loaded = served.engine.model
    served.engine.close()
    sizes = {part.chunk_size for part in loaded.modules() if hasattr(part, "chunk_size")}
    assert sizes == {CHUNK}
    assert {part.chunk_size for part in whole.modules() if hasattr(part, "chunk_size")} == {128}
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)


def test_answers_end_at_the_generation_configs_the_tokenizers_and_the_templates_tokens(
    served_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from nemo_ext.serving.load import load

    folder = shutil.copytree(served_folder, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|user|>"  # the template's is <|end|>
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')

    served = load(folder, ServingSettings(device="cpu"), {})

    served.engine.close()
    assert served.ends == {7, 9, *tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"])}
