"""Curation in shards on a real Slurm: arrays that follow each other, and the same bytes as in one process."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.data.curation.job import run
from nemo_ext.job.config import compose


@pytest.mark.slow
@pytest.mark.slurm
def test_shards_are_arrays_that_make_the_same_bytes(slurm: Any, here: Callable[..., str], tmp_path: Path) -> None:
    texts = [f"a text that is number {number % 70}\nwith one line of its own {number}" for number in range(100)]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [
        *("+curate.blocks.lines={kind: same_paragraphs}", "+curate.blocks.near={kind: near_duplicates}"),
        *("curate.stages=[lines,near]", "curate.unit=2000", "workers=1"),
    ]
    place = ["job=curate", "slurm.shards=2", "cluster=testbed", f"input={tmp_path / 'raw.jsonl'}"]

    here("submit", *place, f"output={tmp_path / 'shards'}", "slurm.folder=record", *words)

    slurm.wait(lambda: not slurm.call("squeue", "-h"), what=lambda: "three arrays")
    assert here("status", "record").count("finished") == 6
    run(compose("curate", [f"input={tmp_path / 'raw.jsonl'}", f"output={tmp_path / 'one'}", *words]))
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one" / "documents").rglob("*.zst"))
    assert len(files) > 3
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "shards" / file).read_bytes()


@pytest.mark.slow
@pytest.mark.slurm
def test_datatrove_queues_its_jobs_which_make_the_same_bytes(
    slurm: Any, here: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps({"text": f"text {n % 70}"}) + "\n" for n in range(100)))
    words = [f"input={tmp_path / 'raw.jsonl'}", "+curate.blocks.same={kind: same_text}", "curate.stages=[same]"]
    path = f"env_command: 'export PATH={Path(sys.executable).parent}:$PATH'"
    options = f"{{time: '0:10:00', partition: boost_usr_prod, qos: null, mem_per_cpu_gb: 1, {path}}}"
    engine = [
        "engine=datatrove",
        "datatrove.executor=slurm",
        f"datatrove.options={options}",
    ]

    here("curate", *words, "curate.unit=500", *engine, f"output={tmp_path / 'queued'}")

    slurm.wait(lambda: not slurm.call("squeue", "-h"), what=lambda: slurm.outputs(tmp_path / "queued" / "datatrove"))
    run(compose("curate", [*words, "curate.unit=500", f"output={tmp_path / 'one'}", "workers=1"]))
    for file in (tmp_path / "one" / "documents" / "text").iterdir():
        assert file.read_bytes() == (tmp_path / "queued" / "documents" / "text" / file.name).read_bytes()
    assert (tmp_path / "queued" / "report.html").exists()
