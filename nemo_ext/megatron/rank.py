"""Process of one training rank, started by `torchrun`, `srun` or, if it is the only one, by the command.

    torchrun --nproc-per-node N -m nemo_ext.megatron.rank RUN_DIR/config.yaml

The module imports nothing heavy at the top, because Megatron's checkpoint writer starts a helper process that imports
it again.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from nemo_ext.job.parent import end_with_parent


def run(config_path: str, prepare: Callable[[], None] | None = None) -> NoReturn:
    """Train from a config, then end the process with code 0, a SystemExit's code, or 1 after printing a traceback.

    Args:
        config_path: path of the resolved config.
        prepare: function called after Megatron is imported and before its arguments are read.
    """
    code = 0
    try:
        from nemo_ext.megatron.trainer import main

        keep_workers()
        main(config_path, prepare)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        with suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
        code = 1
    leave(code)


def keep_workers() -> None:
    """Make data loader workers ignore SIGTERM as soon as torch has installed its signal handlers.

    torchrun sends SIGTERM to the whole process group so that the ranks save. Megatron's workers ignore it only from
    their `worker_init_fn` on, and a worker that ends before that ends its rank.
    """
    from torch.utils.data._utils import signal_handling

    set_handlers = signal_handling._set_worker_signal_handlers

    def ignoring(*arguments: object) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        set_handlers(*arguments)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    signal_handling._set_worker_signal_handlers = ignoring


def leave(code: int) -> NoReturn:
    """End the process at once with an exit code, without Python's own clean-up.

    With `exit_signal_handler`, Megatron makes its data loader workers ignore SIGTERM
    (training/datasets/data_samplers.py) and keeps their iterators alive, so Python would wait for the workers forever.
    They hold nothing that is still needed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk; Python's own exit would then wait for children
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def guard_helper() -> None:
    """Tie the checkpoint writer's helper process to its rank.

    A scheduler or torchrun sends SIGTERM to the whole process group, which would end the helper while the rank still
    needs it to write the last checkpoint (core/dist_checkpointing/strategies/filesystem_async.py). Conversely, a killed
    rank would leave the helper behind.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)


if __name__ == "__mp_main__":
    guard_helper()
if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)  # a rank that loses its torchrun or srun saves and ends
    run(sys.argv[1])
