"""Baselines, standard deviations and rewards over groups (all responses to one prompt) in NeMo-RL.

NeMo-RL has no hooks for these, so functions and classes in its modules are replaced during a run:

what                  where                                            versions
baseline and std      grpo.calculate_baseline_and_std_per_prompt,      all, sync and async
                      advantage_estimator.(the same)
rewards, sync         grpo.scale_rewards                               all
rewards, async        the estimator of grpo._create_advantage_estimator  0.6 and later
rewards, async        grpo.BatchedDataDict.from_batches                0.5

NeMo-RL's own computation differs in three ways (0.5 to 0.7 and main). First, with leave-one-out it also takes the
standard deviation over the other responses. This is 0 for a group's only success, so that response is not normalised,
and dynamic sampling drops it although it carries the signal. Second, the variance is a difference of squares in
float32, so groups of equal rewards such as 0.1 may get a deviation above 0. Third, identical prompts within one step
are merged into one group.
"""

import contextlib
import copy
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy.typing as npt
import torch

from nemo_ext.chat.response import CLOSE, parse_response
from nemo_ext.job.settings import checked
from nemo_ext.rl.algorithms import Advantage
from nemo_ext.rl.episodes import Episode
from nemo_ext.rl.groups import GroupReward, Member, group_reward
from nemo_ext.rl.nemo_rl import compat
from nemo_ext.rl.rewards.advantages import group_factors


@dataclass(frozen=True, kw_only=True)
class Groups:
    """How a group's baselines, standard deviations and rewards are computed.

    Attributes:
        generations: number of responses per prompt.
        leave_one_out: True if a response's baseline is the mean reward of the others, False for the group mean.
        biased: True if the variance has the denominator n, the number of responses, instead of n - 1.
        reward: group reward function; if None, the environments' rewards are used.
        tasks: NeMo-RL's names of the tasks that `reward` applies to; None if it applies to all.
        least: minimum number of responses per prompt.
    """

    generations: int
    leave_one_out: bool
    biased: bool = False
    reward: GroupReward | None = None
    tasks: frozenset[str] | None = None
    least: int = 2

    def __post_init__(self) -> None:
        if self.generations < self.least:
            raise ValueError(f"grpo.num_generations_per_prompt must be at least {self.least}, not {self.generations}")

    def baseline_and_std(
        self,
        prompts: torch.Tensor,
        rewards: torch.Tensor,
        valid_mask: torch.Tensor,
        leave_one_out_baseline: bool = True,
        std_rewards: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replacement for NeMo-RL's `calculate_baseline_and_std_per_prompt`, with the same arguments.

        Args:
            prompts: token ids of the prompts, `[batch, tokens]`.
            rewards: rewards, `[batch]`.
            valid_mask: `[batch]`; 0 excludes a response from its group's statistics.
            leave_one_out_baseline: unused; replaced by `leave_one_out`.
            std_rewards: rewards for the standard deviation, `[batch]`; `rewards` if None.

        Returns:
            Baselines and standard deviations, `[batch]` each. Deviations are computed over all valid responses of the
            group and are exactly 0 for equal rewards. With fewer than two valid responses in a group, its baselines
            equal the rewards.
        """
        del leave_one_out_baseline
        baseline, std = rewards.clone(), torch.zeros_like(rewards)
        spread = rewards if std_rewards is None else std_rewards
        for group in _groups(prompts, self.generations):
            valid = valid_mask[group] > 0
            count = int(valid.sum())
            if count < 2:
                continue
            # In float64, because the mean is subtracted from rewards that may be nearly equal to it.
            values = rewards[group].double()
            total = values[valid].sum()
            means = (total - values * valid) / (count - valid.double()) if self.leave_one_out else total / count
            baseline[group] = means.to(rewards.dtype).expand(len(group))
            measured = spread[group].double()[valid]
            if measured.min() < measured.max():
                std[group] = measured.std(correction=0 if self.biased else 1).to(rewards.dtype)
        return baseline, std

    def rewritten(self, batch: Mapping[str, Any], marker: Sequence[int]) -> torch.Tensor:
        """Return a batch's rewards with the group reward applied, `[batch]`.

        Args:
            batch: NeMo-RL's batch with `message_log`, `total_reward`, `task_name` and `extra_env_info`.
            marker: token ids of `</think>`.

        Raises:
            ValueError: the batch does not consist of whole groups, or `reward` does not return one finite number each.
        """
        rewards = batch["total_reward"].clone()
        if self.reward is None:
            return rewards
        logs, tasks, infos = batch["message_log"], batch["task_name"], batch["extra_env_info"]
        size = self.generations
        if len(logs) % size:
            raise ValueError(
                f"NeMo-RL's batch of {len(logs)} responses is not divisible into groups of {size}; use a supported "
                f"version, {compat.FITS}"
            )
        begins = [at for at in range(0, len(logs), size) if self.tasks is None or tasks[at] in self.tasks]
        for begin in begins:
            if len({logs[row][0]["content"] for row in range(begin, begin + size)}) > 1:
                raise ValueError(
                    f"responses {begin} to {begin + size - 1} of NeMo-RL's batch must have the same prompt, but do "
                    f"not; use a supported version, {compat.FITS}"
                )
        groups = [
            [_member(logs[row], float(rewards[row]), infos[row], marker) for row in range(begin, begin + size)]
            for begin in begins
        ]
        for begin, values in zip(begins, self.reward(groups), strict=True):
            if len(values) != size or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"the group reward must return {size} finite numbers, not {values}; please report this"
                )
            rewards[begin : begin + size] = torch.tensor(list(values), dtype=rewards.dtype)
        return rewards


def groups_of(
    *, generations: int, advantage: Mapping[str, Any] | None, group: Mapping[str, Any] | None, least: int = 2
) -> Groups:
    """Create a run's `Groups` from its settings.

    Args:
        advantage: `baseline` (mean, leave_one_out) and `normalise` (std, unbiased_std, none); NeMo-RL divides by the
            deviation if `grpo.normalize_rewards` is set.
        group: settings of the group reward function (see `nemo_ext.rl.groups.group_reward`), and optionally
            `environments`, the names of the environments that it applies to; by default all.

    Raises:
        ValueError: a setting is invalid; the message names its key.
    """
    defaults = {"baseline": "mean", "normalise": "unbiased_std"}
    settings = checked(Advantage, {**defaults, **(advantage or {})}, "advantage")
    names = (group or {}).get("environments")
    return Groups(
        generations=generations,
        leave_one_out=settings.baseline == "leave_one_out",
        biased=settings.normalise == "std",
        reward=group_reward({key: value for key, value in (group or {}).items() if key != "environments"}),
        tasks=None if names is None else frozenset(compat.PREFIX + name for name in names),
        least=least,
    )


class _Estimator:
    """Wrapper of NeMo-RL's advantage estimator that first replaces a batch's rewards with those from `rewrite`."""

    def __init__(self, inner: Any, rewrite: Callable[[Any], torch.Tensor]) -> None:
        self._inner = inner
        self._rewrite = rewrite

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compute_advantage(self, *, rewards: torch.Tensor, repeated_batch: Any, **others: Any) -> torch.Tensor:
        rewards = self._rewrite(repeated_batch).to(rewards)
        repeated_batch["total_reward"] = rewards
        advantages: torch.Tensor = self._inner.compute_advantage(
            rewards=rewards, repeated_batch=repeated_batch, **others
        )
        return advantages


@contextlib.contextmanager
def scored(
    groups: Groups, tokenizer: Any, *, asynchronous: bool, learn: Callable[[npt.ArrayLike], None] | None = None
) -> Iterator[None]:
    """Context in which NeMo-RL computes baselines, deviations and rewards in this process as `groups` specifies.

    Args:
        asynchronous: True for `async_grpo_train`, which does not scale rewards.
        learn: function that is called with every generated batch's rewards, `[prompts, responses]`, before dynamic
            sampling; only in the synchronous loop.
    """
    module = compat.algorithm("grpo")
    marker = tokenizer(CLOSE, add_special_tokens=False).input_ids
    with contextlib.ExitStack() as stack:
        for place in compat.baseline_modules():
            name = "calculate_baseline_and_std_per_prompt"
            stack.enter_context(patch.object(place, name, groups.baseline_and_std))
        if groups.reward is not None or learn is not None:

            def rewrite(batch: Any) -> torch.Tensor:
                rewards = groups.rewritten(batch, marker)
                if learn is not None:
                    learn(rewards.view(-1, groups.generations).double().numpy())
                return rewards

            scale = module.scale_rewards

            def scale_rewards(repeated_batch: Any, *arguments: Any) -> Any:
                repeated_batch["total_reward"] = rewrite(repeated_batch)
                return scale(repeated_batch, *arguments)

            if not asynchronous:
                stack.enter_context(patch.object(module, "scale_rewards", scale_rewards))
            elif compat.has_estimator():
                create = module._create_advantage_estimator
                stack.enter_context(
                    patch.object(
                        module, "_create_advantage_estimator", lambda config: _Estimator(create(config), rewrite)
                    )
                )
            else:
                stack.enter_context(patch.object(module, "BatchedDataDict", _rewriting_batches(rewrite)))
        yield


def by_group(train: Callable[..., Any], generations: int) -> Callable[..., Any]:
    """Return NeMo-RL's `policy.train` with a mean over groups, each the mean over its tokens (`group_factors`).

    Args:
        train: method that divides the loss of a step's batch by its number of tokens.
        generations: number of responses per prompt, which are adjacent in the batch.
    """

    @functools.wraps(train)
    def train_by_group(data: Any, *arguments: Any, **keywords: Any) -> Any:
        advantages = data["advantages"]
        if len(advantages) % generations:
            raise ValueError(
                f"NeMo-RL's batch of {len(advantages)} responses is not divisible into groups of {generations}; use a "
                f"supported version, {compat.FITS}"
            )
        # The first token of a sequence is not predicted.
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum(dim=1)
        factors = torch.as_tensor(group_factors(tokens.view(-1, generations).cpu().numpy()))
        scaled = copy.copy(data)
        scaled["advantages"] = advantages * factors.repeat_interleave(generations)[:, None].to(advantages)
        return train(scaled, *arguments, **keywords)

    return train_by_group


def lengths(log: Sequence[Mapping[str, Any]], marker: Sequence[int], *, opened: bool = False) -> tuple[int, int]:
    """Return the numbers of reasoning tokens and of other tokens that were generated in a conversation.

    If `</think>` has no tokens of its own because the tokenizer joined it with another character, the response's tokens
    are split in proportion to its characters.

    Args:
        log: messages with `role`, `content` and `token_ids`; the prompt is one user message.
        marker: token ids of `</think>`.
        opened: True if the prompt ends inside a reasoning trace.
    """
    thinking = answer = 0
    for message in log:
        if message["role"] != "assistant":
            continue
        ids, text = message["token_ids"].tolist(), message["content"]
        at = _find(ids, marker)
        if at is None and CLOSE in text:
            at = round((text.index(CLOSE) + len(CLOSE)) / len(text) * len(ids))
        elif at is None:
            # An unclosed trace consists of reasoning only.
            at = len(ids) if parse_response(text, thinking_opened=opened).thinking is not None else 0
        thinking += at
        answer += len(ids) - at
    return thinking, answer


def _member(log: Sequence[Mapping[str, Any]], reward: float, info: Mapping[str, Any], marker: Sequence[int]) -> Member:
    episode: Episode = info["episode"]
    opened = episode.thinking_opened
    thinking, answer = lengths(log, marker, opened=opened)
    texts = [message["content"] for message in log if message["role"] == "assistant"]
    return Member(
        reward=reward,
        thinking_tokens=thinking,
        answer_tokens=answer,
        prompt=episode.task.prompt,
        response=parse_response(texts[-1] if texts else "", thinking_opened=opened),
    )


def _groups(prompts: torch.Tensor, generations: int) -> Iterator[torch.Tensor]:
    """Yield the row indices of each group in a batch, given the token ids of its prompts, `[batch, tokens]`.

    Groups are adjacent rows, because NeMo-RL repeats each prompt `generations` times in a row. If rows have been
    removed, rows with equal prompts form a group.
    """
    rows = torch.arange(len(prompts), device=prompts.device)
    if len(prompts) % generations == 0:
        blocks = prompts.view(-1, generations, *prompts.shape[1:])
        if bool((blocks == blocks[:, :1]).all()):
            yield from rows.view(-1, generations)
            return
    _, which = torch.unique(prompts, dim=0, return_inverse=True)
    for number in which.unique():
        yield rows[which == number]


def _find(ids: Sequence[int], marker: Sequence[int]) -> int | None:
    """Return the number of tokens up to the end of the first marker; None if there is no marker."""
    if not marker:
        return None
    for begin in range(len(ids) - len(marker) + 1):
        if ids[begin] == marker[0] and ids[begin : begin + len(marker)] == list(marker):
            return begin + len(marker)
    return None


def _rewriting_batches(rewrite: Callable[[Any], torch.Tensor]) -> type:
    """Return a BatchedDataDict class that rewrites rewards when it joins groups, which only `async_grpo_train` does."""
    kind: Any = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict

    class RewritingBatches(kind):
        @classmethod
        def from_batches(cls, *arguments: Any, **keywords: Any) -> Any:
            batch = kind.from_batches(*arguments, **keywords)
            batch["total_reward"] = rewrite(batch)
            return batch

    return RewritingBatches
