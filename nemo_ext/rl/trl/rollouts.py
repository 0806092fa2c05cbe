"""Rollouts for TRL: task prompts, rewards of responses, conversations, and a record of everything.

TRL strips special tokens from the texts that it passes to reward functions, and in some tokenizers `<think>` is one.
Here, responses are therefore decoded from their tokens.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from nemo_ext.chat.response import OPEN
from nemo_ext.chat.template import end_tokens
from nemo_ext.rl.episodes import Episode, Episodes, Turn
from nemo_ext.rl.groups import GroupReward, Member
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.rewards.format import malformed
from nemo_ext.rl.task import Task

Generate = Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float]] | None]]
"""Function that takes prompts and a maximum number of new tokens and returns responses, both as token ids.

It also returns the log-probabilities of the responses' tokens, or None if they are unknown.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One response, or all responses of a conversation and the observations between them.

    Attributes:
        episode: initial state of the task.
        prompt: token ids of the prompt; empty for single responses.
        tokens: token ids after the prompt.
        mask: one value per token in `tokens`: 1 if generated, 0 if part of an observation.
        turn: outcome of the last response.
        logprobs: log-probability of each token in `tokens` in generation, 0 for observations; empty if unknown.
    """

    episode: Episode
    prompt: list[int]
    tokens: list[int]
    mask: list[int]
    turn: Turn
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Rollouts:
    """A run's prompts, verification and records.

    Attributes:
        generations: number of responses per prompt, which are adjacent in a batch.
        group: group reward function; if None, the environments' rewards are used.
        record: path of the JSONL file to append to.
        tokens: maximum number of tokens in a response, or in all responses and observations of a conversation.
        same: ids of tasks that duplicate another task's prompt and reference and count as that task.
        validated: task ids and rewards of the responses validated since the last log.
        ends: token ids that end a response; a trainer adds those in the model's generation config.
    """

    tokenizer: Any
    prompts: Prompts
    environments: Mapping[str, Episodes]
    generations: int
    record: Path
    tokens: int
    group: GroupReward | None = None
    same: set[str] = field(default_factory=set)
    validated: list[tuple[str, float]] = field(default_factory=list)
    _begun: dict[str, Episode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="rollouts", daemon=True).start()
        self.ends = end_tokens(self.tokenizer, self.prompts.template)

    @property
    def has_conversations(self) -> bool:
        """True if any environment has several turns."""
        return any(episodes.environment.begin is not None for episodes in self.environments.values())

    def prompt(self, task: Task) -> str:
        """Return a task's prompt as text and remember the task, which is found again when TRL passes the text back.

        Raises:
            ValueError: another task with a different environment or reference has the same prompt.
        """
        text, opened = self.prompts.prompt(task)
        known = self._begun.get(text)
        if known is None:
            known = self._begun[text] = Episode(task=self.prompts.in_mode(task), thinking_opened=opened)
        if (known.task.environment, known.task.reference) != (task.environment, task.reference):
            raise ValueError(
                f"the tasks {known.task.id} and {task.id} have the same prompt but different "
                "environments or references; remove one of them"
            )
        if known.task.id != task.id:
            self.same.add(task.id)
        return text

    def task(self, text: str) -> Task:
        """Return the task whose prompt is `text`."""
        return self._begun[text].task

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the prompts' token ids, without adding special tokens."""
        return list(self.tokenizer(list(texts), add_special_tokens=False)["input_ids"])

    def verified(self, texts: Sequence[str], responses: Sequence[Sequence[int]]) -> list[Rollout]:
        """Verify single responses and return their rollouts.

        Args:
            texts: the prompts' texts.
            responses: token ids, including the end token unless truncated at the length limit.

        Raises:
            ValueError: an environment has several turns.
        """
        episodes = [self._begun[text] for text in texts]
        for episode in episodes:
            if self.environments[episode.task.environment].environment.begin is not None:
                name = episode.task.environment
                raise ValueError(
                    f"environment {name!r} has several turns, which TRL's trainer does not support; remove its tasks"
                )
        turns = self._turns(episodes, responses, [self._finished(ids) for ids in responses])
        return [
            Rollout(episode=episode, prompt=[], tokens=list(ids), mask=[1] * len(ids), turn=turn)
            for episode, ids, turn in zip(episodes, responses, turns, strict=True)
        ]

    def conversations(self, texts: Sequence[str], generate: Generate) -> list[Rollout]:
        """Generate turn by turn, inserting the environments' observations, until all conversations are over.

        Args:
            texts: the prompts' texts, as returned by `prompt`.
            generate: function that generates responses.

        Returns:
            The conversations' rollouts, in the order of `texts`.
        """
        initial = [self._begun[text] for text in texts]
        current = list(initial)
        prompts = self.encoded(texts)
        tokens: list[list[int]] = [[] for _ in texts]
        masks: list[list[int]] = [[] for _ in texts]
        logprobs: list[list[float]] = [[] for _ in texts]
        ended: dict[int, Turn] = {}
        while len(ended) < len(texts):
            active = [index for index in range(len(texts)) if index not in ended]
            room = {index: self.tokens - len(tokens[index]) for index in active}
            responses, found = generate([prompts[index] + tokens[index] for index in active], max(room.values()))
            # A long conversation does not reduce the room of other conversations.
            responses = [ids[: room[index]] for index, ids in zip(active, responses, strict=True)]
            for index, ids in zip(active, responses, strict=True):
                tokens[index] += ids
                masks[index] += [1] * len(ids)
            for index, ids, values in zip(active, responses, found or (), strict=found is not None):
                logprobs[index] += values[: len(ids)]
            finished = [self._finished(ids) for ids in responses]
            turns = self._turns([current[index] for index in active], responses, finished)
            for index, turn, end in zip(active, turns, finished, strict=True):
                if turn.following is None:
                    ended[index] = turn
                    continue
                observation = self.encoded([turn.observation])[0]
                if end and observation[:1] == tokens[index][-1:]:  # end token, which the model has already written
                    observation = observation[1:]
                if not end or len(tokens[index]) + len(observation) >= self.tokens:
                    # No next turn after a cut-off response or with a full context: verify the present state.
                    ended[index] = self._run(self.environments[turn.following.task.environment].close(turn))
                    continue
                tokens[index] += observation
                masks[index] += [0] * len(observation)
                logprobs[index] += [0.0] * (len(observation) if found else 0)
                current[index] = turn.following
        rows = zip(initial, prompts, tokens, masks, logprobs, strict=True)
        return [
            Rollout(episode=episode, prompt=prompt, tokens=ids, mask=mask, turn=ended[index], logprobs=values)
            for index, (episode, prompt, ids, mask, values) in enumerate(rows)
        ]

    def faults(self, before: Sequence[int], response: Sequence[int]) -> tuple[bool, bool]:
        """Return whether a response has malformed thinking tags, and malformed tool calls; False if it was cut off.

        Args:
            before: the last tokens before the response.
        """
        if not self._finished(response):
            return False, False
        return malformed(self._text(response), opened=self.tokenizer.decode(before).rstrip().endswith(OPEN))

    def rewards(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return the rewards of a batch in which responses to the same prompt are adjacent."""
        totals = [rollout.turn.reward.total if rollout.turn.reward else 0.0 for rollout in rollouts]
        if self.group is None:
            return totals
        members = [self._member(rollout, reward) for rollout, reward in zip(rollouts, totals, strict=True)]
        groups = [members[at : at + self.generations] for at in range(0, len(members), self.generations)]
        return [reward for rewards in self.group(groups) for reward in rewards]

    def line(self, rollout: Rollout, reward: float) -> dict[str, Any]:
        """Return a rollout's record; its text has no end token, but `finished` shows whether there was one."""
        task, verdict = rollout.episode.task, rollout.turn.verdict
        ended = rollout.tokens[-1:] and rollout.tokens[-1] in self.ends
        line = {
            "id": task.id,
            "domain": task.domain,
            "reward": reward,
            "outcome": verdict.outcome if verdict else "error",
            "score": verdict.score if verdict else 0.0,
            "tokens": sum(rollout.mask),
            "finished": rollout.turn.response.finished,
            "response": self.tokenizer.decode(rollout.tokens[:-1] if ended else rollout.tokens),
        }
        return line | ({"reason": verdict.reason} if verdict and verdict.reason else {})

    def metrics(self) -> dict[str, float]:
        """Return all environments' metrics since the last call, under the names `environment/metric`."""
        return {
            f"{name}/{metric}": value
            for name, episodes in self.environments.items()
            for metric, value in episodes.take_metrics().items()
        }

    def shutdown(self) -> None:
        """Stop the threads."""
        for episodes in self.environments.values():
            episodes.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _turns(
        self, episodes: Sequence[Episode], responses: Sequence[Sequence[int]], finished: Sequence[bool]
    ) -> list[Turn]:
        async def verify(episode: Episode, ids: Sequence[int], end: bool) -> Turn:
            environment = self.environments[episode.task.environment]
            (turn,) = await environment.turns([episode], [self._text(ids)], tokens=[len(ids)], finished=[end])
            return turn

        async def verify_all() -> list[Turn]:
            return list(await asyncio.gather(*map(verify, episodes, responses, finished)))

        return self._run(verify_all())

    def _run[Result](self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _text(self, ids: Sequence[int]) -> str:
        while ids and ids[-1] in self.ends:
            ids = ids[:-1]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _finished(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] in self.ends

    def _member(self, rollout: Rollout, reward: float) -> Member:
        response = rollout.turn.response
        thinking = 0
        if response.thinking is not None:
            thinking = min(
                len(self.encoded([response.text.partition("</think>")[0] + "</think>"])[0]), sum(rollout.mask)
            )
        return Member(
            reward=reward,
            thinking_tokens=thinking,
            answer_tokens=sum(rollout.mask) - thinking,
            prompt=rollout.episode.task.prompt,
            response=response,
        )
