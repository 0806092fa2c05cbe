"""Attention over packs (docs/data/sft.md) that Transformer Engine lacks, by GPU and version. No torch.

Read in its sources, 2.8 to 2.18: `fused_attn.cpp` takes packed sequences (`thd`) on compute capability 9.0 and up,
`utils.py` turns the unfused attention off under context parallelism, and `context_parallel.py` asserts the rest.
"""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from nemo_ext.megatron import versions

SINCE = {"a2a": Version("2.10"), "all_gather": Version("2.18")}
"""First Transformer Engine that takes packs with a `cp_comm_type`; p2p has always done."""


def flash_attention() -> bool:
    """True if flash-attn is installed here, by any of the names of its versions."""
    return any(importlib.util.find_spec(name) is not None for name in ("flash_attn", "flash_attn_3"))


def engine() -> Version | None:
    """Version of the Transformer Engine here, or None."""
    try:
        return Version(importlib.metadata.version("transformer-engine"))
    except importlib.metadata.PackageNotFoundError:
        return None


def lack(config: Mapping[str, Any], gpu: str, *, fused: bool, flash: bool, version: Version | None) -> str | None:
    """Why the ranks of a config cannot attend over its packs, and what to do; None if they can.

    Args:
        config: composed training config.
        gpu: name of the GPU, for the message.
        fused: True if cuDNN's attention takes packs on it (compute capability 9.0, Hopper, and later).
        flash: True if flash-attn is installed for the ranks.
        version: their Transformer Engine; None if unknown.
    """
    megatron, data = config["megatron"], config.get("data") or {}
    parts = int(megatron.get("context_parallel_size") or 1)
    if parts == 1 or data.get("packed") is None:
        return None
    if not fused and not flash:
        return (
            f"packs with megatron.context_parallel_size={parts} on {gpu}: Transformer Engine's own attention takes "
            "them from Hopper (compute capability 9.0) on, and flash-attn, which takes them here, is not installed: "
            "pip install --no-build-isolation flash-attn, or set megatron.context_parallel_size=1"
        )
    given = megatron.get("cp_comm_type") or "p2p"
    for kind in [given] if isinstance(given, str) else given:
        if version is not None and version < SINCE.get(kind, version):
            other = next((name for name, since in SINCE.items() if since <= version), None)
            advice = f"set megatron.cp_comm_type={other}, or install" if other else "install"
            return (
                f"packs with megatron.cp_comm_type={kind}: Transformer Engine {version} does not take them, "
                f"{SINCE[kind]} does: {advice} a newer one"
            )
    return None


def remark(config: Mapping[str, Any]) -> str | None:
    """Remark for the user about packs that are slow to rotate, before a run starts; None if there is none."""
    if (config.get("data") or {}).get("packed") is None or versions.installed() >= (0, 20):
        return None
    if config["megatron"].get("position_embedding_type") != "yarn":
        return None
    return (
        "YaRN over packs: Megatron-Core before 0.20 rotates the sequences of a pack one after the other, in every "
        "layer, and waits for the GPU each time (rope_utils.py): a newer one is faster"
    )
