"""MinHash of n-grams with rensa's R-MinHash: banding finds near duplicates, compared by the low byte of each slot."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import rensa

from nemo_ext.data.text.words import Hashes


def sketches(
    grams: Sequence[Hashes], *, slots: int, rows: int, seed: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
    """Compute MinHash bands and slots of texts; most efficient for a few hundred texts at a time.

    Texts whose n-grams have Jaccard similarity s share a slot with probability s, and a band with probability s**rows.

    Returns:
        [texts, slots // rows] bands and [texts, slots] low bytes of the slots; zeros for a text without n-grams.
    """
    count, bands = len(grams), slots // rows
    ends = np.cumsum([0, *map(len, grams)], dtype=np.uint64)
    if not count or not ends[-1]:
        return np.zeros((count, bands), np.uint64), np.zeros((count, slots), np.uint8)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(grams), ends, slots, seed)
    digests = np.array(matrix.to_rows(), dtype=np.uint64)
    joined = digests[:, : bands * rows].reshape(count, bands, rows)
    mixed = np.zeros((count, bands), dtype=np.uint64)
    for row in range(rows):
        mixed = (mixed ^ joined[:, :, row]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    low = (digests & np.uint64(255)).astype(np.uint8)
    silent = np.array([not len(row) for row in grams])
    mixed[silent], low[silent] = 0, 0
    return mixed, low
