"""Conversations in which the user changes instructions, in four levels, for the environment `instructions`.

The last answer must follow all instructions in force at the end. The level is the number of changes. The answers in
between were correct when given. Repeating the previous answer, or following only the last message, is wrong.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from nemo_ext.chat.response import parse_response
from nemo_ext.chat.sample import Message
from nemo_ext.job.seeds import generator
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels
from nemo_ext.rl.tasks.instructions import ALTERNATIVES, TOPICS, draw_instruction, write_answer
from nemo_ext.rl.verifiers.instructions import check, verify
from nemo_ext.rl.worlds.world import one_of

LEVELS = 4
_AT_FIRST = 3
"""Number of instructions in the first message."""

Active = dict[int, dict[str, Any]]
"""Instructions in force, keyed by index in `ALTERNATIVES`, in the order in which the user gave them."""


def tasks(count: int, *, seed: int, level: int | None = None) -> Iterator[Task]:
    """Generate conversations with `level` changes of the instructions; if None, with one to four changes in turn."""
    for index, task_level in indexed_levels(count, level, LEVELS):
        random = generator(seed, "conversations", task_level, index)
        while (conversation := _conversation(random, task_level)) is None:  # some draws contradict each other
            continue
        prompt, reference = conversation
        yield Task(
            id=f"conversations/{seed}/{task_level}/{index}",
            environment="instructions",
            prompt=prompt,
            reference=reference,
            domain="conversations",
        )


def solution(task: Task) -> str:
    """Write a text that follows all instructions in force at the end."""
    return write_answer(task.reference)


def _conversation(random: np.random.Generator, changes: int) -> tuple[tuple[Message, ...], Mapping[str, Any]] | None:
    """Draw a conversation: its messages, up to the user's last one, and the reference for the answer to that.

    `changes` is the number of times that the user changes the instructions. Return None if no answer can follow the
    drawn instructions, or if repeating the previous answer or following only the last message would be enough.
    """
    active: Active = {}
    for place in random.permutation(len(ALTERNATIVES))[:_AT_FIRST]:
        active[int(place)] = draw_instruction(random, one_of(random, ALTERNATIVES[place]))
    listed = "\n".join(f"{number}. {_request(each)}" for number, each in enumerate(active.values(), start=1))
    message = f"Write a short text about {one_of(random, TOPICS)}.\n{listed}"
    messages: list[Message] = []
    answer, new = "", dict[str, Any]()
    for change in range(changes):
        answer = write_answer(_reference(active.values()))
        if not _follows(answer, _reference(active.values())):
            return None
        messages += [Message(role="user", content=message), Message(role="assistant", content=answer)]
        active, new, message = _change(random, active, last=change == changes - 1)
    reference = _reference(active.values())
    enough = [answer, write_answer(_reference([new]))]
    if not _follows(write_answer(reference), reference) or any(_follows(text, reference) for text in enough):
        return None
    return (*messages, Message(role="user", content=message)), reference


def _change(random: np.random.Generator, active: Active, *, last: bool) -> tuple[Active, dict[str, Any], str]:
    """Draw a change: return the instructions then in force, the new one ({} if one is withdrawn), and the message.

    `active` are the instructions in force before. If `last`, the change does not withdraw an instruction.
    """
    places = list(active)
    changeable = [place for place in places if active[place]["kwargs"]]
    ways = ["add", *(["change"] if changeable else []), *(["withdraw"] if not last and len(active) > 2 else [])]
    way = one_of(random, ways)
    if way == "withdraw":
        gone = one_of(random, places)
        remaining = {place: each for place, each in active.items() if place != gone}
        return remaining, {}, f"Write it anew. This no longer holds:\n{_request(active[gone])}\nThe rest does."
    if way == "change":
        place = one_of(random, changeable)
        new = draw_instruction(random, active[place]["id"])
        old = _request(active[place])
        message = f"Write it anew. Instead of this:\n{old}\nI want this:\n{_request(new)}\nThe rest still holds."
    else:
        place = int(one_of(random, [place for place in range(len(ALTERNATIVES)) if place not in active]))
        new = draw_instruction(random, one_of(random, ALTERNATIVES[place]))
        message = f"Write it anew. All that holds still holds, and this is new:\n{_request(new)}"
    return {**active, place: new}, new, message


def _reference(instructions: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {"instructions": list(instructions), "mode": "all"}


def _request(instruction: Mapping[str, Any]) -> str:
    return check(_reference([instruction])).instructions[0].says()


def _follows(text: str, reference: Mapping[str, Any]) -> bool:
    return verify(parse_response(text), check(reference)).outcome == "correct"
