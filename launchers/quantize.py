"""Quantize: `nemo-ext quantize from=... to=... precision=... calibration.data=...`, FP8 quantisation."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["quantize", *sys.argv[1:]])
