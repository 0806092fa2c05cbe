"""Responses verified and rewarded, and conversations carried on, whatever engine generated them.

A reward here depends on one response and its task. Verifiers run concurrently, in threads or as coroutines. The state
of a conversation travels in its `Episode`, so nothing is kept between turns.
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
from nemo_ext.rl.rewards.components import Reward
from nemo_ext.rl.rewards.named import Facts, reward_of
from nemo_ext.rl.settings import AtLeastOne
from nemo_ext.rl.task import Task
from nemo_ext.rl.verdict import Verdict

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
        answers: messages of the environment in answer to the response; none if the conversation is over.
        observation: their text, which the model reads before its next response; "" if there is none.
        following: episode of the next response; None if there is none.
    """

    response: Response
    verdict: Verdict | None = None
    reward: Reward | None = None
    answers: tuple[Message, ...] = ()
    observation: str = ""
    following: Episode | None = None


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class EpisodeSettings:
    """Settings of an environment's episodes; the last four are for actors, where the engine has no tokenizer."""

    name: str  # of the environment
    settings: Open | None = None  # of the environment
    reward: Any = None  # see `nemo_ext.rl.rewards.named.reward_of`
    tool_style: Style | None = None  # format of the calls
    concurrency: AtLeastOne | None = None  # number of concurrent verifications
    template: Place | None = None  # name or file of a chat template, for conversations
    eos: str | None = None  # token that ends a response
    tokenizer: Place | None = None  # Hugging Face name or folder, for rewards that count tokens
    max_tokens: int | None = None  # number of tokens at which a response was cut off


class Episodes:
    """Verifies responses to the tasks of one environment.

    Args:
        config: an `EpisodeSettings`.
        prompts: chat template of the model, which writes the text between turns; None where the engine writes it.

    Raises:
        ValueError: unknown key or invalid value.
    """

    def __init__(self, config: Mapping[str, Any] | EpisodeSettings, prompts: Prompts | None = None) -> None:
        given = config if isinstance(config, EpisodeSettings) else checked(EpisodeSettings, config, "environment")
        self.environment = make(given.name, given.settings)
        self.reward = reward_of(given.reward, where=f"environments.{given.name}.reward")
        self._tool_style: Style = given.tool_style or "any"
        self._prompts = prompts
        slots = given.concurrency or CONCURRENCY
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=given.name)
        # Shared by all calls: an engine may pass one response at a time.
        self._at_once = asyncio.Semaphore(slots)
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
        """Outcomes of the responses, in order.

        Args:
            episodes: episode of each response.
            texts: generated texts without the end-of-sequence token.
            tokens: number of generated tokens per response, needed by length rewards.
            finished: False for responses cut off at the length limit.
        """
        counts = tokens or [None] * len(texts)
        ends = finished or [True] * len(texts)

        responses = map(self._response, episodes, texts, counts, ends)
        return list(await asyncio.gather(*map(self.turn, episodes, responses)))

    async def turn(self, episode: Episode, response: Response, unreadable: Mapping[str, str] | None = None) -> Turn:
        """Outcome of one response.

        Args:
            unreadable: id of each call that cannot be read -> reason, which a world's model is told; a single turn
                with one is wrong.
        """
        async with self._at_once:
            began = time.monotonic()
            turn = await self._guarded(response, self._outcome(episode, response, unreadable or {}))
            self._add({"responses": 1, "seconds": time.monotonic() - began})
        return turn if turn.verdict is None else self._rewarded(episode, turn)

    async def close(self, turn: Turn) -> Turn:
        """End the conversation after this turn: the turn with a verdict on the state it is in."""
        assert turn.following is not None and turn.following.conversation is not None
        return self._rewarded(
            turn.following, await self._guarded(turn.response, self._ended(turn.response, turn.following.conversation))
        )

    def begun(self, episode: Episode) -> Episode:
        """The episode of a tool environment with its conversation."""
        assert self.environment.begin is not None
        if episode.conversation is not None:
            return episode
        return replace(episode, conversation=self.environment.begin(self.reference(episode.task)))

    def reference(self, task: Task) -> Any:
        """Parsed reference of a task; cached, since the responses of a group share one.

        Raises:
            ValueError: the environment cannot verify against it.
        """
        # Ids are unique only within a file.
        kept, key = self._references, task.id or repr(task.reference)
        if key not in kept or kept[key][0] != task.reference:
            kept[key] = (task.reference, self.environment.check(task.reference))
        kept.move_to_end(key)
        if len(kept) > REFERENCES:
            kept.popitem(last=False)
        return kept[key][1]

    def take_metrics(self) -> dict[str, float]:
        """Means over the episodes that ended since the last call; empty if none did."""
        totals, self._totals = self._totals, defaultdict(float)
        responses, seconds, episodes = (totals.pop(name, 0.0) for name in ("responses", "seconds", "episodes"))
        if not episodes:
            return {}
        means = {name: total / episodes for name, total in sorted(totals.items())}
        more = {"turns": responses / episodes, "seconds_per_response": seconds / responses}
        return {"episodes": episodes, **means, **more}

    def shutdown(self) -> None:
        """Stop the threads; verifications under way end by their own limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, task: Task) -> None:
        """Raises ValueError for a task that the environment cannot verify, or the reward cannot work with."""
        self.reference(task)
        self.reward.check(task.reference)
        if self.environment.judged_in_groups and task.tools:
            raise ValueError("it has tools, but a judge of groups sees no calls: leave the tools out")

    async def _guarded(self, response: Response, work: Awaitable[Turn]) -> Turn:
        try:
            return await work
        except Exception as error:  # a verifier's own failure must not end a run of many days
            return Turn(response=response, verdict=Verdict.error(f"{type(error).__name__}: {error}"[:300]))

    def _rewarded(self, episode: Episode, turn: Turn) -> Turn:
        assert turn.verdict is not None
        facts = Facts.from_task(episode.task, thinking_opened=episode.thinking_opened)
        reward = self.reward.score(turn.verdict, turn.response, facts)
        outcome = {"correct": turn.verdict.outcome == "correct", "error": turn.verdict.outcome == "error"}
        parts = {f"reward/{name}": value for name, value in reward.parts.items()}
        self._add({"episodes": 1, **outcome, "score": turn.verdict.score, "reward": reward.total, **parts})
        return replace(turn, reward=reward)

    async def _outcome(self, episode: Episode, response: Response, unreadable: Mapping[str, str]) -> Turn:
        if self.environment.begin is not None:
            return await self._conversed(self.begun(episode), response, unreadable)
        if unreadable:
            why = f"a call cannot be read: {next(iter(unreadable.values()))}"[:300]
            return Turn(response=response, verdict=Verdict.wrong(why))
        assert self.environment.verify is not None
        verdict = await self._in_thread(self.environment.verify, response, self.reference(episode.task))
        return Turn(response=response, verdict=await verdict if inspect.isawaitable(verdict) else verdict)

    async def _conversed(self, episode: Episode, response: Response, unreadable: Mapping[str, str]) -> Turn:
        conversation, turn = episode.conversation, episode.turn + 1
        assert conversation is not None
        answers = [Message(role="tool", content=f"Error: {why}", tool_call_id=key) for key, why in unreadable.items()]
        # If no call can be read, the text beside the calls is not for the user.
        if response.tool_calls or not unreadable:
            answers += await self._in_thread(conversation.step, response)
        if not answers or turn >= self.environment.max_turns:
            return await self._ended(response, conversation)
        following = replace(episode, turn=turn)
        if self._prompts is None:
            return Turn(response=response, answers=tuple(answers), following=following)
        task = episode.task
        observation, opened = self._prompts.continuation(answers, tools=task.tools, thinking=task.thinking)
        following = replace(following, thinking_opened=opened)
        return Turn(response=response, answers=tuple(answers), observation=observation, following=following)

    async def _ended(self, response: Response, conversation: Conversation) -> Turn:
        return Turn(response=response, verdict=await self._in_thread(conversation.verdict))

    def _in_thread[Result](self, function: Callable[..., Result], *arguments: Any) -> Awaitable[Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _response(self, episode: Episode, text: str, tokens: int | None, finished: bool) -> Response:
        response = parse_response(text, thinking_opened=episode.thinking_opened, tokens=tokens, finished=finished)
        if not episode.task.tools:
            return response
        parsed = parse_tool_calls(response.answer, self._tool_style, episode.task.tools)
        # If a call cannot be read, the verifier must see that.
        if parsed.problems or not parsed.calls:
            return response
        return replace(response, answer=parsed.answer, tool_calls=parsed.calls)

    def _add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._totals[name] += value
