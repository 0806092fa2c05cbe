"""Records of the settings that an output was made from, stored with it and compared when the job runs again.

Settings that a user can read are compared key by key (`differing`); inputs and long plans by `digest`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_ext.job.files import write_text

LONGEST = 60
"""Maximum number of characters of a value in a message."""


def digest(made_of: object) -> str:
    """SHA-256 of a JSON value as 64 hexadecimal digits; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def flat(section: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Values of a section by dotted key, whether the keys are nested or dotted."""
    values: dict[str, Any] = {}
    for key, value in section.items():
        nested = isinstance(value, Mapping) and value
        values |= flat(value, f"{above}{key}.") if nested else {f"{above}{key}": value}
    return values


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Differences between two sections as `before -> now`, by dotted key; an absent key equals null and {}."""
    old, new = flat(_as_json(before)), flat(_as_json(now))
    return {
        key: " -> ".join(_where_they_differ(old.get(key), new.get(key)))
        for key in dict.fromkeys((*old, *new))
        if (old.get(key) if old.get(key) != {} else None) != (new.get(key) if new.get(key) != {} else None)
    }


def describe(changed: Mapping[str, str]) -> str:
    """Differences (`differing`) as text in one line."""
    return "; ".join(f"{key}: {change}" for key, change in changed.items())


def note(record: Path, made_of: Mapping[str, Any]) -> None:
    """Write the record of the settings that an output is made from."""
    write_text(record, json.dumps(made_of, indent=1) + "\n")


def noted(record: Path) -> Any:
    """Content of a record; None if there is none."""
    return json.loads(record.read_text()) if record.is_file() else None


def check_same(before: Mapping[str, Any] | None, now: Mapping[str, Any], begun: str, advice: str) -> None:
    """Refuse settings that differ from `before`, the settings of an output's first run; None for a new output.

    Raises:
        ValueError: `begun (the settings that differ): advice`.
    """
    if before is not None and (changed := differing(before, now)):
        raise ValueError(f"{begun} ({describe(changed)}): {advice}")


def _as_json(section: Mapping[str, Any]) -> dict[str, Any]:
    as_json: dict[str, Any] = json.loads(json.dumps(section))
    return as_json


def _where_they_differ(*values: Any) -> Iterator[str]:
    """Yield each value as text; a long text is cut to the place where it begins to differ from the other."""
    texts = [json.dumps(value) for value in values]
    alike = next((place for place, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1), 0)
    for text in texts:
        start = 0 if len(text) <= LONGEST else max(0, alike - LONGEST // 3)
        end = start + LONGEST
        yield f"{'...' * (start > 0)}{text[start:end]}{'...' * (len(text) > end)}"
