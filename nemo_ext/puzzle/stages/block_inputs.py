"""Inputs of a block for every step of distillation, in files: the next group of variants goes on from them.

So the parent runs once for all groups, each of which leaves what comes to the first block of the next one.
"""

import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
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
        files = [self._file(number, step) for step in steps]
        sizes = {file.stat().st_size if file.is_file() else 0 for file in files}
        own = len(sizes) <= 1 and 0 not in sizes  # all are as large, but for what a node lost when it went down
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
            ValueError: it could not be written.
        """
        try:
            self._written.result()
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"puzzle.distill.inputs: {self.folder}: {error}: name a folder with more room, or null"
            ) from error

    def remove(self, number: int, steps: Iterable[int]) -> None:
        """Removes this rank's inputs of a block, as far as there are any."""
        for step in steps:
            self._file(number, step).unlink(missing_ok=True)

    def forget(self, number: int) -> None:
        """Removes all ranks' inputs of a block; all ranks together."""
        remove = partial(shutil.rmtree, self._file(number, 0).parent, ignore_errors=True)
        data_parallel.written(remove, on_every_node=True)

    def clear(self) -> None:
        """Removes the folder, and those of shards if it is no shard's; all ranks together."""
        folders = [self.folder] if "_" in self.folder.name else self.folder.parent.glob(f"{self.folder.name}*")

        def remove() -> None:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

        data_parallel.written(remove, on_every_node=True)
