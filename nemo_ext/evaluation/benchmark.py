"""Benchmarks and suites, one YAML file each, in hydra_conf/benchmark and hydra_conf/suite or at a user's path."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, JsonValue
from pydantic.dataclasses import dataclass

from nemo_ext.generate.settings import Sampling
from nemo_ext.job.registry import config_files
from nemo_ext.job.settings import STRICT, Count, StringsOrNone, Whole, checked, nearest
from nemo_ext.rl.tasks import GENERATORS

Kind = Literal["generate", "choice", "bits", "harness"]
Metric = Literal["avg", "pass", "maj"]
PLAIN = "default"
"""Name of a benchmark's only prompt, and of its only mode."""


def _named(value: object) -> object:
    """Convert a single template to a mapping from the default prompt's name; return other values unchanged."""
    return {PLAIN: value} if isinstance(value, str) else value


def _words(value: object) -> object:
    """Rename a mapping's Boolean keys to `on` and `off`, since YAML reads these mode names as Booleans if unquoted."""
    if not isinstance(value, Mapping):
        return value
    return {
        {True: "on", False: "off"}.get(key, key) if isinstance(key, bool) else key: mode for key, mode in value.items()
    }


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mode:
    """Variant of a benchmark's requests, such as reasoning on or off.

    Attributes:
        system: system message; None if there is none.
        body: additional fields of the request, such as {chat_template_kwargs: {enable_thinking: false}}.
        max_tokens: maximum tokens per answer; None for the benchmark's.
    """

    system: str | None = None
    body: Mapping[str, JsonValue] = field(default_factory=dict)
    max_tokens: Count | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Benchmark:
    """Definition of a benchmark: its data, prompts, sampling and scoring.

    Expressions and templates are sandboxed Jinja. Their variables are the row's columns, `row` (the whole row) and
    `file` (the path of the row's file relative to the data root). An expression yields a value, such as a number or a
    list; a template yields a string.

    Attributes:
        name: name in tables and in the store.
        about: measured ability, in a few words.
        kind: `generate`, answers that an environment verifies; `choice`, log-likelihoods of choices; `bits`, bits per
            byte of texts; `harness`, a task of lm-evaluation-harness.
        source: where to get the data; shown when it is missing.
        data: files or globs relative to evaluate.data_root; empty for a generated benchmark.
        tasks: files of RL tasks (docs/rl/tasks.md) to use instead of data; only tasks for `environment` are used.
        generator: generator to use instead of data: a name from `nemo_ext.rl.tasks` or
            `nemo_ext.evaluation.generators`.
        settings: arguments of the generator.
        count: number of generated problems.
        join: files with further columns, such as answers, which are added to the rows of the data with the same ids.
        where: expression that selects rows; None selects all.
        id: expression for a unique row id; if None, a hash of the row is the id.
        domain: expression for the row's group, such as a subject; None if there are no groups.
        prompt: mapping from name to template of the user message; with several, prompt sensitivity is measured. For
            `choice` it is the context, for `bits` the text.
        messages: expression for a whole conversation, instead of prompt.
        complete: whether the model continues the prompt as plain text, without a chat template, as for base models.
        modes: mapping from name to variant of the requests.
        environment: name of the verifier (`nemo_ext.rl.environments`).
        environment_settings: the verifier's settings.
        reference: mapping from the keys of the verifier's reference to expressions.
        metrics: mapping from further metrics to expressions, with `score` and `found`, the answer that the verifier
            compared (or none), as further variables. The value is a number, averaged over problems, or a pair of
            numbers, each summed over all samples and then divided.
        tools: expression for the declared tools.
        choices: for `choice`, expression for the list of choices, each written as a continuation of the context.
        gold: for `choice`, expression for the index of the correct choice, from 0.
        shots: number of few-shot examples before the question.
        shots_data: files with the examples; if empty, other rows of the data are used.
        shot: template of an example; if None, the prompt and the correct choice.
        samples: number of answers per problem.
        sampling: temperature, top_p and extra fields of the requests.
        max_tokens: maximum tokens per answer.
        metric: headline metric: `avg`, mean over samples; `pass`, pass@k; `maj`, majority vote over k samples.
        k: number of samples for pass@k and majority votes; None takes all.
        weight: weight in a suite's grand mean; 0 excludes the benchmark.
        higher_is_better: False for bits per byte and for harm rates.
        task: for `harness`, name of the task, whose file is in evaluate.harness_tasks.
    """

    name: Annotated[str, Field(pattern=r"^[\w.@+-]+$")]
    about: str = ""
    kind: Kind = "generate"
    source: str = ""
    data: StringsOrNone = ()
    tasks: StringsOrNone = ()
    generator: str | None = None
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    count: Count = 100
    join: StringsOrNone = ()
    where: str | None = None
    id: str | None = None
    domain: str | None = None
    prompt: Annotated[Mapping[str, str], BeforeValidator(_named)] = field(default_factory=dict)
    messages: str | None = None
    complete: bool = False
    modes: Annotated[Mapping[str, Mode], BeforeValidator(_words)] = field(default_factory=lambda: {PLAIN: Mode()})
    environment: str | None = None
    environment_settings: Mapping[str, JsonValue] = field(default_factory=dict)
    reference: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    tools: str | None = None
    choices: str | None = None
    gold: str | None = None
    shots: Whole = 0
    shots_data: StringsOrNone = ()
    shot: str | None = None
    samples: Count = 1
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    max_tokens: Count = 2048
    metric: Metric = "avg"
    k: Count | None = None
    weight: Annotated[float, Field(ge=0)] = 1.0
    higher_is_better: bool = True
    task: str | None = None

    def __post_init__(self) -> None:
        if self.kind == "harness" and self.task is None:
            raise ValueError("kind=harness requires task: set it to the name of a task of lm-evaluation-harness")
        if self.task is not None:
            return  # lm-evaluation-harness makes its problems
        if [bool(self.data), bool(self.tasks), self.generator is not None].count(True) != 1:
            raise ValueError("none or several of data, tasks and generator are set; set exactly one of them")
        if self.tasks or self.generator in GENERATORS:
            origin = "tasks" if self.tasks else f"generator={self.generator}"
            ignored = ["join", "where", "id", "domain", "prompt", "messages", "reference", "metrics", "tools"]
            ignored += ["choices"] if self.tasks else ["choices", "environment"]
            if unused := [name for name in (*ignored, "gold", "shots", "shot", "complete") if getattr(self, name)]:
                raise ValueError(f"{unused[0]} is not used with {origin}, which yields complete problems; remove it")
            if self.kind != "generate":
                raise ValueError(f"{origin} requires kind=generate, but kind is {self.kind}: change kind")
        elif not (self.prompt or self.messages):
            raise ValueError("prompt is missing: set it to a template of the user message")
        elif self.kind == "generate" and self.environment is None:
            raise ValueError("environment is missing: set it to the name of the verifier")
        if self.kind != "generate" and (self.messages is not None or self.environment is not None):
            key = "messages" if self.messages is not None else "environment"
            raise ValueError(f"{key} requires kind=generate, but kind is {self.kind}: remove {key}")
        if self.metrics and self.kind != "generate":
            raise ValueError(f"metrics requires kind=generate, but kind is {self.kind}: remove metrics")
        if self.join and (self.id is None or not self.data):
            raise ValueError(
                "join requires data and id: set id to an expression that has the same value in matching rows of both"
            )
        if self.kind == "choice" and (self.choices is None or self.gold is None):
            raise ValueError("kind=choice requires choices and gold, the index of the correct choice")
        if self.generator is not None and self.shots:
            raise ValueError("shots cannot be used with a generator, as the examples are rows of data; remove shots")
        if self.complete and (self.messages is not None or self.tools is not None or self.kind != "generate"):
            raise ValueError(
                "complete=true requires kind=generate and a prompt, without messages and tools; change these, or "
                "remove it"
            )
        if self.k is not None and self.k > self.samples:
            raise ValueError(f"k={self.k} exceeds samples={self.samples}; lower k or raise samples")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Suite:
    """Set of benchmarks that are evaluated together.

    Attributes:
        name: name of the suite.
        about: purpose of the suite.
        source: paper, table and page that the suite follows.
        benchmarks: names of benchmarks, or mappings with `name` and keys that override the benchmark's.
    """

    name: str
    about: str = ""
    source: str = ""
    benchmarks: Sequence[str | Mapping[str, JsonValue]]


def names(kind: Literal["benchmark", "suite", "published"]) -> list[str]:
    """Return the names of the installed benchmarks, suites or tables of published values."""
    return list(config_files(kind))


def read_yaml(kind: Literal["benchmark", "suite", "published"], name: str) -> dict[str, Any]:
    """Read a YAML file: an installed one given by name, or a user's given by a path that ends in .yaml or .yml.

    Raises:
        ValueError: the file does not exist, or does not hold a mapping.
    """
    path, key = Path(name).expanduser(), "paper" if kind == "published" else kind
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ValueError(f"{key}={name}: no such file; name an installed file, or correct the path")
        text = path.read_text()
    elif file := config_files(kind).get(name):
        text = file.read_text(encoding="utf-8")
    else:
        raise ValueError(f"{key}: unknown name {name!r}: {nearest(name, names(kind))}; or give a path to a .yaml file")
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(
            f"{key}={name}: the file is not valid YAML ({' '.join(str(error).split())}); correct it"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{key}={name}: expected a file with a mapping of keys, not {type(found).__name__}")
    return {"name": path.stem if path.suffix in (".yaml", ".yml") else name, **found}


def read_benchmark(given: str | Mapping[str, Any]) -> Benchmark:
    """Read a benchmark given by name or path, or by a mapping with `name` and keys that override the benchmark's.

    A benchmark file with `like: NAME` inherits the keys of another benchmark.

    Raises:
        ValueError: a key is invalid; the message names the benchmark, the key, its value and the expected values.
    """
    own = {"name": given} if isinstance(given, str) else dict(given)
    if "name" not in own:
        raise ValueError(f"benchmark {own}: the key 'name' is missing; set it to the name or path of a benchmark")
    name = str(own.pop("name"))
    found = _with_likes(name, ()) | own
    return checked(Benchmark, found, where=f"benchmark {found['name']}")


def _with_likes(name: str, before: tuple[str, ...]) -> dict[str, Any]:
    found = read_yaml("benchmark", name)
    like = found.pop("like", None)
    if like is None:
        return found
    if like in before:
        raise ValueError(
            f"benchmark {name}: like={like} makes benchmarks inherit from each other in a circle; remove this `like`"
        )
    return {**_with_likes(str(like), (*before, name)), **found}


def read_suite(name: str) -> tuple[Suite, list[Benchmark]]:
    """Read a suite given by name or path, and its benchmarks.

    Raises:
        ValueError: a key of the suite or of a benchmark is invalid, or two benchmarks share a name.
    """
    suite = checked(Suite, read_yaml("suite", name), where=f"suite {name}")
    benchmarks = [read_benchmark(entry) for entry in suite.benchmarks]
    for benchmark in benchmarks:
        if sum(other.name == benchmark.name for other in benchmarks) > 1:
            raise ValueError(f"suite {name} lists benchmark {benchmark.name} twice: remove one")
    return suite, benchmarks
