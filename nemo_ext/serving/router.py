"""vllm-router behind the balancer, where it is installed: its policies (prefix caches), our members and our key.

It listens at a loopback address alone, as its `--api-key` does not guard it (0.1.17), and passes keys on to replicas.
"""

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_ext.endpoint.address import Address
from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.ranks import reserve_port

if TYPE_CHECKING:
    import aiohttp

_NO_LIMIT = str(7 * 86400)
"""Seconds of a request: the client's own limit comes before."""


def program() -> str | None:
    """Path of vllm-router; None if it is not installed."""
    beside = Path(sys.executable).parent / "vllm-router"
    return str(beside) if beside.exists() else shutil.which("vllm-router")


class Router:
    """A running vllm-router.

    Args:
        path: path of the program.
        log: file for its output.
    """

    def __init__(self, path: str, log: Path) -> None:
        self._ports = [reserve_port() for _ in range(2)]  # held while it runs
        port, other = (held.getsockname()[1] for held in self._ports)
        self.root = f"http://127.0.0.1:{port}"
        self.members: frozenset[str] = frozenset()
        words = [path, "--host=127.0.0.1", f"--port={port}", f"--prometheus-port={other}", "--policy=cache_aware"]
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                [*words, f"--request-timeout-secs={_NO_LIMIT}", "--log-level=warning"],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(signal.SIGTERM),
            )

    @property
    def up(self) -> bool:
        """True if it runs and has members."""
        return bool(self.members) and self.process.poll() is None

    async def follow(self, session: "aiohttp.ClientSession", members: Set[str]) -> None:
        """Have it know these members, by their URLs without `/v1`, and no others."""
        import aiohttp

        for verb, changed in (("remove", self.members - members), ("add", members - self.members)):
            for url in changed:
                try:
                    async with (
                        asyncio.timeout(10),
                        session.post(f"{self.root}/{verb}_worker", params={"url": url}) as said,
                    ):
                        if said.status == 200:
                            self.members = self.members ^ {url}
                except (aiohttp.ClientError, OSError, TimeoutError):
                    return

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for held in self._ports:
            held.close()


def root_of(address: Address) -> str:
    """URL of an endpoint without `/v1`."""
    return address.url.removesuffix("/v1")
