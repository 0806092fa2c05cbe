"""Groups of requests that are answered together, once the group is complete or after a time limit."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field


@dataclass
class _Cohort[M, R]:
    members: dict[Hashable, M] = field(default_factory=dict)
    results: "asyncio.Future[dict[Hashable, R]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    timer: asyncio.TimerHandle | None = None


class Cohorts[M, R]:
    """Groups of requests with the same key, which are answered together.

    Args:
        size: number of members of a complete group, which is answered immediately.
        wait_seconds: seconds from its first member until an incomplete group is answered; later members form another.
        answer: function that returns the results of a group's members, in order.
    """

    def __init__(self, size: int, wait_seconds: float, answer: Callable[[Sequence[M]], Awaitable[Sequence[R]]]) -> None:
        self._size = size
        self._wait = wait_seconds
        self._answer = answer
        self._open: dict[Hashable, _Cohort[M, R]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def join(self, key: Hashable, place: Hashable, member: M) -> R:
        """Add a member to a group, wait until the group is answered, and return the member's result.

        Args:
            key: key that identifies the group.
            place: identifies the member within the group; a request that is sent again has the same place.
        """
        cohort = self._open.get(key)
        if cohort is None:
            cohort = self._open[key] = _Cohort()
            cohort.timer = asyncio.get_running_loop().call_later(self._wait, self._close, key, cohort)
        cohort.members[place] = member
        if len(cohort.members) >= self._size:
            self._close(key, cohort)
        # A cancelled request must not cancel the results of other requests.
        return (await asyncio.shield(cohort.results))[place]

    def _close(self, key: Hashable, cohort: _Cohort[M, R]) -> None:
        if self._open.get(key) is not cohort:
            return
        del self._open[key]
        assert cohort.timer is not None
        cohort.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._run(cohort))
        self._running.add(task)  # the event loop keeps only weak references to tasks
        task.add_done_callback(self._running.discard)

    async def _run(self, cohort: _Cohort[M, R]) -> None:
        try:
            results = await self._answer(tuple(cohort.members.values()))
            cohort.results.set_result(dict(zip(cohort.members, results, strict=True)))
        except Exception as error:  # raised in all waiting requests
            cohort.results.set_exception(error)
