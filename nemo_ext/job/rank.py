"""Process of one rank, and the start of all ranks of a job on this machine or on the nodes of its allocation."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from nemo_ext.job import bf16
from nemo_ext.job.config import INTERRUPTED, USER_ERROR
from nemo_ext.job.interrupts import kept_interrupts
from nemo_ext.job.progress import notice
from nemo_ext.job.ranks import ON_NODES, SECONDS_TO_STOP, rank_log, run_ranks


def check_machine(config: Mapping[str, Any]) -> None:
    """Check that a config has a run directory, and asks for several nodes only within a Slurm job on several nodes.

    It prints a warning if BF16 is slow here.

    Raises:
        ValueError: the check failed; the message starts with the key.
    """
    if slow := bf16.remark("megatron.bf16=false", used=bool(config["megatron"].get("bf16"))):
        notice(slow)
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: set it to a directory")
    nodes = config["launcher"]["nodes"]
    if nodes != 1 and ON_NODES not in os.environ:
        raise ValueError(
            f"launcher.nodes={nodes}: this command runs on one machine only; set it to 1, or use `nemo-ext submit "
            "job=puzzle`"
        )


def start(module: str, config: Path, *words: str, ranks: int, seconds_to_stop: float = SECONDS_TO_STOP) -> None:
    """Run a module on `ranks` ranks, with the config's path and `words` as arguments, and wait for it to end.

    Interrupted ranks are killed after `seconds_to_stop`.

    Raises:
        KeyboardInterrupt: the user interrupted the run.
        SystemExit: a rank failed.
    """
    code = run_ranks([sys.executable, "-m", module, str(config), *words], ranks, config.parent, seconds_to_stop)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        sys.exit(code if code > 0 else 1)


def main(config_path: str, log_name: str, work: Callable[[str], None]) -> int:
    """Run a rank's work, and return the exit code for the process.

    Args:
        config_path: path of the composed config.
        log_name: name of the log file in the same directory, for messages from Megatron and torch.
        work: function that does the work, called with the config's path.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    log = Path(config_path).with_name(log_name)
    # Messages of Megatron and torch as well as our own, from all ranks, as they log little.
    logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.captureWarnings(True)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # has its own handler; warns without CUDA
    try:
        with log.open("a") as stream, contextlib.redirect_stdout(stream), kept_interrupts():
            work(config_path)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:
        if ON_NODES in os.environ:  # the job reports the error once, as srun may end the first rank before it can
            with rank_log(log.parent, int(os.environ["RANK"])).open("a") as stream:
                print(f"error: {error}", file=stream)
        else:
            print(f"error: {error}", file=sys.stderr)  # stderr of ranks other than the first is in their logs
        return USER_ERROR
    return 0


def leave(code: int) -> NoReturn:
    """End the process at once with an exit code, because gloo's threads may abort during a regular shutdown."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
