"""Writer of the ordered JSONL: the prompts' records, byte for byte, in the plan's order.

Records are gathered from memory-mapped files. If the files do not fit into memory, this would cause random reads all
over the disk, so records are first copied, front to back, into buckets of neighbouring steps that do fit. The same is
done for very many files, since each map keeps its file open.
"""

import contextlib
import functools
import importlib
import mmap
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from nemo_ext.data.curriculum.prompts import Prompts
from nemo_ext.data.curriculum.settings import Thinking
from nemo_ext.data.text.user_files import pyarrow_module
from nemo_ext.job.files import complete_file
from nemo_ext.job.progress import progress_of
from nemo_ext.job.records import json_line, read_json

ROWS = 1 << 14
MOST_OPEN = 128
BUCKET_BYTES = 1 << 30
AS_IT_IS, ON, OFF = 0, 1, 2

Rows = npt.NDArray[np.int64]
Modes = npt.NDArray[np.int8]
Change = Callable[[bytes, int], bytes]
Arrays = Callable[[int], tuple[int, Any]]


def write_ordered(
    prompts: Prompts,
    rows: Rows,
    path: Path,
    *,
    change: Change | None = None,
    modes: Modes | None = None,
    domain_files: Mapping[int, Path] | None = None,
    memory: int | None = None,
) -> None:
    """Write the records of `rows`, in this order.

    Args:
        rows: [lines] indices into the prompts.
        change: function from a record and its mode to the line to write; None to write records unchanged.
        modes: [lines] modes of the records, required with `change`.
        domain_files: mapping from domain number to a file for that domain's records, in the same order.
        memory: maximum size in bytes of source files that are read in random order; None for half of the free memory.

    Raises:
        ValueError: a file was changed since it was read, or `change` rejects a record.
    """
    if memory is None:
        memory = psutil.virtual_memory().available // 2
    arrow, compute = pyarrow_module(), importlib.import_module("pyarrow.compute")
    kind = arrow.large_binary()
    ending = [arrow.scalar(text, kind) for text in (b"", b"\n")]
    size = sum(file.stat().st_size for file in prompts.files)
    at_random = size <= memory and len(prompts.files) <= MOST_OPEN
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(complete_file(path))  # entered first, so that it is renamed last
        separate = {domain: stack.enter_context(complete_file(file)) for domain, file in (domain_files or {}).items()}
        advance = stack.enter_context(progress_of("writing", len(rows), unit="prompts"))
        gathered = _gathered(prompts, rows) if at_random else _through_buckets(prompts, rows, path, memory)
        begin = 0
        for records in gathered:
            end = begin + len(records)
            if change is not None and modes is not None:
                pairs = zip(records.to_pylist(), modes[begin:end].tolist(), strict=True)
                records = arrow.array([change(line, mode) for line, mode in pairs], type=kind)
            lines = compute.binary_join_element_wise(records, *ending)
            domains = prompts.domain[rows[begin:end]]
            for domain, file in separate.items():
                file.write(_bytes_of(lines.filter(arrow.array(domains == domain))))
            output.write(_bytes_of(lines))
            advance(end - begin)
            begin = end


def marker(settings: Thinking, prompt_key: str) -> Change:
    """Return a function that writes the thinking mode into a record, and adds that mode's system message, if any.

    `prompt_key` is the key of the prompt in a record; dots separate nested keys.
    """
    field = f'"{settings.key}":'.encode()
    marked = re.compile(re.escape(field[:-1]) + rb"\s*:")
    systems = {ON: settings.system_on, OFF: settings.system_off}
    steps = prompt_key.split(".")

    def change(line: bytes, mode: int) -> bytes:
        system = systems[mode]
        if system is None and not marked.search(line):
            return b"{" + field + (b"true," if mode == ON else b"false,") + line.lstrip()[1:]
        record = read_json(line)
        record[settings.key] = mode == ON
        if system is not None:
            _set_system(record, steps, prompt_key, system)
        return json_line(record).rstrip()

    return change


def _set_system(record: dict[str, Any], steps: Sequence[str], key: str, system: str) -> None:
    """Insert the system message `system` at the beginning of a record's prompt, before the text of an existing one.

    The prompt is under the nested keys `steps`; `key` is the same path with dots, for the error message.
    """
    owner = record
    for step in steps[:-1]:
        owner = owner[step]
    messages = owner[steps[-1]]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(
            f"thinking.system_on and thinking.system_off require lists of messages as prompts, but {key!r} is "
            f"{str(messages)[:60]!r}: set both to null, and let the chat template use thinking.key"
        )
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{system}\n{messages[0].get('content') or ''}".rstrip("\n")}
        owner[steps[-1]] = [first, *messages[1:]]
    else:
        owner[steps[-1]] = [{"role": "system", "content": system}, *messages]


def _gathered(prompts: Prompts, rows: Rows) -> Iterator[Any]:
    """Yield the records of the prompts `rows`, in this order, as Arrow arrays of up to `ROWS` records."""
    arrays = _arrays(prompts, mmap.MADV_RANDOM)
    for begin in range(0, len(rows), ROWS):
        yield _records(prompts, rows[begin : begin + ROWS], arrays)


def _through_buckets(prompts: Prompts, rows: Rows, path: Path, memory: int) -> Iterator[Any]:
    """Yield records like `_gathered`, but read each source file once from front to back.

    The records are first copied into buckets in a folder next to `path`; each takes at most half of `memory`, in bytes.
    """
    bytes_of_rows = int(np.diff(prompts.span[rows]).sum())
    bucket_bytes = max(1, min(BUCKET_BYTES, memory // 2))
    count = max(1, -(-bytes_of_rows // bucket_bytes))
    per_bucket = -(-len(rows) // count)
    folder = path.with_name(f".{path.name}.buckets")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    by_source = np.argsort(rows, kind="stable")
    places: list[list[Rows]] = [[] for _ in range(count)]
    arrays = _arrays(prompts, mmap.MADV_SEQUENTIAL)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / str(bucket), "wb")) for bucket in range(count)]
        for begin in range(0, len(rows), ROWS):
            at = by_source[begin : begin + ROWS]
            records = _records(prompts, rows[at], arrays)
            bucket_of = at // per_bucket
            for bucket in np.unique(bucket_of).tolist():
                members = np.flatnonzero(bucket_of == bucket)
                places[bucket].append(at[members])
                files[bucket].write(_bytes_of(records.take(members)))
    for bucket, pieces in enumerate(places):
        if not pieces:
            continue
        at = np.concatenate(pieces)
        edges = np.append(0, np.cumsum(np.diff(prompts.span[rows[at]])))
        order = np.argsort(at)
        records = _array((folder / str(bucket)).read_bytes(), edges)
        (folder / str(bucket)).unlink()
        for begin in range(0, len(order), ROWS):
            yield records.take(order[begin : begin + ROWS])
    shutil.rmtree(folder)


def _arrays(prompts: Prompts, advice: int) -> Arrays:
    """Return a function from a file's number to its first prompt and its records, an Arrow array over the mapped file.

    Every second value is a record; the others are the bytes between two records. The `MOST_OPEN` most recently used
    maps stay open. `advice` is an `madvise` constant that describes the order of the reads.
    """

    @functools.lru_cache(maxsize=MOST_OPEN)
    def array(number: int) -> tuple[int, Any]:
        begin, end = np.searchsorted(prompts.file, [number, number + 1]).tolist()
        path, edges = prompts.files[number], prompts.span[begin:end]
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if edges[-1, 1] > len(memory):
            raise ValueError(f"{path} changed while it was read: rerun the same command")
        memory.madvise(advice)
        return begin, _array(memory, edges.ravel())

    return array


def _records(prompts: Prompts, rows: Rows, arrays: Arrays) -> Any:
    """Return the records of the prompts `rows`, in this order, as an Arrow array."""
    files = prompts.file[rows]
    pieces, places = [], []
    for number in np.unique(files).tolist():
        members = np.flatnonzero(files == number)
        first, array = arrays(number)
        pieces.append(array.take(2 * (rows[members] - first)))
        places.append(members)
    return pyarrow_module().concat_arrays(pieces).take(np.argsort(np.concatenate(places)))


def _array(data: bytes | mmap.mmap, edges: Rows) -> Any:
    """Return the pieces of `data` between `edges`, which ascend, as an Arrow array; does not copy."""
    arrow = pyarrow_module()
    buffers = [None, arrow.py_buffer(edges), arrow.py_buffer(data)]
    return arrow.Array.from_buffers(arrow.large_binary(), len(edges) - 1, buffers)


def _bytes_of(array: Any) -> memoryview | bytes:
    """Return the values of an Arrow array that begins at the start of its buffers, joined; does not copy."""
    if not len(array):
        return b""
    _, edges, data = array.buffers()
    return memoryview(data)[: memoryview(edges).cast("q")[len(array)]]
