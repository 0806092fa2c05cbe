"""Cancel: `nemo-ext cancel RUN_DIR`, a run's job on Slurm, or those of a pipeline or sweep."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["cancel", *sys.argv[1:]])
