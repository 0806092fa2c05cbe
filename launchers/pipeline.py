"""Pipeline: `nemo-ext pipeline pipeline=domyn_small scale=laptop run_dir=runs/x`, consecutive jobs on this machine."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["pipeline", *sys.argv[1:]])
