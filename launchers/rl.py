"""Reinforcement learning: `nemo-ext rl preset=domyn_math_grpo model=exports/mine tasks.train.path=tasks/math.jsonl`."""

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and trains with the engine that it names."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.rl.job import run

        run(config)

    run_job("rl", job, resumable=True)


if __name__ == "__main__":
    main()
