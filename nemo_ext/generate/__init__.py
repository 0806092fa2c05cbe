"""Batch generation: any number of workers send rows to an endpoint; jobs can be resumed (docs/generate.md)."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "map":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_ext.generate.frames import map  # on first use, as commands are listed without the libraries that it needs

    return map
