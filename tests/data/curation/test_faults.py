"""All stages on a corpus with planted faults: recall, precision, counts, and equal output in shards and after kills."""

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.data.curation.job import run
from nemo_ext.job.config import compose


def _benchmark() -> Any:
    path = Path(__file__).parents[3] / "benchmarks" / "curate_faults.py"
    spec = importlib.util.spec_from_file_location("curate_faults", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["curate_faults"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAULTS = _benchmark()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder of a small corpus, and the faults planted in it."""
    folder = tmp_path_factory.mktemp("faults")
    return folder, FAULTS.make(folder, each=12, line=1.2, packages=("hydra", "pydantic", "rich"))


@pytest.fixture(scope="module")
def curated(corpus: tuple[Path, Any]) -> Path:
    """The corpus, curated by one process."""
    folder, _ = corpus
    run(compose("curate", [*FAULTS.words(folder, "one", 1), "curate.unit=1e5"]))
    return folder / "one"


def output_digests(output: Path) -> dict[str, str]:
    """Digests of the output files, independent of the folder's name."""
    digests = {}
    for path in output.rglob("*"):
        if path.is_file() and ".job" not in path.parts and path.suffix not in (".png", ".html"):
            data = path.read_bytes().replace(str(output).encode(), b"OUTPUT")
            digests[str(path.relative_to(output))] = hashlib.sha256(data).hexdigest()
    return digests


def test_every_stage_finds_its_faults_and_little_else(corpus: tuple[Path, Any], curated: Path) -> None:
    results = FAULTS.judged(curated, corpus[1])
    assert len(results) > 12
    for name, result in results.items():
        if "similarity" in name:
            similarity = float(name.split()[2])
            assert result.recall == 1 or similarity < 0.9, (name, result)
            assert result.found == 0 or similarity >= 0.75, (name, result)
            assert result.wrong == 0
        else:
            assert result.planted and result.recall >= 0.9 and result.precision >= 0.7, (name, result)


def test_counts_add_up_and_every_dropped_document_is_written(curated: Path) -> None:
    (counts,) = json.loads((curated / "funnel.json").read_text()).values()
    before = counts["stages"]["read"]["kept"]["documents"]
    for stage in FAULTS.STAGES:
        through = counts["stages"][stage]
        dropped = {name: reason["amount"]["documents"] for name, reason in through["dropped"].items()}
        assert through["came"]["documents"] == before == through["kept"]["documents"] + sum(dropped.values())
        lines = list(FAULTS.lines(curated / "dropped" / stage))
        assert {reason: [line["dropped"] for line in lines].count(reason) for reason in dropped} == dropped
        for name, reason in through["dropped"].items():
            assert len(reason["examples"]) == min(20, dropped[name])
        before = through["kept"]["documents"]
    assert before == len(list(FAULTS.lines(curated / "documents")))
    report = (curated / "report.md").read_text()
    assert "### near_duplicates: near-duplicate" in report and (curated / "funnel.png").stat().st_size > 2_000


def test_shards_do_not_change_a_byte(corpus: tuple[Path, Any], curated: Path) -> None:
    folder, name, count = corpus[0], "shards", 3
    words = [*FAULTS.words(folder, name, 1), "curate.unit=1e5"]
    for _ in range(6):  # passes
        for shard in reversed(range(count)):
            run(compose("curate", [*words, f"shard={shard}/{count}"]))
    assert output_digests(folder / name) == output_digests(curated)


@pytest.mark.slow
def test_datatrove_keeps_the_same_documents(corpus: tuple[Path, Any], curated: Path) -> None:
    folder, name = corpus[0], "datatrove"
    run(compose("curate", [*FAULTS.words(folder, name, 1), "curate.unit=1e5", "engine=datatrove"]))
    theirs, ours = output_digests(folder / name), output_digests(curated)
    for file in ours:
        if not file.startswith(("funnel.json", "report.md")):  # without examples
            assert theirs[file] == ours[file], file


def killed(command: list[str], when: Callable[[], bool]) -> bool:
    """Kill a run and its workers as soon as `when` is true; False if it ended before that."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while process.poll() is None and not when():
            time.sleep(0.005)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "passes", [pytest.param((3,), marks=pytest.mark.slow), pytest.param(range(6), marks=pytest.mark.deep)]
)
def test_kills_in_any_pass_do_not_change_a_byte(corpus: tuple[Path, Any], curated: Path, passes: Sequence[int]) -> None:
    folder, name = corpus[0], f"killed{len(passes)}"
    words = [*FAULTS.words(folder, name, 2), "curate.unit=1e5"]
    command = [sys.executable, "-m", "nemo_ext", "curate", *words]
    for number in passes:
        done = folder / name / ".job" / str(number)
        assert killed(command, lambda: any(done.glob("*.json")))  # noqa: B023
    subprocess.run(command, check=True)
    assert output_digests(folder / name) == output_digests(curated)
