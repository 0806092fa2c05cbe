"""Servers beside the stages that ask them: a stage waits for its servers, and a server ends when nobody asks it."""

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
"""Time between two looks at the queue."""
LOOKS = 3
"""Looks after which a server that no queued job asks is ended: those jobs are queued after it."""
_SERVERS, _ASKING = "beside.json", "asking.json"


def note_servers(record: Path, servers: Mapping[str, str]) -> None:
    """Note the servers that a run asks: run directories by job id."""
    write_text(record / attempts.FOLDER / _SERVERS, json.dumps(dict(servers), indent=1) + "\n")


def note_asking(record: Path, asking: Sequence[Path]) -> None:
    """Note beside a server's record the records of the runs that ask it; none for a server of its own."""
    write_text(
        record / attempts.FOLDER / _ASKING, json.dumps([str(each.resolve()) for each in asking], indent=1) + "\n"
    )


def asking(record: Path) -> list[Path]:
    """Records of the runs that ask a server."""
    file = record / attempts.FOLDER / _ASKING
    return [Path(each) for each in json.loads(file.read_text())] if file.is_file() else []


def is_asked(records: Sequence[Path]) -> bool:
    """True if one of the runs waits or runs, or the queue cannot be asked."""
    queue = _queue()
    return queue is None or any(queued_job(record, queue) for record in records)


def wait(record: Path, say: Callable[[str], None], stopped: Sequence[int]) -> None:
    """Wait until the servers of a run answer or have left the queue, or a signal is in `stopped`."""
    file = record / attempts.FOLDER / _SERVERS
    servers: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    for job, run_dir in servers.items():
        address, looked = Path(run_dir) / FILE, -SECONDS
        if not is_fresh(address):
            say(f"waiting for {address} of job {job}")
        while not is_fresh(address) and not stopped:
            if time.monotonic() - looked > SECONDS:
                looked, queue = time.monotonic(), _queue()
                ids = None if queue is None else {each.partition("_")[0] for each in queue}
                if ids is not None and (job not in ids or not is_own(Path(run_dir) / attempts.FOLDER, job)):
                    say(f"job {job} has left the queue")
                    break
            time.sleep(1)


def _queue() -> dict[str, str] | None:
    """The user's jobs with their states; None if Slurm does not answer."""
    try:
        return queued()
    except ValueError:
        return None
