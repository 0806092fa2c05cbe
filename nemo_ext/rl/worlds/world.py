"""Worlds: tables, tools that read and change them, and conversations that are judged by the final tables.

A tool is a function of a `Database` and typed arguments. Its schema is derived from its signature and docstring, and
arguments that do not fit the signature never reach it. If a tool rejects a call, the reason is returned to the model as
text. The only side effects of tools are changes to the database, which are stored separately from its initial rows, so
a state is small and two states are compared by their changes.
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
"""Type of a tool's string argument."""

_SHOWN = 4000
"""Maximum length of a tool's result in characters, so that no single call fills the context."""


class ToolError(ValueError):
    """Raised if a tool rejects a call; the message is returned to the model."""


class Database:
    """Tables, which map ids to rows, and the changes made to them.

    Args:
        tables: initial rows, which are never modified.
        changed: mapping from (table, id) to the changed row, or None if it was deleted; updated in place.
    """

    def __init__(self, tables: Tables, changed: Changed | None = None) -> None:
        self._tables = tables
        self._changed: Changed = {} if changed is None else changed

    def rows(self, table: str) -> Iterator[tuple[str, Row]]:
        """Yield a table's ids and rows; added rows come last."""
        for key, row in self._tables[table].items():
            now = self._changed.get((table, key), row)
            if now is not None:
                yield key, now
        for (where, key), added in self._changed.items():
            if where == table and key not in self._tables[table] and added is not None:
                yield key, added

    def get(self, table: str, key: str) -> Row:
        """Return a row of a table by its id.

        Raises:
            ToolError: the row does not exist.
        """
        row = self._changed.get((table, key), self._tables[table].get(key))
        if row is None:
            raise ToolError(f"there is no {key!r} in {table}")
        return row

    def insert(self, table: str, row: Mapping[str, Any], prefix: str) -> str:
        """Add a row and return its id, which is the prefix followed by the table's next free number."""
        known = [*self._tables[table], *(key for where, key in self._changed if where == table)]
        numbers = [
            int(key[len(prefix) :]) for key in known if key.startswith(prefix) and key[len(prefix) :].isdecimal()
        ]
        key = f"{prefix}{max(numbers, default=0) + 1}"
        self._changed[table, key] = dict(row)
        return key

    def update(self, table: str, key: str, **values: Any) -> None:
        """Set the given columns of the row with the id `key`.

        Raises:
            ToolError: the row does not exist.
        """
        self._changed[table, key] = {**self.get(table, key), **values}

    def delete(self, table: str, key: str) -> None:
        """Delete the row with the id `key`.

        Raises:
            ToolError: the row does not exist.
        """
        self.get(table, key)
        self._changed[table, key] = None

    def changes(self) -> dict[str, list[str]]:
        """Return a mapping from tables to their sorted differences from the initial rows.

        Added rows have no id here, since it depends on earlier additions. Strings are compared ignoring case and white
        space; NeMo Gym's workplace_assistant ignores case.
        """
        by_table: dict[str, list[str]] = {}
        for (table, key), row in self._changed.items():
            before = self._tables[table].get(key)
            known = key if before is not None else "new"
            if _normalize(row) != _normalize(before):
                by_table.setdefault(table, []).append(json.dumps([known, _normalize(row)], sort_keys=True))
        return {table: sorted(rows) for table, rows in sorted(by_table.items())}


def one_of(random: np.random.Generator, choices: Sequence[Any]) -> Any:
    """Draw one of the choices; this always takes exactly one number from the generator."""
    return choices[int(random.integers(len(choices)))]


def paged(rows: Sequence[Row], page: int, size: int) -> dict[str, Any]:
    """Return a tool's result with one page of the rows, and the numbers of rows and pages; pages count from 1."""
    pages = max(1, -(-len(rows) // size))
    return {"found": len(rows), "page": page, "pages": pages, "rows": rows[(page - 1) * size : page * size]}


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Attributes:
        run: function of the database and keyword arguments that returns a string, or a value that is shown as JSON.
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
        """Schema of the tool in the format of OpenAI's `tools`."""
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
            ToolError: the arguments do not fit the signature, or the tool rejects the call.
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
    """One world: its tables, tools and rules.

    Attributes:
        build: function that builds the tables for a seed.
        tools: tool functions, in the order in which they are declared.
        prompt: system message that describes the setting and the rules.
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
        """Return the database for a seed, with the given changes."""
        return Database(_tables(self.build, seed), changed)

    def carry_out(self, database: Database, call: ToolCall) -> str:
        """Carry out a call and return its result as text.

        Raises:
            ToolError: the call is rejected; the message says why.
        """
        tool = self.by_name.get(call.name)
        if tool is None:
            raise ToolError(f"unknown tool {call.name[:80]!r}: {nearest(call.name[:80], self.by_name)}")
        made = tool.call(database, call.arguments)
        return made if isinstance(made, str) else json.dumps(made, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Expected outcome of a conversation.

    Attributes:
        seed: seed of the tables.
        calls: one correct sequence of tool calls; others that make the same changes are also correct.
        changes: changes made by the calls.
        user: the user's messages, one of which follows each response without a tool call.
        answer: answer that the last message must state in \\boxed{}, else after "The answer is" or "Answer:", else as
            its last line; "" if the task requires no answer.
    """

    seed: int
    calls: tuple[ToolCall, ...]
    changes: Mapping[str, Sequence[str]]
    user: tuple[str, ...] = ()
    answer: str = ""


@dataclass(frozen=True)
class _RawReference:
    """Reference as written in a task."""

    seed: Annotated[int, Field(ge=0)]
    calls: list[Any]
    user: tuple[str, ...] = ()
    answer: str = ""


def check(world: World, reference: Mapping[str, Any]) -> Reference:
    """Parse a reference: {seed, calls: [{name, arguments}], user: [string], answer: string}.

    Raises:
        ValueError: the reference is invalid, a call is rejected, or there is nothing to do; the message names the key.
    """
    raw = checked(_RawReference, reference, where="reference", strict=True)
    read = read_openai_calls(raw.calls)
    if read.problems:
        raise ValueError(f"invalid tool call: {read.problems[0].replace('tool_calls', 'reference.calls')}")
    database = world.database(raw.seed)
    for index, call in enumerate(read.calls):
        try:
            world.carry_out(database, call)
        except ToolError as error:
            raise ValueError(f"reference.calls[{index}]: the tool {call.name} rejects the call: {error}") from None
    changes = database.changes()
    if not changes and not _normalize(raw.answer):
        raise ValueError(
            "reference: the calls change nothing and there is no answer, so doing nothing would be correct: add a call "
            "or an answer"
        )
    return Reference(seed=raw.seed, calls=read.calls, changes=changes, user=raw.user, answer=raw.answer)


def call_of(tool: str, /, **arguments: Any) -> Call:
    """Return a tool call in the form used in references."""
    return {"name": tool, "arguments": arguments}


def solution_calls(reference: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Return the correct tool calls in a task's reference."""
    return read_openai_calls(reference["calls"]).calls


@dataclass
class Session:
    """A conversation in a world; see `nemo_ext.rl.environments.Conversation`.

    Attributes:
        turns: number of responses so far.
        failure: error in a tool itself, which is not the model's fault; "" if there was none.
        heard: number of messages from the user since the task was given.
        last: the model's last text.
        changed: changes to the database.
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
        return _restore, (self.world.name, self.reference, self.max_turns, self.style, state)

    def step(self, response: Response) -> Sequence[Message]:
        """Carry out the response's calls and return their results or the user's next message; empty at the end."""
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
        """Return a verdict, `correct` if the changes are the expected ones and the answer, if required, is right."""
        if self.failure:
            return Verdict.error(self.failure)
        actual, expected = self._database().changes(), self.reference.changes
        if actual != expected:
            tables = sorted(table for table in {*actual, *expected} if actual.get(table) != expected.get(table))
            problem = "unexpected final state of" if actual else "no changes were made, but were expected in"
            return Verdict.wrong(f"{problem} {', '.join(tables)}")
        answer = _normalize_answer(self.reference.answer)
        if answer and answer not in _stated(self.last):
            return Verdict.wrong("the last message does not state the expected answer", self.last[:200])
        return Verdict.correct()

    def _database(self) -> Database:
        return self.world.database(self.reference.seed, self.changed)

    def _answer(self, call: ToolCall) -> str:
        try:
            return self.world.carry_out(self._database(), call)
        except ToolError as error:
            return f"Error: {error}"
        except Exception as error:  # a bug in a tool must not end a training run
            self.failure = f"{call.name}: {type(error).__name__}: {error}"[:300]
            return "Error: the tool failed"


def world_environment(world: World, *, max_turns: int, style: Style) -> Environment:
    """Create a world's environment.

    Args:
        max_turns: maximum number of responses in one conversation.
        style: format of tool calls in raw text; see `nemo_ext.chat.tool_calls`.

    Raises:
        ValueError: a setting is invalid.
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


# By name, for conversations that were pickled in a different process.
_WORLDS: dict[str, World] = {}


def _restore(name: str, reference: Reference, max_turns: int, style: Style, state: tuple[Any, ...]) -> Session:
    if name not in _WORLDS:
        from nemo_ext.rl.environments import make

        make(name)
    return Session(_WORLDS[name], reference, max_turns, style, *state)


@lru_cache(maxsize=256)
def _tables(build: Callable[[int], Tables], seed: int) -> Tables:
    return MappingProxyType(dict(build(seed)))


def _simple(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's schema without its title and, if it is optional, without null."""
    kinds = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) == 1 and schema.get("default", ...) is None:
        return kinds[0]
    return {key: value for key, value in schema.items() if key != "title"}


def _stated(message: str) -> tuple[str, ...]:
    """Return the normalized answers stated in a message, in the places named in `Reference.answer`.

    The whole message is not an answer, because a list of all possible answers would then be correct.
    """
    stated: tuple[str | None, ...] = (last_boxed(message),)
    if stated == (None,):
        stated = final_line(message), final_answer(message)
    if stated == (None, None):
        stated = (message.strip().rpartition("\n")[2],)
    return tuple(_normalize_answer(each or "") for each in stated)


def _normalize_answer(text: str) -> str:
    """Normalize an answer for comparison: ignore case, extra white space and surrounding punctuation."""
    plain: str = _normalize(text)
    return plain.strip(" $*_.")


def _normalize(value: Any) -> Any:
    """Normalize a value for comparison: ignore case and extra white space in strings."""
    if isinstance(value, str):
        return " ".join(value.casefold().split())
    if isinstance(value, Mapping):
        return {key: _normalize(item) for key, item in value.items()}
    return value
