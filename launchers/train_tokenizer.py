"""Tokenizer training: `nemo-ext train_tokenizer input=texts.jsonl vocab=32000 output=data/tokenizer`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and trains on this machine."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.data.vocabulary.job import run

        run(config)

    run_job("train_tokenizer", job)


if __name__ == "__main__":
    main()
