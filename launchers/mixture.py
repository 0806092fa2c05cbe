"""Mixture: `nemo-ext mixture train='...' evaluate='...' output=runs/mixture`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["mixture", *sys.argv[1:]])
