"""Parent of the supervisors: an interpreter started in advance, with the usual modules already imported.

It never sees an answer: each connection that the host passes to it is handled by a new child process.
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

# Modules that contest programs import. random and threading slow down every fork, so they are imported on demand.
_USUAL = (
    *("bisect", "collections", "copy", "datetime", "decimal", "functools", "heapq", "itertools", "json", "math"),
    *("operator", "re", "string", "typing"),
)


def main() -> None:
    """Fork a supervisor for every connection received over descriptor 0, until the host is gone."""
    host = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, kernel.OWN_DESCRIPTORS))
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    for name in _USUAL:
        importlib.import_module(name)
    # Programs must not import from this package's folder or the working directory, the first two entries.
    del sys.path[:2]
    sys.dont_write_bytecode = True
    if os.uname().machine in syscalls.MACHINES:
        # Compiled once for all supervisors.
        syscalls.refusals(os.uname().machine)
    gc.collect()
    gc.freeze()
    # The kernel reaps supervisors that have exited.
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
                supervisor.serve(socket.socket(fileno=kernel.move_up(descriptors[0])))
                status = 0
            finally:
                os._exit(status)
        with contextlib.suppress(OSError):
            os.close(descriptors[0])
