"""Doctor: `nemo-ext doctor`, shows which engines work on this machine, and what the rest require."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["doctor", *sys.argv[1:]])
