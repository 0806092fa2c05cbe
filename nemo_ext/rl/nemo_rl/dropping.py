"""Dynamic sampling in NeMo-RL's asynchronous loop: groups of equal rewards are left out, others generated instead.

`async_grpo_train` never calls `dynamic_sampling`. It has two Ray actors: a collector, which generates groups for one of
the next steps, and a replay buffer, which keeps them until that step trains. Since 0.7 the collector asks the buffer
how many groups a step lacks and generates those alone, for a step that was resumed in its middle or whose rollouts
failed. So a buffer that does not keep a group has another one generated. What the collector lacks is added here:

- It pauses until the next weights once all its steps are being generated, and would not see that one lacks groups
  again: here it sleeps until a step lacks groups.
- After new weights of version n it no longer generates for step n, which may lack groups still: here it does.
- It leaves out prompts of a batch that it does not need: here they come first for the next lack.
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
"""Prefix of the metrics."""


@dataclass
class Tally:
    """Groups that were generated for a step.

    Attributes:
        kept: those that the step trains on.
        dropped: those left out, as their rewards are equal.
        reward: sum of the mean rewards of all of them.
    """

    kept: int = 0
    dropped: int = 0
    reward: float = 0.0

    @property
    def generated(self) -> int:
        """All of them."""
        return self.kept + self.dropped

    def metrics(self, prompts: int) -> dict[str, float]:
        """Metrics of a step of so many prompts; `reward` is the mean before anything was left out."""
        numbers = {"generated": self.generated, "kept": self.kept, "dropped": self.dropped}
        return {**numbers, "batches": self.generated / prompts, "reward": self.reward / max(self.generated, 1)}


_Collector: Any = compat.plain_class(compat.part(compat.asynchronous(), "AsyncTrajectoryCollector"))
_Buffer: Any = compat.plain_class(compat.part(compat.asynchronous(), "ReplayBuffer"))


class Buffer(_Buffer):
    """NeMo-RL's replay buffer without groups of equal rewards.

    Args:
        prompts: number of groups of a step.
        batches: maximum number of batches generated for a step, `prompts` groups each.
        settings: NeMo-RL's own.
    """

    def __init__(self, *, prompts: int, batches: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._prompts, self._batches = prompts, batches
        self._tallies: dict[int, Tally] = {}
        self._ended = False

    def add(self, trajectory: Mapping[str, Any], weight_version: int, target_weight_version: int) -> str:
        """Take a group, or count it and leave it out; the caller is told "success" either way."""
        rewards = trajectory["batch"]["total_reward"]
        tally = self._tallies.setdefault(target_weight_version, Tally())
        if drop := bool(rewards.min() == rewards.max()):
            tally.dropped += 1
        else:
            said: str = super().add(trajectory, weight_version, target_weight_version)
            if said != "success":
                return said
            tally.kept += 1
        tally.reward += float(rewards.mean())
        if drop:
            print(f"left out a group of equal rewards of step {target_weight_version + 1}: {tally}")
        return "success"

    def get_trajectories_needed(self, target_step: int, *arguments: Any, **keywords: Any) -> int:
        """Number of groups that a step lacks, and may still have generated."""
        left = self._prompts * self._batches - self._tallies.get(target_step, Tally()).generated
        lacks: int = super().get_trajectories_needed(target_step, *arguments, **keywords)
        return max(0, min(lacks, left))

    def has_complete_batch(self, target_step: int, *arguments: Any, **keywords: Any) -> bool:
        """True if a step has its groups.

        Raises:
            ValueError: it cannot get them any more.
        """
        complete: bool = super().has_complete_batch(target_step, *arguments, **keywords)
        if not complete:
            self._check(target_step)
        return complete

    def sample(self, *, num_prompt_groups: int, current_weight_version: int, max_age_steps: int) -> Any:
        """Groups of a step, or None as long as it lacks some.

        Raises:
            ValueError: it cannot get them any more.
        """
        found = super().sample(num_prompt_groups, current_weight_version, max_age_steps)
        if found is None:
            self._check(current_weight_version)
        return found

    def end(self) -> None:
        """Be told that the data have ended, and that no more groups come."""
        self._ended = True

    def metrics(self, step: int) -> dict[str, float]:
        """Metrics of a step that was trained, counted from 0; those before it are forgotten."""
        self._tallies = {target: tally for target, tally in self._tallies.items() if target >= step}
        return self._tallies.get(step, Tally()).metrics(self._prompts)

    def _check(self, target: int) -> None:
        tally = self._tallies.get(target, Tally())
        seen = (
            f"step {target + 1}: {tally.dropped} of {tally.generated} generated groups have equal rewards, and "
            f"{self._prompts} others are needed"
        )
        if tally.generated >= self._prompts * self._batches:
            raise ValueError(
                f"{seen}; sampling.max_batches={self._batches} allows no more: choose tasks that the model solves at "
                "times, more generations_per_prompt, or a larger max_batches"
            )
        if self._ended:
            raise ValueError(f"{seen}; the data have ended: give more tasks")


class Collector(_Collector):
    """NeMo-RL's collector, which generates in place of groups that the buffer leaves out."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._changed = threading.Event()

    def start_collection(self, dataloader: Any) -> None:
        """Begin in a thread of its own."""
        super().start_collection(_UntilIdle(dataloader, self._end))

    def set_weight_version(self, version: int) -> None:
        """Be told of new weights."""
        super().set_weight_version(version)
        self._changed.set()

    # Each version has one of these two names, and calls it when all groups asked for have come or failed.
    def _maybe_release_target(self, target_weight_version: int) -> None:
        super()._maybe_release_target(target_weight_version)
        self._changed.set()

    def _release_target(self, target_weight_version: int) -> None:
        super()._release_target(target_weight_version)
        self._changed.set()

    def _calculate_target_weights(self, generation_weight_version: int) -> list[int]:
        # NeMo-RL asks for the steps after it; those that were trained it leaves out itself.
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
                time.sleep(0.1)  # another thread was faster, or an error that NeMo-RL has printed

    def _end(self) -> None:
        self.wait_for_pending_generations()
        importlib.import_module("ray").get(self.replay_buffer.end.remote())


class _UntilIdle:
    """Dataloader that calls a function at its end, while the collector still runs."""

    def __init__(self, loader: Any, at_end: Callable[[], None]) -> None:
        self._loader, self._at_end = loader, at_end

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader
        self._at_end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Watched:
    """Batch that knows how many of its rows, from the first, were taken."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.size: int = batch.size
        self.taken = 0

    def slice(self, begin: int, end: int) -> Any:
        """Rows of the batch."""
        self.taken = max(self.taken, end)
        return self._batch.slice(begin, end)


class _Made:
    """Actor class in place of NeMo-RL's, which adds settings to those that NeMo-RL gives and keeps the actor."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        self._kind, self._settings = importlib.import_module("ray").remote(kind), settings
        self.actor: Any = None

    def options(self, **options: Any) -> "_Made":
        """Ray's options of the actor."""
        self._kind = self._kind.options(**options)
        return self

    def remote(self, *arguments: Any, **settings: Any) -> Any:
        """Start the actor."""
        self.actor = self._kind.remote(*arguments, **settings, **self._settings)
        return self.actor


@contextlib.contextmanager
def dropping(*, prompts: int, batches: int) -> Iterator[Callable[[int], Mapping[str, float]]]:
    """Context in which `async_grpo_train` leaves out groups of equal rewards.

    Args:
        prompts: number of groups of a step.
        batches: maximum number of batches generated for a step.

    Yields:
        Function that gives the metrics of a step when it is logged, counted from 1.
    """
    module, buffer = compat.asynchronous(), _Made(Buffer, prompts=prompts, batches=batches)

    def metrics(step: int) -> Mapping[str, float]:
        found: Mapping[str, float] = importlib.import_module("ray").get(buffer.actor.metrics.remote(step - 1))
        return found

    with (
        patch.object(module, "AsyncTrajectoryCollector", _Made(Collector)),
        patch.object(module, "ReplayBuffer", buffer),
    ):
        yield metrics
