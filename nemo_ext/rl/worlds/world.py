"""A world: tables, tools that read and change them, and a conversation that is judged by how the tables end.

A tool is a function of a `Database` and of typed arguments; its schema is made from its signature and docstring, and
arguments that do not fit the signature never reach it. A refusal by a tool is returned to the model as text. The only
side effects of tools are changes to the database, which stores them apart from its initial rows: so a state is small,
and two states are compared by their changes.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.chat.tool_calls import Style, calls_of, read_openai_calls
from nemo_ext.job.settings import checked, checked_whole, nearest
from nemo_ext.rl.answers import final_answer, final_line, last_boxed
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.tool_calls import check_style

Row = Mapping[str, Any]
Tables = Mapping[str, Mapping[str, Row]]
Call = dict[str, Any]
Changed = dict[tuple[str, str], dict[str, Any] | None]

Text = Annotated[str, Field(min_length=1, max_length=10_000)]
"""Text argument of a tool."""

_SHOWN = 4000
"""Maximum length of a tool's answer in characters, so that no call fills the context."""


class ToolError(ValueError):
    """A tool refuses a call; the message is its answer to the model."""


class Database:
    """Tables of rows by id, and the changes made to them.

    Args:
        tables: initial rows, which are never written to.
        changed: rows changed since, None for a deleted one; written to.
    """

    def __init__(self, tables: Tables, changed: Changed | None = None) -> None:
        self._tables = tables
        self._changed: Changed = {} if changed is None else changed

    def rows(self, table: str) -> Iterator[tuple[str, Row]]:
        """Ids and rows of a table; added rows come last."""
        for key, row in self._tables[table].items():
            now = self._changed.get((table, key), row)
            if now is not None:
                yield key, now
        for (where, key), added in self._changed.items():
            if where == table and key not in self._tables[table] and added is not None:
                yield key, added

    def get(self, table: str, key: str) -> Row:
        """Row of a table.

        Raises:
            ToolError: there is no such row.
        """
        row = self._changed.get((table, key), self._tables[table].get(key))
        if row is None:
            raise ToolError(f"there is no {key!r} in {table}")
        return row

    def insert(self, table: str, row: Mapping[str, Any], prefix: str) -> str:
        """Add a row and return its id: the prefix and the next free number of the table."""
        known = [*self._tables[table], *(key for where, key in self._changed if where == table)]
        numbers = [
            int(key[len(prefix) :]) for key in known if key.startswith(prefix) and key[len(prefix) :].isdecimal()
        ]
        key = f"{prefix}{max(numbers, default=0) + 1}"
        self._changed[table, key] = dict(row)
        return key

    def update(self, table: str, key: str, **values: Any) -> None:
        """Change some columns of a row.

        Raises:
            ToolError: there is no such row.
        """
        self._changed[table, key] = {**self.get(table, key), **values}

    def delete(self, table: str, key: str) -> None:
        """Delete a row.

        Raises:
            ToolError: there is no such row.
        """
        self.get(table, key)
        self._changed[table, key] = None

    def changes(self) -> dict[str, list[str]]:
        """Differences from the initial tables, by table, sorted.

        A row that was added has no id here, since it depends on what was added before it. Text is compared without its
        case and white space, as NeMo Gym's workplace_assistant compares it without its case.
        """
        made: dict[str, list[str]] = {}
        for (table, key), row in self._changed.items():
            before = self._tables[table].get(key)
            known = key if before is not None else "new"
            if _plain(row) != _plain(before):
                made.setdefault(table, []).append(json.dumps([known, _plain(row)], sort_keys=True))
        return {table: sorted(rows) for table, rows in sorted(made.items())}


def one_of(random: np.random.Generator, choices: Sequence[Any]) -> Any:
    """One of the choices, drawn with one number."""
    return choices[int(random.integers(len(choices)))]


def paged(rows: Sequence[Row], page: int, size: int) -> dict[str, Any]:
    """A tool's answer: one page of the rows, and how many there are."""
    pages = max(1, -(-len(rows) // size))
    return {"found": len(rows), "page": page, "pages": pages, "rows": rows[(page - 1) * size : page * size]}


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Attributes:
        run: function of the database and the arguments by name; returns text, or a value that is shown as JSON.
    """

    run: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.run.__name__

    @cached_property
    def arguments(self) -> type[BaseModel]:
        """Pydantic model of the tool's arguments."""
        hints = get_type_hints(self.run, include_extras=True)
        parameters = list(inspect.signature(self.run).parameters.values())[1:]
        fields: dict[str, Any] = {
            each.name: (hints[each.name], ... if each.default is inspect.Parameter.empty else each.default)
            for each in parameters
        }
        config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        return create_model(self.name, __config__=config, **fields)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Schema of the tool in the form of OpenAI's `tools`."""
        parameters = self.arguments.model_json_schema()
        parameters.pop("title", None)
        properties = parameters.get("properties", {})
        parameters["properties"] = {name: _simple(each) for name, each in properties.items()}
        description = inspect.getdoc(self.run) or ""
        function = {"name": self.name, "description": " ".join(description.split()), "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, database: Database, arguments: Mapping[str, Any]) -> Any:
        """Check the arguments and run the tool.

        Raises:
            ToolError: the arguments do not fit, or the tool refuses.
        """
        try:
            checked = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])[:80]
            raise ToolError(f"{place or 'arguments'}: {first['msg'].removeprefix('Value error, ')}") from None
        return self.run(database, **{name: getattr(checked, name) for name in self.arguments.model_fields})


@dataclass(frozen=True, kw_only=True)
class World:
    """One world.

    Attributes:
        name: name of the environment.
        build: function that builds the tables of a seed.
        tools: tool functions in the order in which they are declared.
        prompt: system message: where the model is, and the rules.
    """

    name: str
    build: Callable[[int], Tables]
    tools: tuple[Callable[..., Any], ...]
    prompt: str

    @cached_property
    def by_name(self) -> Mapping[str, Tool]:
        return {run.__name__: Tool(run) for run in self.tools}

    @cached_property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Schemas of the tools that its tasks declare."""
        return tuple(tool.schema for tool in self.by_name.values())

    def database(self, seed: int, changed: Changed | None = None) -> Database:
        """Database of a seed with the changes made to it."""
        return Database(_tables(self.build, seed), changed)

    def carry_out(self, database: Database, call: ToolCall) -> str:
        """Carry out a call and return its answer as text.

        Raises:
            ToolError: the call is refused; the text says why.
        """
        tool = self.by_name.get(call.name)
        if tool is None:
            raise ToolError(f"unknown tool {call.name[:80]!r}: {nearest(call.name[:80], self.by_name)}")
        made = tool.call(database, call.arguments)
        return made if isinstance(made, str) else json.dumps(made, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Expected end of a conversation.

    Attributes:
        seed: seed of the tables.
        calls: one correct sequence of calls; others that make the same changes are as correct.
        changes: changes that the calls make.
        user: texts that the user says when the model turns to them, in order.
        answer: for tasks that ask for one, the answer that the last message must give in \\boxed{}, else behind "The
            answer is" or "Answer:", else as its last line; "" if none.
    """

    seed: int
    calls: tuple[ToolCall, ...]
    changes: Mapping[str, Sequence[str]]
    user: tuple[str, ...] = ()
    answer: str = ""


@dataclass(frozen=True)
class _Given:
    """A reference as a task has it."""

    seed: Annotated[int, Field(ge=0)]
    calls: list[Any]
    user: tuple[str, ...] = ()
    answer: str = ""


def check(world: World, reference: Mapping[str, Any]) -> Reference:
    """Parse a reference: {seed, calls: [{name, arguments}], user: [text], answer: text}.

    Raises:
        ValueError: naming the key, what it holds and what it may hold; a call is refused; the task asks for nothing.
    """
    given = checked(_Given, reference, where="reference", strict=True)
    read = read_openai_calls(given.calls)
    if read.problems:
        raise ValueError(f"reference.calls: {read.problems[0]}")
    database = world.database(given.seed)
    for index, call in enumerate(read.calls):
        try:
            world.carry_out(database, call)
        except ToolError as error:
            raise ValueError(f"reference.calls[{index}]: {call.name}: {error}") from None
    changes = database.changes()
    if not changes and not _plain(given.answer):
        raise ValueError(
            "reference: its calls change nothing and no answer is asked for: whoever does nothing is right"
        )
    return Reference(seed=given.seed, calls=read.calls, changes=changes, user=given.user, answer=given.answer)


def call_of(tool: str, /, **arguments: Any) -> Call:
    """A call as a reference has it."""
    return {"name": tool, "arguments": arguments}


def solution_calls(reference: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Correct calls of a task's reference."""
    return read_openai_calls(reference["calls"]).calls


@dataclass
class Session:
    """A conversation in a world; see `nemo_ext.rl.environments.Conversation`.

    Attributes:
        world: world that it takes place in.
        reference: expected end of the conversation.
        max_turns: maximum number of responses.
        style: style of calls in raw text.
        turns: number of responses so far.
        failure: error of a tool itself, which is not the model's fault; "" if there was none.
        heard: number of times that the user has spoken since the task was given.
        last: last text of the model.
        changed: changes of the database.
    """

    world: World
    reference: Reference
    max_turns: int
    style: Style = "any"
    turns: int = 0
    heard: int = 0
    failure: str = ""
    last: str = ""
    changed: Changed = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        # Neither tables nor functions are pickled: the world is restored by its name, the tables by their seed.
        state = (self.turns, self.heard, self.failure, self.last, self.changed)
        return _restored, (self.world.name, self.reference, self.max_turns, self.style, state)

    def step(self, response: Response) -> Sequence[Message]:
        """Carry out the response's calls; returns the tools' answers, the user's next text, or nothing at the end."""
        if self.turns >= self.max_turns or self.failure:
            return ()
        self.turns += 1
        parsed = calls_of(response, self.world.schemas, self.style)
        self.last = parsed.answer
        answers = [
            Message(role="tool", content=self._answer(call)[:_SHOWN], tool_call_id=call.id) for call in parsed.calls
        ]
        answers += [Message(role="tool", content=f"Error: {problem}"[:_SHOWN]) for problem in parsed.problems]
        if not answers and parsed.answer and self.heard < len(self.reference.user):
            answers = [Message(role="user", content=self.reference.user[self.heard])]
            self.heard += 1
        return () if self.turns >= self.max_turns or self.failure else tuple(answers)

    def verdict(self) -> Verdict:
        """Verdict: correct if the changes are those of the correct calls, and the answer, if any, is right."""
        if self.failure:
            return Verdict.error(self.failure)
        made, expected = self._database().changes(), self.reference.changes
        if made != expected:
            tables = sorted(table for table in {*made, *expected} if made.get(table) != expected.get(table))
            what = "differs from what is asked for" if made else "nothing was changed"
            return Verdict.wrong(f"{what}: {', '.join(tables)}")
        answer = _said(self.reference.answer)
        if answer and answer not in _stated(self.last):
            return Verdict.wrong("the last message does not say what was asked for", self.last[:200])
        return Verdict.correct()

    def _database(self) -> Database:
        return self.world.database(self.reference.seed, self.changed)

    def _answer(self, call: ToolCall) -> str:
        try:
            return self.world.carry_out(self._database(), call)
        except ToolError as error:
            return f"Error: {error}"
        except Exception as error:  # a mistake in a tool must not end a training run
            self.failure = f"{call.name}: {type(error).__name__}: {error}"[:300]
            return "Error: the tool failed"


def world_environment(world: World, *, max_turns: int, style: Style) -> Environment:
    """A world as an environment.

    Raises:
        ValueError: invalid setting.
    """
    check_style(style)
    checked_whole("max_turns", max_turns, least=1)
    _WORLDS[world.name] = world
    return Environment(
        name=world.name,
        check=lambda reference: check(world, reference),
        begin=lambda reference: Session(world=world, reference=reference, max_turns=max_turns, style=style),
        max_turns=max_turns,
    )


# By name, for conversations that were pickled in another process.
_WORLDS: dict[str, World] = {}


def _restored(name: str, reference: Reference, max_turns: int, style: Style, state: tuple[Any, ...]) -> Session:
    if name not in _WORLDS:
        from nemo_ext.rl.environments import make

        make(name)
    return Session(_WORLDS[name], reference, max_turns, style, *state)


@lru_cache(maxsize=256)
def _tables(build: Callable[[int], Tables], seed: int) -> Tables:
    return MappingProxyType(dict(build(seed)))


def _simple(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a parameter without its title, and without null where it may be left out."""
    kinds = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) == 1 and schema.get("default", ...) is None:
        return kinds[0]
    return {key: value for key, value in schema.items() if key != "title"}


def _stated(message: str) -> tuple[str, ...]:
    """Answers that a message states; taking the whole message would let a list of everything be right."""
    stated: tuple[str | None, ...] = (last_boxed(message),)
    if stated == (None,):
        stated = final_line(message), final_answer(message)
    if stated == (None, None):
        stated = (message.strip().rpartition("\n")[2],)
    return tuple(_said(each or "") for each in stated)


def _said(text: str) -> str:
    """Text normalized for comparing answers: no case, white space or surrounding punctuation."""
    plain: str = _plain(text)
    return plain.strip(" $*_.")


def _plain(value: Any) -> Any:
    """Value normalized for comparison: text without case and differences in white space."""
    if isinstance(value, str):
        return " ".join(value.casefold().split())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
