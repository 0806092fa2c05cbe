"""Curriculum: `nemo-ext curriculum prompts=prompts.jsonl 'rollouts=rollouts/*.jsonl' output=curricula/first`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and writes the curriculum on this machine."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.data.curriculum.job import run

        run(config)

    run_job("curriculum", job)


if __name__ == "__main__":
    main()
