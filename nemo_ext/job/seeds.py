"""Random numbers that depend only on a seed and names, not on order, number of workers or interruptions."""

import hashlib

import numpy as np


def digest(seed: int, *names: str | int) -> int:
    """Return 64 random bits for a seed and names; names are kept apart, so that ("a", "b") and ("ab",) differ."""
    text = "\x1f".join([str(seed), *map(repr, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())


def uniform(seed: int, *names: str | int) -> float:
    """Return a random number in [0, 1), with 53 random bits, for a seed and names."""
    return (digest(seed, *names) >> 11) / (1 << 53)


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """Create a random generator for a seed and names."""
    return np.random.default_rng(digest(seed, *names))
