"""Byte tokenizer: `nemo-ext byte_tokenizer output=data/tokenizer template=domyn`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and writes the tokenizer's folder."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.data.text.byte_tokenizer import run

        run(config)

    run_job("byte_tokenizer", job)


if __name__ == "__main__":
    main()
