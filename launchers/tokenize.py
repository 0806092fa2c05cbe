"""Tokenise: `nemo-ext tokenize input=texts.jsonl output=data/mine`, or `nemo-ext tokenize data=...`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this file must not hide the standard library's tokenize

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and tokenises on this machine."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.data.streams import blend_to_tokenize
        from nemo_ext.data.tokenize import tokenize_blend

        try:
            tokenize_blend(blend_to_tokenize(config))
        except RuntimeError as error:  # a worker died, which is nothing that a traceback would explain
            sys.exit(f"error: {error}")

    run_job("tokenize", job, resumable=True)


if __name__ == "__main__":
    main()
