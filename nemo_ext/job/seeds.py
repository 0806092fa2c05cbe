"""Random decisions that depend on a seed and on names alone: not on order, workers or how often work was resumed."""

import hashlib

import numpy as np


def digest(seed: int, *names: str | int) -> int:
    """64 random bits of a seed and names; other names, or the same ones divided otherwise, give other bits."""
    text = "\x1f".join([str(seed), *map(repr, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())


def uniform(seed: int, *names: str | int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (digest(seed, *names) >> 11) / (1 << 53)


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """Random generator of its own for a seed and names."""
    return np.random.default_rng(digest(seed, *names))
