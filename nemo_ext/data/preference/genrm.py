"""Samples that train a generative reward model: two answers with their scores, optionally also in swapped order.

Nemotron 3 Nano, section 3.3.1: helpfulness is 1 to 5, higher is better; the ranking is 1 (first answer far superior) to
6 (second answer far superior). "We augment each sample by switching positions of two responses to prevent positional
bias."
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_ext.chat.formats import FormatError
from nemo_ext.chat.sample import Message, openai_messages
from nemo_ext.data.preference.group import Group, Pair
from nemo_ext.data.preference.records import PROMPT_KEYS, RecordKeys, completion, key_names, number, to_group

LEAST_HELPFUL, MOST_HELPFUL = 1, 5
FIRST_SUPERIOR, SECOND_SUPERIOR = 1, 6
_ANSWERS = (("response_1", "response1"), ("response_2", "response2"))
_SCORES = (("helpfulness_1", "score_1"), ("helpfulness_2", "score_2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenrmSample:
    """Two answers to one prompt, to be compared.

    Attributes:
        group: the prompt's group; its generations are not used.
        answers: the two answers, in the order in which they are shown.
        helpfulness: score of each answer, 1 to 5; None if only the ranking is known.
        ranking: ranking, from 1 (first answer far superior) to 6 (second answer far superior).
        swapped: True if the order of the answers is reversed compared with the data.
    """

    id: str
    group: Group
    answers: tuple[tuple[Message, ...], tuple[Message, ...]]
    helpfulness: tuple[int | None, int | None]
    ranking: int
    swapped: bool = False

    def __post_init__(self) -> None:
        if not FIRST_SUPERIOR <= self.ranking <= SECOND_SUPERIOR:
            raise FormatError(f"ranking must be from {FIRST_SUPERIOR} to {SECOND_SUPERIOR}, not {self.ranking}")
        for score in self.helpfulness:
            if score is not None and not LEAST_HELPFUL <= score <= MOST_HELPFUL:
                raise FormatError(f"helpfulness must be from {LEAST_HELPFUL} to {MOST_HELPFUL}, not {score}")


def swapped(sample: GenrmSample) -> GenrmSample:
    """Return the sample with its answers swapped, and its scores and ranking adapted."""
    return replace(
        sample,
        answers=sample.answers[::-1],
        helpfulness=sample.helpfulness[::-1],
        ranking=FIRST_SUPERIOR + SECOND_SUPERIOR - sample.ranking,
        swapped=not sample.swapped,
    )


def to_genrm(record: Mapping[str, Any], keys: RecordKeys) -> GenrmSample | None:
    """Convert a record with two answers to a sample; return None for a tie, which the ranking cannot express.

    Keys: `response_1` and `response_2` (or without the underscore, as in HelpSteer3), `helpfulness_1` and
    `helpfulness_2` (or `score_1` and `score_2`), and either `ranking` (1 to 6) or HelpSteer3's `overall_preference`
    (-3, first answer much better, to 3; 0 for a tie).

    Raises:
        FormatError: a value is missing or out of range; the message names its key.
    """
    answers = []
    for names in _ANSWERS:
        name = next((name for name in names if record.get(name) is not None), None)
        if name is None:
            raise FormatError(
                f"expected an answer under {names[0]} or {names[1]}, but the record's keys are {key_names(record)}"
            )
        answers.append(completion(record[name], name))
    first, second = answers
    question = {key: value for key, value in record.items() if key not in ("generations", "response")}
    group = to_group({**question, keys.generations: [{"text": "-"}]}, replace(keys, answer=None))
    if not group.prompt:
        raise FormatError(
            f"expected a prompt under {keys.prompt or ' or '.join(PROMPT_KEYS)}; the keys are {key_names(record)}"
        )
    scores = []
    for names in _SCORES:
        name = next((name for name in names if record.get(name) is not None), names[0])
        score = _whole(record.get(name), name)
        if score is not None and not LEAST_HELPFUL <= score <= MOST_HELPFUL:
            raise FormatError(f"{name} must be from {LEAST_HELPFUL} to {MOST_HELPFUL}, not {score}")
        scores.append(score)
    ranking = _whole(record.get("ranking"), "ranking")
    if ranking is None:
        preference = _whole(record.get("overall_preference"), "overall_preference")
        if preference is None:
            raise FormatError(f"expected ranking or overall_preference, but the record's keys are {key_names(record)}")
        if not -3 <= preference <= 3:
            raise FormatError(f"overall_preference must be from -3 to 3, not {preference}")
        if preference == 0:
            return None
        # The ranking has no tie: -1 becomes 3, and 1 becomes 4.
        ranking = preference + 4 if preference < 0 else preference + 3
    helpfulness = scores[0], scores[1]
    return GenrmSample(id=group.id, group=group, answers=(first, second), helpfulness=helpfulness, ranking=ranking)


def from_pair(pair: Pair, *, chosen: int, rejected: int, ranking: int) -> GenrmSample:
    """Convert a pair to a sample; `chosen` and `rejected` are the helpfulness of its answers, in this order."""
    answers = (pair.chosen.messages, pair.rejected.messages)
    return GenrmSample(id=pair.id, group=pair.group, answers=answers, helpfulness=(chosen, rejected), ranking=ranking)


def genrm_record(sample: GenrmSample) -> dict[str, Any]:
    """Return the record to write: prompt and answers (roles `response_1` and `response_2`), and expected labels.

    The judge sees answers without their reasoning ("only final answer is judged by GenRM", section 3.3.2). Roles and
    score names are the same as in NeMo Gym's genrm_compare.
    """
    shown = [
        {"role": role, "content": "\n".join(message.content for message in answer if message.role == "assistant")}
        for role, answer in zip(("response_1", "response_2"), sample.answers, strict=True)
    ]
    return {
        "id": sample.id + ("/swapped" if sample.swapped else ""),
        "messages": openai_messages(sample.group.prompt) + shown,
        "score_1": sample.helpfulness[0],
        "score_2": sample.helpfulness[1],
        "ranking": sample.ranking,
        "swapped": sample.swapped,
    }


def _whole(value: Any, where: str) -> int | None:
    parsed = number(value, where)
    if parsed is not None and parsed != int(parsed):
        raise FormatError(f"{where}: expected a whole number, not {value}")
    return None if parsed is None else int(parsed)
