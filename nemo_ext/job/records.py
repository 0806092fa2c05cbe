"""JSON Lines files, whose last line a killed job may have truncated, and strict JSON parsing."""

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

_LONG, _ZEROS = b"0" * 19, bytes.maketrans(b"123456789", b"000000000")  # much faster than a regular expression


def read_records[T](file: Path, make: Callable[[dict[str, Any]], T], *, what: str, first: int = 1) -> list[T]:
    """Read a file's records, and return the result of `make` for each; an empty list if there is no file.

    A last line that was truncated, as when a job is killed, is skipped.

    Args:
        make: function of a record, which raises TypeError, KeyError or ValueError if the record is invalid.
        what: what a record is, for the message.
        first: 1-based number of the first line with a record.

    Raises:
        ValueError: another line is not a record.
    """
    if not file.is_file():
        return []
    records = []
    lines = file.read_text().splitlines()[first - 1 :]
    for number, line in enumerate(lines, start=first):
        try:
            records.append(make(json.loads(line)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, json.JSONDecodeError) and number == first + len(lines) - 1:
                break
            raise ValueError(f"{file}:{number}: expected {what} ({error}); remove the line") from None
    return records


def read_lines[T](file: Path, kind: Callable[..., T], *, what: str) -> list[T]:
    """Read a file's records as instances of the dataclass `kind`; `what` names a record in error messages."""
    return read_records(file, lambda record: kind(**record), what=what)


def append_lines[T: "DataclassInstance"](file: Path, lines: Sequence[T], kind: type[T], *, what: str) -> None:
    """Append instances of the dataclass `kind` to a file as records, dropping a truncated last line.

    `what` names a record in the message of the ValueError that an invalid line raises.
    """
    known = read_lines(file, kind, what=what)
    write_text(file, "".join(json.dumps(asdict(line)) + "\n" for line in [*known, *lines]))


def json_line(value: Any) -> bytes:
    """Encode a value as a line of JSON; types unknown to JSON become strings, and NaN and infinities become null."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # integers of more than 64 bits, lone surrogates
        return f"{json.dumps(_finite(value), default=str)}\n".encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(text: bytes | str, *, strict: bool = True) -> Any:
    """Parse JSON in UTF-8. Integers are exact, whereas orjson would turn those beyond 64 bits into floats.

    Args:
        strict: False to also accept what Python's parser does: NaN, infinities, lone surrogates, a byte order mark.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: it is nested too deeply (only if `strict` is False).
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        if strict:
            raise
        # json.loads would guess the encoding of bytes.
        return json.loads((text.decode() if isinstance(text, bytes) else text).removeprefix("\ufeff"))
    long = _LONG in (text if isinstance(text, bytes) else text.encode()).translate(_ZEROS)
    return json.loads(text) if long else value


def strict_json(text: str) -> Any:
    """Parse JSON according to RFC 8259, more strictly than json.loads.

    Raises:
        ValueError: the text is not JSON, or contains NaN, an infinity, a number that overflows, or a duplicate key.
        RecursionError: it is nested too deeply.
    """

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not valid JSON")

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"the number {number[:40]} is too large for a 64-bit float")
        return value

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"duplicate key {name!r}")
        return unique

    return json.loads(text, parse_constant=constant, parse_float=finite, object_pairs_hook=once)
