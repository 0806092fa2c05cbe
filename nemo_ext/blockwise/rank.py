"""The process of one rank that works block by block on a model, started by a job, alone or under `torchrun`."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from nemo_ext.job.config import INTERRUPTED, USER_ERROR
from nemo_ext.job.interrupts import kept_interrupts
from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.ranks import ON_NODES, rank_log, run_ranks


def check_machine(config: Mapping[str, Any]) -> None:
    """Refuse a config that names no run directory, or more machines than this one outside a Slurm job on several.

    Raises:
        ValueError: names the key.
    """
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: name a directory")
    nodes = config["launcher"]["nodes"]
    if nodes != 1 and ON_NODES not in os.environ:
        raise ValueError(
            f"launcher.nodes={nodes}: this command runs on this machine only; `nemo-ext submit job=puzzle` on several"
        )


def start(module: str, config: Path, *words: str, ranks: int) -> None:
    """Runs a module as ranks, with the config's path and these words, to its end.

    Raises:
        KeyboardInterrupt: the user interrupted.
        SystemExit: a rank failed.
    """
    code = run_ranks([sys.executable, "-m", module, str(config), *words], ranks, config.parent)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        sys.exit(code if code > 0 else 1)


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
        with log.open("a") as said, contextlib.redirect_stdout(said), kept_interrupts():
            work(config_path)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:
        if ON_NODES in os.environ:  # the job says it once: srun may end the first rank before it does
            with rank_log(log.parent, int(os.environ["RANK"])).open("a") as own:
                print(f"error: {error}", file=own)
        else:
            print(f"error: {error}", file=sys.stderr)  # of ranks other than the first, into their logs
        return USER_ERROR
    return 0


def leave(code: int) -> NoReturn:
    """Ends the process at once: gloo's threads may abort a process during its shutdown."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
