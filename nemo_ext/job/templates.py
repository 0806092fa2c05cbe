"""Jinja templates and expressions over the columns of a row, in the sandbox: files that have them are downloaded."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nemo_ext.job.words import nearest

_LONGEST = 300


class Templates:
    """Templates and expressions with functions and filters beside Jinja's own.

    Args:
        functions: functions by name.
        filters: filters by name.
    """

    def __init__(self, functions: Mapping[str, Any] | None = None, filters: Mapping[str, Any] | None = None) -> None:
        jinja = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_said
        )
        del jinja.globals["lipsum"], jinja.filters["random"]  # the same row would give something else each time
        jinja.globals.update(functions or {})
        jinja.filters.update(filters or {})
        self._template = functools.cache(jinja.from_string)
        self._expression = functools.cache(lambda source: jinja.compile_expression(source, undefined_to_none=False))

    def check(self, key: str, *, text: str | None = None, value: str | None = None) -> None:
        """Raises ValueError, which names the key, for a template or an expression that is no Jinja."""
        if text is not None:
            _guarded(key, "", {}, lambda: self._template(text))
        if value is not None:
            _guarded(key, "", {}, lambda: self._expression(value))

    def text(self, source: str, names: Mapping[str, Any], key: str, where: str = "") -> str:
        """Text of a template.

        Args:
            source: the template.
            names: what it may name.
            key: place of the template, for messages.
            where: place of the row, for messages.

        Raises:
            ValueError: the template is none, or cannot be filled in; names key, row and reason.
        """
        return _guarded(key, where, names, lambda: self._template(source).render(names))

    def value(self, source: str, names: Mapping[str, Any], key: str, where: str = "") -> Any:
        """Value of an expression; see `text`."""

        def value() -> Any:
            return _plain(self._expression(source)(names))

        return _guarded(key, where, names, value)


def _plain(value: Any) -> Any:
    """A value of an expression with lists in place of iterators, as `map` and `select` give."""
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | range | Iterator):
        return [_plain(each) for each in value]
    if callable(value):
        raise ValueError(f"{getattr(value, '__name__', value)} is a function: put its arguments in brackets behind it")
    return value


def _said(value: Any) -> Any:
    """A value that a template writes."""
    if value is None:
        raise ValueError("a value is null")
    return value


def _guarded[Result](key: str, where: str, names: Mapping[str, Any], work: Callable[[], Result]) -> Result:
    place = f"{where}: {key}" if where else key
    try:
        return work()
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{key}, line {error.lineno}: {error.message}") from None
    except jinja2.UndefinedError as error:
        columns = list(names.get("row", names))
        missing = str(error).partition("'")[2].partition("'")[0]
        advice = nearest(missing, columns) if missing and missing not in columns else ""
        shown = ", ".join(map(str, columns))[:_LONGEST]
        raise ValueError(f"{place}: {error}: the row's columns are {shown}. {advice}".strip()) from None
    except Exception as error:  # templates raise whatever they like
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from None
