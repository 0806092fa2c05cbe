"""Rehearse: `nemo-ext rehearse [job=puzzle] recipe=...`, runs ranks of a full-size job on fake tensors."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["rehearse", *sys.argv[1:]])
