"""Submit: `nemo-ext submit recipe=domyn_small/cpt cluster=leonardo account=X`, a checked job for Slurm."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["submit", *sys.argv[1:]])
