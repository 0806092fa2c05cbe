"""SFT data: `nemo-ext sft_data output=data/sft template=nemotron3_nano 'sources=[{name: chat, path: chat.jsonl}]'`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["sft_data", *sys.argv[1:]])
