"""Rewards of a group by a reward model: asks the judge, then uses `nemo_ext.rl.rewards.comparison`."""

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
"""`genrm` for a judge whose chat template has the roles response_1 and response_2, `instructed` for any other."""
LONGEST = 40_000
"""Characters at which an answer is cut for the judge (choice)."""
_REWARD = re.compile(r"\s*(?:reward\s*:)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.IGNORECASE)


async def rlhf_rewards(
    judge: Judge,
    prompt: Sequence[Message],
    responses: Sequence[Response],
    *,
    lengths: Sequence[tuple[int, int]] | None = None,
    show: Show = genrm_messages,
    both_orders: bool = True,
    control: LengthControl | None = None,
    max_answer_characters: int = LONGEST,
) -> GroupRewards:
    """Rewards of the responses to one prompt, from 2N concurrent comparisons, or N with `both_orders=False`.

    Args:
        judge: judge, which never raises or hangs; comparisons that it does not answer are left out and counted.
        prompt: conversation up to the responses.
        responses: responses of the group.
        lengths: each response's (trace, answer) in tokens of the policy, 0 for none; None for those of the texts in
            characters, as NeMo Gym's genrm_compare has them, where no tokenizer is at hand.
        show: one of `SHOWN`.
        both_orders: compare each pair in both orders; see `circular_comparisons`.
        control: length control; see `group_rewards`.
        max_answer_characters: length at which an answer is cut for the judge (choice): one that is more than the judge
            can read would not be judged, and earn the mean of the others.
    """
    answers = [_cut(response.answer, max_answer_characters) for response in responses]
    pairs = circular_comparisons(len(responses), both_orders=both_orders)
    questions = [show(prompt, answers[first], answers[second]) for first, second in pairs]
    judged = await judge.ask_all(questions, parse_judgement)
    lengths = lengths or _in_characters(responses)
    given = group_rewards(
        {pair: answer.value for pair, answer in zip(pairs, judged, strict=True)},
        thinking_lengths=[thinking for thinking, _ in lengths],
        answer_lengths=[answer for _, answer in lengths],
        control=control,
    )
    return replace(given, problem=next((answer.problem for answer in judged if answer.value is None), ""))


async def reward_model_rewards(
    judge: Judge,
    prompt: Sequence[Message],
    responses: Sequence[Response],
    *,
    lengths: Sequence[tuple[int, int]] | None = None,
    control: LengthControl | None = None,
    max_answer_characters: int = LONGEST,
) -> GroupRewards:
    """Rewards of the responses to one prompt by a reward model that gives each a number.

    The model is asked for the conversation with the answer as its last message, and says `reward:-3.25`, as
    Llama-3.1-Nemotron-70B-Reward behind NVIDIA's NIM, or the number alone. A response without a reward gets the mean of
    the others, and one of a group without any 0.

    Args:
        judge, prompt, responses, lengths, max_answer_characters: as for `rlhf_rewards`.
        control: length control in units of the rewards; None for none.
    """
    answers = [_cut(response.answer, max_answer_characters) for response in responses]
    before = openai_messages(prompt)
    given = await judge.ask_all([[*before, {"role": "assistant", "content": answer}] for answer in answers], _reward)
    known = [one.value for one in given if one.value is not None]
    rest = sum(known) / len(known) if known else 0.0
    base = tuple(rest if one.value is None else one.value for one in given)
    judged = tuple(one.value is not None for one in given)
    none = (0.0,) * len(base)
    made = GroupRewards(rewards=base, base=base, length=none, bonus=none, judged=judged)
    if control is not None:
        lengths = lengths or _in_characters(responses)
        made = control_lengths(
            base,
            thinking_lengths=[thinking for thinking, _ in lengths],
            answer_lengths=[answer for _, answer in lengths],
            judged=judged,
            control=control,
        )
    problem = next((one.problem for one in given if one.value is None), "")
    return replace(made, missing=len(base) - len(known), problem=problem)


def _in_characters(responses: Sequence[Response]) -> list[tuple[int, int]]:
    return [(len((response.thinking or "").strip()), len(response.answer.strip())) for response in responses]


def _reward(text: str) -> float | None:
    found = _REWARD.fullmatch(text)
    value = float(found[1]) if found else math.nan
    return value if math.isfinite(value) else None


def _cut(answer: str, characters: int) -> str:
    return answer if len(answer) <= characters else answer[:characters] + "\n[...]"
