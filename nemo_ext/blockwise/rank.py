"""The process of one rank of Puzzle's stages: what the job starts, alone or under `torchrun`.

    torchrun --nproc-per-node N -m nemo_ext.blockwise.rank RUN_DIR/CHILD/config.yaml library distill score cost

Every rank has the whole parent; data are shared out. Finished stages are passed over, interrupted ones go on.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from nemo_ext.job.config import INTERRUPTED, USER_ERROR
from nemo_ext.megatron.rank import end_with_parent

LOG = "stages.log"


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


def stages(config_path: str) -> None:
    """Carries out the stages that the command line names; Megatron is imported now."""
    from nemo_ext.puzzle.stages.stages import run

    run(config_path, sys.argv[2:])


if __name__ == "__main__":
    leave(main(sys.argv[1], LOG, stages))
