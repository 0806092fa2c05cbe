"""Temporary server on this machine for a model that a job sends requests to."""

import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_ext.job.progress import notice
from nemo_ext.serving.group import Replica
from nemo_ext.serving.model import folder_of
from nemo_ext.serving.settings import ServingSettings


@contextmanager
def endpoint_of(config: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str | None, Path | None]]:
    """Yield an endpoint for the config's model: the one in `endpoint`, or else a server that runs until the block ends.

    The values are the endpoint's URL or run directory; the model's name there, or None for its only model; and the
    directory of a model served here, otherwise None.

    Args:
        config: config with `endpoint`, `served`, `serving`, `files_from` and `trust_remote_code`.
        folder: directory for the server's files.

    Raises:
        ValueError: the model cannot be served.
    """
    served = config["served"]
    if config["endpoint"] is not None:
        yield str(config["endpoint"]), served, None
        return
    run_dir = folder / "servers" / uuid.uuid4().hex[:12]
    settings = ServingSettings.from_config(config)
    own: dict[str, Any] = {"name": settings.name, "replica": None}
    if config["serving"]["replica"] is not None:  # on Slurm each worker has one replica
        own |= {"replicas": 1, "least": None}
    server, model = Replica(run_dir), folder_of(str(served), folder, config["files_from"], draft=settings.draft)
    notice(f"serving {served} on this machine during the job (log: {server.log})")
    server.start(
        {
            "served": str(model),
            "port": 0,
            "run_dir": str(run_dir),
            "files_from": config["files_from"],
            "trust_remote_code": config["trust_remote_code"],
            "serving": {**config["serving"], **own},
        }
    )
    try:
        server.wait()
        yield str(run_dir), None, model
    finally:
        server.stop()
        shutil.rmtree(run_dir, ignore_errors=True)
