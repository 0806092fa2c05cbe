"""Files with a block's inputs at every distillation step, from which the next group of variants starts.

Each group writes the inputs of the next group's first block, so that the parent runs only once for all groups.
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
    """Folder of hidden states `[seq, batch, hidden]`, one file per block, step and rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool, self._written = ThreadPoolExecutor(1), Future[None]()
        self._written.set_result(None)

    def _file(self, number: int, step: int) -> Path:
        rank = f"{data_parallel.number()}of{data_parallel.count()}"
        return self.folder / f"block_{number + 1:03d}" / f"step_{step:06d}_{rank}.safetensors"

    def has(self, number: int, steps: Iterable[int]) -> bool:
        """Return whether every rank has a block's inputs for these steps; the block's number is 0-based. Collective."""
        files = [self._file(number, step) for step in steps]
        sizes = {file.stat().st_size if file.is_file() else 0 for file in files}
        complete = (
            len(sizes) <= 1 and 0 not in sizes
        )  # all files have the same size, unless a failing node truncated some
        return int(data_parallel.summed(torch.tensor(int(complete)))) == data_parallel.count()

    def read(self, number: int, steps: Iterable[int]) -> Iterator[Tensor]:
        """Yield this rank's inputs of a block for each of the steps, in host memory, reading one step ahead."""

        def read(step: int) -> Tensor:
            hidden = load_file(self._file(number, step))["hidden"]
            return hidden.pin_memory() if torch.cuda.is_available() else hidden

        return read_ahead(read, [*steps])

    def write(self, number: int, step: int, hidden: Tensor) -> None:
        """Write this rank's input of a block at one step in the background, once the previous write has finished."""

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
        """Wait for the write in progress; raises ValueError if the file could not be written."""
        try:
            self._written.result()
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"puzzle.distill.inputs: {self.folder} cannot be written ({error}); choose another folder, or set null"
            ) from error

    def remove(self, number: int, steps: Iterable[int]) -> None:
        """Remove this rank's existing inputs of a block for these steps."""
        for step in steps:
            self._file(number, step).unlink(missing_ok=True)

    def forget(self, number: int) -> None:
        """Remove all ranks' inputs of a block. Collective."""
        remove = partial(shutil.rmtree, self._file(number, 0).parent, ignore_errors=True)
        data_parallel.written(remove, on_every_node=True)

    def clear(self) -> None:
        """Remove the folder and, unless it belongs to a shard, the shards' folders too. Collective."""
        folders = [self.folder] if "_" in self.folder.name else self.folder.parent.glob(f"{self.folder.name}*")

        def remove() -> None:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

        data_parallel.written(remove, on_every_node=True)
