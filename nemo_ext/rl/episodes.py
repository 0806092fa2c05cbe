"""Verification and rewards of single responses and of conversations, for all engines.

A reward here depends on one response and its task. Verifiers run concurrently, in threads or as coroutines. An
`Episode` holds a conversation's entire state, so nothing else is stored between turns.
"""

import asyncio
import inspect
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import Message
from nemo_ext.chat.tool_calls import Style, parse_tool_calls
from nemo_ext.job.settings import STRICT, Open, Place, checked
from nemo_ext.rl.environments import Conversation, make
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.rewards.named import Facts, reward_of
from nemo_ext.rl.rewards.reward import Reward
from nemo_ext.rl.settings import AtLeastOne
from nemo_ext.rl.task import Task
from nemo_ext.rl.verdict import Verdict

CONCURRENCY = 64
"""Default number of concurrent verifications, one thread each."""
REFERENCES = 4096
"""Maximum number of parsed references in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """State of a task during a rollout; picklable.

    Attributes:
        thinking_opened: True if the prompt ends inside a reasoning trace.
        turn: number of responses so far.
        conversation: state of the tool environment; None before the first response and in single-turn environments.
    """

    task: Task
    thinking_opened: bool
    turn: int = 0
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Outcome of a response: its verdict and reward, or the environment's messages if the conversation continues.

    Attributes:
        answers: the environment's messages after the response; empty if the conversation is over.
        observation: these messages as text for the model; "" if there are none or the engine renders them.
        following: state for the next response; None if the conversation is over.
    """

    response: Response
    verdict: Verdict | None = None
    reward: Reward | None = None
    answers: tuple[Message, ...] = ()
    observation: str = ""
    following: Episode | None = None


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class EpisodeSettings:
    """Settings of an environment's episodes; those from `template` on are for actors that get no tokenizer."""

    name: str  # name of the environment
    settings: Open | None = None  # settings of the environment
    reward: Any = None  # reward; see `nemo_ext.rl.rewards.named.reward_of`
    tool_style: Style | None = None  # format of tool calls
    concurrency: AtLeastOne | None = None  # number of concurrent verifications
    template: Place | None = None  # name or file of a chat template, for conversations
    eos: str | None = None  # token that ends a response
    tokenizer: Place | None = None  # Hugging Face name or folder, for rewards that count tokens
    max_tokens: int | None = None  # maximum response length; a response of this many tokens was cut off


def episode_settings(config: Mapping[str, Any]) -> EpisodeSettings:
    """Check the settings of an environment's episodes; raise ValueError, with the environment's name, for a bad one."""
    return checked(EpisodeSettings, config, f"environment {config.get('name', '')}".rstrip())


class Episodes:
    """Verifies and rewards responses to one environment's tasks.

    Args:
        config: settings, as `EpisodeSettings` or as a mapping with its keys.
        prompts: chat template that renders the text between turns; None if the engine renders it.

    Raises:
        ValueError: a key is unknown or a value is invalid.
    """

    def __init__(self, config: Mapping[str, Any] | EpisodeSettings, prompts: Prompts | None = None) -> None:
        settings = config if isinstance(config, EpisodeSettings) else episode_settings(config)
        self.environment = make(settings.name, settings.settings)
        self.reward = reward_of(settings.reward, where=f"environments.{settings.name}.reward")
        self._tool_style: Style = settings.tool_style or "any"
        self._prompts = prompts
        slots = settings.concurrency or CONCURRENCY
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=settings.name)
        # Shared by all calls, because an engine may pass one response per call.
        self._slots = asyncio.Semaphore(slots)
        self._references: OrderedDict[str, tuple[Mapping[str, Any], Any]] = OrderedDict()
        self._totals: defaultdict[str, float] = defaultdict(float)

    async def turns(
        self,
        episodes: Sequence[Episode],
        texts: Sequence[str],
        *,
        tokens: Sequence[int | None] | None = None,
        finished: Sequence[bool] | None = None,
    ) -> list[Turn]:
        """Return the outcomes of responses, in order.

        Args:
            episodes: episode of each response.
            texts: generated texts without the end-of-sequence token.
            tokens: number of generated tokens per response, required by length rewards.
            finished: False for responses truncated at the length limit; by default all are complete.
        """
        counts = tokens or [None] * len(texts)
        ends = finished or [True] * len(texts)
        responses = map(self._response, episodes, texts, counts, ends)
        return list(await asyncio.gather(*map(self.turn, episodes, responses)))

    async def turn(
        self,
        episode: Episode,
        response: Response,
        unreadable: Mapping[str, str] | None = None,
        *,
        close: bool = True,
    ) -> Turn:
        """Return the outcome of one response.

        Args:
            episode: state before the response.
            unreadable: mapping from the id of each malformed tool call to the reason. In a conversation, the model
                gets the reasons as error messages; in a single-turn environment, the response is wrong.
            close: False if the caller ends the conversation with `close`; its last turn then has neither verdict nor
                `answers`.
        """
        async with self._slots:
            began = time.monotonic()
            turn = await self._guarded(response, self._outcome(episode, response, unreadable or {}, close))
            self._add({"responses": 1, "seconds": time.monotonic() - began})
        return turn if turn.verdict is None else self._rewarded(episode, turn)

    async def close(self, turn: Turn) -> Turn:
        """End the conversation after a turn and return the turn with the verdict on the current state."""
        assert turn.following is not None and turn.following.conversation is not None
        async with self._slots:
            ended = await self._guarded(turn.response, self._last(turn.response, turn.following.conversation.verdict))
        return self._rewarded(turn.following, ended)

    async def judged(self, episode: Episode, response: Response) -> Turn:
        """Return the outcome of a finished conversation's last response; the environment must have `verify`."""
        async with self._slots:
            turn = await self._guarded(response, self._verified(episode, response))
        return self._rewarded(episode, turn)

    async def stepped(self, conversation: Conversation, response: Response) -> Sequence[Message]:
        """Execute a response's tool calls without blocking the event loop, and return the results."""
        return await self._in_thread(conversation.step, response)

    def begun(self, episode: Episode) -> Episode:
        """Return a tool environment's episode with its conversation started, if it is not yet."""
        assert self.environment.begin is not None
        if episode.conversation is not None:
            return episode
        return replace(episode, conversation=self.environment.begin(self.reference(episode.task)))

    def reference(self, task: Task) -> Any:
        """Return a task's parsed reference, cached for its other responses; raise ValueError if it is invalid."""
        # Ids are unique only within a file, so the reference is compared too.
        cache, key = self._references, task.id or repr(task.reference)
        if key not in cache or cache[key][0] != task.reference:
            cache[key] = (task.reference, self.environment.check(task.reference))
        cache.move_to_end(key)
        if len(cache) > REFERENCES:
            cache.popitem(last=False)
        return cache[key][1]

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics' means over the episodes that ended since the last call; empty if there are none."""
        totals, self._totals = self._totals, defaultdict(float)
        responses, seconds, episodes = (totals.pop(name, 0.0) for name in ("responses", "seconds", "episodes"))
        if not episodes:
            return {}
        means = {name: total / episodes for name, total in sorted(totals.items())}
        more = {"turns": responses / episodes, "seconds_per_response": seconds / responses}
        return {"episodes": episodes, **means, **more}

    def shutdown(self) -> None:
        """Stop the threads; running verifications end at their own time limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, task: Task) -> None:
        """Raise ValueError if the environment cannot verify the task or the reward does not support it."""
        self.reference(task)
        self.reward.check(task.reference)
        if self.environment.tools and not task.tools:
            names = ", ".join(tool["function"]["name"] for tool in self.environment.tools)
            raise ValueError(
                f"the task's `tools` are empty, but environment {self.environment.name!r} requires {names}; add them "
                f"with `nemo-ext rl_tasks environment={self.environment.name} records=FILES`"
            )
        if self.environment.judged_in_groups and task.tools:
            raise ValueError(
                f"environment {self.environment.name!r} judges responses in groups, and its judge does not see "
                "tool calls; remove the task's tools"
            )

    async def _guarded(self, response: Response, work: Awaitable[Turn]) -> Turn:
        try:
            return await work
        except Exception as error:  # a failing verifier must not end a run of many days
            return Turn(response=response, verdict=Verdict.error(f"{type(error).__name__}: {error}"[:300]))

    def _rewarded(self, episode: Episode, turn: Turn) -> Turn:
        assert turn.verdict is not None
        facts = Facts.from_task(episode.task, thinking_opened=episode.thinking_opened)
        reward = self.reward.score(turn.verdict, turn.response, facts)
        outcome = {"correct": turn.verdict.outcome == "correct", "error": turn.verdict.outcome == "error"}
        parts = {f"reward/{name}": value for name, value in reward.parts.items()}
        more = {
            name: value if isinstance(value, int | float) else value[0] / (value[1] or 1)
            for name, value in turn.verdict.more.items()
        }
        numbers = {"score": turn.verdict.score, "reward": reward.total, **parts, **more}
        self._add({"episodes": 1, **outcome, **numbers})
        return replace(turn, reward=reward)

    async def _outcome(self, episode: Episode, response: Response, unreadable: Mapping[str, str], close: bool) -> Turn:
        if self.environment.begin is not None:
            return await self._conversed(self.begun(episode), response, unreadable, close)
        if unreadable:
            reason = f"a call cannot be read: {next(iter(unreadable.values()))}"[:300]
            return Turn(response=response, verdict=Verdict.wrong(reason))
        return await self._verified(episode, response)

    async def _verified(self, episode: Episode, response: Response) -> Turn:
        assert self.environment.verify is not None
        return await self._last(response, self.environment.verify, response, self.reference(episode.task))

    async def _conversed(
        self, episode: Episode, response: Response, unreadable: Mapping[str, str], close: bool
    ) -> Turn:
        conversation, turn = episode.conversation, episode.turn + 1
        assert conversation is not None
        answers = [Message(role="tool", content=f"Error: {why}", tool_call_id=key) for key, why in unreadable.items()]
        # If all calls are malformed, the text next to them is not addressed to the user.
        if response.tool_calls or not unreadable:
            answers += await self.stepped(conversation, response)
        following = replace(episode, turn=turn)
        if not answers or turn >= self.environment.max_turns:
            return (
                await self._last(response, conversation.verdict)
                if close
                else Turn(response=response, following=following)
            )
        if self._prompts is None:
            return Turn(response=response, answers=tuple(answers), following=following)
        task = episode.task
        observation, opened = self._prompts.continuation(answers, tools=task.tools, thinking=task.thinking)
        following = replace(following, thinking_opened=opened)
        return Turn(response=response, answers=tuple(answers), observation=observation, following=following)

    async def _last(self, response: Response, judge: Callable[..., Any], *arguments: Any) -> Turn:
        """Return the last turn of an episode, with the verdict of a function that may be asynchronous."""
        verdict = await self._in_thread(judge, *arguments)
        return Turn(response=response, verdict=await verdict if inspect.isawaitable(verdict) else verdict)

    def _in_thread[Result](self, function: Callable[..., Result], *arguments: Any) -> Awaitable[Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _response(self, episode: Episode, text: str, tokens: int | None, finished: bool) -> Response:
        response = parse_response(text, thinking_opened=episode.thinking_opened, tokens=tokens, finished=finished)
        if not episode.task.tools:
            return response
        parsed = parse_tool_calls(response.answer, self._tool_style, episode.task.tools)
        # The verifier must see a malformed call as text.
        if parsed.problems or not parsed.calls:
            return response
        return replace(response, answer=parsed.answer, tool_calls=parsed.calls)

    def _add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._totals[name] += value
