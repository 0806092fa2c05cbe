"""Limits of Transformer Engine's packed-sequence (THD) attention, by GPU and version. Does not import torch.

Source: Transformer Engine 2.8 to 2.18. `fused_attn.cpp` supports packed sequences from compute capability 9.0 on,
`utils.py` disables unfused attention under context parallelism, and `context_parallel.py` asserts what
`cp_comm_type` allows. FlashAttention 2 supports them from 8.0 on; its successors are for Hopper and Blackwell, which do
not need them.
"""

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from nemo_ext.data.phases import sections_of
from nemo_ext.megatron import versions

SINCE = {"a2a": Version("2.10"), "all_gather": Version("2.18")}
"""First Transformer Engine version that supports packs with each `cp_comm_type`; p2p always works, a2a+p2p never."""


def installed(distribution: str) -> Version | None:
    """Return an installed distribution's version; None if it is not installed or has no valid version."""
    try:
        return Version(importlib.metadata.version(distribution))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion, TypeError):
        return None


def lack(
    config: Mapping[str, Any], gpu: str, *, capability: tuple[int, int] | None, flash: bool, version: Version | None
) -> str | None:
    """Explain why ranks have no attention kernel for a config's packs, and the remedy; None if they have one.

    Args:
        config: composed training config.
        gpu: name of the GPU, for the message.
        capability: compute capability of the GPU; None if unknown.
        flash: whether FlashAttention 2 is installed where ranks run.
        version: version of Transformer Engine where ranks run; None if unknown.
    """
    for megatron in _with_packs(config):
        parts = int(megatron.get("context_parallel_size") or 1)
        if parts == 1:
            continue
        where = f"packs with megatron.context_parallel_size={parts}"
        backend = megatron.get("attention_backend") or "auto"
        if backend == "unfused":
            return f"megatron.attention_backend=unfused does not support {where}; set auto, fused or flash"
        if capability is not None:
            able = {"fused": capability >= (9, 0), "flash": flash and capability >= (8, 0)}
            if not any(able.values() if backend == "auto" else [able.get(backend, True)]):
                return (
                    f"{where} and attention_backend={backend} have no attention kernel on {gpu}, as cuDNN's (fused) "
                    "needs compute capability 9.0 (Hopper), and FlashAttention 2 needs 8.0 and its package: "
                    "pip install --no-build-isolation flash-attn, or set megatron.context_parallel_size=1"
                )
        kinds = megatron.get("cp_comm_type") or "p2p"
        base = None if version is None else Version(version.base_version)  # a source tree has `2.18.0.dev0+commit`
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if kind == "a2a+p2p":
                return f"Transformer Engine does not support {where} and cp_comm_type=a2a+p2p; set p2p or a2a"
            if base is not None and base < SINCE.get(kind, base):
                other = next((name for name, since in SINCE.items() if since <= base), None)
                advice = f"set megatron.cp_comm_type={other}, or install" if other else "install"
                return (
                    f"Transformer Engine {version} does not support {where} and cp_comm_type={kind}, but "
                    f"{SINCE[kind]} does: {advice} a newer version"
                )
    return None


def _with_packs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield Megatron's flags for the run if it trains on packs, and for each phase that does."""
    megatron = config["megatron"]
    if (config.get("data") or {}).get("packed") is not None:
        yield megatron
    for section in sections_of(config).values():
        if (section.data or {}).get("packed") is not None:
            yield {**megatron, **(section.megatron or {})}


def remark(config: Mapping[str, Any]) -> str | None:
    """Return a remark on slow RoPE over packs to print before a run starts; None if it does not apply."""
    yarn = any(megatron.get("position_embedding_type") == "yarn" for megatron in _with_packs(config))
    if not yarn or versions.installed() >= (0, 20):
        return None
    return (
        "YaRN over packs is slow, as Megatron-Core before 0.20 rotates the sequences of a pack one after the other in "
        "every layer and waits for the GPU each time (rope_utils.py): a newer version is faster"
    )
