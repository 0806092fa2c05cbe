"""Ray cluster on the nodes of an allocation: started for one driver, monitored, and removed completely.

    with RayCluster(srun, nodes, job=job, logs=folder, environment=environment).running() as cluster:
        code = cluster.run(["-m", "nemo_ext.cli", "rl", ...])

Each node has a Slurm step that keeps `ray start --block` running while its standard input is open. The step therefore
ends with the process that opened it, however that ends, and removes Ray's processes and files. The driver finds the
cluster through RAY_ADDRESS. If it is set, `ray.init` (and NeMo-RL's `init_ray`) connects to that cluster or fails, but
never starts a local one.

`ray symmetric-run` (Ray 2.50 and later; NeMo-RL 0.5 has 2.49) is not used: it refuses to start on a machine with
another job's Ray, also stops that Ray when it ends, exits with 0 if Ray does not start, does not detect a lost node,
and leaves processes and files behind when Slurm ends it.
"""

import ctypes
import json
import math
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import psutil

from nemo_ext.job.parent import end
from nemo_ext.job.ranks import reserve_port
from nemo_ext.memory import sampler
from nemo_ext.slurm.cluster import call

_OPEN_FILES = 65_536
"""Limit on open files that Ray's guide to large clusters recommends."""
_STEP = ("--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none")
_SHAPES = (
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS"),
    *("SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_CPU_BIND", "SLURM_EXACT"),
)
"""Variables that would make srun give a one-task step the resources of one rank instead of the whole node."""
_LAUNCHERS = ("SLURM_", "PMI_", "PMIX_", "MPI_", "OMPI_")
"""Prefixes of variables that make libraries in a worker assume that it was started by srun or mpirun."""
_HEAD_PORTS = ("port", "ray-client-server-port", "dashboard-port")
"""Options for the head node's ports that must be chosen in advance; Ray picks free ports for everything else."""
_SECONDS_TO_END, _SECONDS_TO_STOP, _SECONDS_OF_SRUN = 2, 30, 10
"""Seconds allowed to `ray start` after a signal, to steps after their input is closed, and to srun after SIGTERM."""
_STARTED = "Ray runtime started."
"""Line that `ray start` prints once the node is registered with the head."""
_ERROR = re.compile(r" [ECF] \d+ \d+\] (?!.*logging\.cc)|Check failed")
"""Pattern of error lines in Ray's logs, whose lines begin with time, level, process and thread."""


class ClusterError(RuntimeError):
    """Raised if Ray does not start on all nodes."""


@dataclass
class RayCluster:
    """Ray cluster, which is created and used on the first of its nodes.

    Attributes:
        srun: function that builds the srun command from Python's arguments and srun's options, like `Batch.srun`.
        nodes: node names; the first is this node, on which Ray's head and the driver run.
        job: Slurm job id.
        logs: folder for the output of each node, `ray-NODE.log`.
        environment: environment of all steps, inherited by workers; Ray's variables, such as RAY_ADDRESS, are added.
        container: `Container.runtime`. Pyxis creates a container per step; the steps of the first node share a named
            one, as the driver and its Ray need the same /tmp and /dev/shm.
        memory: folder for every node's memory samples (`nemo_ext.memory.sampler`), and seconds between samples; None to
            take no samples.
        wait: seconds within which all nodes must join.
        grace: seconds after the loss of a node within which the driver may fail on its own.
        say: function that receives progress messages.
    """

    srun: Callable[..., list[str]]
    nodes: Sequence[str]
    _: KW_ONLY
    job: str
    logs: Path
    environment: Mapping[str, str]
    container: str = "none"
    memory: tuple[Path, float] | None = None
    wait: float = 600
    grace: float = 120
    say: Callable[[str], object] = print
    _driver: "subprocess.Popen[bytes] | None" = None
    _steps: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)
    _joined: list[str] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator["RayCluster"]:
        """Run Ray on the nodes until the block ends.

        Raises:
            ClusterError: a node did not join; the message includes the end of its output.
        """
        _raise_open_files()
        self.logs.mkdir(parents=True, exist_ok=True)
        deadline, host = time.monotonic() + self.wait, _address_towards(self.nodes[-1])
        with ExitStack() as held:
            numbers = [held.enter_context(reserve_port()).getsockname()[1] for _ in _HEAD_PORTS]
            ports = [f"--{name}={number}" for name, number in zip(_HEAD_PORTS, numbers, strict=True)]
            address = f"{host}:{numbers[0]}"
            variables = {name: value for name, value in self.environment.items() if name not in _SHAPES}
            # Since 2.60, Ray requires a token by default if the home directory has one, but only at the head. Without
            # a token, anyone on the network can run code as the user. Earlier versions ignore the two variables.
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            self.environment = {
                **({} if "RAY_AUTH_MODE" in variables else token),
                **variables,
                "RAY_ADDRESS": address,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
                "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            }
            try:
                self._start(self.nodes[0], "--head", "--include-dashboard=false", f"--node-ip-address={host}", *ports)
                # In Ray 2.49, another Ray that starts meanwhile on the head's machine would take over its sockets.
                self._wait_until_joined(deadline)
                for node in self.nodes[1:]:
                    self._start(node, f"--address={address}")
                self._wait_until_joined(deadline)
                self.say(f"Ray: {len(self.nodes)} nodes at {address}")
                yield self
            finally:
                self._stop()

    def lost(self) -> list[str]:
        """Nodes on which Ray has ended."""
        return [node for node, process in self._steps.items() if process.poll() is not None]

    def run(self, words: Sequence[str], *options: str) -> int:
        """Run the driver, Python with the arguments `words`, and return its exit code (nonzero if it was terminated).

        NeMo-RL's synchronous loops raise an error when an actor dies with its node, but its asynchronous loops and
        collective operations may hang. The driver is therefore terminated if it is still running `grace` seconds after
        a node is lost. `options` are further options of srun.
        """
        command = self.srun(words, *self._options(self.nodes[0]), *options)
        driver = self._driver = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL)
        reported, deadline = set[str](), math.inf
        try:
            while driver.poll() is None:
                for node in set(self.lost()) - reported:
                    reported.add(node)
                    self.say(f"Ray on {self._account(node)}")
                    deadline = min(deadline, time.monotonic() + self.grace)
                if time.monotonic() > deadline:
                    lost = ", ".join(self.lost())
                    self.say(f"the driver was still running {self.grace:g} s after {lost} was lost, and is terminated")
                    return end(driver, _SECONDS_OF_SRUN) or 1
                time.sleep(0.2)
            return driver.returncode
        finally:
            end(driver, _SECONDS_OF_SRUN)

    def interrupt(self) -> None:
        """Terminate the driver, so that `run` returns; safe to call from a signal handler."""
        if self._driver is not None and self._driver.poll() is None:
            self._driver.terminate()

    def _options(self, node: str) -> list[str]:
        shared = self.container == "pyxis" and node == self.nodes[0]
        return [*_STEP, f"--nodelist={node}", *([f"--container-name=ray-{self.job}"] if shared else [])]

    def _start(self, node: str, *options: str) -> None:
        """Start a node's step, with free ports for services and workers and a Ray resource named after the node."""
        folder, seconds = self.memory or ("", 0)
        ports = (f"--{name}-port=0" for name in ("dashboard-agent-listen", "min-worker", "max-worker"))
        resource = f"--resources={json.dumps({f'slurm_node:{node}': 1})}"
        words = ["-m", "nemo_ext.slurm.ray_cluster", self.job, str(folder), f"{seconds:g}", *options, *ports, resource]
        command = self.srun(words, *self._options(node))
        with self._log(node).open("wb") as log:
            self._steps[node] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def _wait_until_joined(self, deadline: float) -> None:
        """Wait until all started nodes have joined; raise ClusterError if one is lost, or at the time `deadline`."""
        while len(self._joined) < len(self._steps):
            lost = self.lost()
            missing = [node for node in self._steps if node not in self._joined]
            for node in [node for node in missing if _STARTED in self._log(node).read_text(errors="replace")]:
                missing.remove(node)
                self._joined.append(node)
                self.say(f"Ray: {node} has joined, {len(self._joined)} of {len(self.nodes)}")
            if missing and (lost or time.monotonic() > deadline):
                why = "before a node was lost" if lost else f"within {self.wait:g} s"
                accounts = [self._account(node) for node in (lost or missing)[:4]]
                raise ClusterError(
                    "\n".join(
                        [f"Ray: {', '.join(missing)} did not join {why}; correct the error in its log:", *accounts]
                    )
                )
            time.sleep(0.2)

    def _account(self, node: str) -> str:
        """Describe a node's step by its state and the end of its log."""
        code = self._steps[node].poll()
        state = "runs, but has not joined" if code is None else f"ended with exit code {code}"
        lines = self._log(node).read_text(errors="replace").splitlines()
        return "\n".join([f"{node} {state}; the end of {self._log(node)}:", *lines[-20:]])

    def _log(self, node: str) -> Path:
        return self.logs / f"ray-{node}.log"

    def _stop(self) -> None:
        for process in self._steps.values():
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + _SECONDS_TO_STOP
        for process in self._steps.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            end(process, _SECONDS_OF_SRUN)


def _address_towards(node: str) -> str:
    """IP address of this machine on the route to a node, as its own name often resolves to 127.0.1.1.

    If the node's name does not resolve, its address comes from Slurm.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            try:
                way.connect((node, 1))  # sends nothing
            except socket.gaierror:
                said = re.search(r"NodeAddr=(\S+)", call(["scontrol", "show", "node", node]).stdout)
                way.connect((said[1] if said else node, 1))
        except OSError as error:
            raise ClusterError(
                f"this node cannot reach {node} ({error}): exclude it, or report it to the cluster's support"
            ) from None
        return str(way.getsockname()[0])


def _raise_open_files() -> None:
    """Raise the open-file limit of this process and its children, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


# The rest runs on each node, inside the container.


def _hold(folder: Path, options: Sequence[str]) -> int:
    """Run `ray start` with `options` until it ends, standard input closes or a signal arrives; return its exit code.

    `folder` is Ray's temporary folder on this node, which is removed at the end.
    """
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of Ray become children of this process
    _raise_open_files()
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():  # /tmp is writable for everyone
        raise SystemExit(f"{folder} is a symbolic link or belongs to another user; remove it")
    stop = threading.Event()

    def wait_for_end_of_input() -> None:
        os.read(0, 1)
        stop.set()

    threading.Thread(target=wait_for_end_of_input, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stop.set())
    # Slurm sets these for the step.
    sizes = (("num-cpus", "SLURM_CPUS_ON_NODE"), ("num-gpus", "SLURM_GPUS_ON_NODE"))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--log-color=false", f"--temp-dir={folder}"]
    command += [f"--{name}={os.environ[variable]}" for name, variable in sizes if variable in os.environ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    try:
        process = subprocess.Popen([*command, *options], env=environment, stdin=subprocess.DEVNULL)
        while process.poll() is None and not stop.wait(0.2):
            pass
        if not stop.is_set():
            _print_errors(folder / "session_latest" / "logs")
            return process.returncode or 1
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
        return 0
    finally:
        _kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)


def _print_errors(logs: Path) -> None:
    """Print the last errors in the logs of Ray's processes, before the files are removed."""
    for path in (*logs.glob("gcs_server.*"), *logs.glob("raylet.*")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if _ERROR.search(line)]
        if lines:
            print(f"== {path.name}", *lines[-10:], sep="\n", flush=True)


def _kill_descendants() -> None:
    """Kill all descendants; orphans become children of this process, so that none is left once it has no children."""
    with suppress(ChildProcessError):
        while True:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            os.waitpid(-1, 0)


if __name__ == "__main__":
    job, memory, seconds, *words = sys.argv[1:]
    with sampler.sampled(Path(memory), float(seconds) or None):
        # The path is short, as a socket's path has at most 107 characters.
        sys.exit(_hold(Path(f"/tmp/ray-{job}"), words))
