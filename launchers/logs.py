"""Logs: `nemo-ext logs RUN_DIR [-f]`, shows the log of a run's ranks."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["logs", *sys.argv[1:]])
