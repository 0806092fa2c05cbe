"""Every stage on a corpus with planted faults: what it finds, what it leaves alone, whoever does the work."""

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
    """A small corpus and what is planted in it."""
    folder = tmp_path_factory.mktemp("faults")
    return folder, FAULTS.make(folder, each=12, line=1.2, packages=("hydra", "pydantic", "rich"))


@pytest.fixture(scope="module")
def curated(corpus: tuple[Path, Any]) -> Path:
    """The corpus, curated by one process."""
    folder, _ = corpus
    run(compose("curate", [*FAULTS.words(folder, "one", 1), "curate.unit=1e5"]))
    return folder / "one"


def made(output: Path) -> dict[str, str]:
    """Digests of what a user gets, whatever the folder is called."""
    found = {}
    for path in output.rglob("*"):
        if path.is_file() and ".job" not in path.parts and path.suffix not in (".png", ".html"):
            data = path.read_bytes().replace(str(output).encode(), b"OUTPUT")
            found[str(path.relative_to(output))] = hashlib.sha256(data).hexdigest()
    return found


def test_every_stage_finds_its_faults_and_little_else(corpus: tuple[Path, Any], curated: Path) -> None:
    found = FAULTS.judged(curated, corpus[1])
    assert len(found) > 12
    for name, each in found.items():
        if "similarity" in name:
            similarity = float(name.split()[2])
            assert each.recall == 1 or similarity < 0.9, (name, each)
            assert each.found == 0 or similarity >= 0.75, (name, each)
            assert each.wrong == 0
        else:
            assert each.planted and each.recall >= 0.9 and each.precision >= 0.7, (name, each)


def test_counts_add_up_and_every_document_that_left_can_be_looked_up(curated: Path) -> None:
    (own,) = json.loads((curated / "funnel.json").read_text()).values()
    before = own["stages"]["read"]["kept"]["documents"]
    for stage in FAULTS.STAGES:
        through = own["stages"][stage]
        dropped = {reason: each["amount"]["documents"] for reason, each in through["dropped"].items()}
        assert through["came"]["documents"] == before == through["kept"]["documents"] + sum(dropped.values())
        lines = list(FAULTS.lines(curated / "dropped" / stage))
        assert {reason: [line["dropped"] for line in lines].count(reason) for reason in dropped} == dropped
        for reason, each in through["dropped"].items():
            assert len(each["examples"]) == min(20, dropped[reason])
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
    assert made(folder / name) == made(curated)


def killed(command: list[str], when: Callable[[], bool]) -> bool:
    """Whether a run was killed with its workers, as soon as something is so; False if it had ended before."""
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
    assert made(folder / name) == made(curated)
