from dataclasses import replace
from pathlib import Path

import pytest

from nemo_ext.slurm import attempts
from nemo_ext.slurm.attempts import Attempt, verdict
from nemo_ext.slurm.rank import variables


def made(*steps: tuple[int, int]) -> list[Attempt]:
    return [
        Attempt(
            job="1",
            restart=number,
            nodes="n1",
            began=0.0,
            first_step=first,
            ended=1.0,
            last_step=last,
            reason=f"reason {number}",
        )
        for number, (first, last) in enumerate(steps)
    ]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([(0, 5)], None),
        ([(0, 0)], None),
        ([(0, 0), (0, 0)], "2 starts without a new checkpoint (reason 0; reason 1), and slurm.max_idle=2"),
        ([(0, 0), (0, 5), (5, 5)], None),
        ([(0, 5), (5, 5), (5, 5)], "2 starts without a new checkpoint (reason 1; reason 2), and slurm.max_idle=2"),
        ([(0, 5), (5, 9), (9, 12), (12, 13)], "started 4 times, and slurm.max_restarts=3"),
    ],
)
def test_a_run_is_restarted_while_it_makes_progress(steps: list[tuple[int, int]], said: str | None) -> None:
    assert verdict(made(*steps), max_restarts=3, max_idle=2) == said


def test_starts_that_ended_at_a_skipped_step_do_not_count() -> None:
    passed = [replace(each, reason=f"{attempts.PASSED_OVER}nan") for each in made((0, 0), (0, 0))]
    assert verdict([*passed, *made((0, 0))], max_restarts=1, max_idle=2) is None


def test_a_start_without_an_end_was_killed(tmp_path: Path) -> None:
    attempts.begin(tmp_path, job="7", restart=0, nodes="n[1-2]", step=0)
    first, second = attempts.begin(tmp_path, job="7", restart=1, nodes="n1", step=5)

    assert (first.last_step, first.reason) == (5, "killed with its node, or by Slurm")
    assert first.progressed
    assert (second.first_step, second.ended) == (5, None)
    assert attempts.end(tmp_path, step=9, reason="done")[-1] == attempts.read(tmp_path)[-1]
    attempts.finish(tmp_path, step=9, words=["recipe=mine"])
    assert attempts.finished(tmp_path) == ["recipe=mine"]
    attempts.begin(tmp_path, job="8", restart=0, nodes="n1", step=9)
    assert not (tmp_path / "slurm" / "finished.json").exists(), "it has more steps now"


def test_ranks_are_tasks_of_slurm() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}

    assert variables({**slurm, "MASTER_ADDR": "n1", "MASTER_PORT": "1"}) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
    }
    with pytest.raises(ValueError, match="not set: MASTER_ADDR, MASTER_PORT; start this with srun"):
        variables(slurm)
