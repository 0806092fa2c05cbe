"""Requests that a model must turn into tool calls, in five levels, for the environment `tool_calls`.

1  one call of the only declared tool
2  one call of one of five tools, some of whose arguments are optional
3  two or three calls of six tools in one answer, in any order
4  three or four calls of eight tools, in the requested order
5  two or three requests, one or all for tools that are not among the six declared: no call is right for these requests

Every value is in the request exactly as the call must have it, so that only one set of calls is correct.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from typing import Annotated, Any, Literal, TypedDict, get_args

import numpy as np
from pydantic import Field

from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.job.seeds import generator
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels, whole
from nemo_ext.rl.tasks.words import ADJECTIVES, NOUNS, pick, unseen
from nemo_ext.rl.worlds.world import Call, Tool, call_of, one_of, solution_calls

LEVELS = 5
_SYSTEM = (
    "Make all tool calls that the user's wishes need in one answer, with the values as the user writes them. Where no "
    "tool does what is wished, make no call for it and say so."
)
_NOTHING = "None of my tools can do that."

Unit = Literal["celsius", "fahrenheit"]
Currency = Literal["EUR", "USD", "JPY", "GBP", "CHF"]
Language = Literal["French", "German", "Italian", "Spanish", "Japanese"]
Colour = Literal["white", "red", "green", "blue"]
Mode = Literal["car", "bicycle", "foot"]
Obstacle = Literal["tolls", "ferries", "motorways"]
Day = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$", description="YYYY-MM-DD")]
Time = Annotated[str, Field(pattern=r"^\d{2}:\d{2}$", description="HH:MM")]


class Goods(TypedDict):
    """Goods in an order."""

    name: str
    quantity: Annotated[int, Field(ge=1)]


# The signature and docstring of a tool define its schema; it returns the request that a call of it fulfils.


def get_weather(_: Any, city: str, unit: Unit = "celsius") -> str:
    """Current weather in a city."""
    return f"I would like to know the weather in {city}, in degrees {unit.capitalize()}."


def convert_currency(_: Any, amount: Annotated[int, Field(gt=0)], source: Currency, target: Currency) -> str:
    """Convert an amount of money from one currency to another."""
    return f"I would like to know what {amount} {source} are in {target}."


def set_timer(_: Any, label: str, minutes: Annotated[int, Field(ge=1, le=600)], repeat: bool = False) -> str:
    """Start a timer, which begins anew when it ends if it is to be repeated."""
    return f'Start a timer "{label}" of {minutes} minutes, {"repeated" if repeat else "once"}.'


def send_message(_: Any, recipient: str, text: str) -> str:
    """Send a text message to a person."""
    return f'Send {recipient} the message "{text}"'


def book_table(_: Any, restaurant: str, day: Day, guests: Annotated[int, Field(ge=1)], outside: bool = False) -> str:
    """Book a table at a restaurant."""
    return f"Book a table at {restaurant} on {day} for {guests} guests, {'outside' if outside else 'inside'}."


def find_trains(_: Any, origin: str, destination: str, day: Day, first_class: bool = False) -> str:
    """Find trains from one city to another."""
    return f"Find trains from {origin} to {destination} on {day}, in {'first' if first_class else 'second'} class."


def play_music(_: Any, artist: str, shuffle: bool = False) -> str:
    """Play an artist's songs, in random order if they are to be shuffled."""
    return f"Play the songs of {artist}, {'shuffled' if shuffle else 'not shuffled'}."


def add_event(_: Any, title: str, day: Day, time: Time, people: list[str] | None = None) -> str:
    """Add an event to the calendar, and invite people to it."""
    invited = f" and invite {_listed(people)}" if people else ""
    return f'Put "{title}" into my calendar on {day} at {time}{invited}.'


def order_goods(_: Any, address: str, goods: list[Goods]) -> str:
    """Order goods to an address."""
    return f"Order {_listed([f'{one["quantity"]} of "{one["name"]}"' for one in goods])} to {address}."


def find_route(_: Any, origin: str, destination: str, mode: Mode = "car", avoid: list[Obstacle] | None = None) -> str:
    """Find a route between two places."""
    way = "on foot" if mode == "foot" else f"by {mode}"
    return f"Find a route from {origin} to {destination} {way}" + (f", without {_listed(avoid)}." if avoid else ".")


def translate(_: Any, text: str, language: Language) -> str:
    """Translate an English text."""
    return f'Translate "{text}" into {language}.'


def set_lamp(_: Any, name: str, brightness: Annotated[int, Field(ge=0, le=100)], colour: Colour | None = None) -> str:
    """Set the lamp of a name to a brightness in percent, and to a colour."""
    return f'Set the lamp "{name}" to {brightness} percent' + (f" and to {colour}." if colour else ".")


_FUNCTIONS: tuple[Callable[..., str], ...] = (
    *(get_weather, convert_currency, set_timer, send_message, book_table, find_trains),
    *(play_music, add_event, order_goods, find_route, translate, set_lamp),
)
_TOOLS = tuple(map(Tool, _FUNCTIONS))


def tasks(count: int, *, seed: int, level: int | None = None) -> Iterator[Task]:
    """Generate requests at one level from 1 to 5, or at all levels in turn."""
    for index, task_level in indexed_levels(count, level, LEVELS):
        random = generator(seed, "tool-calls", task_level, index)
        order = [_TOOLS[place] for place in random.permutation(len(_TOOLS))]
        number = {1: 1, 2: 1, 3: whole(random, 2, 3), 4: whole(random, 3, 4), 5: whole(random, 2, 3)}[task_level]
        declared = {1: 1, 2: 5, 3: 6, 4: 8, 5: 6}[task_level]
        # Level 5: the first or all of the requested tools are not declared.
        missing = one_of(random, (1, number)) if task_level == 5 else 0
        used, offered = order[:number], order[missing : missing + declared]
        if task_level in (3, 4) and random.random() < 0.3:
            used[-1] = used[0]  # one tool twice, with different arguments
        requests: list[tuple[str, Call | None]] = []
        for tool in used:
            call = _call(random, tool, optional=task_level > 1)
            requests.append((str(tool.call(None, call["arguments"])), call if tool in offered else None))
        shown = [requests[place] for place in (range(number) if task_level == 4 else random.permutation(number))]
        schemas = tuple(offered[place].schema for place in random.permutation(len(offered)))
        yield Task(
            id=f"tool_calls/{seed}/{task_level}/{index}",
            environment="tool_calls",
            prompt=(
                Message(role="system", content=_SYSTEM),
                Message(
                    role="user",
                    content=("In this order:\n" if task_level == 4 else "") + "\n".join(said for said, _ in shown),
                ),
            ),
            reference={
                "expected": [call for _, call in shown if call is not None],
                "order": "as_given" if task_level == 4 else "any",
                "tools": list(schemas),
            },
            tools=schemas,
            domain="tool_calls",
        )


def solution(task: Task) -> tuple[ToolCall, ...] | str:
    """Return the expected tool calls, or a reply in words if the task is to be answered without a call."""
    return solution_calls({"calls": task.reference["expected"]}) or _NOTHING


def _call(random: np.random.Generator, tool: Tool, *, optional: bool) -> Call:
    """Draw a call of a tool with its required arguments; with `optional`, each optional one occurs half the time."""
    seen: set[str] = set()
    return call_of(
        tool.name,
        **{
            name: _VALUES[name](random, seen)
            for name, field in tool.arguments.model_fields.items()
            if field.is_required() or (optional and random.random() < 0.5)
        },
    )


def _thing(random: np.random.Generator, seen: set[str]) -> str:
    return f"{pick(random, ADJECTIVES)} {pick(random, NOUNS)}"


def _place(random: np.random.Generator, seen: set[str]) -> str:
    return unseen(random, seen, 3)


def _person(random: np.random.Generator, seen: set[str]) -> str:
    return f"{unseen(random, seen, 2)} {unseen(random, seen, 3)}"


def _several(random: np.random.Generator, draw: Callable[[], Any], most: int) -> list[Any]:
    return [draw() for _ in range(whole(random, 1, most))]


def _literal(kind: Any) -> Callable[[np.random.Generator, set[str]], Any]:
    """Return a function that draws a value of the Literal `kind`, never the same twice in one tool call."""

    def drawn(random: np.random.Generator, seen: set[str]) -> Any:
        value = one_of(random, [each for each in get_args(kind) if each not in seen])
        seen.add(value)
        return value

    return drawn


_VALUES: Mapping[str, Callable[[np.random.Generator, set[str]], Any]] = {
    **dict.fromkeys(("city", "origin", "destination", "restaurant"), _place),
    **dict.fromkeys(("recipient", "artist"), _person),
    **dict.fromkeys(("source", "target"), _literal(Currency)),
    **dict.fromkeys(("outside", "first_class", "shuffle", "repeat"), lambda random, seen: bool(random.integers(2))),
    **dict.fromkeys(("label", "title", "name"), lambda random, seen: f"{_thing(random, seen)} {whole(random, 1, 99)}"),
    "text": lambda random, seen: f"The {_thing(random, seen)} is at {_place(random, seen)}",
    "address": lambda random, seen: f"{whole(random, 1, 200)} {_place(random, seen)} Street",
    "amount": lambda random, seen: whole(random, 2, 999_999),
    "minutes": lambda random, seen: whole(random, 1, 600),
    "guests": lambda random, seen: whole(random, 2, 12),
    "brightness": lambda random, seen: whole(random, 0, 100),
    "day": lambda random, seen: str(date(2026, 1, 1) + timedelta(days=whole(random, 0, 729))),
    "time": lambda random, seen: f"{whole(random, 7, 21):02}:{5 * whole(random, 0, 11):02}",
    "people": lambda random, seen: _several(random, lambda: _person(random, seen), 3),
    "goods": lambda random, seen: _several(
        random, lambda: {"name": _thing(random, seen), "quantity": whole(random, 1, 20)}, 3
    ),
    "avoid": lambda random, seen: _several(random, lambda: _literal(Obstacle)(random, seen), 3),
    **{name: _literal(kind) for name, kind in (("unit", Unit), ("language", Language), ("mode", Mode))},
    "colour": _literal(Colour),
}


def _listed(items: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))
