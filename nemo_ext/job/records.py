"""Files of records, one line of JSON each, that grow while a job runs and may be cut short by a kill; strict JSON."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from nemo_ext.job.files import write_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LONG, _ZEROS = b"0" * 19, bytes.maketrans(b"123456789", b"000000000")  # many times faster than a pattern


def read_records[T](file: Path, make: Callable[[dict[str, Any]], T], *, what: str, first: int = 1) -> list[T]:
    """Result of `make` for each record of a file; empty if there is no file.

    A last line that a kill cut short is left out.

    Args:
        file: path of the file.
        make: function of a record; raises TypeError, KeyError or ValueError where it is none.
        what: name of a record, for the message.
        first: 1-based number of the first line that is a record.

    Raises:
        ValueError: another line is not a record.
    """
    if not file.is_file():
        return []
    found = []
    lines = file.read_text().splitlines()[first - 1 :]
    for number, line in enumerate(lines, start=first):
        try:
            found.append(make(json.loads(line)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, json.JSONDecodeError) and number == first + len(lines) - 1:
                break
            raise ValueError(f"{file}:{number}: not {what} ({error}): remove the line") from None
    return found


def read_lines[T](file: Path, kind: Callable[..., T], *, what: str) -> list[T]:
    """The records of a file as instances of a dataclass (`read_records`)."""
    return read_records(file, lambda record: kind(**record), what=what)


def append_lines[T: "DataclassInstance"](file: Path, lines: Sequence[T], kind: type[T], *, what: str) -> None:
    """Appends records to the complete lines of a file."""
    known = read_lines(file, kind, what=what)
    write_text(file, "".join(json.dumps(asdict(line)) + "\n" for line in [*known, *lines]))


def json_line(value: Any) -> bytes:
    """A value as a line of JSON; what JSON has no type for becomes its text, NaN and the infinities null."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # whole numbers of more than 64 bits, halves of characters
        return f"{json.dumps(_finite(value), default=str)}\n".encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(text: bytes | str, *, strict: bool = True) -> Any:
    """Value of a JSON text in UTF-8. Whole numbers are exact: orjson makes floats of those beyond 64 bits.

    Args:
        text: the text.
        strict: False for what only Python's parser takes: NaN, infinities, halves of characters, a byte order mark.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deep, where `strict` is False.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        if strict:
            raise
        # Of bytes json.loads would guess the encoding.
        return json.loads((text.decode() if isinstance(text, bytes) else text).removeprefix("\ufeff"))
    long = _LONG in (text if isinstance(text, bytes) else text.encode()).translate(_ZEROS)
    return json.loads(text) if long else value


def strict_json(text: str) -> Any:
    """Value of a JSON text (RFC 8259), which json.loads takes less strictly.

    Raises:
        ValueError: it is no JSON, or has NaN, an infinity, a number that overflows, or a key twice in one object.
        RecursionError: it is nested too deep.
    """

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"the number {number[:40]} is too large")
        return value

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"the key {name!r} stands twice")
        return made

    return json.loads(text, parse_constant=constant, parse_float=finite, object_pairs_hook=once)
