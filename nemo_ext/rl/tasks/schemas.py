"""Objects described in words, to be written as JSON, in four levels, for the environment `structured_output`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nemo_ext.chat.sample import Message
from nemo_ext.job.seeds import generator
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels

LEVELS = 4
_KINDS: Mapping[str, tuple[str, ...]] = {
    "book": ("title", "author", "pages", "genre", "in_print"),
    "recipe": ("title", "cook", "minutes", "course", "vegetarian"),
    "flight": ("number", "pilot", "seats", "cabin", "delayed"),
    "film": ("title", "director", "minutes", "genre", "in_colour"),
}
_WORDS = ("amber", "birch", "cobalt", "delta", "ember", "fjord", "granite", "harbour", "indigo", "juniper")
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "genre": ("drama", "history", "comedy"),
    "course": ("starter", "main", "dessert"),
    "cabin": ("economy", "business", "first"),
}


def tasks(count: int, *, seed: int, level: int | None = None) -> Iterator[Task]:
    """Generate descriptions at levels 1 (two strings) to 4 (lists of objects)."""
    for index, task_level in indexed_levels(count, level, LEVELS):
        kind, schema, value = _draw(seed, task_level, index)
        content = (
            f"{_words(kind, value)}\n\nWrite this as JSON that the schema below allows. Answer with the JSON alone.\n\n"
            f"{json.dumps(schema)}"
        )
        yield Task(
            id=f"schemas/{seed}/{task_level}/{index}",
            environment="structured_output",
            prompt=(Message(role="user", content=content),),
            reference={"schema": schema},
            domain="schemas",
        )


def solution(task: Task) -> str:
    """Return the correct answer, which is the object that the prompt describes, for training and tests."""
    _, seed, level, index = task.id.split("/")
    return json.dumps(_draw(int(seed), int(level), int(index))[2])


def _draw(seed: int, level: int, index: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Draw an object for the task at `index`: return its kind, such as "book", its JSON schema and its value."""
    random = generator(seed, "schemas", level, index)
    kind = str(random.choice(list(_KINDS)))
    schema, record = _flat(random, kind, properties=2 if level == 1 else 5)
    if level >= 3:
        inner, owner = _flat(random, kind, properties=2)
        inner["properties"] = {f"previous_{name}": part for name, part in inner["properties"].items()}
        inner["required"] = list(inner["properties"])
        schema["properties"]["previous"] = inner
        record["previous"] = {f"previous_{name}": value for name, value in owner.items()}
        schema["required"].append("previous")
    if level >= 4:
        schema["$defs"] = {"review": _flat(random, kind, properties=0)[0]}
        schema["$defs"]["review"] |= {
            "properties": {"reader": {"type": "string", "minLength": 1}, "stars": _whole_schema(1, 5)},
            "required": ["reader", "stars"],
        }
        schema["properties"]["reviews"] = {"type": "array", "items": {"$ref": "#/$defs/review"}, "minItems": 1}
        schema["required"].append("reviews")
        record["reviews"] = [
            {"reader": _word(random), "stars": int(random.integers(1, 6))} for _ in range(int(random.integers(1, 4)))
        ]
    return kind, schema, record


def _flat(random: np.random.Generator, kind: str, *, properties: int) -> tuple[dict[str, Any], dict[str, Any]]:
    schemas: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for place, name in enumerate(_KINDS[kind][:properties]):
        if name in _OPTIONS:
            schemas[name], values[name] = {"enum": list(_OPTIONS[name])}, str(random.choice(_OPTIONS[name]))
        elif place == 2:
            schemas[name], values[name] = _whole_schema(1, 999), int(random.integers(1, 1000))
        elif place == 4:
            schemas[name], values[name] = {"type": "boolean"}, bool(random.integers(2))
        else:
            schemas[name], values[name] = {"type": "string", "minLength": 1}, f"{_word(random)} {_word(random)}"
    schema = {"type": "object", "properties": schemas, "required": list(schemas), "additionalProperties": False}
    return schema, values


def _words(kind: str, record: Mapping[str, Any]) -> str:
    """Describe an object in sentences; `kind` is what it is, such as "book", and `record` its value."""
    sentences = [f"There is a {kind}."]
    for name, value in record.items():
        shown = name.replace("_", " ")
        if isinstance(value, Mapping):
            inner = ", ".join(f"{key.replace('_', ' ')} {_shown(part)}" for key, part in value.items())
            sentences.append(f"Its {shown} one: {inner}.")
        elif isinstance(value, list):
            listed = "; ".join(", ".join(f"{key} {_shown(part)}" for key, part in item.items()) for item in value)
            sentences.append(f"Its {shown}: {listed}.")
        else:
            sentences.append(f"Its {shown} is {_shown(value)}.")
    return " ".join(sentences)


def _shown(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _whole_schema(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _word(random: np.random.Generator) -> str:
    return str(random.choice(_WORDS))
