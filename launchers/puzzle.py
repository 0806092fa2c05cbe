"""Puzzle: `nemo-ext puzzle puzzle.parent=... puzzle.search...`, derives a smaller model from a parent."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["puzzle", *sys.argv[1:]])
