"""Changes that a rehearsal makes to the findings on a training job, and jobs without rehearsal."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from nemo_ext.job.config import compose
from nemo_ext.job.findings import Finding
from nemo_ext.megatron.preflight import GIB
from nemo_ext.rehearsal.settings import one_phase
from nemo_ext.slurm import rehearse
from nemo_ext.slurm.rehearse import is_wanted, key_of, with_rehearsals
from nemo_ext.slurm.settings import settings_of
from tests.composing import write_pipeline

GUESS = Finding("note", "memory: about 38 GiB of the 64 of a A100-64GB")
OTHER = Finding("note", "another")
SETTINGS = settings_of(["cluster=leonardo"])


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return compose("train", ["recipe=olmo1/1b", "run_dir=r"])


def rank(peak: float, guess: float, stage: int = 0) -> dict[str, Any]:
    kinds = {"weights": peak / 2, "gradients": peak / 4, "activations": peak / 4}
    return {
        "stage": stage,
        "peak_bytes": round(peak * GIB),
        "peak": {name: round(size * GIB) for name, size in kinds.items()},
        "estimate": {"bytes": round(guess * GIB)},
    }


def kept(folder: Path, config: dict[str, Any], *ranks: dict[str, Any], aside: tuple[str, ...] = ()) -> None:
    """An earlier result."""
    place = folder / key_of(one_phase(config))
    place.mkdir(parents=True)
    result = {"ranks": ranks, "pipeline": len(ranks), "set_aside": aside}
    (place / "rehearsal.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("ranks", "kind", "said"),
    [
        ([rank(40, 38)], "note", "memory: 40 GiB of the 64 of a A100-64GB, rehearsed (weights, gradients and"),
        ([rank(40, 30)], "note", "activations 10); the cost model estimates 30 (-25 %)"),
        (
            [rank(30, 29), rank(60, 58, stage=1)],
            "warning",
            "60 GiB of the 64 of a A100-64GB, rehearsed on pipeline rank 1",
        ),
        ([rank(65, 60)], "error", "activations 16.2): raise tensor, pipeline or context parallelism"),
    ],
)
def test_a_rehearsal_overrides_other_findings_on_memory(
    tmp_path: Path, config: dict[str, Any], ranks: list[dict[str, Any]], kind: str, said: str
) -> None:
    kept(tmp_path, config, *ranks)

    first, found = with_rehearsals([GUESS, OTHER], [config], SETTINGS, tmp_path)

    assert first == OTHER
    assert (found.kind, said in found.text) == (kind, True), found
    assert ("cost model" in found.text) == (ranks == [rank(40, 30)])


@pytest.mark.parametrize(
    ("why", "kind", "said"),
    [
        (
            "stage 0 cannot be built or stepped: AssertionError: no; see log",
            "error",
            "; slurm.rehearse=false submits the run",
        ),
        ("stage 0 cannot be built or stepped: code -9; see log", "warning", "not rehearsed: stage 0"),
    ],
)
def test_a_rehearsals_finding_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any], why: str, kind: str, said: str
) -> None:
    def run(folder: Path, limit: float | None) -> int:
        (folder / "rehearsal.json").write_text(json.dumps({"error": why}))
        return 0

    monkeypatch.setattr(rehearse, "_run", run)

    guess, found = with_rehearsals([GUESS], [config], SETTINGS, tmp_path)

    assert (guess, found.kind) == (GUESS, kind)
    assert why in found.text and said in found.text
    assert not list(tmp_path.rglob("rehearsal.json")), "the next time it is tried again"


def test_settings_removed_for_a_rehearsal_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    kept(tmp_path, config, rank(40, 38), aside=("fp8", "distillation.teacher"))

    _, found = with_rehearsals([OTHER], [config], SETTINGS, tmp_path)

    assert found.text.endswith("without fp8, distillation.teacher, which is not rehearsed")


def test_equal_steps_are_rehearsed_once(config: dict[str, Any]) -> None:
    def key(section: str, **values: Any) -> str:
        return key_of(one_phase({**config, section: {**config[section], **values}}))

    before = key_of(one_phase(config))
    assert key("megatron", lr=1e-5, seed=7, train_iters=9, save_interval=3) == before
    assert key("model", name="other") == before
    for section, change in (
        ("megatron", {"micro_batch_size": 8}),
        ("megatron", {"recompute_granularity": "full"}),
        ("launcher", {"nodes": 16}),
        ("distillation", {"teacher": "runs/teacher"}),
    ):
        assert key(section, **change) != before, change


def test_of_phases_the_longest_sequences_are_rehearsed() -> None:
    config = compose("train", ["recipe=domyn_small/foundation", "run_dir=r"])

    made = one_phase(config)["megatron"]

    assert (config["megatron"]["seq_length"], made["seq_length"]) == (4096, 16384)
    assert made["max_position_embeddings"] >= 16384


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["cluster=leonardo"], True),
        (["cluster=leonardo", "slurm.rehearse=false"], False),
        (["cluster=testbed"], False),
        (["cluster=testbed", "slurm.rehearse=true"], True),
        (["cluster=leonardo", "job=rl", "slurm.rehearse=true"], False),
        (["cluster=leonardo", "job=puzzle"], True),
    ],
)
def test_when_a_job_is_rehearsed(words: list[str], wanted: bool) -> None:
    assert is_wanted(settings_of(words)) is wanted


def test_without_torch_a_rehearsal_reports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any]
) -> None:
    monkeypatch.setattr(rehearse, "find_spec", lambda name: None if name == "torch" else object())

    assert with_rehearsals([GUESS], [config], SETTINGS, tmp_path) == [
        GUESS,
        Finding("note", "not rehearsed: torch is not installed here"),
    ]
    asked = settings_of(["cluster=leonardo", "slurm.rehearse=true"])
    assert with_rehearsals([GUESS], [config], asked, tmp_path)[-1].kind == "error"


def test_a_slow_rehearsal_is_given_up_and_its_processes_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any]
) -> None:
    monkeypatch.setattr(rehearse, "SECONDS", 0.1)
    before = {*psutil.Process().children()}  # of other tests

    guess, found = with_rehearsals([GUESS], [config], SETTINGS, tmp_path)

    assert guess == GUESS, "the cost model's figure stays"
    assert found.text.startswith("not rehearsed within 0 s; slurm.rehearse=true waits for it")
    assert before.issuperset(psutil.Process().children())


def test_a_site_sets_the_limits_of_a_rehearsal() -> None:
    for words, memory in (((), None), (("cluster=leonardo",), 64), (("cluster=testbed",), None)):
        assert compose("rehearse", list(words))["rehearse"]["gpu_memory_gib"] == memory


TINY = ("recipe=nemotron3_nano/quickstart", "data=mock", "megatron.bf16=true", "cluster=testbed", "slurm.rehearse=true")


@pytest.mark.deep
@pytest.mark.slurm
def test_a_chain_is_rehearsed_once_and_ctrl_c_submits_nothing(
    slurm: Any, nemo_ext: Callable[..., str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "chain"
    words = list(TINY[:3])
    stages = {
        "one": {"job": "train", "words": words},
        "two": {"job": "train", "words": [*words, "megatron.lr=2e-3"]},
        "three": {"job": "train", "words": [*words, "megatron.micro_batch_size=2"]},
    }
    write_pipeline(tmp_path, "mine", stages)
    given = ("submit", f"--config-dir={tmp_path}", "pipeline=mine", f"run_dir={run_dir}", *TINY[3:])
    given += ("cluster.node.gpu_memory_gib=1",)
    command = [sys.executable, "-m", "nemo_ext.cli", *given]

    def ranks() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(run_dir) in line and "rehears" in line and "nemo_ext.cli" not in line:
                found.append(process)
        return found

    with subprocess.Popen(command, cwd=tmp_path, env=slurm.environment, start_new_session=True) as interrupted:
        slurm.wait(lambda: any("rehearsal.rank" in " ".join(each.cmdline()) for each in ranks()), what=lambda: "a rank")
        os.killpg(interrupted.pid, signal.SIGINT)
        assert interrupted.wait(60) == 130
    slurm.wait(lambda: not ranks(), seconds=20, what=lambda: "its processes should end")
    assert not slurm.call("squeue", "-h")

    said = nemo_ext(*given, "--dry-run")

    notes = [line for line in said.splitlines() if line.startswith("note: memory: ")]
    assert len(notes) == 3 and notes[0] == notes[1] != notes[2]
    assert all("GiB of the 1 of a none, rehearsed (weights" in note for note in notes)
    made = list((run_dir / "slurm" / "rehearsals").glob("*/rehearsal.json"))
    assert len(made) == 2 and said.count("rehearsing the run's ranks") == 2
    assert not slurm.call("squeue", "-h")

    tight = nemo_ext(*given, "cluster.node.gpu_memory_gib=0.01", code=2)

    assert "rehearsing" not in tight
    assert tight.count("error: memory: ") == 3 and "not submitted: fix the errors first" in tight


def test_a_stage_of_puzzle_is_named_with_keys_that_reduce_it(tmp_path: Path) -> None:
    config = compose("puzzle", ["run_dir=r"])
    stages = [{**rank(peak, 0), "name": name} for name, peak in (("library", 30.0), ("distill", 70.0))]
    for stage in stages:
        del stage["estimate"]
    kept(tmp_path, config, *stages)

    (found,) = with_rehearsals([], [config], SETTINGS, tmp_path)

    assert found.kind == "error"
    assert "70 GiB of the 64 of a A100-64GB, rehearsed in distill (" in found.text
    assert "cost model" not in found.text and found.text.endswith("shard the parent with puzzle.fsdp=shard")


@pytest.mark.parametrize(
    ("job", "section", "key"), [("train", "distillation", "teacher"), ("puzzle", "puzzle", "parent")]
)
def test_a_model_that_an_earlier_stage_makes_is_not_rehearsed_yet(
    job: str, section: str, key: str, tmp_path: Path, config: dict[str, Any]
) -> None:
    made = tmp_path / "sft"
    given = compose("puzzle", ["run_dir=r"]) if job == "puzzle" else config
    given = {**given, section: {**given[section], key: str(made)}}

    found = with_rehearsals([GUESS], [given], SETTINGS, tmp_path, [made])

    assert found == [GUESS, Finding("note", f"not rehearsed: {section}.{key}={made} does not exist yet")]


def test_another_model_at_the_same_path_is_rehearsed_again(tmp_path: Path, config: dict[str, Any]) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    given = {**config, "distillation": {**config["distillation"], "teacher": str(teacher)}}

    def key(recipe: str) -> str:
        (teacher / "config.yaml").write_text(yaml.safe_dump(compose("train", [f"recipe={recipe}", "run_dir=r"])))
        return key_of(one_phase(given))

    assert key("olmo1/1b") == key("olmo1/1b") != key("olmo1/7b")


def test_stages_without_a_model_report_it(tmp_path: Path) -> None:
    config = compose("puzzle", ["run_dir=r", "puzzle.stages=[search]"])
    kept(tmp_path, config)
    said = Finding("note", "nothing to rehearse: no stage runs a model")
    assert with_rehearsals([OTHER], [config], SETTINGS, tmp_path) == [OTHER, said]
