"""Ports for processes that have yet to start, and ranks on several nodes."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from nemo_ext.job.files import write_text
from nemo_ext.job.ranks import ASKED, ENDED, ON_NODES, reserve_port, run_ranks


@pytest.mark.parametrize(
    ("said", "told"),
    [("error: too few\n", "error: too few\n"), ("Traceback\n", "error: a rank failed; see above and {}/rank*.log\n")],
)
def test_a_mistake_of_a_rank_on_another_node_is_shown(
    said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, log = tmp_path / "slurm", tmp_path / "rank3.log"
    folder.mkdir()
    (tmp_path / "rank7.log").write_text("error: of the start before\n")
    monkeypatch.setenv(ON_NODES, str(folder))

    def batch_process() -> list[str]:
        while not (folder / ASKED).is_file():
            time.sleep(0.01)
        log.write_text(said)
        write_text(folder / ENDED, "2")
        asked: list[str] = json.loads((folder / ASKED).read_text())["words"]
        return asked

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(batch_process)
        code = run_ranks([sys.executable, "-m", "a.module", "config.yaml"], 8, tmp_path)

    assert (code, capsys.readouterr().err) == (2, told.format(tmp_path))
    assert asked.result() == ["-m", "nemo_ext.slurm.rank", "-m", "a.module", "config.yaml"]


@pytest.mark.parametrize("rank", [0, 1])
def test_output_of_ranks_but_the_first_goes_to_logs(rank: int, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("[7]")
    slurm = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    environment = {**os.environ, **slurm, "MASTER_ADDR": "n1", "MASTER_PORT": "1"}

    command = [sys.executable, "-m", "nemo_ext.slurm.rank", "-m", "json.tool", str(config)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    written = tmp_path / "rank1.log"
    assert "7" in (written.read_text() if rank else said)
    assert not said if rank else not written.exists()


def test_a_reserved_port_is_given_only_to_its_server() -> None:
    with reserve_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_folder_missing_in_the_container_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ON_NODES, str(tmp_path / "slurm"))

    with pytest.raises(ValueError, match="slurm is not visible inside the container"):
        run_ranks([sys.executable, "-m", "a.module", "config.yaml"], 8, tmp_path)


def test_the_error_of_the_rank_that_caused_the_others_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit(print('error: a wrong task', file=sys.stderr) or 2)\n"
        "time.sleep(0.3)\n"
        "sys.exit(1)"
    )

    assert run_ranks([sys.executable, "-c", script], 2, tmp_path) == 2
    assert capfd.readouterr().err == "error: a wrong task\n"


def test_no_rank_remains_if_another_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "rank1.log").mkdir()
    before = psutil.Process().children()

    with pytest.raises(IsADirectoryError):
        run_ranks([sys.executable, "-c", "import time; time.sleep(60)"], 2, tmp_path)

    assert psutil.Process().children() == before
