"""Responses verified and rewarded, and conversations carried on, whatever engine generated them.

A reward here depends on one response and its task. Verifiers run concurrently, in threads or as coroutines. The state
of a conversation travels in its `Episode`, so nothing is kept between turns.
"""

import asyncio
import functools
import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, cast

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import Message
from nemo_ext.chat.tool_calls import STYLES, Style, parse_tool_calls
from nemo_ext.job.settings import check_keys, checked_whole, nearest
from nemo_ext.rl.environments import Conversation, make
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.rewards.components import Reward
from nemo_ext.rl.rewards.named import Facts, reward_of
from nemo_ext.rl.task import Task
from nemo_ext.rl.verdict import Verdict

KEYS = ("name", "settings", "reward", "tool_style", "concurrency")
CONCURRENCY = 64
"""Number of concurrent verifications; one that waits for something else costs no more than a thread."""
REFERENCES = 4096
"""Number of parsed references that are cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """State of a task while responses to it are generated. Picklable.

    Attributes:
        task: task to respond to.
        thinking_opened: True if the prompt ends inside a reasoning trace.
        turn: number of responses before this one.
        conversation: state of a tool environment; None before the first response.
    """

    task: Task
    thinking_opened: bool
    turn: int = 0
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Outcome of a response.

    Attributes:
        response: parsed response.
        verdict: verdict on it; None if the conversation goes on.
        reward: reward of it; None if the conversation goes on.
        observation: text that the model reads before its next response; "" if there is none.
        following: episode of the next response; None if there is none.
    """

    response: Response
    verdict: Verdict | None = None
    reward: Reward | None = None
    observation: str = ""
    following: Episode | None = None


@dataclass
class Tally:
    """Running totals of one environment since its metrics were last taken."""

    responses: int = 0
    episodes: int = 0
    correct: int = 0
    error: int = 0
    score: float = 0.0
    reward: float = 0.0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Means over the episodes that ended; empty if none did."""
        if not self.episodes:
            return {}
        shares = {name: getattr(self, name) / self.episodes for name in ("correct", "error", "score", "reward")}
        shares |= {f"reward/{name}": total / self.episodes for name, total in sorted(self.parts.items())}
        return {
            "episodes": float(self.episodes),
            **shares,
            "turns": self.responses / self.episodes,
            "seconds_per_response": self.seconds / self.responses,
        }


class References:
    """Cache of parsed references, least recently used ones dropped; the responses of a group share one.

    Args:
        check: `Environment.check`.
    """

    def __init__(self, check: Callable[[Mapping[str, Any]], Any]) -> None:
        self._check = check
        self._kept: OrderedDict[str, tuple[Mapping[str, Any], Any]] = OrderedDict()

    def of(self, task: Task) -> Any:
        """Parsed reference of a task. Ids are unique only within a file, so the reference is compared as well.

        Raises:
            ValueError: as `check`.
        """
        kept, key = self._kept, task.id or repr(task.reference)
        if key not in kept or kept[key][0] != task.reference:
            kept[key] = (task.reference, self._check(task.reference))
        kept.move_to_end(key)
        if len(kept) > REFERENCES:
            kept.popitem(last=False)
        return kept[key][1]


class Episodes:
    """Verifies responses to the tasks of one environment.

    Args:
        config: `name` of the environment and its `settings`; `reward`, see `nemo_ext.rl.rewards.named.reward_of`;
            `tool_style`, format of the calls; `concurrency`, number of concurrent verifications.
        prompts: chat template of the model, required for environments with several turns.

    Raises:
        ValueError: unknown key or invalid value.
    """

    def __init__(self, config: Mapping[str, Any], prompts: Prompts | None = None) -> None:
        check_keys(config, KEYS, required=("name",), where="environment")
        self.environment = make(config["name"], config.get("settings"))
        self.reward = reward_of(config.get("reward"), where=f"environments.{config['name']}.reward")
        style = config.get("tool_style") or "any"
        if style not in STYLES:
            raise ValueError(f"tool_style: unknown {style!r}: {nearest(str(style), STYLES)}")
        self._tool_style = cast(Style, style)
        self._prompts = prompts
        if self.environment.begin is not None and prompts is None:
            raise ValueError(f"environment {config['name']!r} has several turns: give the chat template of the model")
        count = config.get("concurrency")
        slots = CONCURRENCY if count is None else checked_whole("concurrency", count, least=1)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=config["name"])
        # Shared by all calls: an engine may pass one response at a time.
        self._at_once = asyncio.Semaphore(slots)
        self._references = References(self.environment.check)
        self._tally = Tally()

    async def turns(
        self,
        episodes: Sequence[Episode],
        texts: Sequence[str],
        *,
        tokens: Sequence[int | None] | None = None,
        finished: Sequence[bool] | None = None,
    ) -> list[Turn]:
        """Outcomes of the responses, in order.

        Args:
            episodes: episode of each response.
            texts: generated texts without the end-of-sequence token.
            tokens: number of generated tokens per response, needed by length rewards.
            finished: False for responses cut off at the length limit.
        """
        counts = tokens or [None] * len(texts)
        ends = finished or [True] * len(texts)

        async def one(episode: Episode, text: str, count: int | None, end: bool) -> Turn:
            async with self._at_once:
                return await self._turn(episode, self._response(episode, text, count, end))

        return list(await asyncio.gather(*map(one, episodes, texts, counts, ends)))

    async def close(self, turn: Turn) -> Turn:
        """End the conversation after this turn: the turn with a verdict on the state it is in."""
        assert turn.following is not None and turn.following.conversation is not None
        verdict = await asyncio.get_running_loop().run_in_executor(self._threads, turn.following.conversation.verdict)
        return self._rewarded(turn.following, replace(turn, verdict=verdict, observation="", following=None))

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        tally, self._tally = self._tally, Tally()
        return tally.metrics()

    def shutdown(self) -> None:
        """Stop the threads; verifications under way end by their own limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, task: Task) -> None:
        """Raises ValueError for a task that the environment cannot verify, or the reward cannot work with."""
        self.environment.check(task.reference)
        self.reward.check(task.reference)
        if self.environment.judged_in_groups and task.tools:
            raise ValueError("it has tools, but a judge of groups sees no calls: leave the tools out")

    async def _turn(self, episode: Episode, response: Response) -> Turn:
        began = time.monotonic()
        try:
            if self.environment.begin is None:
                turn = Turn(response=response, verdict=await self._verified(episode, response))
            else:
                turn = await self._conversed(episode, response)
        except Exception as error:  # a verifier's own failure must not end a run of many days
            turn = Turn(response=response, verdict=Verdict.error(f"{type(error).__name__}: {error}"))
        self._tally.responses += 1
        self._tally.seconds += time.monotonic() - began
        return turn if turn.verdict is None else self._rewarded(episode, turn)

    def _rewarded(self, episode: Episode, turn: Turn) -> Turn:
        assert turn.verdict is not None
        facts = Facts.of(episode.task, thinking_opened=episode.thinking_opened)
        reward = self.reward.score(turn.verdict, turn.response, facts)
        self._count(turn.verdict, reward)
        return replace(turn, reward=reward)

    async def _verified(self, episode: Episode, response: Response) -> Verdict:
        verify = self.environment.verify
        assert verify is not None
        reference = self._references.of(episode.task)
        made = await asyncio.get_running_loop().run_in_executor(self._threads, verify, response, reference)
        return await made if inspect.isawaitable(made) else made

    async def _conversed(self, episode: Episode, response: Response) -> Turn:
        begin, prompts = self.environment.begin, self._prompts
        assert begin is not None and prompts is not None
        turn = episode.turn + 1
        conversation = episode.conversation or begin(self._references.of(episode.task))
        run = functools.partial(asyncio.get_running_loop().run_in_executor, self._threads)
        answers: Sequence[Message] = await run(conversation.step, response)
        if not answers or turn >= self.environment.max_turns:
            return Turn(response=response, verdict=await run(conversation.verdict))
        task = episode.task
        observation, opened = prompts.continuation(answers, tools=task.tools, thinking=task.thinking)
        following = replace(episode, conversation=conversation, turn=turn, thinking_opened=opened)
        return Turn(response=response, observation=observation, following=following)

    def _response(self, episode: Episode, text: str, tokens: int | None, finished: bool) -> Response:
        response = parse_response(text, thinking_opened=episode.thinking_opened, tokens=tokens, finished=finished)
        if not episode.task.tools:
            return response
        parsed = parse_tool_calls(response.answer, self._tool_style, episode.task.tools)
        # If a call cannot be read, the verifier must see that.
        if parsed.problems or not parsed.calls:
            return response
        return replace(response, answer=parsed.answer, tool_calls=parsed.calls)

    def _count(self, verdict: Verdict, reward: Reward) -> None:
        tally = self._tally
        tally.episodes += 1
        tally.correct += verdict.outcome == "correct"
        tally.error += verdict.outcome == "error"
        tally.score += verdict.score
        tally.reward += reward.total
        for name, value in reward.parts.items():
            tally.parts[name] = tally.parts.get(name, 0.0) + value
