"""Dynamic sampling in NeMo-RL's asynchronous loop: groups with equal rewards are dropped and replaced.

`async_grpo_train` never calls `dynamic_sampling`. It has two Ray actors: a collector, which generates groups for one of
the next steps, and a replay buffer, which stores them until that step trains. Since 0.7, the collector asks the buffer
how many groups a step still needs and generates only those, in case the step was resumed midway or rollouts failed. So
if the buffer drops a group, the collector generates another. This module changes three things:

- Once all its steps are being generated, NeMo-RL's collector pauses until new weights arrive, and would not notice that
  a step needs more groups. Here it resumes as soon as a step does.
- After receiving weights of version n, it no longer generates for step n, even if groups of that step are missing. Here
  it does.
- It discards those prompts of a batch that it does not need. Here they are the first to be used when more are needed.
"""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from nemo_ext.rl.nemo_rl import compat

PREFIX = "train/dynamic_sampling"
"""Prefix under which the metrics are logged."""


@dataclass
class Tally:
    """Counts of the groups generated for a step.

    Attributes:
        kept: number of groups that the step trains on.
        dropped: number of groups dropped because their rewards are equal.
        reward: sum of the mean rewards of all groups, kept or dropped.
    """

    kept: int = 0
    dropped: int = 0
    reward: float = 0.0

    @property
    def generated(self) -> int:
        """Number of groups generated, kept or dropped."""
        return self.kept + self.dropped

    def metrics(self, prompts: int) -> dict[str, float]:
        """Return the metrics of a step with `prompts` prompts; `reward` is the mean over all groups."""
        numbers = {"generated": self.generated, "kept": self.kept, "dropped": self.dropped}
        return {**numbers, "batches": self.generated / prompts, "reward": self.reward / max(self.generated, 1)}


_Collector: Any = compat.plain_class(compat.part(compat.algorithm("async_utils"), "AsyncTrajectoryCollector"))
_Buffer: Any = compat.plain_class(compat.part(compat.algorithm("async_utils"), "ReplayBuffer"))


class Buffer(_Buffer):
    """NeMo-RL's replay buffer, changed to drop groups with equal rewards.

    Args:
        batches: maximum number of batches of `prompts` groups generated per step.
        settings: arguments for NeMo-RL's buffer.
    """

    def __init__(self, *, prompts: int, batches: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._prompts, self._batches = prompts, batches
        self._tallies: dict[int, Tally] = {}
        self._ended = False

    def add(self, trajectory: Mapping[str, Any], weight_version: int, target_weight_version: int) -> str:
        """Store a group, or drop it if its rewards are equal, and count it.

        Args:
            trajectory: the group, with its rewards in `batch`.
            weight_version: version of the weights that generated it.
            target_weight_version: step that it is for, counted from 0.

        Returns:
            "success" if it was stored or dropped, else the status of NeMo-RL's buffer.
        """
        rewards = trajectory["batch"]["total_reward"]
        tally = self._tallies.setdefault(target_weight_version, Tally())
        if drop := bool(rewards.min() == rewards.max()):
            tally.dropped += 1
        else:
            status: str = super().add(trajectory, weight_version, target_weight_version)
            if status != "success":
                return status
            tally.kept += 1
        tally.reward += float(rewards.mean())
        if drop:
            print(f"step {target_weight_version + 1}: dropped a group of equal rewards: {tally}")
        return "success"

    def get_trajectories_needed(self, target_step: int, *arguments: Any, **keywords: Any) -> int:
        """Return the number of groups that a step still needs, limited by its maximum number of batches."""
        allowed = self._prompts * self._batches - self._tallies.get(target_step, Tally()).generated
        needed: int = super().get_trajectories_needed(target_step, *arguments, **keywords)
        return max(0, min(needed, allowed))

    def has_complete_batch(self, target_step: int, *arguments: Any, **keywords: Any) -> bool:
        """Return whether a step has all its groups; raise ValueError if some are missing and none can be added."""
        complete: bool = super().has_complete_batch(target_step, *arguments, **keywords)
        if not complete:
            self._check(target_step)
        return complete

    def sample(self, *, num_prompt_groups: int, current_weight_version: int, max_age_steps: int) -> Any:
        """Return the groups of step `current_weight_version`, counted from 0, or None while it is incomplete.

        Raises:
            ValueError: groups of the step are missing, and none can be added.
        """
        groups = super().sample(num_prompt_groups, current_weight_version, max_age_steps)
        if groups is None:
            self._check(current_weight_version)
        return groups

    def end(self) -> None:
        """Record that the data have ended and no more groups will come."""
        self._ended = True

    def metrics(self, step: int) -> dict[str, float]:
        """Return a trained step's metrics (steps are counted from 0), and discard the counts of earlier steps."""
        self._tallies = {target: tally for target, tally in self._tallies.items() if target >= step}
        return self._tallies.get(step, Tally()).metrics(self._prompts)

    def _check(self, target: int) -> None:
        tally = self._tallies.get(target, Tally())
        problem = (
            f"step {target + 1} requires {self._prompts} groups with unequal rewards, but {tally.dropped} of "
            f"{tally.generated} generated groups have equal rewards"
        )
        if tally.generated >= self._prompts * self._batches:
            raise ValueError(
                f"{problem}, and rl.sampling.max_batches={self._batches} allows no more; choose tasks that the model "
                "sometimes solves, more generations_per_prompt, or a larger max_batches"
            )
        if self._ended:
            raise ValueError(f"{problem}, and no tasks are left; add more to tasks.train")


class Collector(_Collector):
    """NeMo-RL's collector, which also replaces groups that the buffer drops."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._changed = threading.Event()

    def start_collection(self, dataloader: Any) -> None:
        """Start collecting in a separate thread."""
        super().start_collection(_UntilIdle(dataloader, self._end))

    def set_weight_version(self, version: int) -> None:
        """Record the version of new weights and wake the collector."""
        super().set_weight_version(version)
        self._changed.set()

    # Each version has one of these two methods, and calls it when all requested groups have arrived or failed.
    def _maybe_release_target(self, target_weight_version: int) -> None:
        super()._maybe_release_target(target_weight_version)
        self._changed.set()

    def _release_target(self, target_weight_version: int) -> None:
        super()._release_target(target_weight_version)
        self._changed.set()

    def _calculate_target_weights(self, generation_weight_version: int) -> list[int]:
        # NeMo-RL returns only later steps; it skips steps that are already trained.
        later: list[int] = super()._calculate_target_weights(generation_weight_version)
        return [generation_weight_version, *(step for step in later if step != generation_weight_version)]

    def _should_pause_for_generation_limits(self) -> bool:
        return False  # `_process_batch` waits

    def _process_batch(self, batch: Any) -> None:
        while batch.size and self.running:
            self._changed.clear()
            if super()._should_pause_for_generation_limits():
                self._changed.wait()
                continue
            self._manual_pause_cleared.wait()
            watched = _Watched(batch)
            super()._process_batch(watched)
            batch = batch.slice(watched.taken, batch.size)
            if not watched.taken:
                time.sleep(0.1)  # another thread was faster, or there was an error that NeMo-RL has printed

    def _end(self) -> None:
        self.wait_for_pending_generations()
        importlib.import_module("ray").get(self.replay_buffer.end.remote())


class _UntilIdle:
    """Wrapper of a dataloader that calls `at_end` after the last batch, before the collector stops."""

    def __init__(self, loader: Any, at_end: Callable[[], None]) -> None:
        self._loader, self._at_end = loader, at_end

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader
        self._at_end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Watched:
    """Wrapper of a batch that counts how many of its leading rows were taken."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.size: int = batch.size
        self.taken = 0

    def slice(self, begin: int, end: int) -> Any:
        """Return rows `begin` to `end` of the batch and count them as taken."""
        self.taken = max(self.taken, end)
        return self._batch.slice(begin, end)


class Replacement:
    """Replacement for one of NeMo-RL's actor classes that adds arguments and remembers the actor it starts."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        self._kind, self._settings = importlib.import_module("ray").remote(kind), settings
        self.actor: Any = None

    def options(self, **options: Any) -> "Replacement":
        """Set Ray's options for the actor."""
        self._kind = self._kind.options(**options)
        return self

    def remote(self, *arguments: Any, **settings: Any) -> Any:
        """Start and return the actor."""
        self.actor = self._kind.remote(*arguments, **settings, **self._settings)
        return self.actor


@contextlib.contextmanager
def dropping(*, prompts: int, batches: int) -> Iterator[Callable[[int], Mapping[str, float]]]:
    """Context in which `async_grpo_train` drops and replaces groups with equal rewards.

    Args:
        batches: maximum number of batches generated per step.

    Yields:
        Function to call when a step is logged, which returns the step's metrics; steps are counted from 1.
    """
    module, buffer = compat.algorithm("async_utils"), Replacement(Buffer, prompts=prompts, batches=batches)

    def metrics(step: int) -> Mapping[str, float]:
        values: Mapping[str, float] = importlib.import_module("ray").get(buffer.actor.metrics.remote(step - 1))
        return values

    with (
        patch.object(module, "AsyncTrajectoryCollector", Replacement(Collector)),
        patch.object(module, "ReplayBuffer", buffer),
    ):
        yield metrics
