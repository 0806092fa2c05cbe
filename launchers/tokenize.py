"""Tokenise: `nemo-ext tokenize input=texts.jsonl output=data/mine`, or `nemo-ext tokenize data=...`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["tokenize", *sys.argv[1:]])
