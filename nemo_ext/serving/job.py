"""The job `serve`, which serves a model behind an OpenAI-compatible endpoint (docs/serving.md)."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.endpoint.address import FILE, Address
from nemo_ext.job.config import FAILED
from nemo_ext.job.files import only_run_in
from nemo_ext.job.progress import notice
from nemo_ext.serving import vllm
from nemo_ext.serving.group import ReplicaFailed, run_group
from nemo_ext.serving.listen import bind, server, url_of
from nemo_ext.serving.members import present
from nemo_ext.serving.model import checked_settings, checkpoint_digest, folder_of
from nemo_ext.serving.settings import ServingSettings


def run(config: Mapping[str, Any]) -> None:
    """Serve a model until Ctrl-C.

    Raises:
        ValueError: a setting is invalid, or the model cannot be served.
    """
    settings, port = checked_settings(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # handled like Ctrl-C
    run_dir = Path(str(config["run_dir"])).expanduser()
    try:
        # Replicas of an array on Slurm share the directory.
        with only_run_in(run_dir) if settings.replica is None else contextlib.nullcontext():
            if settings.replicas == 1:
                _serve(config, settings, run_dir, port)
                return
            bind(settings.host, port).close()  # checks the address before anything starts
            folder = folder_of(str(config["served"]), run_dir, config["files_from"], draft=settings.draft)
            numbers = range(settings.replicas) if settings.replica is None else [settings.replica]
            asyncio.run(run_group({**config, "served": str(folder)}, settings, run_dir, numbers, port))
    except (ReplicaFailed, vllm.Ended) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)


def _serve(config: Mapping[str, Any], settings: ServingSettings, run_dir: Path, port: int) -> None:
    key, bound = settings.key(), bind(settings.host, port)
    (run_dir / FILE).unlink(missing_ok=True)
    folder = folder_of(str(config["served"]), run_dir, config["files_from"], draft=settings.draft)
    port = bound.getsockname()[1]
    address = Address(
        url=url_of(settings.host, port),
        model=settings.name,
        key=key,
        digest=checkpoint_digest(folder),
    )
    up = f"{address.model} is served at {address.url}; the key is in {run_dir / FILE}; Ctrl-C stops it"
    if settings.engine == "vllm":
        bound.close()  # vLLM binds the port itself
        words = vllm.command(folder, settings, config, port=port)
        with vllm.running(words, key) as process:
            vllm.wait_until_up(process, address.url, key)
            with present(run_dir, address, lambda: process.poll() is None):
                notice(up)
                process.wait()
        raise vllm.Ended(f"vllm serve ended with exit code {process.returncode}; see its output above")
    from nemo_ext.serving.app import Api
    from nemo_ext.serving.load import load

    served = load(folder, settings, config)
    front = server(Api(served).app(key))

    def lives() -> bool:
        front.should_exit |= served.engine.failed is not None
        return not front.should_exit

    with present(run_dir, address, lives):
        notice(up)
        front.run(sockets=[bound])
    if served.engine.failed is not None:
        raise vllm.Ended(f"the engine has failed ({served.engine.failed}): correct the cause and serve again")
    served.engine.close()
