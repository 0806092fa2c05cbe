"""Several replicas behind one endpoint: this machine's replicas, and the balancer on one of the machines.

Each machine (or each task of a Slurm array) keeps its replicas running. The holder of a lease in the run directory also
runs the balancer; if it dies, another machine takes over and writes its address to `endpoint.json`.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_ext.endpoint.address import FILE, Address
from nemo_ext.job.config import USER_ERROR
from nemo_ext.job.leases import Leases
from nemo_ext.job.parent import end, end_with_parent
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import write_config
from nemo_ext.serving.balancer import Balancer
from nemo_ext.serving.listen import bind, server, url_of
from nemo_ext.serving.members import FOLDER, Watch, present
from nemo_ext.serving.settings import ServingSettings

KEY = "NEMO_EXT_SERVING_KEY"
"""Environment variable that holds the replicas' key."""
LOG = "serve.log"
_LEASE, _LEASE_SECONDS = "balancer", 20.0
_LOOK, _SECONDS_TO_STOP = 1.0, 60.0
_QUICK, _MOST_QUICK = 600.0, 3
"""Seconds, and the maximum number of starts within them; a replica that was started more often is not restarted."""


def shared_key(run_dir: Path, settings: ServingSettings) -> str | None:
    """Return the API key of a run's endpoint, which its first process creates; None for an open endpoint."""
    file = run_dir / "key"
    if settings.open or settings.key_variable is not None:
        return settings.key()
    with contextlib.suppress(FileExistsError):
        temporary = run_dir / f".key.{os.getpid()}.{socket.gethostname()}"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600), "w") as new:
            new.write(secrets.token_urlsafe(32))
        try:
            os.link(temporary, file)
        finally:
            temporary.unlink()
    return file.read_text()


@dataclass
class Replica:
    """Server in a separate process.

    Attributes:
        folder: run directory of the server, which holds its config and log.
        process: the process; None before it is started.
        starts: time of each start, by `time.monotonic`.
    """

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    starts: list[float] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """File with the server's output."""
        return self.folder / LOG

    def start(self, config: Mapping[str, Any], key: str | None = None) -> None:
        """Start the process with the config of a serve job, and with `key` in its environment."""
        write_config(self.folder, config)
        environment = {**os.environ, **({KEY: key} if key is not None else {})}
        self.starts.append(time.monotonic())
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nemo_ext.serving.replica", str(self.folder)],
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # `stop` forwards Ctrl-C
                preexec_fn=lambda: end_with_parent(signal.SIGTERM),
            )

    def ended(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return None if self.process is None else self.process.poll()

    def said(self) -> str:
        """Last line of the server's output, followed by the log's path."""
        lines = self.log.read_text(errors="replace").strip().splitlines() or [""]
        return f"{lines[-1][:300].removeprefix('error: ')} (log: {self.log})"

    def is_up(self) -> bool:
        """True if the server accepts requests; False if it does not yet.

        Raises:
            ValueError: the process has ended.
        """
        if (self.folder / FILE).exists():
            return True
        if (code := self.ended()) is not None:
            raise ValueError(f"the server ended with exit code {code}: {self.said()}")
        return False

    def wait(self) -> None:
        """Wait until the server is up.

        Raises:
            ValueError: the process has ended.
        """
        while not self.is_up():
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop the server once its requests in progress are done."""
        if self.process is not None:
            end(self.process, _SECONDS_TO_STOP, signal.SIGINT)

    @property
    def hopeless(self) -> bool:
        """True if the process has recently been started so often that another restart is pointless."""
        return len([start for start in self.starts if time.monotonic() - start < _QUICK]) > _MOST_QUICK


class ReplicaFailed(Exception):
    """Raised if a replica has ended too often."""


async def run_group(
    config: Mapping[str, Any], settings: ServingSettings, run_dir: Path, numbers: Sequence[int], port: int
) -> None:
    """Keep replicas running until cancelled, and the balancer too while this process holds its lease.

    Args:
        numbers: numbers of this machine's replicas.
        port: port of the endpoint; 0 for a free one.

    Raises:
        ReplicaFailed: a replica has ended too often; the message names its log.
        ValueError: a replica has ended because of an invalid setting.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    key = shared_key(run_dir, settings)
    overrides = {"replicas": 1, "replica": None, "least": None, "key_variable": key and KEY, "open": key is None}
    overrides |= {"name": settings.name}
    config = {**config, "port": 0, "serving": {**config["serving"], **overrides}}
    replicas = [Replica(run_dir / FOLDER / f"{number:04}") for number in numbers]
    for replica in replicas:
        replica.start({**config, "run_dir": str(replica.folder)}, key)
    balancing: asyncio.Task[None] | None = None
    leases = Leases(run_dir / ".leases", _LEASE_SECONDS)
    leases.folder.mkdir(exist_ok=True)
    try:
        while True:
            for replica in replicas:
                if (code := replica.ended()) is None:
                    continue
                name = replica.folder.name
                if code == USER_ERROR:
                    raise ValueError(f"replica {name} cannot start: {replica.said()}")
                if replica.hopeless:
                    raise ReplicaFailed(f"replica {name} ended too often, last with exit code {code}: {replica.said()}")
                notice(f"replica {name} ended with exit code {code} and is restarted (log: {replica.log})")
                replica.start({**config, "run_dir": str(replica.folder)}, key)
            leases.touch()
            if balancing is None and leases.take(_LEASE):
                balancing = asyncio.create_task(_balance(settings, run_dir, key, port))
            if balancing is not None and balancing.done():
                balancing.result()
                return
            await asyncio.sleep(_LOOK)
    finally:
        if balancing is not None and not balancing.done():
            balancing.cancel()
            await asyncio.gather(balancing, return_exceptions=True)
        leases.drop(_LEASE)
        with ThreadPoolExecutor(len(replicas)) as pool:
            list(pool.map(Replica.stop, replicas))


async def _balance(settings: ServingSettings, run_dir: Path, key: str | None, port: int) -> None:
    """Run the balancer until cancelled, and publish its address in the run directory once enough replicas answer."""
    bound = bind(settings.host, port)
    balancer = Balancer(Watch(run_dir))
    keeping = asyncio.create_task(balancer.keep())
    front = server(balancer.app(key))
    serving = asyncio.create_task(front.serve(sockets=[bound]))
    least = settings.replicas if settings.least is None else settings.least
    try:
        (run_dir / FILE).unlink(missing_ok=True)
        while balancer.up < least and not serving.done():
            await asyncio.sleep(0.2)
        if not serving.done():
            first = next(member.address for member in balancer.members.values() if member.up)
            url = url_of(settings.host, bound.getsockname()[1])
            address = Address(url=url, model=first.model, key=key, digest=first.digest)
            with present(run_dir, address, lambda: True) as file:
                notice(
                    f"{first.model} is served at {url} by {balancer.up} replicas; the key is in {file}; Ctrl-C stops it"
                )
                await serving
    finally:
        front.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
