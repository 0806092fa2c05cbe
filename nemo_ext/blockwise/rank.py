"""The process of one rank that works block by block on a model, started by a job, alone or under `torchrun`."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from nemo_ext.job.config import INTERRUPTED, USER_ERROR
from nemo_ext.job.parent import end_with_parent


def main(config_path: str, log_name: str, work: Callable[[str], None]) -> int:
    """Runs a rank's work; returns the exit code of the process.

    Args:
        config_path: path of the composed config.
        log_name: name of the log file beside it for messages of Megatron and torch.
        work: function that is called with the config's path.
    """
    end_with_parent(signal.SIGTERM)
    log = Path(config_path).with_name(log_name)
    # Messages of Megatron and torch besides our own; from all ranks, which log little.
    logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.captureWarnings(True)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # has its own handler; warns without CUDA
    try:
        with log.open("a") as said, contextlib.redirect_stdout(said):
            work(config_path)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    return 0


def leave(code: int) -> NoReturn:
    """Ends the process at once: gloo's threads may abort a process during its shutdown."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
