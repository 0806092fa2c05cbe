"""Servers that run alongside pipeline stages: a stage waits for its servers, and an unused server ends."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nemo_ext.endpoint.address import FILE
from nemo_ext.job.files import write_text
from nemo_ext.slurm import attempts
from nemo_ext.slurm.ends import is_own
from nemo_ext.slurm.status import is_fresh, queued, queued_job

SECONDS = 20.0
"""Interval between checks of the queue, in seconds."""
LOOKS = 3
"""Number of consecutive checks that find no client in the queue after which a server is ended.

One check is not enough, as clients are submitted after their servers."""
_SERVERS, _ASKING = "beside.json", "asking.json"


def note_servers(record: Path, servers: Mapping[str, str]) -> None:
    """Store the servers that a run uses in its record folder; `servers` maps their job ids to their run directories."""
    write_text(record / attempts.FOLDER / _SERVERS, json.dumps(dict(servers), indent=1) + "\n")


def note_asking(record: Path, asking: Sequence[Path]) -> None:
    """Write the record folders of the runs that use a server into the server's own record folder.

    `asking` is empty for a server that runs independently of a pipeline.
    """
    clients = [str(client.resolve()) for client in asking]
    write_text(record / attempts.FOLDER / _ASKING, json.dumps(clients, indent=1) + "\n")


def asking(record: Path) -> list[Path]:
    """Return the record folders of the runs that use the server with the record folder `record`."""
    file = record / attempts.FOLDER / _ASKING
    return [Path(client) for client in json.loads(file.read_text())] if file.is_file() else []


def is_asked(records: Sequence[Path]) -> bool:
    """True if one of the runs with these record folders is pending or running, or if the queue cannot be read."""
    queue = _queue()
    return queue is None or any(queued_job(record, queue) for record in records)


def wait(record: Path, say: Callable[[str], None], stopped: Sequence[int]) -> None:
    """Wait until each server that a run uses is up or has left the queue, or until a signal arrives.

    `record` is the run's record folder, and `say` prints progress messages. The caller's signal handler adds signals
    to the list `stopped`; waiting ends once it is not empty.
    """
    file = record / attempts.FOLDER / _SERVERS
    servers: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    for job, run_dir in servers.items():
        address, looked = Path(run_dir) / FILE, -SECONDS
        if not is_fresh(address):
            say(f"waiting until the server of job {job} is up and writes {address}")
        while not is_fresh(address) and not stopped:
            if time.monotonic() - looked > SECONDS:
                looked, queue = time.monotonic(), _queue()
                ids = None if queue is None else {queued_id.partition("_")[0] for queued_id in queue}
                if ids is not None and (job not in ids or not is_own(Path(run_dir) / attempts.FOLDER, job)):
                    say(f"job {job} of the server has left the queue")
                    break
            time.sleep(1)


def _queue() -> dict[str, str] | None:
    """Mapping from id to state of the user's jobs; None if Slurm does not answer."""
    try:
        return queued()
    except ValueError:
        return None
