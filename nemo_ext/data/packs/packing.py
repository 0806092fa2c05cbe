"""Packing of samples of different lengths into packs of equal capacity, by best-fit decreasing.

Samples are placed in order of decreasing length, each into the pack in which it leaves the least room, or into a new
pack. Samples of equal length are placed together, since a pack with room for another one remains the best fit. So
the work grows with the number of (pack, length) pairs rather than samples; a million lengths take about a second.

If samples are short compared with a pack, best fit makes some packs of only long samples and some of only short ones,
whose attention takes very different times. Even packs all have the same mix of lengths: with as many packs as best
fit needs, each sample goes into the emptiest pack, and samples that fit nowhere are then placed by best fit.
"""

import bisect
import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from nemo_ext.job.seeds import generator
from nemo_ext.job.settings import checked_whole, nearest

Lengths = npt.NDArray[np.int64]

Longer = Literal["error", "drop", "truncate"]
"""What to do with a sample longer than a pack: raise an error, drop it, or keep its beginning."""

_MORE_PACKS = 0.01
"""Maximum share of additional packs that even packing may need."""


@dataclass(frozen=True)
class Packs:
    """Assignment of samples to packs.

    Attributes:
        samples: indices of the samples, in the order of the packs.
        starts: `[packs + 1]`, start of each pack in `samples`.
        capacity: capacity of a pack, in tokens.
        tokens: total number of tokens in all packs, without padding.
    """

    samples: Lengths
    starts: Lengths
    capacity: int
    tokens: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> Lengths:
        """Return the indices of the samples in one pack."""
        if not 0 <= pack < len(self):  # without this check, iteration would not end
            raise IndexError(pack)
        return self.samples[self.starts[pack] : self.starts[pack + 1]]

    @property
    def fill(self) -> float:
        """Share of the packs' capacity that is filled with tokens; 1.0 without packs."""
        return self.tokens / (len(self) * self.capacity) if len(self) else 1.0


@dataclass(frozen=True)
class Fitted:
    """Samples that fit into a pack.

    Attributes:
        samples: indices of the kept samples, ascending.
        lengths: lengths of the kept samples, at most the capacity.
        dropped: number of dropped samples.
        truncated: number of truncated samples.
        truncated_tokens: number of tokens removed by truncation.
    """

    samples: Lengths
    lengths: Lengths
    dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0


def fit(lengths: npt.ArrayLike, capacity: int, longer: Longer) -> Fitted:
    """Drop or truncate the samples that are longer than a pack.

    Raises:
        ValueError: `longer` is unknown, or `longer` is `error` and a sample is longer than the capacity.
    """
    if longer not in get_args(Longer):
        raise ValueError(f"longer={longer!r} is not a known option: {nearest(str(longer), get_args(Longer))}")
    sizes = np.asarray(lengths, dtype=np.int64)
    samples = np.arange(len(sizes), dtype=np.int64)
    over = sizes > capacity
    count = int(over.sum())
    if not count:
        return Fitted(samples, sizes)
    if longer == "error":
        first = int(over.argmax())
        raise ValueError(
            f"{count:,} of {len(sizes):,} samples are longer than {capacity:,} tokens (the first is sample {first}, "
            f"with {sizes[first]:,}): set longer=drop or longer=truncate, or a larger capacity"
        )
    if longer == "drop":
        return Fitted(samples[~over], sizes[~over], dropped=count)
    lost = int((sizes[over] - capacity).sum())
    return Fitted(samples, np.minimum(sizes, capacity), truncated=count, truncated_tokens=lost)


def pack(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    even: bool = False,
    max_samples: int | None = None,
    align: int = 1,
    seed: int | None = None,
) -> Packs:
    """Pack samples by best-fit decreasing.

    Args:
        lengths: lengths of the samples in tokens, at least 1.
        capacity: capacity of a pack, in tokens.
        even: True for packs with the same mix of lengths, if this needs at most 1 % more packs.
        max_samples: maximum number of samples in a pack; None for no limit.
        align: each sample is padded to a multiple of this (2 x the context-parallel size).
        seed: seed of the order of the packs, and of samples of equal length; None for the packing order, longest
            samples first.

    Returns:
        Packs that contain every sample once.

    Raises:
        ValueError: a length is below 1 or above the capacity, the capacity is not a multiple of `align`, or a limit is
            below 1.
    """
    for name, value in (("capacity", capacity), ("align", align), ("max_samples", max_samples)):
        if value is not None:
            checked_whole(name, value, least=1)
    if capacity % align:
        raise ValueError(f"capacity={capacity} must be a multiple of align={align}")
    tokens = np.asarray(lengths, dtype=np.int64)
    count = len(tokens)
    if count and tokens.min() < 1:
        raise ValueError(f"sample {int(tokens.argmin())} has length {tokens.min()}: remove empty samples")
    if count and tokens.max() > capacity:
        raise ValueError(
            f"sample {int(tokens.argmax())} has {tokens.max():,} tokens, but a pack has {capacity:,}: call fit() first"
        )
    order = np.arange(count) if seed is None else generator(seed, "samples of one length").permutation(count)
    places = -(-tokens // align)
    order = order[np.argsort(-places[order], kind="stable")]
    room, most = capacity // align, max_samples or max(count, 1)
    pack_of_sample = _place(places[order], capacity=room, max_samples=most)
    packs = int(pack_of_sample.max(initial=-1)) + 1
    if even:
        spread = _spread(places[order], capacity=room, max_samples=most, packs=packs)
        needed = int(spread.max(initial=-1)) + 1
        if needed <= packs * (1 + _MORE_PACKS):
            pack_of_sample, packs = spread, needed
    if seed is not None:
        pack_of_sample = generator(seed, "packs").permutation(packs)[pack_of_sample]
    sizes = np.bincount(pack_of_sample)
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    samples = order[np.argsort(pack_of_sample, kind="stable")]
    return Packs(samples=samples, starts=starts, capacity=capacity, tokens=int(tokens.sum()))


def _place(
    places: Lengths,
    *,
    capacity: int,
    max_samples: int,
    begun: Sequence[int] = (),
    sizes: Sequence[int] = (),
) -> Lengths:
    """Assign each sample to a pack by best fit; return the pack numbers, [samples].

    Args:
        places: padded length of each sample in units of `align`, descending.
        capacity: capacity of a pack, in the same unit.
        max_samples: maximum number of samples in a pack.
        begun: filled length of each existing pack, in the same unit.
        sizes: number of samples in each existing pack.
    """
    pack_of_run, length_of_run = array("q"), array("q")
    packs_by_room: dict[int, list[int]] = {}
    rooms = list[int]()  # keys of `packs_by_room`, ascending
    counts = array("q", sizes)

    def offer(number: int, room: int) -> None:
        if room and counts[number] < max_samples:
            if room not in packs_by_room:
                bisect.insort(rooms, room)
            packs_by_room.setdefault(room, []).append(number)

    for number, taken in enumerate(begun):
        offer(number, capacity - taken)
    wanted, repeated = np.unique(-places, return_counts=True)
    for size, left in zip((-wanted).tolist(), repeated.tolist(), strict=True):
        while left:
            place = bisect.bisect_left(rooms, size)
            if place == len(rooms):
                room, number = capacity, len(counts)
                counts.append(0)
            else:
                room = rooms[place]
                number = packs_by_room[room].pop()
                if not packs_by_room[room]:
                    del packs_by_room[room], rooms[place]
            placed = min(room // size, left, max_samples - counts[number])
            pack_of_run.append(number)
            length_of_run.append(placed)
            left -= placed
            counts[number] += placed
            offer(number, room - placed * size)
    return np.repeat(np.array(pack_of_run, dtype=np.int64), np.array(length_of_run, dtype=np.int64))


def _spread(places: Lengths, *, capacity: int, max_samples: int, packs: int) -> Lengths:
    """Assign each sample to the emptiest of `packs` packs; return the pack numbers, [samples].

    A sample that does not fit there is placed by best fit at the end, in a new pack if necessary. See `_place`.
    """
    pack_of_sample = np.empty(len(places), dtype=np.int64)
    taken, sizes = [0] * packs, [0] * packs
    emptiest = [(0, number) for number in range(packs)]
    left = array("q")
    for sample, size in enumerate(places.tolist()):
        before, number = emptiest[0]
        if before + size > capacity:
            left.append(sample)
            continue
        pack_of_sample[sample] = number
        taken[number] = before + size
        sizes[number] += 1
        if sizes[number] < max_samples:
            heapq.heapreplace(emptiest, (before + size, number))
        else:
            heapq.heapreplace(emptiest, (capacity, number))
    rest = np.array(left, dtype=np.int64)
    pack_of_sample[rest] = _place(places[rest], capacity=capacity, max_samples=max_samples, begun=taken, sizes=sizes)
    return pack_of_sample
