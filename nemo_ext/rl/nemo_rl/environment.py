"""Ray actor that verifies responses for NeMo-RL in any environment of `nemo_ext.rl.environments`.

A step gets messages with role and content only, and a call has the samples of a whole batch (sync rollouts) or one
sample (async). So a reward here depends on one response and its task; rewards over groups are in `group_rewards`. A
conversation's state travels in the metadata, so the actor keeps none.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

from nemo_ext.job.settings import checked
from nemo_ext.rl.episodes import Episodes, EpisodeSettings
from nemo_ext.rl.prompts import Prompts


class TaskEnvironment(EnvironmentInterface):
    """An environment as NeMo-RL calls it; `TaskEnvironmentActor` is the Ray actor around it.

    Args:
        config: an `EpisodeSettings`.

    Raises:
        ValueError: unknown key or invalid value.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        given = checked(EpisodeSettings, config, "environment")
        prompts = None if given.template is None else Prompts.load(given.template, eos=given.eos)
        self._episodes = Episodes(given, prompts)
        if self._episodes.environment.begin is not None and prompts is None:
            raise ValueError(f"environment {given.name!r} has several turns: give the chat template of the model")
        self._max_tokens = given.max_tokens
        self._tokenizer = _tokenizer(given.tokenizer) if self._episodes.reward.counts_tokens else None

    async def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Mapping[str, Any]]
    ) -> EnvironmentReturn:
        """Verify the last message of every conversation, or carry out its calls.

        Args:
            message_log_batch: `[batch]`, messages with role and content each.
            metadata: `[batch]`, dicts with the `episode`, from `data.TaskProcessor` or the previous step.

        Returns:
            Observations of role `environment`: the tools' answers as the chat template writes them, up to the prompt of
            the next response; or, where the episode is over, the outcome as a word (an empty observation would change
            the type of NeMo-RL's token ids). `rewards` and `terminateds` [batch].
        """
        texts = [log[-1]["content"] for log in message_log_batch]
        tokens = [self._tokens(text) for text in texts]
        turns = await self._episodes.turns(
            [info["episode"] for info in metadata],
            texts,
            tokens=tokens,
            finished=[count is None or self._max_tokens is None or count < self._max_tokens for count in tokens],
        )
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": turn.verdict.outcome if turn.verdict else turn.observation}
                for turn in turns
            ],
            metadata=[None if turn.following is None else {"episode": turn.following} for turn in turns],
            next_stop_strings=[None] * len(turns),
            rewards=torch.tensor([turn.reward.total if turn.reward else 0.0 for turn in turns], dtype=torch.float32),
            terminateds=torch.tensor([turn.following is None for turn in turns], dtype=torch.bool),
            answers=[turn.verdict.answer if turn.verdict else None for turn in turns],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """The unchanged batch and the metrics; NeMo-RL's training loops never call this."""
        return batch, self.take_metrics()

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        return self._episodes.take_metrics()

    def shutdown(self) -> None:
        """Stop the threads; verifications under way end by their own limits."""
        self._episodes.shutdown()

    def _tokens(self, text: str) -> int | None:
        return None if self._tokenizer is None else len(self._tokenizer(text, add_special_tokens=False).input_ids)


def _tokenizer(name: str | None) -> Any:
    if name is None:
        raise ValueError("this reward counts tokens: give the environment the tokenizer's name or folder")
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(name)


TaskEnvironmentActor = ray.remote(TaskEnvironment)
"""Actor class that NeMo-RL creates; see `compat.register`."""
