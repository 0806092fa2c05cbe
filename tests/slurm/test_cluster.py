import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import hydra_conf
from nemo_ext.slurm.batch import forget_callers_array
from nemo_ext.slurm.cluster import Cluster, call, duration
from nemo_ext.slurm.settings import settings_of, split

NAMES = sorted(path.stem for path in (Path(hydra_conf.__file__).parent / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_cluster_of_the_package_is_complete(name: str) -> None:
    cluster = settings_of([f"cluster={name}"]).cluster

    assert cluster.name == name
    assert (cluster.limit is None) == (not cluster.limits)


def test_leonardo() -> None:
    cluster = settings_of(["cluster=leonardo", "cluster.qos=boost_qos_dbg"]).cluster

    assert cluster.limit is not None and duration(cluster.limit.time) == timedelta(minutes=30)
    assert cluster.node is not None and (cluster.node.gpus, cluster.node.fp8) == (4, ())
    assert cluster.variables()["HF_HUB_OFFLINE"] == "1"


def test_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    assert settings_of(["cluster=leonardo"]).cluster.variables()["OMP_NUM_THREADS"] == "3"


def test_a_command_enters_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORK", "/work")
    for name in ("FAST", "CINECA_SCRATCH"):
        monkeypatch.delenv(name, raising=False)
    bare = settings_of(["cluster=leonardo"]).cluster
    inside = settings_of(["cluster=leonardo", "cluster.container.image=/images/nemo.sif"]).cluster

    assert bare.inside(["python"], {"A": "1"}) == ["python"]
    assert inside.inside(["python", "-m", "x"], {"A": "1"}) == [
        *("singularity", "exec", "--nv", "--bind", "/work", "--bind", "/dev/infiniband"),
        *("--env", "A=1", "/images/nemo.sif", "python", "-m", "x"),
    ]
    assert inside.srun_options() == []


def test_pyxis_uses_options_of_srun() -> None:
    words = ["cluster=dgx_h100", "cluster.container.image=nvcr.io/nemo", "cluster.container.binds=[/lustre]"]
    cluster = settings_of(words).cluster

    assert cluster.inside(["python"], {}) == ["python"]
    assert cluster.srun_options() == [
        "--container-image=nvcr.io/nemo",
        "--container-mounts=/lustre:/lustre",
        "--no-container-mount-home",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30:00", 1800), ("24:00:00", 86400), ("4-00:00:00", 345600), ("1-12", 129600), ("1-12:30", 131400)],
)
def test_times_as_slurm_writes_them(text: str, seconds: int) -> None:
    assert duration(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "30", "24h", "UNLIMITED", "1:2:3:4", "-1:00"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected HH:MM:SS"):
        duration(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster=testbed", "cluster.container.image=a.sif"], "set it to singularity"),
        (["time=tomorrow"], "time='tomorrow'"),
        (["slurm.max_idle=0"], "max_idle=0"),
    ],
)
def test_invalid_settings_are_named(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings_of(words)


def test_words_come_from_the_site_or_the_job() -> None:
    words = [
        "recipe=olmo3/7b_pretrain",
        "cluster=leonardo",
        "account=X",
        "time=01:00:00",
        "slurm.margin=60",
        "megatron.lr=1",
    ]

    assert split(words) == (words[1:5], [words[0], words[5]])


def test_facts_are_optional() -> None:
    cluster: Any = Cluster(name="x")

    assert (cluster.limit, cluster.node, cluster.variables()) == (None, None, {})


def test_a_slurm_command_does_not_see_its_callers_job(monkeypatch: pytest.MonkeyPatch) -> None:
    callers = (
        *("SLURM_ARRAY_TASK_ID", "SLURM_MEM_PER_CPU", "SLURM_RESTART_COUNT", "SLURM_TIME_FORMAT", "SBATCH_ARRAY_INX"),
        *("SQUEUE_STATES", "SCANCEL_STATE", "SRUN_CPUS_PER_TASK", "PMI_RANK", "PMIX_RANK", "NEMO_EXT_SAVE_BY"),
    )
    others = ("SLURM_CONF", "SLURM_JWT", "WORK_OF_SLURM_USER", "NEMO_EXT_PYTHON")
    for name in (*callers, *others):
        monkeypatch.setenv(name, "3")

    seen = {line.partition("=")[0] for line in call(["env"]).stdout.splitlines()}

    assert not seen.intersection(callers)
    assert seen.issuperset(others)


@pytest.mark.parametrize(("said", "stays"), [("9|N/A", False), ("9|3\n8|2", True), ("", True)])
def test_a_job_does_not_inherit_the_array_that_submitted_it(
    said: str, stays: bool, programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(squeue=f"echo '{said}'")
    for name, value in {"SLURM_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "8"}.items():
        monkeypatch.setenv(name, value)

    forget_callers_array()

    assert [name in os.environ for name in ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_JOB_ID")] == [stays] * 2
