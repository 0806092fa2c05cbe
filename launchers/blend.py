"""Blend: tokens and epochs per stream, `nemo-ext blend data=domyn_cpt tokens=503e9 [output=DIR]`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["blend", *sys.argv[1:]])
