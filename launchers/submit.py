"""Submit: `nemo-ext submit recipe=domyn_small/cpt cluster=leonardo account=X`, checks and submits a job."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["submit", *sys.argv[1:]])
