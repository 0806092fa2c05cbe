"""The commands of docs/leonardo.md on a Slurm whose partition and nodes are like Leonardo's."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job.run_directory import last_checkpoint
from nemo_ext.slurm import attempts

PAGE = Path(__file__).parents[2] / "docs" / "leonardo.md"
ELSEWHERE = ("ssh ", "cd $WORK && curl ", "git clone ", "uv venv ", "export HF_HOME=")
"""Login, installation and downloads."""


def commands() -> list[str]:
    found = re.search(r"```shell\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    return found[1].splitlines()


def test_it_is_ten_commands() -> None:
    assert len(commands()) == 10
    assert all(any(line.startswith(start) for line in commands()) for start in ELSEWHERE)


@pytest.mark.slow
@pytest.mark.slurm
def test_the_commands_of_the_page_start_a_run(slurm: Any, tmp_path: Path) -> None:
    environment = {
        **slurm.environment,
        "WORK": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{slurm.environment['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    # tests/test_doctor.py runs the doctor.
    walked = [line for line in commands() if not line.startswith((*ELSEWHERE, "nemo-ext doctor"))]
    assert len(walked) == 4
    said = []
    for line in walked:
        # A few steps of the run are enough here, on CPUs.
        more = "train.tokens=8192 megatron.eval_iters=1 +cluster.environment.NEMO_EXT_GPUS=none"
        short = line.replace("cluster=leonardo", f"cluster=leonardo {more}")
        done = subprocess.run(
            ["bash", "-ec", short], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{short}\n{done.stdout}{done.stderr}"
        said.append(done.stdout)

    run_dir = tmp_path / "runs" / "first"
    job = (run_dir / "slurm" / "job").read_text().strip()
    assert "not submitted: --dry-run" in said[1]
    assert f"job {job}" in said[2]
    assert str(run_dir) in said[3]
    output = run_dir / "slurm" / f"{job}.out"
    slurm.wait(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), what=lambda: slurm.outputs(run_dir))
    assert slurm.state(job) == "COMPLETED", output.read_text()
    assert attempts.finished(run_dir) is not None
    assert last_checkpoint(run_dir)
