"""Jinja templates and expressions over the columns of a row, sandboxed because they may have been downloaded."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nemo_ext.job.words import nearest

_LONGEST = 300


class Templates:
    """Environment for templates and expressions, with functions and filters in addition to Jinja's own."""

    def __init__(self, functions: Mapping[str, Any] | None = None, filters: Mapping[str, Any] | None = None) -> None:
        jinja = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_written
        )
        del jinja.globals["lipsum"], jinja.filters["random"]  # not deterministic
        jinja.globals.update(functions or {})
        jinja.filters.update(filters or {})
        self._template = functools.cache(jinja.from_string)
        self._expression = functools.cache(lambda source: jinja.compile_expression(source, undefined_to_none=False))

    def check(self, key: str, *, text: str | None = None, value: str | None = None) -> None:
        """Check the syntax of the template `text` or the expression `value`; raise a ValueError that names the key."""
        if text is not None:
            _guarded(key, "", {}, lambda: self._template(text))
        if value is not None:
            _guarded(key, "", {}, lambda: self._expression(value))

    def text(self, source: str, names: Mapping[str, Any], key: str, where: str = "") -> str:
        """Render a template.

        Args:
            names: mapping from variable to value.
            key: config key of the template, for messages.
            where: location of the row, for messages.

        Raises:
            ValueError: the template is invalid or cannot be rendered; names the key, the row and the reason.
        """
        return _guarded(key, where, names, lambda: self._template(source).render(names))

    def value(self, source: str, names: Mapping[str, Any], key: str, where: str = "") -> Any:
        """Evaluate an expression, with the same arguments and errors as `text`."""

        def value() -> Any:
            return _plain(self._expression(source)(names))

        return _guarded(key, where, names, value)


def _plain(value: Any) -> Any:
    """Convert iterators in an expression's value (as from `map` and `select`) to lists; reject functions."""
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range | Iterator):
        return [_plain(item) for item in value]
    if callable(value):
        raise ValueError(
            f"{getattr(value, '__name__', value)} is a function: call it with its arguments in parentheses"
        )
    return value


def _written(value: Any) -> Any:
    """Return a value that a template is about to write; raise ValueError if it is null."""
    if value is None:
        raise ValueError("a value is null; write a default for it, such as {{ value or '' }}")
    return value


def _guarded[Result](key: str, where: str, names: Mapping[str, Any], work: Callable[[], Result]) -> Result:
    place = f"{where}: {key}" if where else key
    try:
        return work()
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"{key}, line {error.lineno}: invalid Jinja syntax ({error.message}); correct the line"
        ) from None
    except jinja2.UndefinedError as error:
        columns = list(names.get("row", names))
        missing = str(error).partition("'")[2].partition("'")[0]
        advice = nearest(missing, columns) if missing and missing not in columns else ""
        shown = ", ".join(map(str, columns))[:_LONGEST]
        raise ValueError(f"{place}: {error}; the row's columns are {shown}. {advice}".strip()) from None
    except Exception as error:  # templates may raise any exception
        raise ValueError(
            f"{place}: cannot be evaluated ({type(error).__name__}: {error}); correct the expression or the row"
        ) from None
