"""Checks of ranks without a GPU in a job that has GPUs."""

import os
import re
import subprocess
import sys

import pytest
import torch

from nemo_ext.job.ranks import GPUS, reserve_port
from nemo_ext.megatron.cpu import runtime
from nemo_ext.slurm.settings import settings_of


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (GPUS, "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, "4"),
        ({GPUS: "A100-64GB"}, "A100-64GB"),
        ({"SLURM_GPUS_ON_NODE": "4", GPUS: "none"}, None),
        ({"SLURM_GPUS_ON_NODE": "0"}, None),
        ({"SLURM_JOB_GPUS": "0,1"}, "0,1"),
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({}, None),
    ],
)
def test_a_job_with_gpus_does_not_train_on_cpus(
    rank: pytest.MonkeyPatch, environment: dict[str, str], asked: str | None
) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    rank.setattr(torch.cuda, "init", too_old)
    for name, value in environment.items():
        rank.setenv(name, value)

    if asked is None:
        runtime.check_gpu()
        return
    with pytest.raises(
        ValueError, match=rf"has GPUs \({asked}\), but torch .*: The NVIDIA driver .*\(found version 11040\)\.;"
    ):
        runtime.check_gpu()


def test_a_rank_that_sees_one_gpu_of_several_says_so(rank: pytest.MonkeyPatch) -> None:
    rank.setattr(torch.cuda, "is_available", lambda: True)
    rank.setattr(torch.cuda, "device_count", lambda: 1)
    runtime.check_gpu()
    rank.setenv("LOCAL_RANK", "3")
    rank.setenv("CUDA_VISIBLE_DEVICES", "0")

    with pytest.raises(ValueError, match=r"local rank 3 \(rank None\) sees only 1 GPU \(CUDA_VISIBLE_DEVICES=0\)"):
        runtime.check_gpu()


@pytest.mark.parametrize(("site", "told"), [("leonardo", "A100-64GB"), ("testbed", "none"), ("generic", None)])
def test_a_site_says_what_its_ranks_have(rank: pytest.MonkeyPatch, site: str, told: str | None) -> None:
    rank.setenv(GPUS, "none")  # of a laptop's run in the same shell
    assert settings_of([f"cluster={site}"]).cluster.variables().get(GPUS) == told


RANK = """
import sys, time, torch
torch.cuda.is_available = lambda: {able}
waited = torch.distributed.PrefixStore.wait
def wait(self, keys, *timeout):
    waited(self, keys, *timeout)
    time.sleep({late})
torch.distributed.PrefixStore.wait = wait
from nemo_ext.megatron.cpu import runtime
try:
    runtime.check_ranks()
except ValueError as error:
    sys.exit(print(error))
torch.distributed.init_process_group("gloo")  # the same address and port again
"""


def said_by_ranks(*able: bool) -> list[str]:
    """Output of ranks of which the second is late."""
    with reserve_port() as port:
        base = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK.format(able=each, late=rank)],
                env={**os.environ, **base, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, each in enumerate(able)
        ]
        said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return said


def test_ranks_with_and_without_gpus_do_not_wait_for_each_other() -> None:
    said = said_by_ranks(True, False)

    assert re.search(r"1 of 2 ranks have a GPU .*\(rank 0 on .* has one\)", said[0])
    assert re.search(r"1 of 2 ranks have a GPU .*\(rank 1 on .* has none\): check nvidia-smi", said[1])


def test_ranks_that_are_alike_start() -> None:
    assert said_by_ranks(False, False) == ["", ""]
