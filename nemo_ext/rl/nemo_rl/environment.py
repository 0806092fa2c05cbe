"""The Ray actor in which NeMo-RL verifies responses: any environment of `nemo_ext.rl.environments`.

A step sees messages of role and content alone, and a call holds the samples of a whole batch (sync rollouts) or one
sample (async). So a reward here depends on one response and its task; what depends on a group is in `group_rewards`.
Verifiers run in threads, or as coroutines where they are, many at once; a conversation's state travels in the
metadata, so the actor keeps none.
"""

import asyncio
import functools
import importlib
import inspect
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, cast

import ray
import torch
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

from nemo_ext.data.settings import check_keys, checked_whole, nearest
from nemo_ext.data.sft.sample import Message
from nemo_ext.rl.environments import Conversation, make
from nemo_ext.rl.nemo_rl.prompts import Prompts
from nemo_ext.rl.nemo_rl.rewards import Facts, reward_of
from nemo_ext.rl.response import Response, parse_response
from nemo_ext.rl.rewards.components import Reward
from nemo_ext.rl.tools import STYLES, Style, parse_tool_calls
from nemo_ext.rl.verifiers.verdict import Verdict

KEYS = ("name", "settings", "reward", "template", "eos", "tool_style", "tokenizer", "max_tokens", "concurrency")
CONCURRENCY = 64
"""Verifications at once; those that wait for something else cost no more than a thread."""
REFERENCES = 4096
"""Parsed references that are kept."""


@dataclass
class Tally:
    """What one environment saw since it was last asked."""

    responses: int = 0
    episodes: int = 0
    correct: int = 0
    error: int = 0
    score: float = 0.0
    reward: float = 0.0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Means over the episodes that ended; nothing if none did."""
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


@dataclass(frozen=True)
class _Turn:
    observation: str
    metadata: dict[str, Any] | None
    reward: float
    over: bool
    answer: str | None


class TaskEnvironment(EnvironmentInterface):
    """An environment as NeMo-RL calls it; `TaskEnvironmentActor` is the Ray actor around it.

    Args:
        config: `name` of the environment and its `settings`; `reward`, see `rewards.reward_of`; `concurrency`,
            verifications at once. What the responses are written in: `tool_style` of calls, for conversations
            `template`, a chat template's name or file, and `eos`, the token that ends a response. For rewards that
            count tokens `tokenizer`, a Hugging Face name or folder, and `max_tokens`, at which a response was cut off.

    Raises:
        ValueError: a key is not known or holds what it may not.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        check_keys(config, KEYS, required=("name",), where="environment")
        self._environment = make(config["name"], config.get("settings"))
        self._reward = reward_of(config.get("reward"), where=f"environments.{config['name']}.reward")
        style = config.get("tool_style") or "any"
        if style not in STYLES:
            raise ValueError(f"tool_style: unknown {style!r}: {nearest(str(style), STYLES)}")
        self._tool_style = cast(Style, style)
        self._max_tokens = config.get("max_tokens")
        self._tokenizer = _tokenizer(config.get("tokenizer")) if self._reward.counts_tokens else None
        template = config.get("template")
        self._prompts = None if template is None else Prompts.load(template, eos=config.get("eos"))
        if self._environment.begin is not None and self._prompts is None:
            raise ValueError(f"environment {config['name']!r} has several turns: give the chat template of the model")
        count = config.get("concurrency")
        self._slots = CONCURRENCY if count is None else checked_whole("concurrency", count, least=1)
        self._threads = ThreadPoolExecutor(self._slots, thread_name_prefix=config["name"])
        self._at_once = asyncio.Semaphore(self._slots)
        self._references: OrderedDict[str, Any] = OrderedDict()
        self._tally = Tally()

    async def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Mapping[str, Any]]
    ) -> EnvironmentReturn:
        """Verify the last message of every conversation, or carry out what it asks for.

        Args:
            message_log_batch: [batch], messages of role and content each.
            metadata: [batch], what `data.prompt_datum` wrote, or the step before returned.

        Returns:
            Observations of role `environment`: the tools' answers as the chat template writes them, up to the prompt of
            the next response; or, where the episode is over, the outcome as a word (an empty observation would change
            the type of NeMo-RL's token ids). `rewards` and `terminateds` [batch].
        """
        turns = await asyncio.gather(
            *(self._turn(log[-1]["content"], info) for log, info in zip(message_log_batch, metadata, strict=True))
        )
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": turn.observation} for turn in turns],
            metadata=[turn.metadata for turn in turns],
            next_stop_strings=[None] * len(turns),
            rewards=torch.tensor([turn.reward for turn in turns], dtype=torch.float32),
            terminateds=torch.tensor([turn.over for turn in turns], dtype=torch.bool),
            answers=[turn.answer for turn in turns],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """The batch as it is, and the metrics; NeMo-RL's training loops never ask for them."""
        return batch, self.take_metrics()

    def take_metrics(self) -> dict[str, float]:
        """Metrics since this was last called."""
        tally, self._tally = self._tally, Tally()
        return tally.metrics()

    def shutdown(self) -> None:
        """Stop the threads; verifications under way end by their own limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, text: str, info: Mapping[str, Any]) -> _Turn:
        began = time.monotonic()
        response = self._response(text, info)
        following = None
        verdict: Verdict | None
        async with self._at_once:
            if self._environment.begin is None:
                verdict = await self._verified(response, info)
            else:
                verdict, following = await self._conversed(response, info)
        self._tally.responses += 1
        self._tally.seconds += time.monotonic() - began
        if verdict is None:
            assert following is not None
            observation, metadata = following
            return _Turn(observation, metadata, 0.0, False, None)
        reward = self._reward.score(verdict, response, Facts.of(info))
        self._count(verdict, reward)
        return _Turn(verdict.outcome, None, reward.total, True, verdict.answer)

    async def _verified(self, response: Response, info: Mapping[str, Any]) -> Verdict:
        verify = self._environment.verify
        assert verify is not None
        try:
            reference = self._reference(info)
            made = await asyncio.get_running_loop().run_in_executor(self._threads, verify, response, reference)
            return await made if inspect.isawaitable(made) else made
        except Exception as error:  # a verifier's own failure must not end a run of many days
            return _failed(error)

    async def _conversed(
        self, response: Response, info: Mapping[str, Any]
    ) -> tuple[Verdict | None, tuple[str, dict[str, Any]] | None]:
        """The verdict if the conversation is over, else what the model reads next and the metadata of that turn."""
        begin, prompts = self._environment.begin, self._prompts
        assert begin is not None and prompts is not None
        turn = info.get("turn", 0) + 1
        try:
            conversation: Conversation = info.get("conversation") or begin(self._reference(info))
            run = functools.partial(asyncio.get_running_loop().run_in_executor, self._threads)
            answers: Sequence[Message] = await run(conversation.step, response)
            if not answers or turn >= self._environment.max_turns:
                return await run(conversation.verdict), None
            content, opened = prompts.continuation(answers, tools=info["tools"], thinking=info.get("thinking"))
        except Exception as error:
            return _failed(error), None
        following = {**info, "conversation": conversation, "turn": turn, "thinking_opened": opened}
        return None, (content, following)

    def _response(self, text: str, info: Mapping[str, Any]) -> Response:
        tokens = None if self._tokenizer is None else len(self._tokenizer(text, add_special_tokens=False).input_ids)
        cut = tokens is not None and self._max_tokens is not None and tokens >= self._max_tokens
        opened = bool(info.get("thinking_opened"))
        response = parse_response(text, thinking_opened=opened, tokens=tokens, finished=not cut)
        tools = info.get("tools") or ()
        if not tools:
            return response
        parsed = parse_tool_calls(response.answer, self._tool_style, tools)
        # Where some of it cannot be read, the verifier must see that.
        if parsed.problems or not parsed.calls:
            return response
        return replace(response, answer=parsed.answer, tool_calls=parsed.calls)

    def _reference(self, info: Mapping[str, Any]) -> Any:
        """The reference, parsed; those seen last are kept, since a group's responses share one."""
        kept = self._references
        if info["id"] in kept:
            kept.move_to_end(info["id"])
        else:
            kept[info["id"]] = self._environment.check(info["reference"])
            if len(kept) > REFERENCES:
                kept.popitem(last=False)
        return kept[info["id"]]

    def _count(self, verdict: Verdict, reward: Reward) -> None:
        tally = self._tally
        tally.episodes += 1
        tally.correct += verdict.outcome == "correct"
        tally.error += verdict.outcome == "error"
        tally.score += verdict.score
        tally.reward += reward.total
        for name, value in reward.parts.items():
            tally.parts[name] = tally.parts.get(name, 0.0) + value


def _failed(error: Exception) -> Verdict:
    return Verdict.error(f"{type(error).__name__}: {error}")


def _tokenizer(name: str | None) -> Any:
    if name is None:
        raise ValueError("this reward counts tokens: give the environment the tokenizer's name or folder")
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(name)


TaskEnvironmentActor = ray.remote(TaskEnvironment)
"""What NeMo-RL creates; see `register`."""
