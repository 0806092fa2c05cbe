"""Planned tasks (`nemo_ext.rl.plan`) as NeMo-RL's datasets.

Their order is that of a dataloader that does not shuffle, whose position NeMo-RL saves in its checkpoints. Where shares
adapt (`nemo_ext.rl.adaptive`), it saves their state with it: a `StatefulDataLoader` asks its dataset for `state_dict`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from nemo_ext.rl.adaptive import AdaptiveShares, signals_of
from nemo_ext.rl.episodes import Episode
from nemo_ext.rl.plan import PlannedTasks
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.task import Task


@dataclass(frozen=True)
class TaskProcessor:
    """NeMo-RL task processor: makes the prompt's tokens and the environment's information.

    Attributes:
        prompts: chat template of the model.
    """

    prompts: Prompts

    def __call__(
        self, record: Mapping[str, Any], spec: Any, tokenizer: Any, max_length: int | None, number: int
    ) -> Any:
        """Make a sample for NeMo-RL's rollouts.

        A prompt of `max_length` tokens or more leaves nothing to generate: it is cut, takes part with no loss
        (`loss_multiplier` 0), and a warning names it.
        """
        task: Task = self.prompts.in_mode(record["task"])
        text, opened = self.prompts.prompt(task)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        too_long = max_length is not None and len(ids) >= max_length
        if too_long:
            warnings.warn(f"task {task.id}: its prompt has {len(ids)} tokens, {max_length} are too many", stacklevel=2)
            ids = ids[:4]
        return {
            "message_log": [{"role": "user", "content": text, "token_ids": ids}],
            "length": len(ids),
            "extra_env_info": {"episode": Episode(task=task, thinking_opened=opened)},
            "loss_multiplier": 0.0 if too_long else 1.0,
            "idx": number,
            "task_name": record["task_name"],
            "stop_strings": None,
        }


@dataclass(frozen=True)
class Records:
    """Tasks as the records that NeMo-RL's `AllTaskProcessedDataset` hands to a processor.

    Attributes:
        tasks: tasks by number in training order.
        prefix: prefix of the environments' names in NeMo-RL.
    """

    tasks: PlannedTasks | Mapping[int, Task]
    prefix: str

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, number: int) -> dict[str, Any]:
        task = self.tasks[number]
        return {"task_name": self.prefix + task.environment, "task": task}


class AdaptiveTasks:
    """NeMo-RL dataset of tasks whose shares adapt: a batch is drawn when it is read, by the weights of that time.

    Its dataloader must have no workers: they read ahead, before the rewards of the last batch are known.

    Args:
        tasks: tasks of the run.
        shares: their shares.
        processed: function that makes NeMo-RL's dataset of tasks by number.
    """

    def __init__(
        self, tasks: PlannedTasks, shares: AdaptiveShares, processed: Callable[[Mapping[int, Task]], Any]
    ) -> None:
        self._tasks, self._shares = tasks, shares
        self._batch: dict[int, Task] = {}
        self._processed = processed(self._batch)
        self._datasets: list[int] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """The next batch of samples, which torch's dataloader asks for at once; their numbers only name them."""
        places = self._shares.draw(len(numbers))
        self._datasets = [dataset for dataset, _ in places]
        self._batch.clear()
        self._batch.update((number, self._tasks.nth(*place)) for number, place in zip(numbers, places, strict=True))
        return [self._processed[number] for number in numbers]

    def learn(self, rewards: npt.ArrayLike) -> None:
        """Take the rewards of the last batch, `[prompts, responses]`.

        Raises:
            ValueError: they are not of as many prompts, or one is not finite.
        """
        self._shares.learn(self._datasets, signals_of(rewards))

    def metrics(self) -> dict[str, float]:
        """Weights by which the last batch was drawn, and the signals behind them, until `learn` changes them."""
        found = {"weight": self._shares.weights, "signal": self._shares.signals}
        return {f"{kind}/{name}": value for kind, values in found.items() for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """State for the dataloader's own."""
        return self._shares.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; raises ValueError if it is of other datasets."""
        self._shares.restore(state)
