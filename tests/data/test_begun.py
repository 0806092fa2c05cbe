"""Folders begun by an earlier version (begun.json, written by e618dd7) are resumed, with that version's result."""

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.data.curation.job import run
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.text.tokenizers import ByteTokenizer
from nemo_ext.data.tokenize import tokenize_stream
from nemo_ext.job.config import compose

BEGUN: dict[str, Any] = json.loads(Path(__file__).with_name("begun.json").read_text())
WORDS = (
    *("input=in.jsonl", "output=curated", "workers=1", "curate.unit=200", "curate.stages=[same]"),
    "+curate.blocks.same={kind: same_text}",
)


@pytest.fixture(autouse=True)
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacks the folders into the working directory, with the original modification time of their input."""
    monkeypatch.chdir(tmp_path)
    for name, content in BEGUN["files"].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content.replace("HERE", str(tmp_path)))
        else:
            path.write_bytes(base64.b64decode(content["base64"]))
    os.utime("in.jsonl", (1e9, 1e9))


def are_equal(folder: Path, *names: str) -> list[bool]:
    """Whether each file has the digest that the earlier version gave it."""
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() == BEGUN["made"][name] for name in names]


def test_tokenising_resumes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_ext.data.text import shards

    tokenize, done = shards.tokenize_shard, list[int]()

    def recorded(work: Any, shard: Any) -> None:
        done.append(shard.number)
        tokenize(work, shard)

    monkeypatch.setattr(shards, "tokenize_shard", recorded)
    source = load_source({"kind": "jsonl", "path": "in.jsonl"})
    tokenize_stream(source, ByteTokenizer(), "tokens/out", workers=1, documents_per_shard=3)
    assert done == [1] and "starting over" not in capsys.readouterr().err
    assert all(are_equal(Path("tokens"), "out_train.bin", "out_train.idx", "out_valid.bin", "out_valid.idx"))


def test_curation_resumes_and_refuses_other_settings() -> None:
    before = [Path(f"curated/.job/0/{number:06d}.json").stat().st_mtime_ns for number in (0, 2, 4)]
    with pytest.raises(
        ValueError, match=r"output=curated was begun with other settings \(curate\.unit: 200 -> 300\); choose"
    ):
        run(compose("curate", [*WORDS, "curate.unit=300"]))
    run(compose("curate", WORDS))
    assert [Path(f"curated/.job/0/{number:06d}.json").stat().st_mtime_ns for number in (0, 2, 4)] == before
    assert all(are_equal(Path(), "curated/funnel.json"))
