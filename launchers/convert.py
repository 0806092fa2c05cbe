"""Convert: `nemo-ext convert from=... to=...`, checkpoints between Hugging Face and Megatron."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.config import run_job

INTERRUPTED = 130


def main() -> None:
    """Composes the config and converts on this machine."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.checkpoint.convert import run

        try:
            run(config)
        except KeyboardInterrupt:
            print("interrupted: the same command goes on", file=sys.stderr)
            sys.exit(INTERRUPTED)

    run_job("convert", job)


if __name__ == "__main__":
    main()
