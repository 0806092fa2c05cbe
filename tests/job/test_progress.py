import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import nemo_ext
from nemo_ext.job import progress
from nemo_ext.job.progress import notice, progress_of


def test_progress_is_plain_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress_of("web: reading", 4_000_000, enabled=True) as advance:
        advance(1_000_000)
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
        advance(1_500_000)
    with progress_of("web: reading", 4_000_000, enabled=False) as advance:
        advance(1_000_000)

    assert capsys.readouterr().err == "web: reading 2.5 of 4.0 MB\n"


def test_a_notice_is_one_unchanged_line(capsys: pytest.CaptureFixture[str]) -> None:
    notice("web: skipped 1 malformed ([bold]:smile: " + "x" * 300 + ")")

    assert capsys.readouterr().err == "web: skipped 1 malformed ([bold]:smile: " + "x" * 300 + ")\n"


def test_progress_is_a_bar_on_a_terminal() -> None:
    script = """
from nemo_ext.job.progress import notice, progress_of
with progress_of("web: reading", 4_000_000, enabled=True) as advance:
    advance(2_500_000)
notice("web: done")
"""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))
    root = str(Path(nemo_ext.__file__).parents[1])

    environment = os.environ | {"PYTHONPATH": root, "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", script], env=environment, stderr=end, check=True)

    shown = os.read(terminal, 100_000).decode()
    assert "web: reading" in shown
    assert "2.5/4.0 MB" in shown
    assert shown.endswith("web: done\r\n")
