"""Planned tasks (`nemo_ext.rl.plan`) and preference pairs (`nemo_ext.rl.pairs`) as datasets for NeMo-RL.

NeMo-RL's dataloader does not shuffle tasks, and its position is saved in checkpoints. The state of adaptive shares
(`nemo_ext.rl.adaptive`) is saved with it, because a `StatefulDataLoader` calls its dataset's `state_dict`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from nemo_ext.rl.adaptive import AdaptiveShares, signals_of
from nemo_ext.rl.episodes import Episode
from nemo_ext.rl.pairs import Pair, token_ids
from nemo_ext.rl.plan import PlannedTasks
from nemo_ext.rl.prompts import Prompts
from nemo_ext.rl.task import Task


@dataclass(frozen=True)
class TaskProcessor:
    """NeMo-RL task processor that tokenizes the prompt and adds the information that the environment needs."""

    prompts: Prompts

    def __call__(
        self, record: Mapping[str, Any], spec: Any, tokenizer: Any, max_length: int | None, number: int
    ) -> Any:
        """Return a sample for NeMo-RL's rollouts, as a dict.

        A prompt of at least `max_length` tokens leaves no room for a response: it is truncated and excluded from the
        loss (`loss_multiplier` 0), and a warning is issued.

        Args:
            record: record from `Records`, with the task and its name in NeMo-RL.
        """
        task: Task = self.prompts.in_mode(record["task"])
        text, opened = self.prompts.prompt(task)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        too_long = max_length is not None and len(ids) >= max_length
        if too_long:
            warnings.warn(
                f"task {task.id} is excluded from the loss, because its prompt has {len(ids)} tokens, which must be "
                f"fewer than data.max_input_seq_length={max_length} (rl.lengths.prompt); shorten it or raise the limit",
                stacklevel=2,
            )
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
    """Task records that NeMo-RL's `AllTaskProcessedDataset` passes to a processor.

    Attributes:
        tasks: tasks, indexed by their number in training order.
        prefix: prefix that the environments' names have in NeMo-RL.
    """

    tasks: PlannedTasks | Mapping[int, Task]
    prefix: str

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, number: int) -> dict[str, Any]:
        task = self.tasks[number]
        return {"task_name": self.prefix + task.environment, "task": task}


class AdaptiveTasks:
    """NeMo-RL dataset of tasks drawn from several datasets, whose shares in a batch adapt to the rewards.

    A batch is drawn with the current shares when it is read.

    Its dataloader must not have workers, which would read ahead before the last batch's rewards are known.

    Args:
        processed: function that makes NeMo-RL's dataset from a mapping from numbers to tasks.
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
        """Draw a batch, which torch's dataloader requests as a whole.

        `numbers` are the dataloader's indices: they determine the size of the batch, but not which tasks are drawn.
        """
        places = self._shares.draw(len(numbers))
        self._datasets = [dataset for dataset, _ in places]
        self._batch.clear()
        self._batch.update((number, self._tasks.nth(*place)) for number, place in zip(numbers, places, strict=True))
        return [self._processed[number] for number in numbers]

    def learn(self, rewards: npt.ArrayLike) -> None:
        """Update the shares from the last batch's rewards, `[prompts, responses]`.

        Raises:
            ValueError: the number of prompts differs from the last batch's.
        """
        self._shares.learn(self._datasets, signals_of(rewards))

    def metrics(self) -> dict[str, float]:
        """Return each dataset's weight and signal; until `learn` is called, they are those of the last draw."""
        current = {"weight": self._shares.weights, "signal": self._shares.signals}
        return {f"{kind}/{name}": value for kind, values in current.items() for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the dataloader's checkpoint."""
        return self._shares.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state from a checkpoint; raise ValueError if it belongs to different datasets."""
        self._shares.restore(state)


@dataclass(frozen=True)
class PairDataset:
    """Dataset of pairs for `dpo.setup`; pairs longer than `max_length` tokens are excluded from the loss."""

    pairs: Sequence[Pair]
    tokenizer: Any
    max_length: int | None

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, number: int) -> dict[str, Any]:
        pair = self.pairs[number]
        prompt, *answers = (torch.tensor(ids, dtype=torch.long) for ids in token_ids(pair, self.tokenizer))
        sides = list(zip((pair.chosen, pair.rejected), answers, strict=True))
        lengths = [len(prompt) + len(ids) for _, ids in sides]
        fits = self.max_length is None or max(lengths) <= self.max_length
        # A longer pair is truncated to four tokens per message, as in NeMo-RL, and excluded from the loss.
        short = None if fits else 4
        logs = [
            [
                {"role": "user", "content": pair.prompt, "token_ids": prompt[:short]},
                {"role": "assistant", "content": text, "token_ids": ids[:short]},
            ]
            for text, ids in sides
        ]
        totals = [sum(len(message["token_ids"]) for message in log) for log in logs]
        datum = {
            "message_log_chosen": logs[0],
            "message_log_rejected": logs[1],
            "length_chosen": totals[0],
            "length_rejected": totals[1],
            "loss_multiplier": float(fits),
            "idx": number,
        }
        return datum if pair.rewards is None else {**datum, "rewards": pair.rewards}
