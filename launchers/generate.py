"""Generate: `nemo-ext generate endpoint=... input=... output=...`, sends rows to an endpoint."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["generate", *sys.argv[1:]])
