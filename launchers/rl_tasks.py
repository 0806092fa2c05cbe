"""Tasks for RL: `nemo-ext rl_tasks generator=arithmetic count=2000 output=tasks/arithmetic.jsonl`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["rl_tasks", *sys.argv[1:]])
