"""Size of a checkpoint, summed over the tensors that ranks would write. Does not import torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def sum_tensors(tensors: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Add up the sizes of the tensors listed by `checkpoint.plan`.

    Returns:
        `model_bytes` and `optimizer_bytes` of the whole tensors, and `own_bytes`, which this rank writes.
    """
    sums = {"model_bytes": 0, "optimizer_bytes": 0, "own_bytes": 0}
    for line in tensors:
        part = "optimizer" if "optimizer" in line["name"].split(".")[:2] else "model"
        sums[f"{part}_bytes"] += line["bytes"]
        sums["own_bytes"] += line["own_bytes"]
    return sums


def combine(ranks: Sequence[dict[str, Any]], share: float) -> dict[str, Any]:
    """Derive the whole checkpoint's figures from the rehearsed pipeline ranks; remove `names` from each of `ranks`.

    Args:
        ranks: each rehearsed pipeline rank's sums (`sum_tensors`), `writers`, and its tensors' names (`names`).
        share: ratio of all pipeline ranks' parameters to those of the rehearsed ones.

    Returns:
        A dict with bytes, model_bytes, optimizer_bytes, own_bytes (maximum written by one rank), tensors (number in the
        rehearsed ranks), writers, and estimated (True if other pipeline ranks are included in proportion to their
        parameters).
    """
    model, optimizer = (round(share * sum(rank[f"{part}_bytes"] for rank in ranks)) for part in ("model", "optimizer"))
    names = {name for rank in ranks for name in rank.pop("names")}
    return {
        "bytes": model + optimizer,
        "model_bytes": model,
        "optimizer_bytes": optimizer,
        "own_bytes": max(rank["own_bytes"] for rank in ranks),
        "tensors": len(names),
        "writers": ranks[0]["writers"],
        "estimated": share > 1,
    }
