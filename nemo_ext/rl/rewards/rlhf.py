"""Rewards of a group by a generative reward model: asks the judge, then uses `nemo_ext.rl.rewards.comparison`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message
from nemo_ext.rl.judge import Judge
from nemo_ext.rl.rewards.comparison import GroupRewards, LengthControl, circular_comparisons, group_rewards
from nemo_ext.rl.rewards.genrm import genrm_messages, instructed_messages, parse_judgement

Show = Callable[[Sequence[Message], str, str], list[dict[str, Any]]]
SHOWN: Mapping[str, Show] = {"genrm": genrm_messages, "instructed": instructed_messages}
"""`genrm` for a judge whose chat template has the roles response_1 and response_2, `instructed` for any other."""


async def rlhf_rewards(
    judge: Judge,
    prompt: Sequence[Message],
    responses: Sequence[Response],
    *,
    lengths: Sequence[tuple[int, int]] | None = None,
    show: Show = genrm_messages,
    both_orders: bool = True,
    control: LengthControl | None = None,
    max_answer_characters: int = 40_000,
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
    if lengths is None:
        lengths = [(len((response.thinking or "").strip()), len(response.answer.strip())) for response in responses]
    given = group_rewards(
        {pair: answer.value for pair, answer in zip(pairs, judged, strict=True)},
        thinking_lengths=[thinking for thinking, _ in lengths],
        answer_lengths=[answer for _, answer in lengths],
        control=control,
    )
    return replace(given, problem=next((answer.problem for answer in judged if answer.value is None), ""))


def _cut(answer: str, characters: int) -> str:
    return answer if len(answer) <= characters else answer[:characters] + "\n[...]"
