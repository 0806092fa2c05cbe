"""`engine=datatrove`: the same documents and counts as in our own passes, resumed tasks, and invalid settings."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.data.curation import pipelines
from nemo_ext.data.curation.job import check, run
from nemo_ext.job.config import compose

Write = Callable[..., Path]
BLOCKS = (
    "+curate.blocks.length={kind: length, least: 5}",
    "+curate.blocks.near={kind: near_duplicates}",
    "+curate.blocks.lines={kind: same_paragraphs}",
    "curate.stages=[length,near,lines]",
    *("curate.unit=6000", "curate.keep_dropped=all", "curate.divide=[language]", "workers=1"),
)


@pytest.fixture
def words(write: Write) -> list[str]:
    """Arguments for documents with near copies and equal lines; some units have only documents that are dropped."""
    chance = random.Random(0)

    def text() -> str:
        return " ".join(f"word{chance.randrange(3000)}" for _ in range(200))

    texts = [text() for _ in range(40)]
    half = [" ".join([*each.split()[:100], *text().split()[:100]]) for each in texts[:9]]  # similarity 0.32
    near = [f"{each.rpartition(' ')[0]} changed" for each in texts[9:25]]  # similarity 0.99
    same = [f"{text()}\nThe same line." for _ in half]
    records = [{"text": each, "language": "en"} for each in (*texts, *["x"] * 500, *half, *near, *same)]
    return [f"input={write(records)}", *BLOCKS]


def funnel(output: Path) -> Any:
    """Counts of a run without examples, which datatrove's stats cannot hold."""
    (counts,) = json.loads((output / "funnel.json").read_text()).values()
    for stage in counts["stages"].values():
        for reason in stage["dropped"].values():
            del reason["examples"]
    return counts


def documents(output: Path) -> dict[str, bytes]:
    """Content of the files of kept and dropped documents."""
    paths = [path for folder in ("documents", "dropped") for path in (output / folder).rglob("*.zst")]
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_datatrove_keeps_the_same_documents_and_resumes_completed_tasks(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run(compose("curate", [*words, f"output={ours}"]))
    words = [*words, f"output={theirs}", "engine=datatrove"]
    capsys.readouterr()
    run(compose("curate", [*words, "--dry-run"]))
    assert "02_compare_near: 14 tasks\n  MinhashDedupBuckets" in capsys.readouterr().out and not theirs.exists()

    def fails(*_: object) -> None:
        raise OSError("the node is lost")

    with monkeypatch.context() as patch:
        patch.setattr(pipelines, "finish", fails)
        with pytest.raises(OSError, match="the node is lost"):
            run(compose("curate", words))
    logs = sorted((theirs / "datatrove").glob("*_pass_*/logs/*"))
    before = [log.stat().st_mtime_ns for log in logs]
    run(compose("curate", words))

    assert len(logs) > 10 and [log.stat().st_mtime_ns for log in logs] == before
    assert documents(theirs) == documents(ours) and len(documents(ours)) > 4
    assert funnel(theirs) == funnel(ours)
    left = {path.name for path in (theirs / ".job").glob("[0-9]/*") if path.suffix != ".json"}
    assert left == {"decided"}
    near = funnel(theirs)["stages"]["near"]
    assert near["dropped"]["near-duplicate"]["amount"]["documents"] == 16 < near["kept"]["documents"]
    with pytest.raises(ValueError, match='engine: "datatrove" -> null'):
        run(compose("curate", [*words, "engine=null"]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("engine=datatrove", "shard=0/2"), "shard=0/2: datatrove divides the work itself"),
        (("datatrove.executor=slurm",), "require engine=datatrove"),
        (("engine=datatrove", "datatrove.options.start_methods=fork"), "did you mean 'start_method'"),
        (("engine=datatrove", "datatrove.executor=slurm"), "datatrove.options: the key 'time' is missing"),
    ],
)
def test_invalid_settings_are_reported(tmp_path: Path, words: list[str], more: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(compose("curate", [*words, f"output={tmp_path / 'out'}", *more]))
