"""Preference pairs (`nemo_ext.rl.pairs`) as datasets for NeMo-RL's DPO and our RPO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_ext.rl.pairs import Pair, token_ids


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
