"""Sums over the tensors of a checkpoint that ranks would write. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def summed(tensors: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes by model and optimizer, whole and of one rank, from the tensors of `checkpoint.plan`."""
    sums = {"model_bytes": 0, "optimizer_bytes": 0, "own_bytes": 0}
    for line in tensors:
        part = "optimizer" if "optimizer" in line["name"].split(".")[:2] else "model"
        sums[f"{part}_bytes"] += line["bytes"]
        sums["own_bytes"] += line["own_bytes"]
    return sums


def whole(ranks: Sequence[dict[str, Any]], share: float) -> dict[str, Any]:
    """A checkpoint of all pipeline ranks, from those that were rehearsed; takes `names` out of each.

    Args:
        ranks: of each pipeline rank, the sums and the names of its tensors.
        share: parameters of all pipeline ranks by those of these.

    Returns:
        bytes, model_bytes, optimizer_bytes; own_bytes (the most that one rank writes), tensors (in all, or those of
        these ranks), writers, estimated (whether pipeline ranks that were not rehearsed are counted by parameters).
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
