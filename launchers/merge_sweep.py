"""Evaluated averages of checkpoints: `nemo-ext merge_sweep 'from=[a,b]' 'sweep.points=[0,0.5,1]' suite=...`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["merge_sweep", *sys.argv[1:]])
