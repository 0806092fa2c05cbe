"""Adaptive limit on concurrent requests to an endpoint, and limits per minute."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median

FIRST, MOST = 32, 1024
"""Initial and maximum number of concurrent requests."""
_ROUND_SECONDS, _WAVES = 0.2, 3
"""Minimum length of a round, in seconds and in answers per concurrent request (as answers arrive in waves)."""
_OUTCOMES = 64
"""Minimum number of outcomes in a round."""
_LESS, _NOISE = 0.7, 0.1
_PAYS = 4
"""More concurrent requests pay off if the rate grows by more than their relative increase divided by this number."""
_ROUNDS = 8
"""Number of rounds between two trials with more concurrent requests."""


class Pace:
    """Limiter of concurrent requests, which adapts to the endpoint's throughput.

    A round ends after about three outcomes (answers or signs of overload) per concurrent request. Every few rounds, a
    higher limit is tried, and kept if the rate of answers has increased enough. The limit is doubled until that no
    longer pays off, and raised by a quarter afterwards. If more than a tenth of the outcomes are signs of overload
    (429, 503, timeouts), the limit is reduced by half that share. If the median answer takes twice as long and the
    rate of answers falls by 30 %, the limit is reduced by 30 %.

    Args:
        fixed: fixed limit; if None, the limit adapts.
        requests: maximum number of requests per minute; None if there is no limit.
        tokens: maximum number of prompt and answer tokens per minute; None if there is no limit.
    """

    def __init__(self, *, fixed: int | None = None, requests: int | None = None, tokens: int | None = None) -> None:
        import anyio
        from aiolimiter import AsyncLimiter

        self._fixed = fixed is not None
        self._turns = anyio.CapacityLimiter(FIRST if fixed is None else fixed)
        # Spread over the minute, as an endpoint would refuse a whole minute's requests at once.
        self._requests = None if requests is None else AsyncLimiter(1, 60 / requests)
        self._tokens = None if tokens is None else AsyncLimiter(tokens, 60)
        self._growth, self._hold = 2.0, 0
        self._kept = (self.limit, 0.0, float("inf"))
        self._begin()

    @property
    def limit(self) -> int:
        """Maximum number of concurrent requests."""
        return int(self._turns.total_tokens)

    @asynccontextmanager
    async def turn(self, tokens: int) -> AsyncIterator[None]:
        """Wait until the limits admit one more request, and count it as running until the block ends.

        `tokens` is an estimate of the tokens that the request will use.
        """
        if self._requests is not None:
            await self._requests.acquire()
        await self.used(tokens)
        async with self._turns:
            yield

    async def used(self, tokens: int) -> None:
        """Count further tokens towards the limit per minute, after waiting until it admits them."""
        if self._tokens is not None and tokens > 0:
            await self._tokens.acquire(min(tokens, self._tokens.max_rate))

    def answered(self, seconds: float) -> None:
        """Record an answer and how long it took, in seconds."""
        self._seconds.append(seconds)
        self._end()

    def overloaded(self) -> None:
        """Record a sign of overload, such as status 429 or a timeout."""
        self._refusals += 1
        self._end()

    def _end(self) -> None:
        """End the round if it is long enough, and set the limit for the next one."""
        self._full |= self._turns.borrowed_tokens >= self.limit
        answers, elapsed, now = len(self._seconds), time.monotonic() - self._began, self.limit
        refused = self._refusals / (answers + self._refusals)
        least = max(_OUTCOMES, now * (_WAVES if refused <= _NOISE else 1))
        if self._fixed or answers + self._refusals < least or elapsed < _ROUND_SECONDS:
            return
        rate, usual = answers / elapsed, median(self._seconds or [0.0])
        limit, best, quick = self._kept
        self._hold -= 1
        if refused > _NOISE:
            self._keep(int(now * (1 - refused / 2)), rate, usual)
        elif now > limit:  # a trial of a higher limit
            if rate > best * (1 + (now / limit - 1) / _PAYS):
                self._kept = now, rate, usual
            else:
                self._keep(limit, best, quick)
        elif rate < best * _LESS and usual > 2 * quick:
            self._keep(int(now * _LESS), rate, usual)
        else:
            self._kept = limit, rate, usual
        limit = self._kept[0]
        if self._full and self._hold <= 0:
            limit = max(limit + 1, int(limit * self._growth))
        self._turns.total_tokens = max(1, min(MOST, limit))
        self._begin()

    def _keep(self, limit: int, rate: float, mean: float) -> None:
        """Keep a limit, with its rate of answers and median latency, for some rounds; then raise it more slowly."""
        self._kept = max(1, limit), rate, mean
        self._growth, self._hold = 1.25, _ROUNDS

    def _begin(self) -> None:
        self._began, self._refusals, self._full = time.monotonic(), 0, False
        self._seconds: list[float] = []
