"""Rehearses ranks in forks, so that Python and Megatron start once."""

import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from nemo_ext.rehearsal import ranks


@pytest.fixture(autouse=True, scope="module")
def forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forks the processes that `rehearse` starts from one that has imported Megatron."""
    one_at_a_time = threading.Lock()  # ranks are rehearsed in threads

    def run(command: Sequence[str], *, stdout: TextIO, env: Mapping[str, str], **_: Any) -> SimpleNamespace:
        program = command[command.index("-m") :]
        with one_at_a_time:
            (code,) = request.getfixturevalue("fork_program")(program, stdout.name, environment=env)
        return SimpleNamespace(returncode=code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))
        yield
