"""Preference training in rounds: `nemo-ext online preset=rpo_online model=exports/mine tasks.train.path=TASKS`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["online", *sys.argv[1:]])
