"""Last pass over a stream's shards: selects documents, and splits them into training and validation.

One process sees all documents in order, so the files do not depend on which workers wrote the shards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nemo_ext.data.text.documents import Admission, ReadReport, Source
from nemo_ext.data.text.indexed_dataset import ids_type, write_index
from nemo_ext.data.text.manifest import SPLITS, SplitCounts
from nemo_ext.data.text.shards import open_tokens, read_rows
from nemo_ext.job.files import publish, unfinished


@dataclass(frozen=True)
class Selection:
    """Masks of the kept documents and of those for validation, one per shard; `size` is the kept text in bytes."""

    kept: list[npt.NDArray[np.bool_]]
    validation: list[npt.NDArray[np.bool_]]
    report: ReadReport
    size: int
    full: bool

    def masks(self, split: str) -> list[npt.NDArray[np.bool_]]:
        """Return the masks of the documents in a split ("train" or "valid"), one per shard."""
        if split == "valid":
            return self.validation
        return [kept & ~held for kept, held in zip(self.kept, self.validation, strict=True)]


def select(directory: Path, count: int, source: Source, validation_share: float) -> Selection:
    """Select each split's documents from the rows of the first `count` shards, in order.

    Raises:
        ValueError: There are no documents, or too many records of the source are malformed.
    """
    kept: list[npt.NDArray[np.bool_]] = []
    validation: list[npt.NDArray[np.bool_]] = []
    admission, report = Admission(source), ReadReport()
    lowest, highest = (1 << 64, 0, 0), (-1, 0, 0)  # position, shard, row
    for shard in range(count):
        rows = read_rows(directory, shard)
        report.add(rows.report)
        admitted = [
            admission.admit(digest.tobytes(), int(size), report)
            for digest, size in zip(rows.digests, rows.sizes, strict=True)
        ]
        kept.append(np.array(admitted, dtype=np.bool_))
        validation.append(kept[-1] & (rows.positions < np.uint64(int(validation_share * 2**64))))
        for row in np.flatnonzero(kept[-1]):
            here = int(rows.positions[row]), shard, int(row)
            lowest, highest = min(lowest, here), max(highest, here)
    source.finish(report)
    documents = sum(int(flags.sum()) for flags in kept)
    held_out = sum(int(flags.sum()) for flags in validation)
    if documents == 0:
        if not report.records and not report.skipped:
            paths = ", ".join(str(path) for _, path in source.inputs()[:3])
            raise ValueError(f"{source.kind} source: {paths} is empty or has only blank lines; give a file with text")
        raise ValueError(
            f"{source.kind} source: none of its {report.records} records can be used ({report.summary()}); correct its "
            "settings, or give other files"
        )
    if documents >= 2 and held_out == 0 and validation_share > 0:
        validation[lowest[1]][lowest[2]] = True
    if held_out == documents:
        validation[highest[1]][highest[2]] = False
    return Selection(kept, validation, report, admission.size, admission.full)


def write_splits(
    prefix: Path, directory: Path, selection: Selection, vocab_size: int, *, advance: Callable[[int], None]
) -> dict[str, SplitCounts]:
    """Write the selected documents as Megatron's files, and return the counts of each split, keyed by its name.

    Args:
        directory: directory of the shards, in which files are written before they are moved into place.
        advance: called with the size of written text, in bytes.
    """
    dtype = ids_type(vocab_size)
    counts: dict[str, SplitCounts] = {}
    written: list[Path] = []
    for split in SPLITS:
        data, index = Path(f"{prefix}_{split}.bin"), Path(f"{prefix}_{split}.idx")
        # In the shards' directory, which is removed at the end, so that a killed run leaves no other files.
        lengths: list[npt.NDArray[np.int64]] = []
        text_bytes = 0
        with open(unfinished(directory / data.name), "wb") as file:
            for shard, flags in enumerate(selection.masks(split)):
                rows = read_rows(directory, shard)
                ends = np.concatenate(([0], np.cumsum(rows.lengths)))
                stored = open_tokens(directory, shard, dtype, int(ends[-1]))
                # Start and end of each run of consecutive documents in this split; most runs are long.
                bounds = np.flatnonzero(np.diff(flags, prepend=False, append=False))
                for first, last in bounds.reshape(-1, 2):
                    file.write(stored[ends[first] : ends[last]])
                lengths.append(rows.lengths[flags])
                size = int(rows.sizes[flags].sum())
                text_bytes += size
                advance(size)
        all_lengths = np.concatenate(lengths)
        counts[split] = SplitCounts(documents=len(all_lengths), tokens=int(all_lengths.sum()), text_bytes=text_bytes)
        if len(all_lengths):  # Megatron cannot open an empty .bin
            write_index(unfinished(directory / index.name), all_lengths, dtype)
            written += [data, index]
    # Remove the old manifest and files first: neither may be combined with the new ones.
    for old in (".json", *(f"_{split}.{end}" for split in SPLITS for end in ("bin", "idx"))):
        Path(f"{prefix}{old}").unlink(missing_ok=True)
    for path in written:
        publish(unfinished(directory / path.name), path)
    return counts
