"""Records of the settings that an output was made with, stored with it and compared when the job runs again.

Settings that a user can read are compared key by key (`differing`), inputs and long plans by their `digest`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_ext.job.files import write_text

LONGEST = 60
"""Maximum number of characters that a message shows of a value."""


def digest(made_of: object) -> str:
    """SHA-256 of a JSON value as 64 hexadecimal digits, independent of the order of keys."""
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def flat(section: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten a section, whose keys may be nested or dotted, into a mapping from dotted key to value."""
    values: dict[str, Any] = {}
    for key, value in section.items():
        nested = isinstance(value, Mapping) and value
        values |= flat(value, f"{above}{key}.") if nested else {f"{above}{key}": value}
    return values


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Map each dotted key that differs between two sections to "before -> now"; null, {} and [] equal a missing key."""
    old, new = flat(_as_json(before)), flat(_as_json(now))
    return {
        key: " -> ".join(_where_they_differ(old.get(key), new.get(key)))
        for key in dict.fromkeys((*old, *new))
        if (old.get(key) if old.get(key) not in ({}, []) else None)
        != (new.get(key) if new.get(key) not in ({}, []) else None)
    }


def describe(changed: Mapping[str, str]) -> str:
    """Describe the differences returned by `differing` in one line."""
    return "; ".join(f"{key}: {change}" for key, change in changed.items())


def note(record: Path, made_of: Mapping[str, Any]) -> None:
    """Write the settings used to produce an output to the file `record`."""
    write_text(record, json.dumps(made_of, indent=1) + "\n")


def noted(record: Path) -> Any:
    """Read the settings in the file `record`; None if there is no such file."""
    return json.loads(record.read_text()) if record.is_file() else None


def check_same(before: Mapping[str, Any] | None, now: Mapping[str, Any], begun: str, advice: str) -> None:
    """Reject settings `now` that differ from `before`, with which the output was begun (None if the output is new).

    Raises:
        ValueError: settings differ; the message is `begun`, the differences in parentheses, and `advice`.
    """
    if before is not None and (changed := differing(before, now)):
        raise ValueError(f"{begun} ({describe(changed)}); {advice}")


def _as_json(section: Mapping[str, Any]) -> dict[str, Any]:
    as_json: dict[str, Any] = json.loads(json.dumps(section))
    return as_json


def _where_they_differ(*values: Any) -> Iterator[str]:
    """Yield each value as JSON, a long one shortened to the part around the first difference between the values."""
    texts = [json.dumps(value) for value in values]
    alike = next((place for place, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1), 0)
    for text in texts:
        start = 0 if len(text) <= LONGEST else max(0, alike - LONGEST // 3)
        end = start + LONGEST
        yield f"{'...' * (start > 0)}{text[start:end]}{'...' * (len(text) > end)}"
