"""Describe: `nemo-ext describe model=... [draw=model.svg]`, or `recipe=...` for a recipe on its GPUs."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["describe", *sys.argv[1:]])
