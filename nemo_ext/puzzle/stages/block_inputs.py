"""Inputs of a block for every step of distillation, in files: the next group of variants goes on from them.

So the parent runs once for all groups, each of which leaves what comes to the first block of the next one.
"""

import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.read_ahead import read_ahead


class BlockInputs:
    """A folder of hidden states `[seq, batch, hidden]`, a file for each block, step and rank.

    Args:
        folder: path of the folder, which belongs to one training alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool, self._written = ThreadPoolExecutor(1), Future[None]()
        self._written.set_result(None)

    def _file(self, number: int, step: int) -> Path:
        rank = f"{data_parallel.number()}of{data_parallel.count()}"
        return self.folder / f"block_{number + 1:03d}" / f"step_{step:06d}_{rank}.safetensors"

    def has(self, number: int, steps: Iterable[int]) -> bool:
        """True if every rank has the input of a block (0-based number) for these steps; all ranks together."""
        own = all(self._file(number, step).is_file() for step in steps)
        return int(data_parallel.summed(torch.tensor(int(own)))) == data_parallel.count()

    def read(self, number: int, steps: Iterable[int]) -> Iterator[Tensor]:
        """This rank's inputs of a block in the host's memory, one read ahead."""

        def read(step: int) -> Tensor:
            hidden = load_file(self._file(number, step))["hidden"]
            return hidden.pin_memory() if torch.cuda.is_available() else hidden

        return read_ahead(read, [*steps])

    def write(self, number: int, step: int, hidden: Tensor) -> None:
        """Writes this rank's input of a block in the background, once the one before is written."""

        def write() -> None:
            file = self._file(number, step)
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".unfinished")
            host = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=torch.cuda.is_available())
            save_file({"hidden": host.copy_(hidden)}, unfinished)
            unfinished.replace(file)

        self.wait()
        self._written = self._pool.submit(write)

    def wait(self) -> None:
        """Waits for what is being written.

        Raises:
            OSError: it could not be written.
        """
        self._written.result()

    def remove(self, number: int, steps: Iterable[int]) -> None:
        """Removes this rank's inputs of a block, as far as there are any."""
        for step in steps:
            self._file(number, step).unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes the folder; all ranks together."""
        data_parallel.written(partial(shutil.rmtree, self.folder, ignore_errors=True))
