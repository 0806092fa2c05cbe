"""Megatron's .bin/.idx files: the concatenated ids of all documents, and the start of each document.

Implemented here so that data can be written without torch and Megatron, in the format of Megatron's IndexedDataset
(megatron/core/datasets/indexed_dataset.py). The tests read the files with Megatron's reader.
"""

import hashlib
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint16 | np.int32]

# Below this vocabulary size Megatron uses two bytes per id (DType.optimal_dtype).
_SMALL_VOCABULARY = 65500
_TYPE_CODES = {np.uint8: 1, np.int32: 4, np.uint16: 8}
MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
"""Start of an .idx: `MAGIC`, version, code of the ids' type, and numbers of sequences and of documents plus one."""
_BLOCKS, _BLOCK = 64, 64


def ids_type(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the integer type that Megatron uses to store ids from a vocabulary of this size."""
    return np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32


def write_index(
    path: Path,
    lengths: npt.NDArray[np.int64],
    dtype: type[np.uint8] | type[np.uint16] | type[np.int32],
    *,
    documents: npt.NDArray[np.int64] | None = None,
) -> None:
    """Write the .idx file of a .bin file.

    Args:
        lengths: [sequences] length of each sequence, in tokens.
        dtype: type of a token in the .bin.
        documents: first sequence of each document, followed by the number of sequences, `[documents + 1]`; None for
            one sequence per document.

    Raises:
        ValueError: A sequence has 2**31 tokens or more, which the format cannot hold.
    """
    if len(lengths) and lengths.max() >= 1 << 31:
        raise ValueError(
            f"{path}: a document has {lengths.max():,} tokens; split it, as Megatron's format allows fewer than 2**31"
        )
    starts = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], out=starts[1:])
    if documents is None:
        documents = np.arange(len(lengths) + 1)
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, _TYPE_CODES[dtype], len(lengths), len(documents)))
        file.write(lengths.astype("<i4").tobytes())
        file.write((starts * np.dtype(dtype).itemsize).tobytes())
        file.write(documents.astype("<i8").tobytes())


def read_index(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], type[np.uint16] | type[np.int32]]:
    """Read each sequence's length in tokens and start in bytes, both [sequences], and the ids' integer type.

    Raises:
        ValueError: the file is missing, damaged, or not an index of token ids.
    """
    types: dict[int, type[np.uint16] | type[np.int32]] = {
        _TYPE_CODES[np.uint16]: np.uint16,
        _TYPE_CODES[np.int32]: np.int32,
    }
    try:
        content = path.read_bytes()
        magic, _, code, sequences, _ = HEADER.unpack_from(content)
        lengths = np.frombuffer(content, dtype="<i4", count=sequences, offset=HEADER.size)
        starts = np.frombuffer(content, dtype="<i8", count=sequences, offset=HEADER.size + lengths.nbytes)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): give the prefix of existing .bin and .idx files"
        ) from None
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path} is truncated, or not a Megatron index ({error}): create the files again") from None
    dtype = types.get(code)
    if magic != MAGIC or dtype is None:
        raise ValueError(
            f"{path} is not an index of token ids: give the prefix of files that `nemo-ext sft_data` wrote"
        )
    return lengths.astype(np.int64), starts.astype(np.int64), dtype


def index_digest(path: Path) -> str:
    """Hash an .idx in constant time to 16 hex digits: its header, and 64 evenly spaced runs of 64 sequences.

    A sequence's start is the sum of the lengths before it, so different data collide only if all of these runs have the
    same lengths and starts.
    """
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    hashed = hashlib.sha256(header)
    sequences = HEADER.unpack(header)[3]
    if sequences:
        first = np.linspace(0, max(0, sequences - _BLOCK), _BLOCKS, dtype=np.int64)
        rows = np.unique(np.minimum(first[:, None] + np.arange(_BLOCK), sequences - 1))
        for dtype, offset in (("<i4", HEADER.size), ("<i8", HEADER.size + 4 * sequences)):
            hashed.update(np.memmap(path, dtype, "r", offset, (sequences,))[rows].tobytes())
    return hashed.hexdigest()[:16]
