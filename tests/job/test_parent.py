"""Ending of processes."""

import signal
import subprocess

from nemo_ext.job.parent import end


def test_a_process_that_ignores_the_signal_is_killed() -> None:
    command = ["bash", "-c", "trap '' INT; echo; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert end(process, 0.2, signal.SIGINT) == -signal.SIGKILL
        assert end(process, 0.2) == -signal.SIGKILL
