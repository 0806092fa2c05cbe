"""A Ray cluster on the nodes of an allocation, for one driver: started, monitored and removed without a trace.

    with ray_cluster(srun, nodes, job=job, logs=folder, environment=environment) as cluster:
        code = cluster.run(["-m", "nemo_ext.cli", "rl", ...])

Each node has a Slurm step that keeps `ray start --block` running while its standard input is open: the step ends with
the process that opened it, however that ends, and removes Ray's processes and files. The driver finds the cluster by
RAY_ADDRESS, with which `ray.init`, and so NeMo-RL's `init_ray`, connects or fails and never starts a local one.

`ray symmetric-run` is not used: it looks for any Ray on the machine and ends with `ray stop`, so two jobs on one
machine would interfere; it reports neither a missing nor a lost node, and leaves its files behind.
"""

import ctypes
import importlib
import json
import os
import re
import resource
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from nemo_ext.memory import sampler
from nemo_ext.slurm.cluster import call

_FIRST_PORT, _BLOCK, _BLOCKS = 28_672, 64, 64
"""Blocks end at 32767, the last port below Linux's ephemeral range; NeMo-RL's own ports are 11001 to 28000."""
_SERVICES = (
    *("node-manager-port", "object-manager-port", "runtime-env-agent-port", "dashboard-agent-grpc-port"),
    *("dashboard-agent-listen-port", "metrics-export-port"),
)
_OPEN_FILES = 65_536
"""Open files that Ray's guide to large clusters asks for."""
_STEP_OPTIONS = ("--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none")
_SHAPES = (
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS"),
    *("SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_CPU_BIND", "SLURM_EXACT"),
)
"""Variables with which srun would give a step of one task the share of one rank instead of the node."""
_LAUNCHERS = ("SLURM_", "PMI_", "PMIX_", "MPI_", "OMPI_")
"""Prefixes of variables that make a library in a worker assume that srun or mpirun started it."""
_STOP_SECONDS, _KILL_SECONDS = 30, 2
_ERROR = re.compile(r" [ECF] \d+ \d+\] (?!.*logging\.cc)|Check failed|exit code")
"""Errors in Ray's logs, whose lines begin with time, level, process and thread."""
_THIS = "nemo_ext.slurm.ray_cluster"


class ClusterError(RuntimeError):
    """Ray did not start on all nodes."""


@dataclass(frozen=True)
class Ports:
    """Block of ports of one job from `first` on, outside the ephemeral range; two jobs on one machine seldom share one.

    Workers use none of these: each binds a free port, so no range runs out.
    """

    first: int

    @classmethod
    def of(cls, job: str) -> "Ports":
        """Ports for a job number."""
        return cls(_FIRST_PORT + int(job) % _BLOCKS * _BLOCK)

    @classmethod
    def free(cls, job: str, restart: str = "0") -> "Ports":
        """The job's block, or the next one that is entirely free on this machine; each restart begins at another block.

        Raises:
            ClusterError: if no block is free.
        """
        for shift in range(_BLOCKS):
            ports = cls.of(str(int(job) + int(restart) + shift))
            if all(_is_free(port) for port in range(ports.first, ports.first + _BLOCK)):
                return ports
        raise ClusterError(
            f"ports {_FIRST_PORT} to {_FIRST_PORT + _BLOCK * _BLOCKS - 1}: no {_BLOCK} in a row are free"
        )

    def head(self) -> dict[str, int]:
        """Options of `ray start --head`."""
        return {"port": self.first, "ray-client-server-port": self.first + 1, "dashboard-port": self.first + 2}

    def head_variables(self) -> dict[str, str]:
        """Environment variables for the head's ports that have no option."""
        return {"AUTOSCALER_METRIC_PORT": str(self.first + 3), "DASHBOARD_METRIC_PORT": str(self.first + 4)}

    def node(self, place: int) -> dict[str, int]:
        """Options of `ray start` on a node after `place` others with the same address.

        Raises:
            ClusterError: if one machine holds more nodes than the block has ports for.
        """
        first = self.first + 8 * (place + 1)
        if first + 8 > self.first + _BLOCK:
            raise ClusterError(f"{place + 1} nodes have one address: ports are for {_BLOCK // 8 - 1}")
        return {name: first + number for number, name in enumerate(_SERVICES)}


@dataclass(frozen=True)
class _Step:
    node: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def account(self) -> str:
        """State of the step and the end of its log."""
        code = self.process.poll()
        ended = "runs, but has not joined" if code is None else f"ended with exit code {code}"
        return f"{self.node} {ended}; the end of {self.log}:\n{_last_lines(self.log)}"


@dataclass
class RayCluster:
    """A running Ray cluster.

    Attributes:
        srun: builds the srun command from Python's arguments and srun's options, as `Batch.srun` does.
        environment: environment of srun for the driver, with RAY_ADDRESS and RAY_AUTH_TOKEN.
        options: srun's options for the driver: on the first node, beside Ray's own step, in its container.
        grace: seconds that the driver has to fail by itself once a node is lost.
        say: receives progress messages.
    """

    srun: Callable[..., list[str]]
    environment: dict[str, str]
    options: tuple[str, ...]
    grace: float
    say: Callable[[str], object]
    _driver: "subprocess.Popen[bytes] | None" = None
    _steps: list[_Step] = field(default_factory=list)
    _told: set[str] = field(default_factory=set)

    def lost(self) -> list[str]:
        """Nodes on which Ray has ended."""
        return [step.node for step in self._steps if step.process.poll() is not None]

    def run(self, words: Sequence[str], *options: str) -> int:
        """Run the driver, Python with these arguments, to its end; returns its exit code, not 0 if it had to be ended.

        NeMo-RL's synchronous loops raise when an actor dies with its node; its asynchronous ones may hang, and so may
        a collective operation. So the driver is ended if it still runs `grace` seconds after a node is lost.
        """
        command = self.srun(words, *self.options, *options)
        driver = self._driver = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL)
        end: float | None = None
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return driver.wait(timeout=1)
                if self._tell_losses() and end is None:
                    end = time.monotonic() + self.grace
                if end is not None and time.monotonic() > end:
                    self.say(f"the driver still runs {self.grace:g} s after {', '.join(self.lost())} was lost: ended")
                    _kill(driver)
                    return driver.returncode or 1
        finally:
            _kill(driver)

    def interrupt(self) -> None:
        """Terminate the driver, upon which `run` returns; safe to call from a signal handler."""
        if self._driver is not None and self._driver.poll() is None:
            self._driver.terminate()

    def _tell_losses(self) -> bool:
        for step in self._steps:
            if step.process.poll() is not None and step.node not in self._told:
                self._told.add(step.node)
                self.say(f"Ray on {step.account()}")
        return bool(self._told)

    def _start(self, words: Sequence[str], node: str, log: Path, environment: Mapping[str, str], *options: str) -> None:
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.srun(words, *_STEP_OPTIONS, f"--nodelist={node}", *options),
                env={**self.environment, **environment},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
            )
        self._steps.append(_Step(node, process, log))

    def _wait(self, address: str, seconds: float, log: Path) -> None:
        """Wait until all nodes have joined; ClusterError if one has not in time or ended, or Ray cannot be asked."""
        names = [step.node for step in self._steps]
        missing = dict.fromkeys(names)
        words = self.srun(["-m", _THIS, "joined", address, str(seconds), *names], *self.options)
        with log.open("wb") as file:
            asking = subprocess.Popen(words, env=self.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        end = time.monotonic() + seconds
        try:
            while missing:
                over = asking.poll() is not None
                # A warning on stderr may have left the line that it came into without an end.
                for node in re.findall(r"joined (\S+)\n", log.read_text(errors="replace")):
                    if node in missing:
                        del missing[node]
                        self.say(f"Ray: {node} has joined, {len(names) - len(missing)} of {len(names)}")
                if missing and over and time.monotonic() < end and not self._one_ends():
                    raise ClusterError(f"Ray cannot be asked for its nodes; the end of {log}:\n{_last_lines(log)}")
                if missing and (self.lost() or time.monotonic() > end):
                    raise ClusterError(self._absent(list(missing), seconds))
                time.sleep(0.2)
            with suppress(subprocess.TimeoutExpired):
                asking.wait(timeout=_STOP_SECONDS)
        finally:
            _kill(asking)

    def _one_ends(self) -> bool:
        """True if a node's step has ended or ends within 3 s: the client may notice before Slurm does."""
        end = time.monotonic() + 3
        while not (lost := self.lost()) and time.monotonic() < end:
            time.sleep(0.1)
        return bool(lost)

    def _absent(self, missing: Sequence[str], seconds: float) -> str:
        blamed = [step for step in self._steps if step.process.poll() is not None]
        why = f"within {seconds:g} s" if not blamed else "before one ended"
        shown = blamed or [step for step in self._steps if step.node in missing]
        return "\n".join(
            [f"Ray: {', '.join(missing)} did not join {why}", *(step.account().rstrip() for step in shown[:4])]
        )

    def _stop(self, job: str) -> None:
        """End all steps; if one had to be killed or failed, another step removes its files."""
        for step in self._steps:
            assert step.process.stdin is not None
            step.process.stdin.close()
        end = time.monotonic() + _STOP_SECONDS
        for step in self._steps:
            with suppress(subprocess.TimeoutExpired):
                step.process.wait(timeout=max(0.1, end - time.monotonic()))
        killed = [step for step in self._steps if step.process.poll() != 0]
        for step in killed:
            _kill(step.process)
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    self.srun(["-m", _THIS, "clean", job], *_STEP_OPTIONS, f"--nodelist={step.node}"),
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_STOP_SECONDS,
                    check=False,
                )


@contextmanager
def ray_cluster(
    srun: Callable[..., list[str]],
    nodes: Sequence[str],
    *,
    job: str,
    logs: Path,
    environment: Mapping[str, str],
    container: str = "none",
    memory: tuple[Path, float] | None = None,
    wait: float = 600,
    grace: float = 120,
    say: Callable[[str], object] = print,
) -> Iterator[RayCluster]:
    """Run Ray on these nodes until the block ends; call it on the first of them.

    Args:
        srun: builds the srun command from Python's arguments and srun's options.
        nodes: node names; the first is this node and gets Ray's head and the driver.
        job: Slurm job id.
        logs: folder for each node's output, `ray-NODE.log`.
        environment: environment of every step, which workers inherit.
        container: `Container.runtime`. Pyxis makes a container for each step: those of the first node share one by
            name, as the driver and its Ray need the same /tmp and /dev/shm.
        memory: folder for samples of every node's memory (`nemo_ext.memory.sampler`), and seconds between samples.
        wait: seconds for all nodes to join.
        grace: see `RayCluster`.
        say: receives progress messages.

    Raises:
        ClusterError: if a node did not join, with the end of its output.
    """
    open_files()
    logs.mkdir(parents=True, exist_ok=True)
    restart = environment.get("SLURM_RESTART_COUNT", "0")
    ports, addresses = Ports.free(job, restart), [_address(node) for node in nodes]
    # The address by which the other nodes reach this one: its own name often resolves to 127.0.1.1 here.
    address = f"{_address_towards(addresses[-1])}:{ports.first}"
    given = {name: value for name, value in environment.items() if name not in _SHAPES}
    given |= _variables(given, address)
    shared = (f"--container-name=ray-{job}",) if container == "pyxis" else ()
    made = RayCluster(srun, given, (*_STEP_OPTIONS, f"--nodelist={nodes[0]}", *shared), grace, say)
    try:
        for number, node in enumerate(nodes):
            head, place = not number, addresses[:number].count(addresses[number])
            words = node_words(
                node, job=job, restart=restart, place=place, address=address, ports=ports, head=head, memory=memory
            )
            variables, options = (ports.head_variables(), shared) if head else ({}, ())
            made._start(words, node, logs / f"ray-{node}.log", variables, *options)
        made._wait(address, wait, logs / "ray-joined.log")
        say(f"Ray: {len(nodes)} nodes at {address}")
        yield made
    finally:
        made._stop(job)


def node_words(
    node: str,
    *,
    job: str,
    restart: str,
    place: int,
    address: str,
    ports: Ports,
    head: bool,
    memory: tuple[Path, float] | None = None,
) -> list[str]:
    """Arguments of Python on a node: the verb `hold` and options for `ray start`.

    The resource `slurm_node:NODE` shows that it has joined. `address` is the head's IP:PORT; `place` see `Ports.node`.
    """
    start = ["--head", "--include-dashboard=false"] if head else [f"--address={address}"]
    # The head is up once its raylet answers: in 2.49 another one starting meanwhile on its machine takes its sockets.
    up = f"{address.rpartition(':')[0]}:{ports.node(0)['node-manager-port']}"
    options = {
        "temp-dir": str(_folder(job) / f"{restart}-{place}"),
        "resources": json.dumps({_resource(node): 1}),
        **(ports.head() if head else {}),
        **ports.node(place),
        "min-worker-port": 0,
        "max-worker-port": 0,
    }
    sampled = ["", "0"] if memory is None else [str(memory[0]), f"{memory[1]:g}"]
    return ["-m", _THIS, "hold", job, up, *sampled, *start, *(f"--{name}={value}" for name, value in options.items())]


def start_command(words: Sequence[str], *, host: str, environment: Mapping[str, str]) -> list[str]:
    """The `ray start` command of this node, from the options of `node_words`; Slurm gives CPUs and GPUs in the step."""
    options = {"node-ip-address": host}
    for option, name in (("num-cpus", "SLURM_CPUS_ON_NODE"), ("num-gpus", "SLURM_GPUS_ON_NODE")):
        if name in environment:
            options[option] = environment[name]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        "--log-color=false",
        *(f"--{name}={value}" for name, value in options.items()),
        *words,
    ]


def open_files() -> None:
    """Raise the open-file limit of this process and its children as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _variables(given: Mapping[str, str], address: str) -> dict[str, str]:
    """Environment variables of every step.

    Since 2.60 Ray requires a token by default if the home directory has one, but only at the head; without a token
    anyone on the network can run code as the user. Earlier versions ignore the two variables.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {
        "RAY_ADDRESS": address,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        **({} if "RAY_AUTH_MODE" in given else token),
    }


def _address(node: str) -> str:
    """IP address of a node; Slurm is asked for a name that does not resolve."""
    with suppress(OSError):
        return socket.gethostbyname(node)
    said = call(["scontrol", "show", "node", node, "--oneliner"]).stdout.split()
    named = next((word.removeprefix("NodeAddr=") for word in said if word.startswith("NodeAddr=")), node)
    try:
        return socket.gethostbyname(named)
    except OSError as error:
        raise ClusterError(f"node {node}: {named}: {error}") from None


def _address_towards(host: str) -> str:
    """Address of this machine on the route to a host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 1))
        return str(way.getsockname()[0])


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asked.bind(("", port))
        except OSError:
            return False
        return True


def _resource(node: str) -> str:
    return f"slurm_node:{node}"


def _folder(job: str) -> Path:
    """Folder of Ray's files; short, as a socket's path has 107 characters at most."""
    return Path(f"/tmp/ray-{job}")


def _last_lines(path: Path, count: int = 20) -> str:
    with suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
    return ""


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End an srun and with it its step."""
    if process.poll() is not None:
        return
    process.terminate()  # srun kills its step
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# What follows runs on each node, inside the container.


def _hold(job: str, up: str, words: Sequence[str]) -> int:
    """Run `ray start` until it ends, standard input closes or a signal comes; other nodes first wait for the head."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide exit codes
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what Ray starts and forgets becomes this process's child
    open_files()
    temporary = Path(next(word for word in words if word.startswith("--temp-dir=")).removeprefix("--temp-dir="))
    _make_folder(job, temporary)
    host, _, port = up.rpartition(":")
    try:
        if "--head" not in words and not _answers(host, int(port), lambda: _is_over(asked)):
            return 0
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        command = start_command(words, host=_address_towards(host), environment=os.environ)
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        while process.poll() is None and not _is_over(asked):
            _reap(process.pid)
        over = _is_over(asked)
        if not over:
            _print_logs(temporary / "session_latest" / "logs")
            return process.returncode or 1
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_SECONDS)
        return 0
    finally:
        _kill_all()
        _clean(job, temporary)


def _is_over(asked: Sequence[int]) -> bool:
    """True if standard input was closed or a signal came; waits for up to half a second."""
    readable = select.select([sys.stdin.buffer], [], [], 0.5)[0]
    return bool(asked) or (bool(readable) and not os.read(sys.stdin.fileno(), 1024))


def _answers(host: str, port: int, over: Callable[[], bool]) -> bool:
    """Wait until the head accepts connections; False if `over` came first."""
    while not over():
        with suppress(OSError), socket.create_connection((host, port), timeout=5):
            return True
    return False


def _reap(own: int) -> None:
    """Reap ended children other than `own`."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == own:
            return
        os.waitpid(ended.si_pid, 0)


def _kill_all() -> None:
    """Kill all descendants; orphans are reparented to this process, so without a child none is left."""
    psutil = importlib.import_module("psutil")
    end = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < end:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        # An empty list proves nothing: a process that loses its parent while the list is made is not in it.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


def _make_folder(job: str, temporary: Path) -> None:
    folder = _folder(job)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # Never through a link, which anyone may have put there.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise SystemExit(f"{folder} is a link, another user's, or others may write in it: remove it")
    for old in folder.iterdir():  # left by a start that was killed
        if re.fullmatch(r"\d+-\d+", old.name) and old.name.partition("-")[0] != temporary.name.partition("-")[0]:
            shutil.rmtree(old, ignore_errors=True)


def _clean(job: str, temporary: Path | None = None) -> None:
    shutil.rmtree(temporary or _folder(job), ignore_errors=True)
    with suppress(OSError):
        _folder(job).rmdir()


def _print_logs(logs: Path) -> None:
    """Print errors from the logs of Ray's own processes, without stack traces, before the files are removed."""
    for name in ("ray_process_exit.log", "gcs_server.out", "raylet.out", "raylet.err"):
        lines = [line for line in _last_lines(logs / name, 500).splitlines() if _ERROR.search(line)]
        if lines:
            print(f"== {name}", *lines[-10:], sep="\n", flush=True)


def _joined(address: str, seconds: float, names: Sequence[str]) -> None:
    """Print each node as it joins."""
    end = time.monotonic() + seconds
    host, _, port = address.rpartition(":")
    _answers(host, int(port), lambda: _slept(end))
    ray: Any = importlib.import_module("ray")
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            break
        except (ConnectionError, RuntimeError):  # the head's own raylet is not up
            if _slept(end):
                raise
    missing = dict.fromkeys(names)
    while missing and not _slept(end):
        here = {name for node in ray.nodes() if node["Alive"] for name in node["Resources"]}
        for name in [name for name in missing if _resource(name) in here]:
            del missing[name]
            print(f"joined {name}", flush=True)


def _slept(end: float) -> bool:
    """Sleep for half a second; True if `end` has passed."""
    time.sleep(0.5)
    return time.monotonic() > end


def main() -> NoReturn:
    """The steps' commands: `hold JOB HEAD MEMORY SECONDS OPTION...`, `joined ADDRESS SECONDS NODE...`, `clean JOB`."""
    what, *words = sys.argv[1:]
    if what == "hold":
        job, up, memory, seconds, *more = words
        with sampler.sampled(Path(memory), float(seconds) or None):
            sys.exit(_hold(job, up, more))
    if what == "joined":
        _joined(words[0], float(words[1]), words[2:])
    elif what == "clean":
        _clean(words[0])
    else:
        raise SystemExit(f"{what}: hold, joined or clean")
    sys.exit(0)


if __name__ == "__main__":
    main()
