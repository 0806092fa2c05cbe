"""Settings of `nemo-ext synthesize`: roles, steps and outputs of a recipe."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue
from pydantic.dataclasses import dataclass

from nemo_ext.generate.settings import BatchSettings, Sampling
from nemo_ext.job.settings import STRICT, Count, Place, Places, Share, checked, nearest
from nemo_ext.serving.settings import AskingSettings
from nemo_ext.synthesis.expressions import TEMPLATES


def _spelled(value: object) -> object:
    """A number or a truth value that YAML has read, as an expression."""
    return json.dumps(value) if isinstance(value, bool | int | float) else value


Expression = Annotated[str, BeforeValidator(_spelled)]
Named = Mapping[str, Annotated[Expression, BeforeValidator(lambda value: "none" if value is None else value)]]
"""Expressions by the names of columns."""


def _without_nulls(value: object) -> object:
    if not isinstance(value, Mapping):
        return {} if value is None else value
    return {key: each for key, each in value.items() if each is not None}


Reasons = Annotated[Mapping[str, Expression], BeforeValidator(_without_nulls)]
"""Conditions by the reasons for which what does not satisfy them leaves; null leaves one out."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Role:
    """Who answers: an endpoint.

    Attributes:
        endpoint: run directory of `nemo-ext serve`, or URL; None for the job's `endpoint`.
        model: name of the model there, where it serves several.
        key_variable: environment variable with the endpoint's key.
        like: role whose endpoint this one takes where it has none of its own.
    """

    endpoint: Place | None = None
    model: str | None = None
    key_variable: str | None = None
    like: str | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Canaries:
    """Copies of rows with planted faults, which tell whether a judge judges.

    Attributes:
        share: share of the rows that get one; at least `LEAST` rows, or all if there are fewer.
        columns: columns that are planted, as expressions that may name `other`, a row made of another one of the input.
        when: expression: in which rows a fault is planted; None for any.
        fooled: expression over the answer's columns: true if the fault was taken for right.
        most: share of the canaries above which the job ends.
    """

    LEAST: ClassVar[int] = 20

    columns: Named
    fooled: Expression
    when: Expression | None = None
    share: Share = 0.02
    most: Share = 0.2

    def values(self) -> Iterator[tuple[str, str]]:
        """The expressions, each with its key."""
        yield from _named(**{"canaries.columns": self.columns})
        yield "canaries.fooled", self.fooled
        if self.when is not None:
            yield "canaries.when", self.when


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Step:
    """A step.

    Attributes:
        when: expression; rows for which it is false go on as they are. None for all rows.
    """

    kind: ClassVar[str]
    when: Expression | None = None

    def texts(self) -> Iterator[tuple[str, str]]:
        """The templates, each with its key."""
        yield from ()

    def values(self) -> Iterator[tuple[str, str]]:
        """The expressions, each with its key."""
        if self.when is not None:
            yield "when", self.when

    def roles(self) -> Iterator[str]:
        """The roles that it asks."""
        yield from ()

    def makes(self) -> set[str]:
        """The columns that it names."""
        planted = getattr(self, "canaries", None)
        named = [getattr(self, key, {}) for key in ("columns", "templates")] + ([planted.columns] if planted else [])
        return {name for section in named for name in section} | {getattr(self, "column", "")}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ask(Step):
    """Answers of a model to each row.

    Attributes:
        role: who is asked.
        prompt: template of the user's message.
        messages: expression in place of it: a text, or messages.
        system: template of a system message before it; nothing is put there where it gives no text.
        tools: expression of declared tools.
        thinking: expression of the mode, for models with modes: true or false; null leaves it to the endpoint.
        complete: whether the prompt goes to /v1/completions, without a chat template.
        samples: number of answers, each a row of its own; None for one in the row itself.
        temperature, top_p, max_tokens, stop, extra: see `nemo_ext.generate.settings.Sampling`.
        columns: what is kept of the answer, over the row and `answer`, `reasoning`, `tool_calls`, `finish_reason`,
            `tokens`, `model`, `sample` (its number), `samples` (how many were asked for).
        require: what an answer must satisfy, over the same and the new columns, by the reason for which it leaves.
        truncated, refusals: whether answers that the limit cut off, and those that begin like refusals, stay.
        canaries: see there.
    """

    kind: ClassVar[str] = "ask"
    role: str = "teacher"
    prompt: str | None = None
    messages: Expression | None = None
    system: str | None = None
    tools: Expression | None = None
    thinking: Expression | None = None
    complete: bool = False
    samples: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Share | None = None
    max_tokens: Count | None = None
    stop: str | tuple[str, ...] | None = None
    extra: Mapping[str, JsonValue] = Field(default_factory=dict)
    columns: Named = Field(default_factory=lambda: {"answer": "answer", "reasoning": "reasoning", "tokens": "tokens"})
    require: Reasons = Field(default_factory=dict)
    truncated: bool = False
    refusals: bool = False
    canaries: Canaries | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give a template here, or an expression in messages, and not both")
        if self.complete and self.thinking is not None:
            raise ValueError("thinking: a completion has no chat template: leave out thinking, or complete")
        self.sampling.body()

    @property
    def sampling(self) -> Sampling:
        """Sampling of the requests."""
        return Sampling(**{each.name: getattr(self, each.name) for each in fields(Sampling)})

    def texts(self) -> Iterator[tuple[str, str]]:
        yield from _given(self, "prompt", "system")

    def values(self) -> Iterator[tuple[str, str]]:
        yield from super().values()
        yield from _given(self, "messages", "tools", "thinking")
        yield from _named(columns=self.columns, require=self.require)
        if self.canaries is not None:
            yield from self.canaries.values()

    def roles(self) -> Iterator[str]:
        yield self.role


@dataclass(frozen=True, kw_only=True, config=STRICT)
class User:
    """A model that speaks as the user.

    Attributes:
        system: template of what it is told, over the task's row and `request`, the task's last message.
        role: who is asked.
        end: text with which it ends the conversation.
        max_turns: most of its messages.
    """

    system: str
    role: str = "user"
    end: str = "[done]"
    max_turns: Count = 8


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Converse(Step):
    """Whole conversations with the tools of a world (`nemo_ext.rl.worlds`), judged by how its database ends.

    Adds `messages`, `correct`, `score`, `why`, `tokens` and `samples`; the row is a task: prompt, tools, reference.

    Attributes:
        environment: name of the world; None for the row's column `environment`.
        settings: its settings.
        role: who is asked.
        samples: number of conversations, each a row of its own.
        user: a model in the user's place; None for the user's lines of the task.
        thinking: see `Ask`.
        temperature, top_p, max_tokens, stop, extra: see `Ask`.
    """

    kind: ClassVar[str] = "converse"
    environment: str | None = None
    settings: Mapping[str, Any] = Field(default_factory=dict)
    role: str = "teacher"
    samples: Count = 1
    user: User | None = None
    thinking: Expression | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Share | None = None
    max_tokens: Count | None = None
    stop: str | tuple[str, ...] | None = None
    extra: Mapping[str, JsonValue] = Field(default_factory=dict)

    @property
    def sampling(self) -> Sampling:
        """Sampling of the requests."""
        return Sampling(**{each.name: getattr(self, each.name) for each in fields(Sampling)})

    def texts(self) -> Iterator[tuple[str, str]]:
        if self.user is not None:
            yield "user.system", self.user.system

    def values(self) -> Iterator[tuple[str, str]]:
        yield from super().values()
        yield from _given(self, "thinking")

    def roles(self) -> Iterator[str]:
        yield self.role
        if self.user is not None:
            yield self.user.role


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Verify(Step):
    """Verdicts of an environment (`nemo_ext.rl.environments`); adds `correct`, `score`, `why`.

    Attributes:
        environment: name of the environment; None for the row's column `environment`.
        reference: what the environment compares with, by key; None for the row's column `reference`.
        answer, reasoning, tool_calls: expressions of the response's parts.
        tools: expression of the tools that were declared.
        settings: settings of the environment; by environment where the rows name it.
        judge: role that judges, for an environment with a judge.
        canaries: see there.
    """

    kind: ClassVar[str] = "verify"
    environment: str | None = None
    reference: Named | None = None
    answer: Expression = "answer"
    reasoning: Expression = "reasoning if reasoning is defined else none"
    tool_calls: Expression = "tool_calls if tool_calls is defined else []"
    tools: Expression = "tools if tools is defined else []"
    settings: Mapping[str, Any] = Field(default_factory=dict)
    judge: str | None = None
    canaries: Canaries | None = None

    def values(self) -> Iterator[tuple[str, str]]:
        yield from super().values()
        yield from ((key, getattr(self, key)) for key in ("answer", "reasoning", "tool_calls", "tools"))
        yield from _named(reference=self.reference or {})
        if self.canaries is not None:
            yield from self.canaries.values()

    def roles(self) -> Iterator[str]:
        if self.judge is not None:
            yield self.judge


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Set(Step):
    """New columns: expressions, or templates in `texts`. Later ones may name earlier ones."""

    kind: ClassVar[str] = "set"
    columns: Named = Field(default_factory=dict)
    templates: Named = Field(default_factory=dict)

    def texts(self) -> Iterator[tuple[str, str]]:
        yield from _named(templates=self.templates)

    def values(self) -> Iterator[tuple[str, str]]:
        yield from super().values()
        yield from _named(columns=self.columns)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Keep(Step):
    """Rows that satisfy all of `require`, by the reason for which others leave."""

    kind: ClassVar[str] = "keep"
    require: Reasons

    def values(self) -> Iterator[tuple[str, str]]:
        yield from super().values()
        yield from _named(require=self.require)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Expand(Step):
    """A row for each entry of a list: a mapping of columns, or a value that becomes the column with the step's name.

    Adds `part`, the entry's number from 0, and `parts`, how many there are.
    """

    kind: ClassVar[str] = "expand"
    rows: Expression

    def values(self) -> Iterator[tuple[str, str]]:
        yield from super().values()
        yield "rows", self.rows


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Group(Step):
    """Rows that a step has made out of one, together again.

    Attributes:
        by: that step: an `ask` or `converse` with samples, or an `expand`.
        columns: new columns over `group`, the list of the rows, and the first row's columns.
        require: what the group must satisfy, by the reason for which it leaves.
        where: expression over each row: which of them stay.
        order: expression over each row; those with the lowest values stay.
        most: number of rows that stay; None for all.
        into: `rows`, or `one` row with the first row's columns and the new ones.
    """

    kind: ClassVar[str] = "group"
    by: str
    columns: Named = Field(default_factory=dict)
    require: Reasons = Field(default_factory=dict)
    where: Expression | None = None
    order: Expression | None = None
    most: Count | None = None
    into: Literal["rows", "one"] = "rows"

    def __post_init__(self) -> None:
        if self.when is not None:
            raise ValueError("when: a group has no such key: use where")

    def values(self) -> Iterator[tuple[str, str]]:
        yield from _named(columns=self.columns, require=self.require)
        yield from _given(self, "where", "order")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Draw(Step):
    """A column with a list of values of other rows, drawn by the seed.

    Attributes:
        column: the new column.
        count: number of other rows.
        value: expression over each of them.
    """

    kind: ClassVar[str] = "draw"
    column: str
    value: Expression
    count: Count = 1

    def values(self) -> Iterator[tuple[str, str]]:
        yield from super().values()
        yield "value", self.value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Unique(Step):
    """The first of rows with the same text, or with nearly the same.

    Attributes:
        text: expression of the text.
        near: least Jaccard similarity of word 5-grams that counts as the same; None for equal texts alone.
    """

    kind: ClassVar[str] = "unique"
    text: Expression
    near: Annotated[float, Field(gt=0, le=1)] | None = 0.8

    def values(self) -> Iterator[tuple[str, str]]:
        yield from super().values()
        yield "text", self.text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Screen(Step):
    """The filters of `nemo-ext sft_data` (docs/data/sft_filters.md).

    Attributes:
        messages: expression of the conversation; a text is one message of the user's.
        filters: filters with their settings.
        language: expression of the language that the filter `language` expects; None for none.
        tools: expression of the declared tools.
    """

    kind: ClassVar[str] = "screen"
    messages: Expression
    filters: Mapping[str, Any]
    language: Expression | None = None
    tools: Expression | None = None

    def values(self) -> Iterator[tuple[str, str]]:
        yield from super().values()
        yield from _given(self, "messages", "language", "tools")


KINDS: Mapping[str, type[Step]] = {
    kind.kind: kind for kind in (Ask, Converse, Verify, Set, Keep, Expand, Group, Draw, Unique, Screen)
}

OutputKind = Literal["conversations", "generations", "tasks", "documents", "prompts"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OutputSettings:
    """A file of the output.

    Attributes:
        kind: conversations for `sft_data`, generations for `preference_data`, tasks for `rl`, documents for `curate`
            and `tokenize`, prompts for other recipes.
        record: expressions of the record's keys; keys whose value is null are left out.
        of: step whose rows it is made of; None for the last.
        where: expression: which rows; None for all.
        once: expression: only the first row of each value; None for all.
        pairing: kind of `preference_data` source that reads generations, for the card.
    """

    kind: OutputKind
    record: Named
    of: str | None = None
    where: Expression | None = None
    once: Expression | None = None
    pairing: Literal["judged", "pairs", "safety", "tool_hallucination"] = "judged"

    def values(self) -> Iterator[tuple[str, str]]:
        """The expressions, each with its key."""
        yield from _named(record=self.record)
        yield from _given(self, "where", "once")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WorkSettings(BatchSettings):
    """How the work is done: the section `synthesize`; beside those of any batch job, for each step that asks:

    Attributes:
        canaries: share of the rows with a planted fault, in place of the recipe's; 0 plants none.
    """

    canaries: Share | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(AskingSettings):
    """Settings of `nemo-ext synthesize`; roles, steps and outputs are a `Recipe`'s.

    Attributes:
        input: files with the rows that the steps begin with; globs too.
        output: folder to write.
        recipe: name of the recipe.
        about: source of the recipe, for the card.
        license: license of the data, for the card.
        seed: seed of answers and of sampled rows.
        roles: models by role.
        steps: steps by name, in order.
        outputs: files by name.
        synthesize: how the work is done.
    """

    input: Places
    output: Place
    recipe: str
    about: str | None = None
    license: str | None = None
    seed: int = 1234
    roles: Mapping[str, Any] = Field(default_factory=dict)
    steps: Mapping[str, Any] = Field(default_factory=dict)
    outputs: Mapping[str, Any] = Field(default_factory=dict)
    synthesize: WorkSettings = Field(default_factory=WorkSettings)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe.

    Attributes:
        name: its name.
        about: where it is from, for the card.
        roles: who answers, by name.
        steps: the steps by name, in order.
        outputs: the files by name.
    """

    name: str
    about: str
    roles: Mapping[str, Role]
    steps: Mapping[str, Any]
    outputs: Mapping[str, OutputSettings]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Recipe":
        """The recipe of a composed config.

        Raises:
            ValueError: naming the step, the key, what it holds and what it may hold.
        """
        for key in ("roles", "steps", "outputs"):
            if not isinstance(config[key], Mapping):
                raise ValueError(f"{key}={config[key]!r}: expected a section with names")
        roles = {str(name): checked(Role, role or {}, where=f"roles.{name}") for name, role in config["roles"].items()}
        known = [name for name, step in config["steps"].items() if isinstance(step, Mapping) and "kind" in step]
        steps = {str(name): _step(str(name), step, known) for name, step in config["steps"].items() if step is not None}
        if not steps:
            raise ValueError("steps: there are none: name a recipe, such as recipe=verified_traces")
        outputs = {
            str(name): checked(OutputSettings, output, where=f"outputs.{name}")
            for name, output in config["outputs"].items()
            if output is not None
        }
        if not outputs:
            raise ValueError("outputs: there are none: name a file and its kind")
        recipe = cls(
            name=str(config["recipe"]), about=str(config["about"] or ""), roles=roles, steps=steps, outputs=outputs
        )
        recipe._check()
        return recipe

    def _check(self) -> None:
        multiply = list[str]()
        for name, role in self.roles.items():
            if role.like is not None and (role.like not in self.roles or self.roles[role.like].like is not None):
                raise ValueError(f"roles.{name}.like={role.like}: {nearest(role.like, set(self.roles) - {name})}")
        for name, step in self.steps.items():
            where = f"steps.{name}"
            _check_name(where, name)
            if "id" in step.makes():
                raise ValueError(f"{where}: id names the row, and cannot be a new column")
            for role in step.roles():
                if role not in self.roles:
                    raise ValueError(f"{where}: unknown role {role!r}: {nearest(role, self.roles)}")
            if isinstance(step, Group) and step.by not in multiply:
                known = nearest(step.by, multiply) if multiply else "there is none before it"
                raise ValueError(f"{where}.by={step.by}: no step before it that makes several rows of one: {known}")
            for key, text in step.texts():
                TEMPLATES.check(f"{where}.{key}", text=text)
            for key, value in step.values():
                TEMPLATES.check(f"{where}.{key}", value=value)
            if isinstance(step, Expand | Converse) or (isinstance(step, Ask) and step.samples is not None):
                multiply.append(name)
        for name, output in self.outputs.items():
            _check_name(f"outputs.{name}", name)
            if output.of is not None and output.of not in self.steps:
                raise ValueError(f"outputs.{name}.of={output.of}: unknown step: {nearest(output.of, self.steps)}")
            for key, value in output.values():
                TEMPLATES.check(f"outputs.{name}.{key}", value=value)

    def place(self, role: str) -> Role:
        """Where a role is asked: at its own endpoint, or at that of the one it is like."""
        own = self.roles[role]
        if own.endpoint is not None or own.like is None:
            return own
        other = self.roles[own.like]
        named = {key: getattr(own, key) or getattr(other, key) for key in ("model", "key_variable")}
        return Role(endpoint=other.endpoint, **named)

    def asked(self) -> list[str]:
        """The roles that are asked, each once."""
        return list(dict.fromkeys(role for step in self.steps.values() for role in step.roles()))


def _check_name(where: str, name: str) -> None:
    if not name.replace("_", "").isalnum():
        raise ValueError(f"{where}: a name has letters, digits and _ alone")


def _step(name: str, section: Any, known: Sequence[str]) -> Step:
    if not isinstance(section, Mapping):
        raise ValueError(f"steps.{name}={section!r}: expected a section with keys")
    own = dict(section)
    if "kind" not in own:
        raise ValueError(f"steps.{name}: no such step, and without a kind no new one: {nearest(name, known)}")
    kind = own.pop("kind")
    if kind not in KINDS:
        raise ValueError(f"steps.{name}.kind={kind}: {nearest(str(kind), KINDS)}")
    return checked(KINDS[kind], own, where=f"steps.{name}")


def _given(section: Any, *keys: str) -> Iterator[tuple[str, str]]:
    yield from ((key, text) for key in keys if (text := getattr(section, key)) is not None)


def _named(**sections: Named) -> Iterator[tuple[str, str]]:
    for key, section in sections.items():
        yield from ((f"{key}.{name}", text) for name, text in section.items())
