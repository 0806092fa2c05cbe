"""Size of a stream in training tokens, read from its files, or assumed by the config before they exist."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_ext.data.text.indexed_dataset import HEADER, MAGIC
from nemo_ext.data.text.manifest import read_manifest

# megatron/core/datasets/indexed_dataset.py, DType: code -> bytes of an id.
_WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a stream in training tokens, and whether it was read from the `files` or `assumed` by the config."""

    tokens: int
    known: Literal["files", "assumed"]


def size_of(prefix: Path, *, assumed: int | None = None) -> Size | None:
    """Return the size of a stream's training split.

    Args:
        prefix: prefix of the stream's files: `<prefix>_train.idx`, `<prefix>_train.bin`, and a manifest
            `<prefix>.json` if this package wrote them.
        assumed: number of tokens to assume if the files do not exist.

    Returns:
        The size; None if there are neither files nor an assumption.

    Raises:
        ValueError: The files are empty, truncated, or not Megatron's.
    """
    index = Path(f"{prefix}_train.idx")
    if index.is_file():
        tokens = indexed_tokens(index)
    elif Path(f"{prefix}.json").is_file():
        tokens = read_manifest(prefix).splits["train"].tokens
        if tokens:
            raise ValueError(f"{prefix}.json lists {tokens:,} training tokens, but {index} does not exist: copy it too")
    else:
        return None if assumed is None else Size(tokens=assumed, known="assumed")
    if not tokens:
        raise ValueError(f"{prefix} has no training tokens: remove the stream, or tokenise text for it")
    return Size(tokens=tokens, known="files")


def indexed_tokens(index: Path) -> int:
    """Read the number of tokens in a Megatron .bin from its .idx in constant time; the files may come from any tool.

    Raises:
        ValueError: The file is not an .idx or is truncated, or its .bin is missing or of a different size.
    """
    with open(index, "rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise ValueError(
                f"{index} is not an index of Megatron's .bin/.idx files: correct the stream's prefix, or tokenise the "
                "text again"
            )
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != 1 or code not in _WIDTHS:
            raise ValueError(
                f"{index} has version {version} and id type {code}, which Megatron does not read: tokenise the text "
                "again"
            )
        if index.stat().st_size < len(head) + 12 * sequences + 8 * documents:
            raise ValueError(f"{index} is truncated: tokenise or copy it again")
        size = 0
        if sequences:
            # The index has each sequence's length in ids, then each one's offset in the .bin, which the last one ends.
            file.seek(len(head) + 4 * (sequences - 1))
            (length,) = struct.unpack("<i", file.read(4))
            file.seek(len(head) + 4 * sequences + 8 * (sequences - 1))
            (start,) = struct.unpack("<q", file.read(8))
            size = start + length * _WIDTHS[code]
    data = index.with_suffix(".bin")
    if sequences and not data.is_file():
        raise ValueError(f"{data} does not exist, but its index {index} does: copy both")
    if sequences and data.stat().st_size != size:
        raise ValueError(f"{data} has {data.stat().st_size:,} bytes, but {index} lists {size:,}: copy both again")
    return int(size // _WIDTHS[code])
