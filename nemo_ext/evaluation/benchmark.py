"""Benchmarks and suites: one YAML file each in hydra_conf/benchmark and hydra_conf/suite, or the user's own by path."""

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
"""Name of the prompt and of the mode of a benchmark that has one of each."""


def _named(value: object) -> object:
    """Prompts or modes by name; one without a name is the default."""
    return {PLAIN: value} if isinstance(value, str) else value


def _words(value: object) -> object:
    """Modes by name: `on` and `off` without quotes are no texts to YAML."""
    if not isinstance(value, Mapping):
        return value
    return {
        {True: "on", False: "off"}.get(key, key) if isinstance(key, bool) else key: mode for key, mode in value.items()
    }


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mode:
    """A way to ask for an answer, such as reasoning on or off.

    Attributes:
        system: text of the system message; None for none.
        body: further fields of the request, such as {chat_template_kwargs: {enable_thinking: false}}.
        max_tokens: most tokens of an answer; None takes the benchmark's.
    """

    system: str | None = None
    body: Mapping[str, JsonValue] = field(default_factory=dict)
    max_tokens: Count | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Benchmark:
    """A benchmark.

    Expressions and templates are Jinja's, sandboxed, over a row's columns, `row` with all of them, and `file`, the path
    of the row's file below the data root. An expression gives a value (a number, a list); a template gives a text.

    Attributes:
        name: name in tables and in the store.
        about: what it measures, in a few words.
        kind: `generate`, an answer that an environment verifies; `choice`, log-likelihoods of choices; `bits`, bits per
            byte of texts; `harness`, a task of lm-evaluation-harness.
        source: where its data is had, for the user who lacks it.
        data: files below evaluate.data_root, globs too; empty for a generated benchmark.
        tasks: files of RL tasks (docs/rl/tasks.md), in place of data: those of `environment`.
        generator: module of `nemo_ext.rl.tasks` or `nemo_ext.evaluation.generators` by name, in place of data.
        settings: arguments of the generator.
        count: number of generated problems.
        where: expression that a row must satisfy; None takes all.
        id: expression with a name for each row; None takes a hash of the row.
        domain: expression with the row's group, such as a subject; None for none.
        prompt: templates of the user's message, by name; with several, the sensitivity to prompts is measured. For
            `choice` the context, for `bits` the text.
        messages: expression with whole conversations, in place of prompt.
        complete: whether the model continues the prompt as a text, without a chat template, as base models want.
        modes: ways to ask, by name.
        environment: name of the verifier (`nemo_ext.rl.environments`).
        environment_settings: its settings.
        reference: expressions of the verifier's reference, by key.
        tools: expression with declared tools.
        choices: for `choice`, expression with the texts of the choices, as they follow the context.
        gold: for `choice`, expression with the number of the right one, from 0.
        shots: number of solved examples before the question.
        shots_data: files with the examples; empty takes other rows of the data.
        shot: template of an example; None is the prompt and the right choice.
        samples: answers to each problem.
        sampling: of the answers; temperature, top_p, extra.
        max_tokens: most tokens of an answer.
        metric: what the headline is: `avg`, mean over samples; `pass`, at least one of k right; `maj`, the most
            frequent answer.
        k: samples that the metric is about; None takes all.
        weight: weight in a suite's grand mean; 0 leaves it out.
        higher_is_better: False for bits per byte and for rates of harm.
        task: for `harness`, name of the task; its folder is evaluate.harness_tasks.
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
            raise ValueError("task: name the task of lm-evaluation-harness")
        if self.task is not None:
            return  # lm-evaluation-harness makes its problems
        if [bool(self.data), bool(self.tasks), self.generator is not None].count(True) != 1:
            raise ValueError("data, tasks, generator: give one of them")
        if self.tasks or self.generator in GENERATORS:
            of = "tasks" if self.tasks else f"generator={self.generator}"
            ignored = ["where", "id", "domain", "prompt", "messages", "reference", "tools", "choices"]
            ignored += [] if self.tasks else ["environment"]
            if given := [name for name in (*ignored, "gold", "shots", "shot", "complete") if getattr(self, name)]:
                raise ValueError(f"{given[0]}: {of} makes whole problems: leave it out")
            if self.kind != "generate":
                raise ValueError(f"kind={self.kind}: {of} makes problems with answers")
        elif not (self.prompt or self.messages):
            raise ValueError("prompt: say how a row is asked")
        elif self.kind == "generate" and self.environment is None:
            raise ValueError("environment: say what verifies an answer")
        if self.kind != "generate" and (self.messages is not None or self.environment is not None):
            raise ValueError(f"{'messages' if self.messages is not None else 'environment'}: is for generated answers")
        if self.kind == "choice" and (self.choices is None or self.gold is None):
            raise ValueError("choices, gold: say what the choices are, and which is right")
        if self.generator is not None and self.shots:
            raise ValueError("shots: are rows of data, which a generator has not")
        if self.complete and (self.messages is not None or self.tools is not None or self.kind != "generate"):
            raise ValueError("complete: is for generated answers to a prompt, without messages or tools")
        if self.k is not None and self.k > self.samples:
            raise ValueError(f"k={self.k}: there are samples={self.samples}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Suite:
    """Benchmarks that are evaluated together.

    Attributes:
        name: name of the suite.
        about: what it is for.
        source: paper, table and page.
        benchmarks: names, or mappings with `name` and the keys that differ here.
    """

    name: str
    about: str = ""
    source: str = ""
    benchmarks: Sequence[str | Mapping[str, JsonValue]]


def names(kind: Literal["benchmark", "suite", "published"]) -> list[str]:
    """Names of installed benchmarks, suites or tables of published values."""
    return list(config_files(kind))


def read_yaml(kind: Literal["benchmark", "suite", "published"], name: str) -> dict[str, Any]:
    """The mapping of a file of the package by its name, or of the user's by a path that ends in .yaml.

    Raises:
        ValueError: there is none, or it is no mapping.
    """
    own = Path(name).expanduser()
    if own.suffix in (".yaml", ".yml"):
        if not own.is_file():
            raise ValueError(f"{kind}={name}: no such file")
        text = own.read_text()
    elif file := config_files(kind).get(name):
        text = file.read_text(encoding="utf-8")
    else:
        raise ValueError(f"{kind}: unknown name {name!r}: {nearest(name, names(kind))}; or give a path to a .yaml file")
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{kind}={name}: no YAML ({' '.join(str(error).split())})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{kind}={name}: expected a mapping")
    return {"name": own.stem if own.suffix in (".yaml", ".yml") else name, **found}


def read_benchmark(given: str | Mapping[str, Any]) -> Benchmark:
    """A benchmark by its name or path, or by a mapping with `name` and the keys that differ.

    A file's `like: NAME` takes over the keys of another one.

    Raises:
        ValueError: naming the benchmark, the key, what it holds and what it may hold.
    """
    own = {"name": given} if isinstance(given, str) else dict(given)
    if "name" not in own:
        raise ValueError(f"benchmark: {own}: the key 'name' is missing")
    name = str(own.pop("name"))
    found = _with_likes(name, ()) | own
    return checked(Benchmark, found, where=f"benchmark {found['name']}")


def _with_likes(name: str, before: tuple[str, ...]) -> dict[str, Any]:
    found = read_yaml("benchmark", name)
    like = found.pop("like", None)
    if like is None:
        return found
    if like in before:
        raise ValueError(f"benchmark {name}: like={like}: goes round in a circle")
    return {**_with_likes(str(like), (*before, name)), **found}


def read_suite(name: str) -> tuple[Suite, list[Benchmark]]:
    """A suite by its name or path, and its benchmarks.

    Raises:
        ValueError: see `read_benchmark`; or two benchmarks share a name.
    """
    suite = checked(Suite, read_yaml("suite", name), where=f"suite {name}")
    found = [read_benchmark(each) for each in suite.benchmarks]
    for benchmark in found:
        if sum(each.name == benchmark.name for each in found) > 1:
            raise ValueError(f"suite {name}: benchmark {benchmark.name} is there twice")
    return suite, found
