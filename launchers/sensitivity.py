"""Sensitivity: `nemo-ext sensitivity sensitivity.model=...`, finds blocks that need more than FP8."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["sensitivity", *sys.argv[1:]])
