"""Columns of the output: input columns and answer columns, with the same Arrow types in all parts."""

import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from nemo_ext.data.text.user_files import pyarrow_module

ANSWER = (
    *("key", "sample", "answer", "reasoning", "tool_calls", "finish_reason"),
    *("prompt_tokens", "completion_tokens", "seed", "seconds"),
)
"""Names of the answer columns."""
_WHOLE = ("sample", "prompt_tokens", "completion_tokens", "seed")
_AS_JSON, _BIG = {b"nemo_ext": b"json"}, {b"nemo_ext": b"big"}
_LONGEST_WHOLE = 1 << 53
"""Limit up to which doubles represent all integers exactly; `_BIG` marks columns with larger integers."""
PREFIX = "input_"
"""Prefix of input columns whose names collide with answer columns."""


def renamed(columns: Iterable[str], key: str | None, answer: Collection[str] = ANSWER) -> dict[str, str]:
    """Return a mapping from input columns to their names in the output.

    An input column gets a prefix if an answer column has the same name. A key column called `key` is omitted, as the
    answers already have it.

    Args:
        key: the column with the rows' keys; None if their keys are not from a column.
        answer: names of the answer columns.

    Raises:
        ValueError: two columns would get the same name.
    """
    names = {
        column: f"{PREFIX}{column}" if column in answer else column for column in columns if not column == key == "key"
    }
    if len(set(names.values())) < len(names):
        twice = next(name for name in names.values() if name.startswith(PREFIX) and name in names)
        raise ValueError(
            f"input: column {twice.removeprefix(PREFIX)} would be renamed to {twice}, which also exists; rename one"
        )
    return names


def widened(known: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return an Arrow schema widened to fit further rows; columns without a common type become JSON strings."""
    pyarrow = pyarrow_module()
    fields = {item.name: item for item in known}
    for name in dict.fromkeys(name for row in rows for name in row):
        before = fields.get(name)
        if before is not None and before.metadata == _AS_JSON:
            continue
        values = [row.get(name) for row in rows]
        big = any(isinstance(value, int) and abs(value) > _LONGEST_WHOLE for value in values)
        try:
            item = pyarrow.field(name, pyarrow.array(values).type, metadata=_BIG if big else None)
            if before is not None:
                big = big or before.metadata == _BIG
                schemas = [pyarrow.schema([column.remove_metadata()]) for column in (before, item)]
                item = pyarrow.unify_schemas(schemas, promote_options="permissive").field(0)
                item = item.with_metadata(_BIG if big else None)
            if item.type != getattr(before, "type", None) and not _fits(item, big):
                item = pyarrow.field(name, pyarrow.string(), metadata=_AS_JSON)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
            item = pyarrow.field(name, pyarrow.string(), metadata=_AS_JSON)
        fields[name] = item
    return pyarrow.schema(list(fields.values()))


def _fits(item: Any, big: bool) -> bool:
    """Return whether an Arrow field's type can be written to Parquet and represents all of the column's values exactly.

    `big` is True if the column has integers that a float cannot represent exactly.
    """
    pyarrow = pyarrow_module()
    if pyarrow.types.is_nested(item.type) and "double" in str(item.type):
        return False  # nested integers may have been large
    if big and pyarrow.types.is_floating(item.type):
        return False
    try:
        pyarrow.parquet.write_table(pyarrow.schema([item]).empty_table(), io.BytesIO())
    except pyarrow.ArrowNotImplementedError:
        return False
    return True


def answer_fields() -> list[Any]:
    """Return the Arrow fields of the answer columns."""
    pyarrow = pyarrow_module()
    types = {**dict.fromkeys(_WHOLE, pyarrow.int64()), "seconds": pyarrow.float64()}
    return [
        pyarrow.field(name, types.get(name, pyarrow.string()), metadata=_AS_JSON if name == "tool_calls" else None)
        for name in ANSWER
    ]


def table(rows: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    """Convert rows to an Arrow table with the given schema."""
    pyarrow = pyarrow_module()
    arrays = []
    for item in schema:
        values = [row.get(item.name) for row in rows]
        if item.metadata == _AS_JSON:
            values = [None if value is None else json.dumps(value, ensure_ascii=False, default=str) for value in values]
        elif pyarrow.types.is_null(item.type):
            values = [None] * len(rows)
        arrays.append(pyarrow.array(values, item.type))
    return pyarrow.table(arrays, schema=schema)
