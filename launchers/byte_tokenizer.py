"""Byte tokenizer: `nemo-ext byte_tokenizer output=data/tokenizer template=domyn`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["byte_tokenizer", *sys.argv[1:]])
