"""Runs `nemo-ext puzzle` without starting Python and Megatron for each stage."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from nemo_ext.job import run_directory
from nemo_ext.job.config import compose


@pytest.fixture(scope="session")
def in_process(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Run the command and the rank of its stages in this process, and fork training ranks; returns stderr."""
    # By name: a test that requests the fixture `megatron` would leave the worker of its file.
    request.getfixturevalue("megatron")
    fork_ranks = request.getfixturevalue("fork_ranks")

    from nemo_ext import launch
    from nemo_ext.puzzle import job
    from nemo_ext.puzzle.stages import stages

    def rank(command: Sequence[str], ranks: int, logs: Path, seconds_to_stop: float) -> int:
        config, *names = command[command.index("nemo_ext.puzzle.rank") + 1 :]
        stages.run(config, names)
        return 0

    def train(run_dir: Path, ranks: int, target: int, console: object) -> None:
        fork_ranks(run_dir / run_directory.CONFIG, ranks)

    def run(*words: str) -> str:
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
            patch.setattr("nemo_ext.job.rank.run_ranks", rank)
            patch.setattr(launch, "_run_ranks", train)
            job.Job(compose("puzzle", words)).run()
        return said.getvalue()

    return run
