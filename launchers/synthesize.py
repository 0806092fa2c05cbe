"""Synthesize: `nemo-ext synthesize recipe=NAME input=... output=...`, generates training data."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["synthesize", *sys.argv[1:]])
