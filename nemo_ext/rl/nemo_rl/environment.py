"""Ray actor that verifies responses for NeMo-RL, for any environment in `nemo_ext.rl.environments`.

A call receives messages with only role and content, for a whole batch (synchronous rollouts) or one sample
(asynchronous). Rewards here therefore depend on one response and its task; `group_rewards` has rewards over groups. The
metadata hold a conversation's state, so the actor is stateless.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

from nemo_ext.rl.episodes import Episodes, EpisodeSettings, episode_settings
from nemo_ext.rl.prompts import Prompts


class TaskEnvironment(EnvironmentInterface):
    """NeMo-RL environment configured by `EpisodeSettings`; `TaskEnvironmentActor` is its Ray actor class."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = episode_settings(config)
        prompts = None if settings.template is None else Prompts.load(settings.template, eos=settings.eos)
        self._episodes = Episodes(settings, prompts)
        if self._episodes.environment.begin is not None and prompts is None:
            raise ValueError(
                f"environment {settings.name!r} has several turns, which require the model's chat template; set "
                "template=NAME"
            )
        self._max_tokens = settings.max_tokens
        self._tokenizer = _tokenizer(settings) if self._episodes.reward.counts_tokens else None

    async def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Mapping[str, Any]]
    ) -> EnvironmentReturn:
        """Verify the last message of every conversation, or execute its tool calls.

        Args:
            message_log_batch: conversations as messages with role and content, `[batch]`.
            metadata: dicts with the `episode`, from `data.TaskProcessor` or the previous step, `[batch]`.

        Returns:
            NeMo-RL's result, whose `rewards` and `terminateds` are `[batch]`. Observations have the role `environment`
            and contain the tool messages rendered with the chat template, up to the next response. At the end of an
            episode, the observation is the outcome as a word, because an empty one would change the type of NeMo-RL's
            token ids.
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
        """Return the unchanged batch and the metrics; NeMo-RL's training loops never call this."""
        return batch, self.take_metrics()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics accumulated since the last call."""
        return self._episodes.take_metrics()

    def shutdown(self) -> None:
        """Stop the threads; running verifications end at their own time limits."""
        self._episodes.shutdown()

    def _tokens(self, text: str) -> int | None:
        return None if self._tokenizer is None else len(self._tokenizer(text, add_special_tokens=False).input_ids)


def _tokenizer(settings: EpisodeSettings) -> Any:
    if settings.tokenizer is None:
        raise ValueError(
            f"environments.{settings.name}.reward counts tokens; set environments.{settings.name}.tokenizer to the "
            "policy's tokenizer (a name or folder)"
        )
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(settings.tokenizer)


TaskEnvironmentActor = ray.remote(max_concurrency=10_000)(TaskEnvironment)  # by default, Ray limits calls to 1,000
"""Actor class that NeMo-RL creates; see `compat.register`."""
