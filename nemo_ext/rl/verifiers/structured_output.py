"""Verifier for structured output, which must be valid JSON under a schema.

As in Nemotron 3 Nano, the content is not judged. Checks that can be slow for some schemas and answers (regular
expressions, unique items, recursive schemas) run in a worker with a time limit. Nothing is ever downloaded, since a
schema may only refer to parts of itself.
"""

import functools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from nemo_ext.chat.json_schemas import DATA, NAMED, rewritten, validator
from nemo_ext.chat.response import Response
from nemo_ext.job.records import strict_json
from nemo_ext.job.settings import check_keys, checked_whole
from nemo_ext.rl.answers import fences
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.workers import WorkerError, WorkerPool

MAX_LENGTH = 200_000
"""Maximum length of an answer in characters."""
MAX_DEPTH = 64
"""Maximum nesting depth of objects and arrays."""
_REFERS = ("$ref", "$dynamicRef", "$recursiveRef")


class NotJsonError(ValueError):
    """Raised if an answer is not JSON of the required form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Schema that an answer must satisfy, as JSON; its draft is named by `$schema` and is 2020-12 by default."""

    text: str


def check(reference: Mapping[str, Any]) -> Reference:
    """Parse a task's reference: {schema: {...} or its JSON, strict: false}.

    With `strict`, all properties are required and no others are allowed, at all levels and whatever the schema says (as
    NeMo Gym's structured_outputs does for every schema).

    Raises:
        ValueError: the schema is invalid or refers to another document; the message names the key.
    """
    check_keys(reference, ("schema", "strict"), required=("schema",), where="reference")
    schema, strict = reference["schema"], reference.get("strict", False)
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"reference.schema={schema[:80]!r} is not valid JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise ValueError(f"reference.schema={repr(schema)[:80]}: expected a JSON schema, which is a mapping")
    if not isinstance(schema.get("$schema", ""), str):
        raise ValueError(f"reference.schema.$schema={schema['$schema']!r}: expected a string")
    if not isinstance(strict, bool):
        raise ValueError(f"reference.strict={strict!r}: expected true or false")
    try:
        text = json.dumps(strictly(schema) if strict else schema, allow_nan=False)
        if "$schema" in schema and validator_for(schema, default=None) is None:
            raise ValueError(f"$schema={schema['$schema']!r} is unknown: name a draft of JSON Schema, or remove it")
        compiled = validator(text)
    except SchemaError as error:
        path = "".join(f".{part}" for part in error.absolute_path)
        raise ValueError(f"reference.schema{path} is not a valid JSON schema: {error.message[:200]}") from None
    except (TypeError, RecursionError) as error:
        raise ValueError(f"reference.schema cannot be written as JSON ({error}): use only JSON values") from None
    except ValueError as error:
        raise ValueError(f"reference.schema is not a valid JSON schema: {error}") from None
    for path, part in _parts(schema, "reference.schema"):
        _check_part(schema, part, path)
        if any(key in part for key in _REFERS):
            try:
                list(compiled.evolve(schema=part).iter_errors({}))  # all of them: the first may precede the loop
            except RecursionError:
                raise ValueError(f"{path}: its $ref references form an endless loop; break the loop") from None
            except Unresolvable as error:
                raise ValueError(f"{path}: a reference cannot be resolved ({error}); correct it") from None
    return Reference(text=text)


def verify(
    response: Response,
    reference: Reference,
    *,
    pool: WorkerPool,
    max_length: int = MAX_LENGTH,
    max_depth: int = MAX_DEPTH,
) -> Verdict:
    """Return the verdict `correct` if the answer is valid JSON under the schema, alone or in one ```json fence.

    Answers longer than `max_length` characters or nested deeper than `max_depth` are wrong. `pool` is the pool of
    workers that runs `problem`.
    """
    if not response.answer:
        return Verdict.wrong("no answer")
    if len(response.answer) > max_length:
        return Verdict.wrong(f"longer than {max_length} characters")
    try:
        text = unfenced(response.answer)
        parse(text, max_depth=max_depth)
    except NotJsonError as error:
        return Verdict.wrong(str(error), response.answer[:200])
    try:
        problem = pool.call(reference.text, text)
    except WorkerError as error:
        return Verdict.error(f"the answer cannot be checked against the schema: {error}", text[:200])
    return Verdict.wrong(problem, text[:200]) if problem else Verdict.correct(text[:200])


def environment(
    *,
    time_limit: float = 10.0,
    workers: int | None = None,
    max_length: int = MAX_LENGTH,
    max_depth: int = MAX_DEPTH,
    memory: int = 4096,
) -> Environment:
    """Create the environment `structured_output`, for answers that must be JSON under a schema.

    Args:
        time_limit: time limit for one answer, in seconds.
        workers: maximum number of worker processes; if None, one per core, at most eight.
        max_length: maximum length of an answer in characters; longer ones are wrong.
        max_depth: maximum nesting depth of objects and arrays; deeper answers are wrong.
        memory: maximum address space of a worker process in MiB.

    Raises:
        ValueError: a setting is out of range.
    """
    checked_whole("max_length", max_length, least=1)
    checked_whole("max_depth", max_depth, least=1)
    pool = WorkerPool(f"{__name__}:problem", time_limit=time_limit, workers=workers, memory=memory)
    return Environment(
        name="structured_output",
        check=check,
        verify=functools.partial(verify, pool=pool, max_length=max_length, max_depth=max_depth),
        waits=True,
    )


def unfenced(text: str) -> str:
    """Return the JSON string in an answer: all of it, or the contents of its only fenced block.

    Raises:
        NotJsonError: the fenced block is not closed or is not the whole answer.
    """
    text = text.strip()
    if not text.startswith(("```", "~~~")):
        return text
    blocks = fences(text)
    if len(blocks) != 1 or blocks[0][2:] != (0, text.count("\n")) or blocks[0][0] not in ("", "json"):
        raise NotJsonError("the answer must be JSON, alone or in a single fenced block")
    return blocks[0][1]


def parse(text: str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse JSON (RFC 8259); NaN, infinities, numbers that overflow, and duplicate keys in an object are rejected.

    Raises:
        NotJsonError: the JSON is invalid or nested deeper than `max_depth`.
    """
    try:
        value = strict_json(text)
        deep = _depth(value) > max_depth
    except RecursionError:
        deep = True
    except ValueError as error:  # also an integer of more than 4300 digits
        raise NotJsonError(f"the answer is not JSON: {str(error)[:100]}") from None
    if deep:
        raise NotJsonError(f"the JSON is nested deeper than {max_depth} levels")
    return value


def _depth(value: Any) -> int:
    """Return the nesting depth of objects and arrays; 0 for other values."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def strictly(schema: Any) -> Any:
    """Return a copy of a schema in which all properties of every object are required and no others are allowed."""

    def strict(part: dict[str, Any]) -> dict[str, Any]:
        if isinstance(part.get("properties"), Mapping):
            part |= {"required": list(part["properties"]), "additionalProperties": False}
        return part

    return rewritten(schema, strict)


def prepare() -> None:
    """Import jsonschema in a worker."""
    problem("{}", "1")


def problem(schema: str, text: str) -> str:
    """Return why a JSON string is invalid under the schema, or "" if it is valid.

    This runs in a worker, since it may take any amount of time.
    """
    # Recursive schemas descend as deep as the answer, with several calls per level.
    sys.setrecursionlimit(20_000)
    error = next(validator(schema).iter_errors(json.loads(text)), None)
    if error is None:
        return ""
    return f"{error.json_path[:100]}: {error.message[:200]}"


def _parts(schema: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a schema and all of its subschemas, each with its path."""
    if isinstance(schema, list | tuple):
        for index, part in enumerate(schema):
            yield from _parts(part, f"{path}[{index}]")
    elif isinstance(schema, Mapping):
        yield path, schema
        for key, value in schema.items():
            if key in NAMED and isinstance(value, Mapping):
                for name, part in value.items():
                    yield from _parts(part, f"{path}.{key}.{name}")
            elif key not in DATA:
                yield from _parts(value, f"{path}.{key}")


def _check_part(root: Mapping[str, Any], part: Mapping[str, Any], path: str) -> None:
    if "$id" in part and part is not root:
        raise ValueError(f"{path}.$id={part['$id']!r}: only the top level of a schema may have an $id; remove it")
    for key in _REFERS:
        target = part.get(key)
        if target is None:
            continue
        if not isinstance(target, str) or not target.startswith("#"):
            raise ValueError(
                f"{path}.{key}={target!r}: a schema may refer only to parts of itself, such as '#/$defs/...'"
            )
        if key == "$ref" and not _resolves(root, target):
            raise ValueError(
                f"{path}.{key}={target!r}: the schema has no part at this path; define it or correct the path"
            )


def _resolves(root: Mapping[str, Any], target: str) -> bool:
    resource = Resource.from_contents(root, default_specification=DRAFT202012)
    name = str(root.get("$id", ""))
    try:
        Registry().with_resource(name, resource).resolver(name).lookup(target)
    except (Unresolvable, ValueError, KeyError, TypeError):
        return False
    return True
