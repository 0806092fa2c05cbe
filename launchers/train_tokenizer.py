"""Tokenizer training: `nemo-ext train_tokenizer input=texts.jsonl vocab=32000 output=data/tokenizer`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["train_tokenizer", *sys.argv[1:]])
