"""Rewards for a group from a reward model: sends requests to the judge, then calls `nemo_ext.rl.rewards.comparison`."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message, openai_messages
from nemo_ext.rl.judge import Judge
from nemo_ext.rl.rewards.comparison import (
    GroupRewards,
    LengthControl,
    circular_comparisons,
    control_lengths,
    group_rewards,
)
from nemo_ext.rl.rewards.genrm import genrm_messages, instructed_messages, parse_judgement

Show = Callable[[Sequence[Message], str, str], list[dict[str, Any]]]
SHOWN: Mapping[str, Show] = {"genrm": genrm_messages, "instructed": instructed_messages}
"""Functions that write comparisons: `genrm` for judges whose template has roles response_1 and 2, else `instructed`."""
LONGEST = 40_000
"""Number of characters at which an answer is truncated for the judge (choice)."""
_REWARD = re.compile(r"\s*(?:reward\s*:)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.IGNORECASE)


async def rlhf_rewards(
    judge: Judge,
    prompt: Sequence[Message],
    responses: Sequence[Response],
    *,
    lengths: Sequence[tuple[int, int]] | None = None,
    show: Show = genrm_messages,
    both_orders: bool = False,
    control: LengthControl | None = None,
    max_answer_characters: int = LONGEST,
) -> GroupRewards:
    """Compute the rewards of the responses to one prompt from N concurrent comparisons, or 2N with `both_orders`.

    Args:
        judge: judge, which never raises or hangs; comparisons without a judgement are ignored and counted.
        prompt: conversation up to the responses.
        lengths: lengths (reasoning, answer) of each response in the policy's tokens, 0 if empty; if None, lengths are
            counted in characters, as in NeMo Gym's genrm_compare.
        show: function that writes the messages of a comparison; a value of `SHOWN`.
        both_orders: whether to compare each pair in both orders; see `circular_comparisons`.
        control: length control; see `group_rewards`.
        max_answer_characters: length at which an answer is truncated for the judge, so that answers longer than the
            judge can read are judged too; the default is our choice.
    """
    answers = [_cut(response.answer, max_answer_characters) for response in responses]
    pairs = circular_comparisons(len(responses), both_orders=both_orders)
    questions = [show(prompt, answers[first], answers[second]) for first, second in pairs]
    judged = await judge.ask_all(questions, parse_judgement)
    lengths = lengths or _in_characters(responses)
    rewards = group_rewards(
        {pair: answer.value for pair, answer in zip(pairs, judged, strict=True)},
        thinking_lengths=[thinking for thinking, _ in lengths],
        answer_lengths=[answer for _, answer in lengths],
        control=control,
    )
    return replace(rewards, problem=next((answer.problem for answer in judged if answer.value is None), ""))


async def reward_model_rewards(
    judge: Judge,
    prompt: Sequence[Message],
    responses: Sequence[Response],
    *,
    lengths: Sequence[tuple[int, int]] | None = None,
    control: LengthControl | None = None,
    max_answer_characters: int = LONGEST,
) -> GroupRewards:
    """Compute the rewards of the responses to one prompt with a reward model that scores each separately.

    The request is the conversation with the answer as its last message. The model replies `reward:-3.25`, as
    Llama-3.1-Nemotron-70B-Reward does behind NVIDIA's NIM, or just the number. A response without a reward gets the
    mean of the others, or 0 if the whole group has none.

    Args:
        judge, prompt, responses, lengths, max_answer_characters: as for `rlhf_rewards`.
        control: length control in units of the rewards; not applied if None.
    """
    answers = [_cut(response.answer, max_answer_characters) for response in responses]
    before = openai_messages(prompt)
    replies = await judge.ask_all([[*before, {"role": "assistant", "content": answer}] for answer in answers], _reward)
    known = [reply.value for reply in replies if reply.value is not None]
    rest = sum(known) / len(known) if known else 0.0
    base = tuple(rest if reply.value is None else reply.value for reply in replies)
    judged = tuple(reply.value is not None for reply in replies)
    lengths = lengths or _in_characters(responses)
    rewards = control_lengths(
        base,
        thinking_lengths=[thinking for thinking, _ in lengths],
        answer_lengths=[answer for _, answer in lengths],
        judged=judged,
        control=control or LengthControl(thinking=0, answer=0, thinking_bonus=0, answer_bonus=0),
    )
    problem = next((reply.problem for reply in replies if reply.value is None), "")
    return replace(rewards, missing=len(base) - len(known), problem=problem)


def _in_characters(responses: Sequence[Response]) -> list[tuple[int, int]]:
    return [(len((response.thinking or "").strip()), len(response.answer.strip())) for response in responses]


def _reward(text: str) -> float | None:
    found = _REWARD.fullmatch(text)
    value = float(found[1]) if found else math.nan
    return value if math.isfinite(value) else None


def _cut(answer: str, characters: int) -> str:
    return answer if len(answer) <= characters else answer[:characters] + "\n[...]"
