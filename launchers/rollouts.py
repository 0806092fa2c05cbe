"""Rollouts: `nemo-ext rollouts model=... tasks=...`, verified answers to RL tasks."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["rollouts", *sys.argv[1:]])
