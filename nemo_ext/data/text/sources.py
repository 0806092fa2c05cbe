"""Registry of sources by their kind in a config: `{kind: jsonl, path: texts.jsonl, max_bytes: 8000000}`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from nemo_ext.data.text.corpora import DocstringsSource, PackageDocsSource, PythonStdlibSource
from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.user_files import JsonlSource, ParquetSource, TextSource, TreeSource
from nemo_ext.job.settings import check_keys, checked_share, checked_whole, nearest

KINDS: dict[str, type[Source]] = {
    source.kind: source
    for source in (
        JsonlSource,
        ParquetSource,
        TextSource,
        TreeSource,
        PythonStdlibSource,
        DocstringsSource,
        PackageDocsSource,
    )
}


def load_source(config: Mapping[str, object]) -> Source:
    """Build the source that `config["kind"]` names from the other keys, the fields of its class.

    Raises:
        ValueError: A kind or key is unknown (with the nearest known), a key is missing, or a value has the wrong type.
    """
    kind = config.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown source kind {kind!r}: {nearest(str(kind), KINDS)}")
    where = f"{kind} source"
    fields = {field.name: field for field in dataclasses.fields(KINDS[kind])}
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    check_keys(config, ("kind", *fields), required=required, where=where)
    values = {
        key: _checked_value(f"{where}: {key}", value, fields[key].type)
        for key, value in config.items()
        if key != "kind"
    }
    return cast(Callable[..., Source], KINDS[kind])(**values)


def _checked_value(name: str, value: object, expected: object) -> object:
    """Return the value in the type of its dataclass field."""
    if expected == tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, Sequence) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise ValueError(f"{name} must be a string or a list of strings, not {value!r}")
    if expected == int | None:
        return None if value is None else checked_whole(name, value, least=1)
    if expected is float:
        return checked_share(name, value)
    if expected is bool and isinstance(value, bool):
        return value
    if expected is str and isinstance(value, str) and value:
        return value
    raise ValueError(f"{name} must be {'true or false' if expected is bool else 'a text'}, not {value!r}")
