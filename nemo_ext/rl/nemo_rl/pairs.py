"""Preference pairs as NeMo-RL's datasets, for DPO and RPO.

A line has NeMo-RL's form, as `nemo-ext preference_data` writes it: {context: messages, completions: [{rank, completion:
messages}, ...]}, lower ranks preferred; for RPO each completion also has its true `reward`. Rendered pairs hold one
text of the user and one of the assistant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from nemo_ext.chat.formats import to_sample
from nemo_ext.chat.template import thinks
from nemo_ext.rl.prompts import Prompts


@dataclass(frozen=True)
class Pair:
    """A preference pair from one line of a file, checked.

    Attributes:
        prompt: text before the responses.
        chosen: text of the better response, with its end token.
        rejected: text of the other response.
        rewards: true rewards of both; None if there are none.
    """

    prompt: str
    chosen: str
    rejected: str
    rewards: tuple[float, float] | None = None


def read_pairs(path: str | Path, prompts: Prompts | None, *, with_rewards: bool = False) -> list[Pair]:
    """Read the pairs of a file.

    Args:
        path: path of a JSONL file.
        prompts: chat template of the model; None if the pairs are rendered.
        with_rewards: True if the pairs must have true rewards.

    Raises:
        ValueError: naming the line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file of pairs")
    pairs = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                pairs.append(_pair(line, prompts, with_rewards=with_rewards, where=f"{path}:{number}"))
    if not pairs:
        raise ValueError(f"{path}: no pairs")
    return pairs


@dataclass(frozen=True)
class PairDataset:
    """Dataset of pairs for `dpo.setup`.

    Attributes:
        pairs: pairs in order.
        tokenizer: tokenizer of the policy.
        max_length: maximum tokens of a conversation; a longer pair takes part with no loss.
    """

    pairs: Sequence[Pair]
    tokenizer: Any
    max_length: int | None

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, number: int) -> dict[str, Any]:
        pair = self.pairs[number]
        prompt = self._ids(pair.prompt)
        sides = [(pair.chosen, self._ids(pair.chosen)), (pair.rejected, self._ids(pair.rejected))]
        lengths = [len(prompt) + len(ids) for _, ids in sides]
        fits = self.max_length is None or max(lengths) <= self.max_length
        # A cut pair keeps four tokens of each side, as in NeMo-RL, and its loss counts for nothing.
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

    def _ids(self, text: str) -> torch.Tensor:
        ids: torch.Tensor = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        return ids.long()


def _pair(line: bytes, prompts: Prompts | None, *, with_rewards: bool, where: str) -> Pair:
    try:
        record = orjson.loads(line)
        context, completions = record["context"], sorted(record["completions"], key=lambda given: given["rank"])
        (chosen, rejected) = (given["completion"] for given in completions)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: a pair is {{context, completions: [{{rank, completion}}, two of them]}}") from error
    if completions[0]["rank"] == completions[1]["rank"]:
        raise ValueError(f"{where}: both completions have the rank {completions[0]['rank']}")
    rewards = None
    if with_rewards:
        better, worse = (given.get("reward") for given in completions)
        if not isinstance(better, int | float) or not isinstance(worse, int | float):
            raise ValueError(f"{where}: RPO needs a number as `reward` of each completion, not {better!r}, {worse!r}")
        rewards = (float(better), float(worse))
    if prompts is None:
        texts = [_rendered(side, where) for side in (context, chosen, rejected)]
    else:
        texts = _by_template(prompts, record, context, (chosen, rejected), where)
    return Pair(prompt=texts[0], chosen=texts[1], rejected=texts[2], rewards=rewards)


def _rendered(messages: Sequence[Mapping[str, Any]], where: str) -> str:
    if len(messages) != 1:
        raise ValueError(f"{where}: a rendered pair has one message a side, not {len(messages)}: or give a template")
    return str(messages[0]["content"])


def _by_template(
    prompts: Prompts, record: Mapping[str, Any], context: Any, sides: Sequence[Any], where: str
) -> list[str]:
    tools = record.get("tools")
    tools = orjson.loads(tools) if isinstance(tools, str) else tools
    texts = []
    for side in sides:
        try:
            whole = to_sample({"messages": [*context, *side], "tools": tools}, id=where, format="openai")
            before = to_sample({"messages": context, "tools": tools}, id=where, format="openai")
            prompt = prompts.template.render(before, thinking=thinks(whole), add_generation_prompt=True).text
            text = prompts.template.render(whole).text
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not text.startswith(prompt):
            raise ValueError(f"{where}: the chat template begins the response otherwise than its prompt ends")
        texts.append((prompt, text[len(prompt) :].rstrip("\n")))
    (prompt, chosen), (other, rejected) = texts
    if prompt != other:
        raise ValueError(f"{where}: one response has reasoning and the other has none: their prompts differ")
    return [prompt, chosen, rejected]
