"""Planned tasks (`nemo_ext.rl.plan`) as NeMo-RL's datasets.

Their order is that of a dataloader that does not shuffle, whose position NeMo-RL saves in its checkpoints.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        tasks: tasks in training order.
        prefix: prefix of the environments' names in NeMo-RL.
    """

    tasks: PlannedTasks
    prefix: str

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, number: int) -> dict[str, Any]:
        task = self.tasks[number]
        return {"task_name": self.prefix + task.environment, "task": task}
