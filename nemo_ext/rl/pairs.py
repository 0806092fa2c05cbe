"""Preference pairs for DPO and RPO, which are read, rendered and tokenised in the same way for every engine.

Each line of a file is a pair in one of the two forms that `nemo-ext preference_data` writes:

TRL       {prompt, chosen, rejected: lists of messages, or rendered strings; chosen_score, rejected_score; tools;
          chat_template_kwargs: {enable_thinking}}
NeMo-RL   {context: messages, completions: two of {rank, completion: messages, reward}}; the lower rank is preferred

If a pair does not specify its thinking mode, thinking is on if one of its responses contains reasoning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.chat.formats import thinking_mode, to_sample
from nemo_ext.data.preference.measure import Texts, rendered_pair
from nemo_ext.data.text.user_files import record_source
from nemo_ext.job.progress import notice
from nemo_ext.job.records import read_json
from nemo_ext.rl.prompts import Prompts


@dataclass(frozen=True)
class Pair:
    """A validated preference pair from one line of a file.

    Attributes:
        prompt: rendered text before the responses.
        chosen: text of the better response, including its end token.
        rejected: text of the other response, including its end token.
        rewards: true rewards of the chosen and the rejected response; None if they were not requested.
    """

    prompt: str
    chosen: str
    rejected: str
    rewards: tuple[float, float] | None = None


def read_pairs(path: str | Path, prompts: Prompts | None, *, with_rewards: bool = False) -> list[Pair]:
    """Read the pairs in a file.

    Args:
        path: path of a JSONL or Parquet file.
        prompts: the model's chat template; None if the pairs are already rendered.
        with_rewards: True if the pairs must have true rewards.

    Raises:
        ValueError: the file is missing or empty, or a pair is invalid; the message names its line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; write pairs with `nemo-ext preference_data`")
    rows = record_source((str(path),), None, "pairs").rows(strict=True)
    pairs = [_pair(record, prompts, with_rewards=with_rewards, where=where) for where, record in rows]
    if not pairs:
        raise ValueError(f"{path}: the file contains no pairs; write them with `nemo-ext preference_data`")
    return pairs


def with_short_prompts(pairs: Sequence[Pair], tokenizer: Any, limit: int | None) -> list[Pair]:
    """Return the pairs whose prompts have at most `limit` tokens (None for no limit); a notice counts the others.

    Raises:
        ValueError: no pair remains.
    """
    if limit is None:
        return list(pairs)
    short = [pair for pair in pairs if len(tokenizer(pair.prompt, add_special_tokens=False)["input_ids"]) <= limit]
    if not short:
        raise ValueError(
            f"all {len(pairs):,} pairs have prompts of more than rl.lengths.prompt={limit} tokens; raise "
            "rl.lengths.prompt"
        )
    if len(short) < len(pairs):
        count = len(pairs) - len(short)
        notice(f"excluded {count:,} pairs with prompts of more than rl.lengths.prompt={limit} tokens")
    return short


def token_ids(pair: Pair, tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the token ids of prompt, chosen and rejected; the rendered texts already contain all special tokens."""
    encoded = tokenizer([pair.prompt, pair.chosen, pair.rejected], add_special_tokens=False)["input_ids"]
    prompt, chosen, rejected = (list(ids) for ids in encoded)
    return prompt, chosen, rejected


def _pair(record: Any, prompts: Prompts | None, *, with_rewards: bool, where: str) -> Pair:
    try:
        if "completions" in record:
            completions = sorted(record["completions"], key=lambda completion: completion["rank"])
            ranks = [completion["rank"] for completion in completions]
            sides = [record["context"], *(completion["completion"] for completion in completions)]
            scores = [completion.get("reward") for completion in completions]
        else:
            ranks = [0, 1]
            sides = [record[key] for key in ("prompt", "chosen", "rejected")]
            scores = [record.get(f"{key}_score") for key in ("chosen", "rejected")]
        _, _, _ = sides
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{where}: expected a pair with prompt, chosen and rejected, or with context and two completions (rank "
            "and completion), as `nemo-ext preference_data` writes it"
        ) from error
    if ranks[0] == ranks[1]:
        raise ValueError(f"{where}: both completions have rank {ranks[0]!r}; give the better one the lower rank")
    rewards = None
    if with_rewards:
        better, worse = scores
        if not isinstance(better, int | float) or not isinstance(worse, int | float):
            raise ValueError(
                f"{where}: RPO requires a numeric `reward` of each completion, or chosen_score and rejected_score, not "
                f"{better!r} and {worse!r}; `nemo-ext preference_data` writes them for responses with a score"
            )
        rewards = (float(better), float(worse))
    prompt, chosen, rejected = _texts(record, sides, prompts, where)
    return Pair(prompt=prompt, chosen=chosen, rejected=rejected, rewards=rewards)


def _texts(record: Mapping[str, Any], sides: list[Any], prompts: Prompts | None, where: str) -> Texts:
    if all(isinstance(side, str) for side in sides):
        return sides[0], sides[1], sides[2]
    if prompts is None:
        if "completions" not in record:
            raise ValueError(f"{where}: the pair has messages, but the model has no chat template; set template=NAME")
        prompt, chosen, rejected = (_rendered(side, where) for side in sides)
        return prompt, chosen, rejected
    tools = record.get("tools")
    tools = read_json(tools) if isinstance(tools, str) else tools
    try:
        mode = thinking_mode((record.get("chat_template_kwargs") or {}).get("enable_thinking"), "enable_thinking")
        prompt_sample = to_sample({"messages": sides[0], "tools": tools}, id=where, format="openai", thinking=mode)
        responses = []
        for side in sides[1:]:
            whole = to_sample({"messages": [*sides[0], *side]}, id=where, format="openai")
            responses.append(whole.messages[len(prompt_sample.messages) :])
        return rendered_pair(prompt_sample, responses[0], responses[1], prompts.template)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where}: prompt and responses must be lists of messages ({error})") from None
    except ValueError as error:
        raise ValueError(f"{where}: the pair cannot be rendered ({error}); correct or remove it") from None


def _rendered(messages: Any, where: str) -> str:
    if not isinstance(messages, list) or len(messages) != 1:
        raise ValueError(
            f"{where}: without a chat template, prompt and responses must be one message each; set template=NAME"
        )
    return str(messages[0]["content"])
