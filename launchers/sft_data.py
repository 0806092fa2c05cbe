"""SFT data: `nemo-ext sft_data output=data/sft template=nemotron3_nano 'sources=[{name: chat, path: chat.jsonl}]'`."""

import sys

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and makes packs on this machine."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.data.sft.job import run
        from nemo_ext.job.progress import notice

        try:
            notice(f"report: {run(config)}")
        except RuntimeError as error:  # a worker died, which is nothing that a traceback would explain
            sys.exit(f"error: {error}")

    run_job("sft_data", job, resumable=True)


if __name__ == "__main__":
    main()
