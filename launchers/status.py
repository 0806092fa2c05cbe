"""Status: `nemo-ext status [RUN_DIR ...]`, shows the runs on Slurm below directories."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["status", *sys.argv[1:]])
