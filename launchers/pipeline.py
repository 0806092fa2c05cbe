"""Pipeline: `nemo-ext pipeline pipeline=domyn_small scale=laptop run_dir=runs/x`, jobs that follow each other, here."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["pipeline", *sys.argv[1:]])
