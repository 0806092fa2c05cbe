"""Training run of one rank; with a lock file, it first imports, then waits for the GPU.

python benchmarks/gpu_rank.py LOCK|- KEY=VALUE...
"""

import fcntl
import os
import signal
import sys
from typing import TextIO

from nemo_ext.job.parent import end_with_parent
from nemo_ext.megatron.rank import guard_helper

locked: list[TextIO] = []
"""Lock file, open until the process ends."""


def wait() -> None:
    """Acquire the lock unless it is `-`."""
    if sys.argv[1] != "-":
        stream = open(sys.argv[1], "w")  # noqa: SIM115
        fcntl.flock(stream, fcntl.LOCK_EX)
        locked.append(stream)


def main() -> None:
    from nemo_ext.job.config import compose
    from nemo_ext.job.ranks import rank_environment, reserve_port
    from nemo_ext.launch import prepare
    from nemo_ext.megatron.rank import run
    from nemo_ext.megatron.run import Run

    config = compose("train", sys.argv[2:])
    Run.from_config(config).tokenized()
    port = reserve_port()
    os.environ |= {**rank_environment(1), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    run(str(prepare(config)), wait)


if __name__ == "__mp_main__":
    guard_helper()
if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    main()
