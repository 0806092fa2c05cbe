"""Teachers of on-policy distillation for tasks outside NeMo Gym.

NeMo-RL's asynchronous collector selects the teacher of a response by the name of its NeMo Gym agent, which our tasks
do not have. Here the name of a task's environment or domain takes its place.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal
from unittest.mock import patch

from nemo_ext.rl.episodes import Episode
from nemo_ext.rl.nemo_rl import compat
from nemo_ext.rl.nemo_rl.dropping import Replacement

_Collector: Any = compat.plain_class(compat.part(compat.algorithm("async_utils"), "AsyncTrajectoryCollector"))


class Collector(_Collector):
    """NeMo-RL's collector, which also names the agents of our tasks.

    Args:
        by: attribute of a task whose value is the agent's name, environment or domain.
        settings: arguments for NeMo-RL's collector.
    """

    def __init__(self, *arguments: Any, by: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._by = by

    async def _enqueue_rollout_group(self, rollout_result: Any, *arguments: Any, **settings: Any) -> None:
        batch = rollout_result.final_batch
        episodes: list[Episode] = [info["episode"] for info in batch["extra_env_info"]]
        batch["agent_ref"] = [{"name": getattr(episode.task, self._by)} for episode in episodes]
        await super()._enqueue_rollout_group(rollout_result, *arguments, **settings)


@contextlib.contextmanager
def routed(by: Literal["environment", "domain"]) -> Iterator[None]:
    """Context in which the teacher of a response is selected by its task's environment or domain."""
    with patch.object(compat.algorithm("async_utils"), "AsyncTrajectoryCollector", Replacement(Collector, by=by)):
        yield
