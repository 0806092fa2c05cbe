"""Classifier: `nemo-ext curate_classifier positives=good.jsonl negatives=web.jsonl output=data/quality`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's
    from nemo_ext.cli import main

    main(["curate_classifier", *sys.argv[1:]])
