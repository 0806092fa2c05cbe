"""Preference training in rounds: `nemo-ext online preset=rpo_online model=exports/mine tasks.train.path=TASKS`."""

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and trains in rounds; the same command goes on after a stop."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.online.job import run

        run(config)

    run_job("online", job, resumable=True)


if __name__ == "__main__":
    main()
