"""Requests made from rows: from a column with messages, or from a Jinja template over the columns."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nemo_ext.endpoint.client import Request
from nemo_ext.generate.rows import is_batch, row_key
from nemo_ext.generate.settings import GenerateSettings
from nemo_ext.job.seeds import digest
from nemo_ext.job.settings import nearest

MESSAGES, PROMPT = "messages", "prompt"
_PATHS = {"/v1/chat/completions": "chat/completions", "/v1/completions": "completions"}


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Builder of requests from rows.

    Attributes:
        settings: the settings in the `generate` section.
        seed: base seed; each request's seed is derived from it, the row's key and the sample number.
        source: source text of the template; None if the messages are in a column.
        column: column with the messages or the user message; None if there is a template.
    """

    settings: GenerateSettings
    seed: int
    source: str | None
    column: str | None

    @classmethod
    def from_settings(cls, settings: GenerateSettings, seed: int, *, columns: Sequence[str], batch: bool) -> "Prompts":
        """Create a builder of requests for rows with these columns or, if `batch`, for lines of OpenAI batch files.

        Raises:
            ValueError: the template cannot be read, a named column does not exist, or the rows have no messages.
        """
        if batch:
            unused = [name for name in ("key", "messages", "template", "system", "tools") if getattr(settings, name)]
            if unused:
                raise ValueError(
                    f"generate.{unused[0]} is not used with OpenAI batch files, whose lines are requests: remove it"
                )
            return cls(settings=settings, seed=seed, source=None, column=None)
        for key in ("messages", "tools"):
            if (named := getattr(settings, key)) is not None and named not in columns:
                raise ValueError(f"generate.{key}: unknown column {named!r}; {nearest(named, columns)}")
        if settings.template is not None:
            if settings.messages is not None:
                raise ValueError("generate.messages and generate.template cannot both be set: remove one of them")
            source = settings.template
            if source.endswith(".jinja"):
                try:
                    source = Path(source).expanduser().read_text()
                except (OSError, UnicodeDecodeError) as error:
                    raise ValueError(f"generate.template={source} cannot be read ({error}): correct its path") from None
            return cls(settings=settings, seed=seed, source=source, column=None)
        column = settings.messages or next((name for name in (MESSAGES, PROMPT) if name in columns), None)
        if not columns:
            raise ValueError("input: the first rows are empty; each row needs at least one column")
        if column is None:
            raise ValueError(
                f"input has no column {MESSAGES} or {PROMPT}, only {', '.join(columns)}: set "
                "generate.template='{{ "
                + columns[0]
                + " }}', a Jinja template over the columns, or generate.messages=COLUMN"
            )
        return cls(settings=settings, seed=seed, source=None, column=column)

    def made_of(self) -> dict[str, Any]:
        """Return the settings that, together with the rows, determine the requests."""
        settings = self.settings
        return {
            "template": self.source,
            "messages": self.column,
            **{name: getattr(settings, name) for name in ("key", "system", "complete", "tools")},
            **settings.sampling.body(),
        }

    def request(self, row: Mapping[str, Any], sample: int) -> Request:
        """Build the request for one sample of a row.

        Raises:
            ValueError: the row has no prompt, or the template fails.
        """
        key = row_key(row, self.settings.key)
        seed = {"seed": digest(self.seed, "generate", key, sample) >> 33}  # some servers accept at most 31 bits
        if is_batch(row):
            url, body = str(row.get("url") or "/v1/chat/completions"), row["body"]
            body = json.loads(body) if isinstance(body, str) else body
            if url not in _PATHS:
                raise ValueError(f"row {key}: url={url!r} is not supported; {nearest(url, _PATHS)}")
            if not isinstance(body, Mapping):
                raise ValueError(f"row {key}: body must be a JSON object, not {str(body)[:60]!r}")
            body = {name: value for name, value in body.items() if name not in ("model", "stream")}
            if body.get("n") not in (None, 1):
                raise ValueError(f"row {key}: n={body['n']} is not supported; set samples={body['n']} instead")
            sampling = self.settings.sampling.body()
            return Request(key=key, sample=sample, path=_PATHS[url], body={**seed, **body, **sampling})
        body = self.settings.sampling.body() | seed
        prompt = self._text(row) if self.source is not None else self._column(row)
        if self.settings.complete:
            if not isinstance(prompt, str):
                raise ValueError(
                    f"row {key}: column {self.column} must be a string for generate.complete=true, not messages"
                )
            return Request(key=key, sample=sample, path="completions", body=body | {"prompt": prompt})
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.settings.system is not None:
            messages = [{"role": "system", "content": self.settings.system}, *messages]
        if self.settings.tools is not None and (tools := row.get(self.settings.tools)):
            body["tools"] = json.loads(tools) if isinstance(tools, str) else tools
        return Request(key=key, sample=sample, body=body | {"messages": messages})

    def _text(self, row: Mapping[str, Any]) -> str:
        try:
            return _compiled(self.source or "").render(row)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"generate.template is not valid Jinja in line {error.lineno}: {error.message}; correct it"
            ) from None
        except jinja2.UndefinedError as error:
            raise ValueError(f"generate.template: {error}; use only the columns {', '.join(map(str, row))}") from None
        except Exception as error:  # templates may raise anything
            raise ValueError(
                f"generate.template cannot be rendered ({type(error).__name__}: {error}); correct it"
            ) from None

    def _column(self, row: Mapping[str, Any]) -> str | Sequence[Mapping[str, Any]]:
        value = row.get(str(self.column))
        if isinstance(value, str) and self.column != PROMPT:
            value = _messages(value) or value
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
            raise ValueError(f"column {self.column}: expected a string or a list of messages, not {str(value)[:60]!r}")
        return without_nulls(value)


def without_nulls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Drop null values from messages, except `content`: table rows have every key, and endpoints reject nulls."""
    return [
        {name: value for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]


def _messages(text: str) -> list[Any] | None:
    """Parse a JSON list of messages; return None for any other string."""
    if not text.lstrip().startswith("["):
        return None
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return None
    valid = messages and all(isinstance(message, dict) and "role" in message for message in messages)
    return messages if valid else None


@functools.cache
def _compiled(source: str) -> jinja2.Template:
    # Sandboxed: templates and rows may come from untrusted sources.
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined).from_string(source)
