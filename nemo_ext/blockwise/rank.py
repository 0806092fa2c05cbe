"""The process of one rank of work on a model opened up: what a job starts, alone or under `torchrun`."""

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
    """Does a rank's work; returns the process's exit code.

    Args:
        config_path: of the composed config.
        log_name: of the file beside it for what Megatron and torch have to say.
        work: is given the config's path.
    """
    end_with_parent(signal.SIGTERM)
    log = Path(config_path).with_name(log_name)
    # What Megatron and torch have to say beside our own messages; of all ranks, which say little.
    logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.captureWarnings(True)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # has a handler of its own, and no CUDA
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
    """Ends the process at once: gloo's threads may abort one that takes itself apart."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
