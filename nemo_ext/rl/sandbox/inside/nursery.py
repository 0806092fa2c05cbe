"""Parent of the supervisors: an interpreter that is started, and has imported what programs use, ahead of need.

It knows nothing of any answer: each connection that the host hands over goes to a child of its own.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import socket
import sys

from nemo_ext.rl.sandbox.inside import kernel, supervisor, syscalls

# What contest programs import. Not random and threading, which make every fork dearer; they come when one asks.
_USUAL = (
    *("bisect", "collections", "copy", "datetime", "decimal", "functools", "heapq", "itertools", "json", "math"),
    *("operator", "re", "string", "typing"),
)


def main() -> None:
    """Fork a supervisor for every connection that comes over descriptor 0, until the host is gone."""
    host = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, kernel.OWN_DESCRIPTORS))
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    for name in _USUAL:
        importlib.import_module(name)
    # The first are this package's folder and the working directory: programs import from neither.
    del sys.path[:2]
    sys.dont_write_bytecode = True
    if os.uname().machine in syscalls.MACHINES:
        # Made once for all.
        syscalls.refusals(os.uname().machine)
    gc.collect()
    gc.freeze()
    # Ended supervisors need no burial.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, descriptors, _, _ = socket.recv_fds(host, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            status = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                host.close()
                low = descriptors[0]
                connection = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, kernel.OWN_DESCRIPTORS))
                os.close(low)
                supervisor.serve(connection)
                status = 0
            finally:
                os._exit(status)
        with contextlib.suppress(OSError):
            os.close(descriptors[0])
