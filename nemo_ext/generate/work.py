"""Worker of a batch job: leases ranges of rows, sends their requests, and finally helps with other workers' ranges."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_ext.endpoint.client import Answer, Client, Request
from nemo_ext.generate.output import OpenRange, Output, Pair
from nemo_ext.generate.rows import Index, Range, Rows, row_key

_LONGEST_BEAT = 5.0
_IDLE = 1.0


class Requests(Protocol):
    """Builder of a batch job's requests from its input rows."""

    def request(self, row: Mapping[str, Any], sample: int) -> Request:
        """Build the request for one sample of a row; raise ValueError if that is impossible."""


def try_requests(requests: Requests, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that a request can be built from at least one of the rows; otherwise raise the first row's ValueError."""
    problems = []
    for row in rows:
        try:
            requests.request(row, 0)
            return
        except ValueError as error:
            problems.append(error)
    if problems:
        raise problems[0]


class TooManyDead(Exception):
    """Raised if more answers failed than `max_dead` allows."""


@dataclass
class Work:
    """State of one worker.

    Attributes:
        index, rows: the input.
        prompts: builder of the requests.
        output: the output.
        samples: number of answers per row.
        most_dead: number of failures above which the job fails.
        seen: callback for every answer that this worker receives.
        dead: number of failures so far.
        known: function that returns an existing answer to a request, or None; None if there are no such answers.
    """

    index: Index
    rows: Rows
    prompts: Requests
    output: Output
    samples: int
    most_dead: float
    seen: Callable[[Answer], None]
    dead: int = 0
    known: Callable[[Request], Answer | None] | None = None
    _open: dict[int, OpenRange] = field(default_factory=dict)
    _asked: dict[tuple[str, int], tuple[OpenRange, Pair]] = field(default_factory=dict)
    _retried: set[int] = field(default_factory=set)
    _settled: set[str] = field(default_factory=set)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: Client) -> None:
        """Work until all ranges are finished, whether by this worker or by others.

        Raises:
            TooManyDead: more answers failed than `most_dead`.
            ValueError: the endpoint rejects the API key.
            EndpointGone: the endpoint has not responded for longer than the client's patience.
        """
        if self.dead > self.most_dead:
            raise TooManyDead("too many answers failed, counted over earlier starts")
        asking, beating = asyncio.create_task(self._ask(client)), asyncio.create_task(self._beat())
        try:
            # Heartbeats end when all ranges are finished; requests still open then were answered by other workers.
            await asyncio.wait((asking, beating), return_when=asyncio.FIRST_COMPLETED)
            for task in (asking, beating):
                if task.done():
                    task.result()
        finally:
            for task in (asking, beating):
                task.cancel()
            await asyncio.gather(asking, beating, return_exceptions=True)
            for opened in list(self._open.values()):
                if self.dead > self.most_dead:
                    self.output.give_up(opened)
                self._close(opened)

    async def _ask(self, client: Client) -> None:
        async with contextlib.aclosing(client.answers(self._requests(), store=self)) as answers:
            async for answer in answers:
                self.seen(answer)

    def has(self, request: Request) -> bool:
        """Return whether another worker has received the answer to a request since this worker made it."""
        opened, pair = self._asked[request.key, request.sample]
        if pair in opened.settled:
            del self._asked[request.key, request.sample]
            return True
        return False

    def add(self, request: Request, answer: Answer) -> None:
        """Store the answer to a request that this worker made.

        Raises:
            TooManyDead: the answer is a failure, and there are now more than `most_dead` failures.
        """
        opened, pair = self._asked.pop((request.key, request.sample))
        self._keep(opened, pair, answer)

    def _keep(self, opened: OpenRange, pair: Pair, answer: Answer) -> None:
        if opened.range.number in self._open:  # other workers may have finished its range
            self.output.add(opened, pair, answer)
        if answer.problem:
            self.dead += 1
            if self.dead > self.most_dead:
                raise TooManyDead(f"too many answers failed (last failure: {answer.problem})")
        self._finish(opened)

    async def _requests(self) -> AsyncIterator[Request]:
        while not self._all_settled():
            for opened in self._free():
                for request in self._wanted(opened, opened.pairs):
                    yield request
            for opened in self._others():
                for request in self._wanted(opened, opened.pairs[::-1]):
                    yield request
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _IDLE)

    def _wanted(self, opened: OpenRange, pairs: Sequence[Pair]) -> Iterator[Request]:
        """Yield the requests for `pairs` of (row, sample) that are unanswered and that this worker has not made yet.

        Requests with a known answer are not yielded: their answers are stored. A failure is stored if no request can be
        made from a row. At the end, the range's part is written if the range is complete.
        """
        for pair in pairs:
            if pair in opened.settled or pair in opened.asked:
                continue
            opened.asked.add(pair)
            try:
                request = self.prompts.request(opened.rows[pair[0]], pair[1])
            except ValueError as error:
                self._keep(opened, pair, Answer(problem=f"prompt: {error}"))
                continue
            if self.known is not None and (answer := self.known(request)) is not None:
                self._keep(opened, pair, answer)
                self.seen(answer)
                continue
            self._asked[request.key, request.sample] = opened, pair
            yield request
        self._finish(opened)

    def _free(self) -> Iterator[OpenRange]:
        """Open and yield ranges that this worker can lease."""
        for range_ in self.index.ranges:
            if range_.number in self._open and self.output.leases.holds(range_.name):
                continue
            if self._is_settled(range_) or not self.output.leases.take(range_.name):
                continue
            if self._is_settled(range_, look=True):
                self.output.leases.drop(range_.name)
                continue
            yield self._open.get(range_.number) or self._opened(range_)

    def _others(self) -> Iterator[OpenRange]:
        """Open and yield unfinished ranges with requests that nobody has answered and this worker has not made yet."""
        for range_ in self.index.ranges:
            if self.output.part(range_).name not in self._settled:
                opened = self._open.get(range_.number) or self._opened(range_)
                if set(opened.pairs) - opened.settled - opened.asked:
                    yield opened

    def _all_settled(self) -> bool:
        self._settled = self.output.settled()
        return all(self._is_settled(range_) for range_ in self.index.ranges)

    def _is_settled(self, range_: Range, *, look: bool = False) -> bool:
        part = self.output.part(range_)
        if not (part.exists() if look else part.name in self._settled):
            return False
        return not self.output.retry_dead or range_.number in self._retried or not self.output.failures(range_)

    def _opened(self, range_: Range) -> OpenRange:
        rows = self.rows.read(range_)
        keys = [row_key(row, self.rows.key) for row in rows]
        opened = self.output.open(range_, rows, keys, self.samples)
        self._open[range_.number] = opened
        return opened

    def _finish(self, opened: OpenRange) -> None:
        """Write a range's part if the range is complete and leased by this worker."""
        if opened.complete and self.output.leases.holds(opened.range.name):
            if self.output.commit(opened):
                self._retried.add(opened.range.number)
                self._close(opened)
            self._news.set()

    def _close(self, opened: OpenRange) -> None:
        self._open.pop(opened.range.number, None)
        self.output.close(opened)

    async def _beat(self) -> None:
        """Periodically renew leases and read other workers' progress, until all ranges are finished."""
        while not self._all_settled():
            self.output.leases.touch()
            for opened in list(self._open.values()):
                if self.output.part(opened.range).exists() and not opened.again:
                    self._close(opened)
                    continue
                self.output.refresh(opened)
                self._finish(opened)
            await asyncio.sleep(min(self.output.leases.seconds / 4, _LONGEST_BEAT))
