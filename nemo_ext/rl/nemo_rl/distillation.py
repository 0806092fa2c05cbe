"""Teachers of on-policy distillation for tasks outside NeMo Gym.

NeMo-RL's asynchronous collector selects the teacher of a response by the name of its NeMo Gym agent, which our tasks
do not have. Here the name of a task's teacher takes its place.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from nemo_ext.rl.algorithms import Distillation
from nemo_ext.rl.episodes import Episode
from nemo_ext.rl.nemo_rl import compat
from nemo_ext.rl.nemo_rl.dropping import Replacement
from nemo_ext.rl.teachers import divergences

_Collector: Any = compat.plain_class(compat.part(compat.asynchronous(), "AsyncTrajectoryCollector"))


class Collector(_Collector):
    """NeMo-RL's collector, which also names the teachers of our tasks.

    Args:
        distillation: settings that select a task's teacher.
        settings: arguments for NeMo-RL's collector.
    """

    def __init__(self, *arguments: Any, distillation: Distillation, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._distillation = distillation

    async def _enqueue_rollout_group(self, rollout_result: Any, *arguments: Any, **settings: Any) -> None:
        batch = rollout_result.final_batch
        episodes: list[Episode] = [info["episode"] for info in batch["extra_env_info"]]
        batch["agent_ref"] = [{"name": self._distillation.teacher(episode.task)} for episode in episodes]
        await super()._enqueue_rollout_group(rollout_result, *arguments, **settings)


@contextlib.contextmanager
def routed(distillation: Distillation) -> Iterator[dict[str, float]]:
    """Context in which the teacher of a response is its task's.

    Yields:
        Estimates of the KL divergence to each teacher on its tasks in the newest batch, in nats per token.
    """
    module, kls = compat.grpo(), dict[str, float]()
    estimator = compat.part(module, "OPDAdvantageEstimator")

    class Measured(estimator):  # type: ignore[misc,valid-type]
        """NeMo-RL's estimator of advantages, which also measures the divergences."""

        def compute_advantage(
            self, *, mask: Any, repeated_batch: Any, teacher_logprobs: Any, prev_logprobs: Any, **others: Any
        ) -> Any:
            names = [agent["name"] for agent in repeated_batch["agent_ref"]]
            sums = divergences(names, teacher_logprobs, prev_logprobs, mask)
            kls.clear()
            kls.update({name: total / tokens for name, (total, tokens) in sums.items() if tokens})
            batch = {"repeated_batch": repeated_batch, **others}
            return super().compute_advantage(
                mask=mask, teacher_logprobs=teacher_logprobs, prev_logprobs=prev_logprobs, **batch
            )

    replaced = Replacement(Collector, distillation=distillation)
    with (
        patch.object(compat.asynchronous(), "AsyncTrajectoryCollector", replaced),
        patch.object(module, "OPDAdvantageEstimator", Measured),
    ):
        yield kls
