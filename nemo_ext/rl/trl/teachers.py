"""Teachers of on-policy distillation: log-probabilities of the tokens that the policy sampled."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from trl.trainer import add_fused_lm_head

from nemo_ext.endpoint.client import Client
from nemo_ext.endpoint.echo import Echo
from nemo_ext.job.progress import notice
from nemo_ext.rl.algorithms import Distillation
from nemo_ext.rl.teachers import check_vocabulary

Measure = Callable[[Any, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Function of a model, token ids and attention mask `[rows, tokens]`, and a number of tokens: their log-probabilities
`[rows, number]`, which are the last ones of each row."""


class Teachers:
    """A run's teachers, each loaded once.

    Args:
        settings: the algorithm's section `distillation`.
        may_run_code: function that returns whether Python files in a model's folder may run.

    Raises:
        ValueError: a folder has no model, or a teacher's vocabulary differs from the policy's.
    """

    def __init__(self, settings: Distillation, tokenizer: Any, may_run_code: Callable[[str], bool]) -> None:
        self.settings = settings
        self._models: dict[str, Any] = {}
        for name, place in settings.places.items():
            if place in self._models:
                continue
            folder = Path(place).expanduser()
            if (folder / "config.json").is_file():
                notice(f"loading the teacher {folder}")
                trusted = may_run_code(str(folder))
                check_vocabulary(name, folder, tokenizer, trust_remote_code=trusted)
                model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=trusted)
                add_fused_lm_head(model, temperature=1.0)  # through which TRL computes log-probabilities
                self._models[place] = model.requires_grad_(False).eval()
            elif settings.logits is not None:
                raise ValueError(
                    f"rl.distillation.teachers.{name}={place} must be a Hugging Face folder, because "
                    "rl.distillation.logits requires the teacher's logits, which endpoints do not return"
                )
            elif "://" in place or folder.is_dir():
                asyncio.run(_ask(place, (), ()))  # raises an error before training if it is not up
                self._models[place] = place
            else:
                raise ValueError(
                    f"rl.distillation.teachers.{name}={place} must be a Hugging Face folder, a run directory of "
                    "`nemo-ext serve`, or a URL that begins with http://"
                )

    def logits(self, place: str, ids: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
        """Return the logits of the teacher at `place` for each row's last tokens, `[rows, width, vocabulary]`.

        Args:
            place: folder of the teacher.
            ids: token ids, as for `logprobs`, `[rows, tokens]`.
            mask: 1 for tokens, 0 for padding, `[rows, tokens]`.
            width: number of tokens that responses have with padding.
        """
        with torch.no_grad():
            return last_logits(self._models[place].to(ids.device), ids, mask, width)

    def logprobs(
        self, names: Sequence[str], ids: torch.Tensor, mask: torch.Tensor, width: int, measure: Measure
    ) -> torch.Tensor:
        """Return the teachers' log-probabilities in nats of each row's last tokens, `[rows, width]`; 0 where masked.

        Args:
            names: name of each row's teacher.
            ids: token ids of prompts, padded on the left, and responses, padded on the right, `[rows, tokens]`.
            mask: 1 for tokens, 0 for padding, `[rows, tokens]`.
            width: number of tokens that responses have with padding.
            measure: function that computes log-probabilities with a loaded model.

        Raises:
            ValueError: an endpoint does not return log-probabilities.
        """
        result = torch.zeros(len(ids), width, device=ids.device)
        places = [self.settings.places[name] for name in names]
        for place, model in self._models.items():
            rows = [row for row, its in enumerate(places) if its == place]
            if not rows:
                continue
            if isinstance(model, str):
                values = asyncio.run(
                    _ask(
                        model,
                        [ids[row][mask[row].bool()].tolist() for row in rows],
                        [int(mask[row, -width:].sum()) for row in rows],
                    )
                )
                for row, numbers in zip(rows, values, strict=True):
                    result[row, : len(numbers)] = torch.tensor(numbers, device=ids.device)
            else:
                model.to(ids.device)
                result[rows] = measure(model, ids[rows], mask[rows], width).to(result)
        return result * mask[:, -width:]


def last_logits(model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    """Return a model's logits for the last `width` tokens of each row, `[rows, width, vocabulary]`."""
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits[:, -width - 1 : -1]


async def _ask(place: str, sequences: Sequence[list[int]], lasts: Sequence[int]) -> list[list[float]]:
    async with Client(place) as client:
        await client.check()
        echo = Echo(client)
        return await asyncio.gather(*(echo.of_tokens(ids, last) for ids, last in zip(sequences, lasts, strict=True)))
