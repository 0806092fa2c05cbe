"""Curation: raw documents through filters and deduplication to text that is ready for training, all of it counted."""

from importlib.util import find_spec

if find_spec("datatrove") is None:
    raise ValueError("curation needs datatrove: pip install 'nemo_ext[curate]'")
