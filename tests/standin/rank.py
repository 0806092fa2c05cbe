"""A rank that starts in a moment, in the place of `nemo_ext.megatron.rank`: it logs, saves and resumes as that does.

Ranks meet at MASTER_ADDR and MASTER_PORT, and agree after every step on whether one of them was told to stop. The loss
comes of a state that checkpoints hold, so that a step that is lost or done twice shows. Variables of the environment:

STAND_IN_HOLDS_AT   steps, 7,14 for example: a start waits after the next of them until it is told to stop, or a file
                    `go` is in its run directory
STAND_IN_FAILS      where it is not empty, a rank fails before its first step
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from nemo_ext.job.files import write_text
from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.run_directory import CHECKPOINTS, METRICS, last_checkpoint, read_config, truncate_metrics

SECONDS_A_STEP = 0.02
START = 1


def following(state: int) -> int:
    """The state after one more step."""
    return state * 16_807 % 2_147_483_647


def loss_of(state: int) -> float:
    """The loss that a state gives."""
    return 1 + state / 2_147_483_647


class Told:
    """Whether this rank was told to stop."""

    def __init__(self) -> None:
        self.stop = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.stop = True


class Ranks:
    """All ranks of the run, of which the first collects."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
        if count == 1:
            self.others: list[socket.socket] = []  # torchrun itself listens there
        elif rank:
            self.others = [self._reach(address)]
        else:
            with socket.create_server(address) as server:
                self.others = [server.accept()[0] for _ in range(count - 1)]

    def _reach(self, address: tuple[str, int]) -> socket.socket:
        until = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(address)
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank. ConnectionError if one is gone."""
        if self.rank:
            self.others[0].sendall(bytes([mine]))
            return bool(self._byte(self.others[0]))
        found = any([mine, *(bool(self._byte(each)) for each in self.others)])
        for each in self.others:
            each.sendall(bytes([found]))
        return found

    @staticmethod
    def _byte(other: socket.socket) -> int:
        if not (got := other.recv(1)):
            raise ConnectionError("a rank is gone")
        return got[0]


def save(run_dir: Path, step: int, state: int) -> None:
    """A checkpoint; the tracker comes last."""
    folder = run_dir / CHECKPOINTS / f"iter_{step:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").write_text(str(state))
    write_text(run_dir / CHECKPOINTS / "latest_checkpointed_iteration.txt", str(step))


def main(path: Path) -> None:
    """Train to the last step of the config, or until told to stop."""
    config = read_config(path)
    run_dir, megatron = Path(config["run_dir"]), config["megatron"]
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    told, ranks = Told(), Ranks(rank, count)
    if os.environ.get("STAND_IN_FAILS"):
        raise RuntimeError("as it was asked to")
    done, state = last_checkpoint(run_dir) or 0, START
    if done:
        state = int((run_dir / CHECKPOINTS / f"iter_{done:07d}" / "state").read_text())
    holds = [int(word) for word in os.environ.get("STAND_IN_HOLDS_AT", "").split(",") if word]
    holds_at = min((each for each in holds if each > done), default=None)
    if rank == 0:
        truncate_metrics(run_dir / METRICS, done)
    saved = done
    for step in range(done + 1, megatron["train_iters"] + 1):
        time.sleep(SECONDS_A_STEP)
        state = following(state)
        if rank == 0:
            log(run_dir, megatron, step, state)
        stop = ranks.any(told.stop)
        while step == holds_at and not stop and not ranks.any((run_dir / "go").exists()):
            time.sleep(0.05)
            stop = ranks.any(told.stop)
        if stop or step in (megatron["train_iters"], saved + (megatron.get("save_interval") or 0)):
            saved = step
            if rank == 0:
                save(run_dir, step, state)
            ranks.any(False)  # nobody leaves before it is written
        if stop:
            return


def log(run_dir: Path, megatron: dict[str, int], step: int, state: int) -> None:
    """The line of a step."""
    tokens = megatron["global_batch_size"] * megatron["seq_length"]
    line = {"step": step, "tokens": step * tokens, "loss": loss_of(state), "lr": 1e-3, "grad_norm": 1.0}
    line |= {"tokens_per_second": tokens / SECONDS_A_STEP, "seconds_per_step": SECONDS_A_STEP, "mfu": None}
    with (run_dir / METRICS).open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f" iteration {step:8}/{megatron['train_iters']:8} | lm loss: {loss_of(state):.6E}", flush=True)


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    main(Path(sys.argv[1]))
