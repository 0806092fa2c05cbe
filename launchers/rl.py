"""Reinforcement learning: `nemo-ext rl preset=domyn_math_grpo model=exports/mine tasks.train.path=tasks/math.jsonl`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["rl", *sys.argv[1:]])
