"""Commands in the test process, their ranks forked."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext.job import run_directory


@pytest.fixture
def launched(
    fork_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`nemo-ext WORDS` in this process with forked ranks, killed at a step where one is given; what it printed."""
    from nemo_ext import cli, launch

    def run(*words: str, kill_at: int | None = None) -> str:
        def run_ranks(run_dir: Path, ranks: int, target: int, console: object) -> None:
            fork_ranks(run_dir / run_directory.CONFIG, ranks, None if kill_at is None or kill_at > target else kill_at)

        monkeypatch.setattr(launch, "_run_ranks", run_ranks)
        monkeypatch.setattr(sys, "argv", ["nemo-ext", *words])
        capfd.readouterr()
        code: object = None
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code
        out, err = capfd.readouterr()
        assert not code, err
        return out

    return run
