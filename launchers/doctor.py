"""Doctor: `nemo-ext doctor`, which engines work on this machine, and what the others lack."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["doctor", *sys.argv[1:]])
