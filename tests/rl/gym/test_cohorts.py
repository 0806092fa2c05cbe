"""Requests that are answered as a group."""

import asyncio
from collections.abc import Sequence

import pytest

from nemo_ext.rl.gym.cohorts import Cohorts


def cohorts(size: int, wait: float, seen: list[tuple[str, ...]]) -> Cohorts[str, str]:
    async def answer(members: Sequence[str]) -> list[str]:
        seen.append(tuple(members))
        if "bad" in members:
            raise RuntimeError("broken")
        return [f"{member} of {len(members)}" for member in members]

    return Cohorts(size, wait, answer)


def test_a_complete_group_is_answered_member_by_member() -> None:
    seen: list[tuple[str, ...]] = []

    async def all_of_them() -> list[str]:
        made = cohorts(2, 60, seen)
        return await asyncio.gather(
            made.join("x", 0, "a"), made.join("y", 0, "b"), made.join("x", 1, "c"), made.join("y", 1, "d")
        )

    assert asyncio.run(all_of_them()) == ["a of 2", "b of 2", "c of 2", "d of 2"]
    assert sorted(seen) == [("a", "c"), ("b", "d")]


def test_an_incomplete_group_is_answered_after_the_time_limit() -> None:
    async def two_of_three() -> list[str]:
        made = cohorts(3, 0.05, [])
        return await asyncio.gather(made.join("x", 0, "a"), made.join("x", 1, "b"))

    assert asyncio.run(two_of_three()) == ["a of 2", "b of 2"]


def test_a_repeated_request_counts_once() -> None:
    async def three() -> list[str]:
        made = cohorts(2, 60, [])
        return await asyncio.gather(made.join("x", 0, "a"), made.join("x", 0, "a"), made.join("x", 1, "b"))

    assert asyncio.run(three()) == ["a of 2", "a of 2", "b of 2"]


def test_a_cancelled_request_does_not_affect_others() -> None:
    async def one_cancelled() -> str:
        made = cohorts(3, 60, [])
        tasks = [asyncio.create_task(made.join("x", place, name)) for place, name in enumerate("ab")]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        await made.join("x", 2, "c")
        return await tasks[1]

    assert asyncio.run(one_cancelled()) == "b of 3"


def test_a_failure_reaches_all_members_but_not_the_next_group() -> None:
    async def both() -> tuple[list[BaseException | str], list[str]]:
        made = cohorts(2, 60, [])
        failed = await asyncio.gather(made.join("x", 0, "bad"), made.join("x", 1, "b"), return_exceptions=True)
        return failed, await asyncio.gather(made.join("x", 0, "c"), made.join("x", 1, "d"))

    failed, fine = asyncio.run(both())

    assert [str(error) for error in failed] == ["broken", "broken"] and fine == ["c of 2", "d of 2"]


@pytest.mark.parametrize("size", [2, 7])
def test_later_groups_of_the_same_key_are_separate(size: int) -> None:
    seen: list[tuple[str, ...]] = []

    async def twice() -> None:
        made = cohorts(size, 60, seen)
        for _ in range(2):
            await asyncio.gather(*(made.join("x", place, str(place)) for place in range(size)))

    asyncio.run(twice())

    assert [len(group) for group in seen] == [size, size]
