"""Curation: `nemo-ext curate input='raw/*.jsonl.gz' preset=dolma output=data/curated`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["curate", *sys.argv[1:]])
