"""Cancel: `nemo-ext cancel RUN_DIR`, cancels the jobs of a run, pipeline or sweep on Slurm."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["cancel", *sys.argv[1:]])
