"""Fixtures with small inputs, and readers of the files written from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_ext.data.text.documents import Document, ReadReport, Source, readable
from nemo_ext.data.text.manifest import Manifest
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.text.tokenizers import Tokenizer
from tests.small_tokenizers import byte_level_bpe

WORDS = ["the", "model", "is", "a", "sequence", "of", "residual", "blocks", "größe", "大小"]


def draw_texts(count: int) -> list[str]:
    draw = np.random.default_rng(7)
    return [f"{number}: " + " ".join(draw.choice(WORDS, size=draw.integers(3, 300))) for number in range(count)]


@pytest.fixture
def pictures() -> None:
    """Request this fixture in tests that need a report's real pictures."""


@pytest.fixture(autouse=True)
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pictures by empty files in other tests, since rendering takes longer than the rest of a small job."""
    from matplotlib.figure import Figure

    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: Path(path).write_bytes(b"\x89PNG"))


@pytest.fixture
def command(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Function that runs `nemo-ext WORDS` in this process, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")
    # Hydra takes seconds to list all config groups for a help text, and the help of these jobs does not show them.
    monkeypatch.setattr("hydra._internal.hydra.Hydra.format_config_groups", lambda *_: "")
    return command


@pytest.fixture(scope="session")
def texts_of() -> Callable[[int], list[str]]:
    """Function that draws distinct texts of 3 to 300 words; a larger count begins with the same texts."""
    return draw_texts


@pytest.fixture(scope="session")
def jsonl() -> Callable[..., Source]:
    """Function that writes texts to a JSONL file and returns its source."""

    def write(path: Path, texts: list[str], **options: object) -> Source:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return load_source({"kind": "jsonl", "path": str(path), **options})

    return write


@pytest.fixture(scope="session")
def read_all() -> Callable[[Source], tuple[list[Document], ReadReport]]:
    """Function that reads a whole source, including duplicates."""

    def read(source: Source) -> tuple[list[Document], ReadReport]:
        report = ReadReport()
        parts = source.parts(max_documents=1 << 62, max_size=1 << 62)
        documents = [document for part in parts for document, _ in readable(source, part, report)]
        source.finish(report)
        return documents, report

    return read


@pytest.fixture(scope="session")
def ids_in() -> Callable[[Manifest, str], list[list[int]]]:
    """Function that returns the documents of a split as ids, by Megatron's reader."""
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")

    def read(manifest: Manifest, split: str) -> list[list[int]]:
        dataset = indexed_dataset.IndexedDataset(manifest.split_prefix(split))
        assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
        return [dataset[number].tolist() for number in range(len(dataset))]

    return read


@pytest.fixture(scope="session")
def texts_in(
    ids_in: Callable[[Manifest, str], list[list[int]]],
) -> Callable[[Manifest, str, Tokenizer], list[str]]:
    """Function that returns the texts of a split, after checking that each document ends with eod."""

    def read(manifest: Manifest, split: str, tokenizer: Tokenizer) -> list[str]:
        documents = ids_in(manifest, split)
        assert all(ids[-1] == tokenizer.eod and tokenizer.eod not in ids[:-1] for ids in documents)
        return [tokenizer.decode(ids) for ids in documents]

    return read


@pytest.fixture(scope="session")
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """Function that returns the content of all files of a finished stream, by their names after the prefix."""

    def read(prefix: Path) -> dict[str, bytes]:
        paths = sorted(prefix.parent.glob(f"{prefix.name}[_.]*"))
        return {path.name.removeprefix(prefix.name): path.read_bytes() for path in paths}

    return read


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer.json of 500 ids, whose id 0 is <|endoftext|>."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    byte_level_bpe(draw_texts(50), 500, "<|endoftext|>").save(str(path))
    return path
