"""Problems of a benchmark: prompts and references, made from rows that its files or a generator provide."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_ext.chat.sample import Message
from nemo_ext.data.text.user_files import pyarrow_module, record_source, table_row
from nemo_ext.evaluation.benchmark import PLAIN, Benchmark
from nemo_ext.evaluation.expressions import FILTERS, FUNCTIONS
from nemo_ext.evaluation.store import digest_of
from nemo_ext.job.records import read_json
from nemo_ext.job.settings import prefixed_errors
from nemo_ext.job.templates import Templates
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.plan import TaskFile
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import GENERATORS, generate
from nemo_ext.rl.verdict import Metric


class Missing(ValueError):
    """Raised if a benchmark's data files do not exist."""


class Row(dict[str, Any]):
    """Row of a benchmark's data: its columns, and in `file` the path of its file relative to the data root."""

    file = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a benchmark.

    Attributes:
        id: identifier, independent of the row's position in the data.
        domain: group, such as a subject; "" if there is none.
        prompts: mapping from name to prompt: a string or messages.
        reference: reference that the verifier compares answers with.
        environment: name of the verifier; "" if log-likelihoods are measured.
        tools: declared tools.
        choices: continuations of the prompt to compare.
        gold: index of the correct choice, from 0.
        thinking: reasoning mode (true for on) that the problem requires of models with modes; None if it requires none.
        row: the row, if the benchmark has metrics, as their expressions use it.
    """

    id: str
    domain: str = ""
    prompts: Mapping[str, str | Sequence[Message]]
    reference: Mapping[str, Any]
    environment: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    choices: tuple[str, ...] = ()
    gold: int = 0
    thinking: bool | None = None
    row: Mapping[str, Any] = field(default_factory=dict)

    def task(self, prompt: str) -> Task:
        """Return the problem with the prompt of this name as an RL task."""
        content = self.prompts[prompt]
        messages = (Message(role="user", content=content),) if isinstance(content, str) else tuple(content)
        return Task(
            id=self.id,
            environment=self.environment,
            prompt=messages,
            reference=self.reference,
            tools=self.tools,
            domain=self.domain,
        )


def problems(benchmark: Benchmark, data_root: Path, *, seed: int, limit: int | None = None) -> list[Problem]:
    """Return a benchmark's problems; a larger limit adds problems to those of a smaller one.

    Problems from files are ordered by the hashes of their ids, generated ones by their numbers.

    Args:
        benchmark: the benchmark; not of the kind `harness`.
        data_root: folder with the benchmarks' data.
        seed: seed for generated problems.
        limit: maximum number of problems; None for no limit.

    Raises:
        Missing: the data files do not exist.
        ValueError: a row is invalid; the message names the file, the row and the reason.
    """
    settings: dict[str, Any] = dict(benchmark.settings)
    if taken := {"count", "seed"} & settings.keys():
        raise ValueError(
            f"benchmark {benchmark.name}: settings.{min(taken)} is not allowed; use count or evaluate.seed"
        )
    count = min(benchmark.count, limit or benchmark.count)
    if benchmark.generator in GENERATORS:
        return [_of_task(task) for task in generate(str(benchmark.generator), count, seed=seed, **settings)]
    if benchmark.tasks:
        return _of_tasks(benchmark, data_root, limit)
    place = f"benchmark {benchmark.name}"
    if benchmark.generator is not None:
        from nemo_ext.evaluation.generators import rows

        generated = rows(benchmark.generator, count, seed=seed, **settings)
        located = ((f"{place}, row {number}", Row(row)) for number, row in enumerate(generated))
        return [_problem(benchmark, row, {}, where) for where, row in _selected(benchmark, located)]
    named: dict[str, tuple[str, Row, str]] = {}
    for where, row in _selected(benchmark, _joined(benchmark, data_root)):
        whole = digest_of(row)
        name = whole if benchmark.id is None else str(_value(benchmark, "id", benchmark.id, row, where))
        if name in named and named[name][0] != whole:
            raise ValueError(
                f"{where}: {place}: the row has the same id {name!r} as {named[name][2]}; change `id` so that ids are "
                "unique"
            )
        named.setdefault(name, (whole, row, where))
    if not named:
        why = "its data has no rows" if benchmark.where is None else f"no row of its data satisfies {benchmark.where}"
        raise ValueError(f"{place} has no problems: {why}; correct `data` or `where`")
    chosen = sorted(named, key=lambda name: digest_of("limit", name))[:limit]
    shots = _shots(benchmark, data_root, named) if benchmark.shots else {}
    return [_problem(benchmark, named[name][1], shots, named[name][2], name=name) for name in chosen]


def with_python(
    benchmark: Benchmark, found: list[Problem], python: bool | Mapping[str, Any]
) -> tuple[Benchmark, list[Problem]]:
    """Return a benchmark and its problems with Python as a tool, or unchanged if it is not a benchmark of mathematics.

    `python` is True or the settings of the environment `python_tool`; nothing changes if it is False.
    """
    if python is False or benchmark.complete or not found or found[0].environment != "math":
        return benchmark, found
    settings = {**(python if isinstance(python, Mapping) else {}), "settings": dict(benchmark.environment_settings)}
    problems = [replace(problem, environment="python_tool") for problem in found]
    return replace(benchmark, environment_settings=settings), problems


def check(benchmark: Benchmark, environment: Environment | None, found: Sequence[Problem]) -> None:
    """Check that every problem has a reference that the verifier accepts, or a valid index of the correct choice.

    Raises:
        ValueError: a problem is invalid; the message names its id and the reason.
    """
    for problem in found:
        with prefixed_errors(f"benchmark {benchmark.name}: problem {problem.id}"):
            if environment is not None:
                environment.check(problem.reference)
                metrics(benchmark, problem, 0.0, None)
            elif benchmark.kind == "choice" and not 0 <= problem.gold < len(problem.choices):
                size = len(problem.choices)
                raise ValueError(
                    f"gold={problem.gold}: must be from 0 to {size - 1}, as the problem has {size} choices"
                )


def _of_tasks(benchmark: Benchmark, data_root: Path, limit: int | None) -> list[Problem]:
    tasks: dict[str, Task] = {}
    for name in benchmark.tasks:
        if not (data_root / name).is_file():
            raise Missing(f"{data_root / name}: no such task file; correct `tasks`")
        for task in TaskFile(data_root / name).tasks:
            if benchmark.environment not in (None, task.environment):
                continue
            if tasks.setdefault(task.id, task) != task:
                raise ValueError(
                    f"{data_root / name}: task id {task.id!r} is already used in an earlier file; rename it"
                )
    environments = sorted({task.environment for task in tasks.values()})
    if len(environments) != 1:
        names = ", ".join(environments) or f"no task with the environment {benchmark.environment}"
        raise ValueError(
            f"benchmark {benchmark.name}: its files have {names}; set environment to the environment of its tasks"
        )
    chosen = sorted(tasks, key=lambda name: digest_of("limit", name))[:limit]
    return [_of_task(tasks[name]) for name in chosen]


def _of_task(task: Task) -> Problem:
    return Problem(
        id=task.id,
        domain=task.domain,
        prompts={PLAIN: task.prompt},
        reference=task.reference,
        environment=task.environment,
        tools=task.tools,
        thinking=task.thinking,
    )


def _problem(
    benchmark: Benchmark,
    row: Mapping[str, Any],
    shots: Mapping[str, Sequence[Mapping[str, Any]]],
    where: str,
    *,
    name: str | None = None,
) -> Problem:
    def invalid(text: str) -> ValueError:
        return ValueError(f"{where}: benchmark {benchmark.name}: {text}")

    def value(key: str, expression: str | None, otherwise: Any) -> Any:
        return otherwise if expression is None else _value(benchmark, key, expression, row, where)

    domain = str(value("domain", benchmark.domain, ""))
    choices = value("choices", benchmark.choices, [])
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, str | int | float) for choice in choices):
        raise invalid(f"choices={str(choices)[:80]!r}: expected a list of strings")
    examples = _examples(benchmark, shots, domain, digest_of(row), where)
    prompts: dict[str, str | Sequence[Message]] = {}
    for key, template in benchmark.prompt.items():
        prompts[key] = "\n\n".join([*examples, _text(benchmark, f"prompt.{key}", template, row, where)])
    if benchmark.messages is not None:
        messages = value("messages", benchmark.messages, ())
        try:
            record = {"id": "-", "environment": "-", "prompt": messages}
            prompts = {PLAIN: Task.from_record(record, f"{where}: messages").prompt}
        except (TypeError, AttributeError):
            raise invalid(f"messages={str(messages)[:80]!r}: expected a list of messages") from None
    tools = value("tools", benchmark.tools, None) or ()
    if isinstance(tools, str):
        try:
            tools = read_json(tools)
        except json.JSONDecodeError as error:
            raise invalid(f"tools: invalid JSON ({error}); correct the row") from None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise invalid(f"tools={str(tools)[:80]!r}: expected a list of objects")
    reference = {
        key: held
        for key, expression in benchmark.reference.items()
        if (held := value(f"reference.{key}", expression, None)) is not None
    }
    gold = value("gold", benchmark.gold, 0)
    if not isinstance(gold, int):
        raise invalid(f"gold={gold!r}: expected the index of a choice, counted from 0")
    if name is None:
        name = digest_of(row) if benchmark.id is None else str(value("id", benchmark.id, ""))
    return Problem(
        id=name,
        domain=domain,
        prompts=prompts,
        reference=reference,
        environment=benchmark.environment or "",
        tools=tuple(tools),
        choices=tuple(map(str, choices)),
        gold=gold,
        row=row if benchmark.metrics else {},
    )


def metrics(benchmark: Benchmark, problem: Problem, score: float, found: str | None) -> dict[str, Metric]:
    """Return the values of a benchmark's further metrics for an answer with this score and extracted answer.

    Raises:
        ValueError: a value is neither a number nor a pair of numbers.
    """
    values: dict[str, Metric] = {}
    names = {**problem.row, "score": score, "found": found}
    for key, expression in benchmark.metrics.items():
        value = _value(benchmark, f"metrics.{key}", expression, names, f"problem {problem.id}")
        parts = value if isinstance(value, list | tuple) else [value]
        if len(parts) > 2 or not all(isinstance(part, int | float) for part in parts):
            raise ValueError(
                f"benchmark {benchmark.name}: metrics.{key}={str(value)[:80]!r}: expected a number or a pair of numbers"
            )
        values[key] = float(value) if parts == [value] else tuple(map(float, parts))
    return values


def _shots(
    benchmark: Benchmark, data_root: Path, named: Mapping[str, tuple[str, Row, str]]
) -> dict[str, list[Mapping[str, Any]]]:
    """Map domains to rows for few-shot examples: those of `shots_data` in file order, or of the data in hash order.

    `named` maps the id of each row of the data to its hash, the row and its location in the files.
    """
    if benchmark.shots_data:
        rows = [row for _, row in _rows(benchmark, benchmark.shots_data, data_root)]
    else:
        rows = [row for _, row, _ in sorted(named.values(), key=lambda entry: digest_of("shot", entry[0]))]
    shots: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        domain = "" if benchmark.domain is None else str(_value(benchmark, "domain", benchmark.domain, row, "a shot"))
        shots.setdefault(domain, []).append(row)
    return shots


def _examples(
    benchmark: Benchmark, shots: Mapping[str, Sequence[Mapping[str, Any]]], domain: str, own: str, where: str
) -> list[str]:
    if not benchmark.shots:
        return []
    rows = [row for row in shots.get(domain, ()) if digest_of(row) != own][: benchmark.shots]
    if len(rows) < benchmark.shots:
        of = f" of {domain}" if domain else ""
        raise ValueError(
            f"{where}: benchmark {benchmark.name}: shots={benchmark.shots}: only {len(rows)} examples{of} are "
            "available; lower shots"
        )
    return [_example(benchmark, row, where) for row in rows]


def _example(benchmark: Benchmark, row: Mapping[str, Any], where: str) -> str:
    if benchmark.shot is not None:
        return _text(benchmark, "shot", benchmark.shot, row, where)
    if benchmark.kind != "choice":
        raise ValueError(
            f"benchmark {benchmark.name}: shots={benchmark.shots} requires `shot`: set it to a template of an example"
        )
    prompt = _text(benchmark, "prompt", next(iter(benchmark.prompt.values())), row, where)
    choices = _value(benchmark, "choices", str(benchmark.choices), row, where)
    return prompt + str(choices[_value(benchmark, "gold", str(benchmark.gold), row, where)])


def _selected(benchmark: Benchmark, located: Iterable[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """Yield the rows that satisfy the benchmark's `where`, each with its location."""
    for where, row in located:
        if benchmark.where is None or _value(benchmark, "where", benchmark.where, row, where):
            yield where, row


def _rows(benchmark: Benchmark, patterns: Sequence[str], data_root: Path) -> Iterator[tuple[str, Row]]:
    """Yield the rows of the files that match the first pattern with matches, each with its location for messages."""
    for pattern in patterns:
        paths = sorted(path for path in data_root.glob(pattern) if not path.name.startswith("."))
        if not paths:
            continue
        for path in paths:
            for file in sorted(path.rglob("*.arrow")) if path.is_dir() else [path]:
                for where, columns in _records(file):
                    row = Row(columns)
                    row.file = str(file.relative_to(data_root))
                    yield where, row
        return
    advice = f"get it from {benchmark.source}" if benchmark.source else "correct `data` or evaluate.data_root"
    raise Missing(f"{data_root / patterns[0]}: no such file; {advice}")


def _joined(benchmark: Benchmark, data_root: Path) -> Iterator[tuple[str, Row]]:
    """Yield the rows of the data with their locations, adding the columns of the row in `join` that has the same id.

    Columns of the data are not replaced, and rows without a counterpart are unchanged.
    """
    more: dict[str, Row] = {}
    for where, row in _rows(benchmark, benchmark.join, data_root) if benchmark.join else ():
        name = str(_value(benchmark, "id", str(benchmark.id), row, where))
        if more.setdefault(name, row) != row:
            raise ValueError(
                f"{where}: benchmark {benchmark.name}: an earlier row of {more[name].file} has the same id {name!r}; "
                "remove one, or narrow `join`"
            )
    for where, row in _rows(benchmark, benchmark.data, data_root):
        if more:
            for key, value in more.get(str(_value(benchmark, "id", str(benchmark.id), row, where)), {}).items():
                row.setdefault(key, value)
        yield where, row


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix != ".arrow":
        yield from record_source((str(path),), None, "data").rows()
        return
    pyarrow = pyarrow_module()  # a file written by Hugging Face's `datasets`
    try:
        with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as reader:
            rows = (table_row(row) for batch in reader for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a valid Arrow stream ({error}); copy or create it again") from None


_TEMPLATES = Templates(FUNCTIONS, FILTERS)


def _names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of templates: the columns, `row` (the whole row) and `file` (the path of its file)."""
    return {"row": row, "file": getattr(row, "file", ""), **row}


def _text(benchmark: Benchmark, key: str, source: str, row: Mapping[str, Any], where: str) -> str:
    return _TEMPLATES.text(source, _names(row), f"benchmark {benchmark.name}: {key}", where)


def _value(benchmark: Benchmark, key: str, source: str, row: Mapping[str, Any], where: str) -> Any:
    return _TEMPLATES.value(source, _names(row), f"benchmark {benchmark.name}: {key}", where)
