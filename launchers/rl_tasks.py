"""Tasks for RL: `nemo-ext rl_tasks generator=arithmetic count=2000 output=tasks/arithmetic.jsonl`."""

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and writes the tasks."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.rl.tasks.job import run

        run(config)

    run_job("rl_tasks", job)


if __name__ == "__main__":
    main()
