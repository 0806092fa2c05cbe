"""Evaluate: `nemo-ext evaluate model=... suite=quick`, benchmarks with confidence intervals and all answers."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["evaluate", *sys.argv[1:]])
