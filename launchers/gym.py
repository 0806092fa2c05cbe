"""NeMo Gym servers: `nemo-ext gym output=DIR`."""

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and lays the folder out."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.rl.gym.install import run

        print(run(config))

    run_job("gym", job)


if __name__ == "__main__":
    main()
