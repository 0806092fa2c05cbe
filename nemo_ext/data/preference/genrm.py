"""Samples that train a generative reward model: two answers with their scores, and the same in swapped order.

Nemotron 3 Nano, section 3.3.1: helpfulness is 1 to 5, higher is better; the ranking is 1 (the first is far superior)
to 6 (the second is). "We augment each sample by switching positions of two responses to prevent positional bias."
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_ext.chat.formats import FormatError
from nemo_ext.chat.sample import Message, openai_messages
from nemo_ext.data.preference.group import Group, Pair
from nemo_ext.data.preference.records import RecordKeys, completion, number, to_group

LEAST_HELPFUL, MOST_HELPFUL = 1, 5
FIRST_SUPERIOR, SECOND_SUPERIOR = 1, 6
_ANSWERS = (("response_1", "response1"), ("response_2", "response2"))
_SCORES = (("helpfulness_1", "score_1"), ("helpfulness_2", "score_2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenrmSample:
    """Sample of two answers to compare.

    Attributes:
        group: group of the prompt; its generations are not used.
        answers: the two answers, in the order in which they are shown.
        helpfulness: score of each answer, 1 to 5; None where only the ranking is known.
        ranking: ranking, from 1 (the first is far superior) to 6 (the second is).
        swapped: True if the answers are in the opposite order to the data.
    """

    id: str
    group: Group
    answers: tuple[tuple[Message, ...], tuple[Message, ...]]
    helpfulness: tuple[int | None, int | None]
    ranking: int
    swapped: bool = False

    def __post_init__(self) -> None:
        if not FIRST_SUPERIOR <= self.ranking <= SECOND_SUPERIOR:
            raise FormatError(f"ranking={self.ranking}: expected {FIRST_SUPERIOR} to {SECOND_SUPERIOR}")
        for score in self.helpfulness:
            if score is not None and not LEAST_HELPFUL <= score <= MOST_HELPFUL:
                raise FormatError(f"helpfulness={score}: expected {LEAST_HELPFUL} to {MOST_HELPFUL}")


def swapped(sample: GenrmSample) -> GenrmSample:
    """Swap the answers of a sample; swapping twice gives the sample itself."""
    return replace(
        sample,
        answers=sample.answers[::-1],
        helpfulness=sample.helpfulness[::-1],
        ranking=FIRST_SUPERIOR + SECOND_SUPERIOR - sample.ranking,
        swapped=not sample.swapped,
    )


def to_genrm(record: Mapping[str, Any], keys: RecordKeys) -> GenrmSample | None:
    """Convert a record with two answers to a sample; None for a tie, which the ranking cannot express.

    Keys: `response_1` and `response_2` (or without the underscore, as in HelpSteer3), `helpfulness_1` and
    `helpfulness_2` (or `score_1` and `score_2`), and either `ranking` (1 to 6) or `overall_preference` (-3, the first
    is much better, to 3; 0 is a tie), as in HelpSteer3.

    Raises:
        FormatError: something is missing or out of range; the message names it.
    """
    answers = []
    for names in _ANSWERS:
        name = next((name for name in names if record.get(name) is not None), None)
        if name is None:
            raise FormatError(f"neither {names[0]} nor {names[1]}; the keys are {sorted(map(str, record))}")
        answers.append(completion(record[name], name))
    first, second = answers
    asked = {key: value for key, value in record.items() if key not in ("generations", "response")}
    group = to_group({**asked, keys.generations: [{"text": "-"}]}, replace(keys, answer=None))
    if not group.prompt:
        raise FormatError("no prompt")
    helpful = []
    for names in _SCORES:
        given = next((record[name] for name in names if record.get(name) is not None), None)
        helpful.append(_whole(given, names[0]))
    ranking = _whole(record.get("ranking"), "ranking")
    if ranking is None:
        preference = _whole(record.get("overall_preference"), "overall_preference")
        if preference is None:
            raise FormatError("neither ranking nor overall_preference")
        if not -3 <= preference <= 3:
            raise FormatError(f"overall_preference={preference}: expected -3 to 3")
        if preference == 0:
            return None
        # The ranking has no middle: -1 is 3, 1 is 4.
        ranking = preference + 4 if preference < 0 else preference + 3
    one, two = helpful
    return GenrmSample(id=group.id, group=group, answers=(first, second), helpfulness=(one, two), ranking=ranking)


def of_pair(pair: Pair, *, chosen: int, rejected: int, ranking: int) -> GenrmSample:
    """Make a sample of a pair with the given labels, the chosen answer first."""
    answers = (pair.chosen.messages, pair.rejected.messages)
    return GenrmSample(id=pair.id, group=pair.group, answers=answers, helpfulness=(chosen, rejected), ranking=ranking)


def genrm_record(sample: GenrmSample) -> dict[str, Any]:
    """Record to write: the judge's messages, roles `response_1` and `response_2`, and the expected scores and ranking.

    The judge sees answers without their reasoning ("only final answer is judged by GenRM", section 3.3.2). The roles
    and the names of the scores are those of NeMo Gym's genrm_compare.
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
    given = number(value, where)
    if given is not None and given != int(given):
        raise FormatError(f"{where}={value}: expected a whole number")
    return None if given is None else int(given)
