"""The number of concurrent requests, with simulated endpoints and a simulated clock."""

import asyncio
import time
from collections.abc import Callable

import pytest

from nemo_ext.endpoint.pace import FIRST, MOST, Pace


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("nemo_ext.endpoint.pace.time.monotonic", made)
    return made


def rounds(pace: Pace, clock: Clock, count: int, serve: Callable[[int], tuple[float, float]]) -> list[int]:
    """Limits after rounds in which an endpoint always gets as many requests as the limit.

    Args:
        pace: what finds the limit.
        clock: its clock.
        count: number of rounds.
        serve: seconds of an answer and share of refusals by the number of requests at a time.
    """
    limits = []

    async def hold(end: asyncio.Event) -> None:
        async with pace.turn(0):
            await end.wait()

    async def work() -> None:
        for _ in range(count):
            now, end = pace.limit, asyncio.Event()
            seconds, refused = serve(now)
            holding = [asyncio.create_task(hold(end)) for _ in range(now)]
            await asyncio.sleep(0)
            for number in range(4 * max(now, 64)):
                clock.now += seconds / now
                if number % 100 < 100 * refused:
                    pace.overloaded()
                else:
                    pace.answered(seconds)
                if pace.limit != now:
                    break
            end.set()
            await asyncio.gather(*holding)
            limits.append(pace.limit)

    asyncio.run(work())
    return limits


@pytest.mark.slow
def test_the_number_grows_while_throughput_improves(clock: Clock) -> None:
    assert rounds(Pace(), clock, 60, lambda now: (0.5, 0.0))[-1] == MOST


def test_the_number_stays_at_the_capacity_of_an_endpoint(clock: Clock) -> None:
    limits = rounds(Pace(), clock, 100, lambda now: (0.5 * max(1.0, now / 64), 0.0))

    assert max(limits) <= 160
    assert min(limits) >= 32


@pytest.mark.deep
def test_refusals_lower_the_number_and_it_recovers(clock: Clock) -> None:
    pace = Pace()
    rounds(pace, clock, 30, lambda now: (0.5, 0.0))
    limits = rounds(pace, clock, 100, lambda now: (0.5, 0.5 if now > 40 else 0.0))

    assert limits[-1] <= 60
    assert rounds(pace, clock, 200, lambda now: (0.5, 0.0))[-1] > 300


def test_a_fixed_number_stays(clock: Clock) -> None:
    assert set(rounds(Pace(fixed=7), clock, 5, lambda now: (0.5, 0.9))) == {7}
    assert Pace().limit == FIRST


def test_requests_and_tokens_per_minute() -> None:
    async def turns(pace: Pace, tokens: int) -> float:
        began = time.monotonic()
        for _ in range(4):
            async with pace.turn(tokens):
                pass
        return time.monotonic() - began

    assert asyncio.run(turns(Pace(requests=600), 0)) > 0.25
    assert asyncio.run(turns(Pace(tokens=6000), 1530)) > 1  # 6000 are available at once, then 100 per second
