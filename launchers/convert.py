"""Convert: `nemo-ext convert from=... to=...`, converts checkpoints between Hugging Face and Megatron."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["convert", *sys.argv[1:]])
