"""A rank of training on one GPU that waits, once everything is imported, until others are done with the device.

python benchmarks/gpu_rank.py RUN_DIR/config.yaml [LOCK]
"""

import fcntl
import signal
import sys
from typing import TextIO

from nemo_ext.job.parent import end_with_parent
from nemo_ext.megatron.rank import guard_helper, run

held: list[TextIO] = []
"""Open until the process ends."""


def wait() -> None:
    """Takes the lock."""
    stream = open(sys.argv[2], "w")  # noqa: SIM115
    fcntl.flock(stream, fcntl.LOCK_EX)
    held.append(stream)


if __name__ == "__mp_main__":
    guard_helper()
if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    run(sys.argv[1], wait if len(sys.argv) > 2 else None)
