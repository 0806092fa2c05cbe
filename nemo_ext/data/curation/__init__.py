"""Curation of raw documents into training text: filters, deduplication, and counts of what each stage drops."""

from importlib.util import find_spec

if find_spec("datatrove") is None:
    raise ValueError("curation requires datatrove: pip install 'nemo_ext[curate]'")
