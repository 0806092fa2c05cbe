"""Serve: `nemo-ext serve model=...`, serves a model at an OpenAI-compatible endpoint."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["serve", *sys.argv[1:]])
