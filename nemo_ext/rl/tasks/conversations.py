"""Conversations whose user adds, changes and withdraws instructions, in four levels, for `instructions`.

The last answer must follow all instructions that then hold. The level is the number of times that they change; the
answers between are right when they are given. Neither the answer before nor the last message alone is enough: a text
that repeats the former, or follows only the latter, is wrong.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from nemo_ext.chat.response import parse_response
from nemo_ext.chat.sample import Message
from nemo_ext.job.seeds import generator
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import level_of
from nemo_ext.rl.tasks.instructions import ALTERNATIVES, TOPICS, drawn, written
from nemo_ext.rl.verifiers.instructions import check, verify
from nemo_ext.rl.worlds.world import one_of

LEVELS = 4
_AT_FIRST = 3
"""Instructions of the first message."""

Held = dict[int, dict[str, Any]]
"""Instructions that hold, by their place in `ALTERNATIVES`, in the order in which they were given."""


def tasks(count: int, *, seed: int, level: int | None = None) -> Iterator[Task]:
    """Conversations with as many changes as the level says, or with one to four in turn."""
    for index in range(count):
        of = level_of(index, level, LEVELS)
        random = generator(seed, "conversations", of, index)
        while (made := _conversation(random, of)) is None:  # not all draws can be kept at once
            continue
        prompt, reference = made
        yield Task(
            id=f"conversations/{seed}/{of}/{index}",
            environment="instructions",
            prompt=prompt,
            reference=reference,
            domain="conversations",
        )


def solution(task: Task) -> str:
    """Text that follows all instructions that hold in the end."""
    return written(task.reference)


def _conversation(random: np.random.Generator, changes: int) -> tuple[tuple[Message, ...], Mapping[str, Any]] | None:
    """Messages up to the last question and its reference; None if an answer is wrong, or too little is right."""
    held: Held = {}
    for place in random.permutation(len(ALTERNATIVES))[:_AT_FIRST]:
        held[int(place)] = drawn(random, one_of(random, ALTERNATIVES[place]))
    listed = "\n".join(f"{number}. {_says(each)}" for number, each in enumerate(held.values(), start=1))
    said = f"Write a short text about {one_of(random, TOPICS)}.\n{listed}"
    messages: list[Message] = []
    answer, new = "", dict[str, Any]()
    for change in range(changes):
        answer = written(_reference(held.values()))
        if not _follows(answer, _reference(held.values())):
            return None
        messages += [Message(role="user", content=said), Message(role="assistant", content=answer)]
        held, new, said = _changed(random, held, last=change == changes - 1)
    reference = _reference(held.values())
    enough = [answer, written(_reference([new]))]
    if not _follows(written(reference), reference) or any(_follows(text, reference) for text in enough):
        return None
    return (*messages, Message(role="user", content=said)), reference


def _changed(random: np.random.Generator, held: Held, *, last: bool) -> tuple[Held, dict[str, Any], str]:
    """What holds after a change, the new instruction, and the message; the last change withdraws nothing."""
    places = list(held)
    changeable = [place for place in places if held[place]["kwargs"]]
    ways = ["add", *(["change"] if changeable else []), *(["withdraw"] if not last and len(held) > 2 else [])]
    way = one_of(random, ways)
    if way == "withdraw":
        gone = one_of(random, places)
        kept = {place: each for place, each in held.items() if place != gone}
        return kept, {}, f"Write it anew. This no longer holds:\n{_says(held[gone])}\nThe rest does."
    if way == "change":
        place = one_of(random, changeable)
        new = drawn(random, held[place]["id"])
        said = (
            f"Write it anew. Instead of this:\n{_says(held[place])}\nI want this:\n{_says(new)}\nThe rest still holds."
        )
    else:
        place = int(one_of(random, [place for place in range(len(ALTERNATIVES)) if place not in held]))
        new = drawn(random, one_of(random, ALTERNATIVES[place]))
        said = f"Write it anew. All that holds still holds, and this is new:\n{_says(new)}"
    return {**held, place: new}, new, said


def _reference(instructions: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {"instructions": list(instructions), "mode": "all"}


def _says(instruction: Mapping[str, Any]) -> str:
    return check(_reference([instruction])).instructions[0].says()


def _follows(text: str, reference: Mapping[str, Any]) -> bool:
    return verify(parse_response(text), check(reference)).outcome == "correct"
