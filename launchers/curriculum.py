"""Curriculum: `nemo-ext curriculum prompts=prompts.jsonl 'rollouts=rollouts/*.jsonl' output=curricula/first`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["curriculum", *sys.argv[1:]])
