"""Settings of `nemo-ext synthesize`: roles, steps and outputs of a recipe."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from nemo_ext.generate.settings import BatchSettings, Sampling
from nemo_ext.job.settings import STRICT, Count, Place, Places, Share, checked, nearest
from nemo_ext.serving.settings import AskingSettings
from nemo_ext.synthesis.expressions import TEMPLATES


def _spelled(value: object) -> object:
    """Return a number or boolean from YAML as the expression that evaluates to it; return other values unchanged."""
    return json.dumps(value) if isinstance(value, bool | int | float) else value


Expression = Annotated[str, BeforeValidator(_spelled)]
Named = Mapping[str, Annotated[Expression, BeforeValidator(lambda value: "none" if value is None else value)]]
"""Mapping from column name to expression."""


def _without_nulls(value: object) -> object:
    if not isinstance(value, Mapping):
        return {} if value is None else value
    return {key: each for key, each in value.items() if each is not None}


Reasons = Annotated[Mapping[str, Expression], BeforeValidator(_without_nulls)]
"""Mapping from reason to condition: rows that fail the condition are dropped for this reason; null disables it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Role:
    """Role of a model in a recipe, and the endpoint that serves it.

    Attributes:
        endpoint: run directory of `nemo-ext serve`, or URL; if None, the job's `endpoint`.
        model: name of the model, for an endpoint that serves several.
        key_variable: environment variable that holds the endpoint's API key.
        like: role whose endpoint is the default for this role.
    """

    endpoint: Place | None = None
    model: str | None = None
    key_variable: str | None = None
    like: str | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Canaries:
    """Canaries: copies of rows with planted faults, which show whether a judge detects faults.

    Attributes:
        share: share of rows that get a canary; at least `LEAST` rows do, or all if there are fewer.
        columns: faulty columns, as expressions that may refer to `other`, a row that comes from another input row.
        when: condition for planting a fault in a row; None for all rows.
        fooled: condition over the answer's columns that holds if the judge accepted the fault.
        most: share of accepted canaries above which the job fails.
    """

    LEAST: ClassVar[int] = 20
    VALUES: ClassVar[tuple[str, ...]] = ("canaries.columns", "canaries.fooled", "canaries.when")

    columns: Named
    fooled: Expression
    when: Expression | None = None
    share: Share = 0.02
    most: Share = 0.2


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Step:
    """Step of a recipe.

    `TEXTS` lists the keys that hold templates, `VALUES` those that hold expressions, and `ROLES` those that name the
    roles (models) that the step queries.

    Attributes:
        when: condition for applying the step to a row; other rows pass unchanged. None for all rows.
    """

    kind: ClassVar[str]
    TEXTS: ClassVar[tuple[str, ...]] = ()
    VALUES: ClassVar[tuple[str, ...]] = ()
    ROLES: ClassVar[tuple[str, ...]] = ()
    when: Expression | None = None

    def roles(self) -> Iterator[str]:
        """Yield the roles (models) that the step queries."""
        return (role for _, role in _entries(self, self.ROLES))

    def makes(self) -> set[str]:
        """Return the names of the columns that the step and its canaries set; may contain the empty string."""
        planted = getattr(self, "canaries", None)
        named = [getattr(self, key, {}) for key in ("columns", "templates")] + ([planted.columns] if planted else [])
        return {name for section in named for name in section} | {getattr(self, "column", "")}


_NOT_EMBEDDED = ("system", "tools", "thinking", "complete", "samples", "temperature", "top_p", "max_tokens", "stop")
"""Settings of a step `ask` that have no meaning for embeddings."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ask(Step, Sampling):
    """Step that asks a model for answers to each row.

    Attributes:
        role: role that answers.
        prompt: template of the user message.
        messages: expression for the user message or for whole messages, instead of `prompt`.
        system: template of a system message; the message is omitted if it renders to nothing.
        tools: expression for the declared tools.
        thinking: expression for the reasoning mode, true or false; null leaves it to the endpoint.
        complete: whether to send the prompt to /v1/completions, without a chat template.
        embed: true to send the prompt to /v1/embeddings; the answer is the vector as JSON.
        samples: number of answers per row, each of which becomes a new row; None adds one answer to the row itself.
        temperature, top_p, max_tokens, stop, extra: see `nemo_ext.generate.settings.Sampling`.
        columns: expressions for new columns, over the row and `answer`, `reasoning`, `tool_calls`, `finish_reason`,
            `tokens`, `model`, `sample` (number of the answer) and `samples` (answers per row).
        require: conditions on an answer, over the same variables and the new columns.
        truncated, refusals: whether to keep answers truncated by the token limit, and answers that begin like refusals.
        canaries: see `Canaries`.
    """

    kind = "ask"
    TEXTS = ("prompt", "system")
    VALUES = ("when", "messages", "tools", "thinking", "columns", "require", *Canaries.VALUES)
    ROLES = ("role",)
    role: str = "teacher"
    prompt: str | None = None
    messages: Expression | None = None
    system: str | None = None
    tools: Expression | None = None
    thinking: Expression | None = None
    complete: bool = False
    embed: Literal[True] | None = None
    samples: Count | None = None
    columns: Named = Field(default_factory=lambda: {"answer": "answer", "reasoning": "reasoning", "tokens": "tokens"})
    require: Reasons = Field(default_factory=dict)
    truncated: bool = False
    refusals: bool = False
    canaries: Canaries | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.messages is None):
            raise ValueError(
                "prompt (a template) and messages (an expression) are both set, or neither is: set exactly one of them"
            )
        if self.complete and self.thinking is not None:
            raise ValueError("thinking requires a chat template, which complete=true does not use: remove one of them")
        if self.embed and (unused := [key for key in _NOT_EMBEDDED if getattr(self, key)]):
            raise ValueError(f"{unused[0]} is not used with embed=true, which requests the vector of a text: remove it")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class User:
    """Model that simulates the user.

    Attributes:
        system: template of its system message, over the task's row and `request`, the task's last message.
        role: role that simulates the user.
        end: string with which the model ends the conversation.
        max_turns: maximum number of its messages.
    """

    system: str
    role: str = "user"
    end: str = "[done]"
    max_turns: Count = 8


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Converse(Step, Sampling):
    """Step that holds conversations in which a model uses an environment's tools (`nemo_ext.rl.worlds`).

    Each row is a task with prompt, tools and reference. The environment verifies a conversation by the final state of
    its database. The step adds the columns `messages`, `correct`, `score`, `why`, `tokens` and `samples`.

    Attributes:
        environment: name of the environment; if None, the row's column `environment`.
        settings: the environment's settings.
        role: role that answers.
        samples: number of conversations per row, each of which becomes a new row.
        user: model that simulates the user; if None, the task's user messages are used.
        thinking: see `Ask`.
        temperature, top_p, max_tokens, stop, extra: see `Ask`.
    """

    kind = "converse"
    TEXTS = ("user.system",)
    VALUES = ("when", "thinking")
    ROLES = ("role", "user.role")
    environment: str | None = None
    settings: Mapping[str, Any] = Field(default_factory=dict)
    role: str = "teacher"
    samples: Count = 1
    user: User | None = None
    thinking: Expression | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Verify(Step):
    """Step that verifies answers with an environment (`nemo_ext.rl.environments`); adds `correct`, `score`, `why`.

    Attributes:
        environment: name of the environment; if None, the row's column `environment`.
        reference: mapping from the reference's keys to expressions; if None, the row's column `reference`.
        answer, reasoning, tool_calls: expressions for the parts of the response.
        tools: expression for the declared tools.
        settings: the environment's settings; a mapping from environment to settings if the rows name the environment.
        judge: role of the judge, for an environment that uses one.
        canaries: see `Canaries`.
    """

    kind = "verify"
    VALUES = ("when", "answer", "reasoning", "tool_calls", "tools", "reference", *Canaries.VALUES)
    ROLES = ("judge",)
    environment: str | None = None
    reference: Named | None = None
    answer: Expression = "answer"
    reasoning: Expression = "reasoning if reasoning is defined else none"
    tool_calls: Expression = "tool_calls if tool_calls is defined else []"
    tools: Expression = "tools if tools is defined else []"
    settings: Mapping[str, Any] = Field(default_factory=dict)
    judge: str | None = None
    canaries: Canaries | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Set(Step):
    """Step that sets columns from expressions (`columns`) or `templates`; later ones may refer to earlier ones."""

    kind = "set"
    TEXTS = ("templates",)
    VALUES = ("when", "columns")
    columns: Named = Field(default_factory=dict)
    templates: Named = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Keep(Step):
    """Step that keeps the rows that satisfy all conditions in `require`."""

    kind = "keep"
    VALUES = ("when", "require")
    require: Reasons


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Expand(Step):
    """Step that makes one row per entry of the list `rows`.

    An entry is a mapping of new columns, or a value for a column with the step's name. The step also adds `part`, the
    entry's index from 0, and `parts`, the number of entries.
    """

    kind = "expand"
    VALUES = ("when", "rows")
    rows: Expression


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Group(Step):
    """Step that groups the rows that an earlier step made from one row.

    Attributes:
        by: name of the earlier step, of kind `ask` with samples, `converse` or `expand`.
        columns: expressions for new columns, over `group` (the list of rows) and the first row's columns.
        require: conditions on the group, which is dropped if one fails.
        where: condition for keeping a row.
        order: expression by which the rows are sorted, in ascending order.
        most: maximum number of rows to keep, the first in this order; None for all.
        into: `rows` yields the kept rows, `one` a single row with the columns of the first one and the new columns.
    """

    kind = "group"
    VALUES = ("columns", "require", "where", "order")
    by: str
    columns: Named = Field(default_factory=dict)
    require: Reasons = Field(default_factory=dict)
    where: Expression | None = None
    order: Expression | None = None
    most: Count | None = None
    into: Literal["rows", "one"] = "rows"

    def __post_init__(self) -> None:
        if self.when is not None:
            raise ValueError("a step with kind=group does not support the key `when`: use `where`")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Draw(Step):
    """Step that adds a column with a list of values from other rows, which are drawn at random.

    Attributes:
        column: name of the new column.
        count: number of rows to draw.
        value: expression over each drawn row.
        among: condition for the rows that are drawn from; None for all.
    """

    kind = "draw"
    VALUES = ("when", "among", "value")
    column: str
    value: Expression
    count: Count = 1
    among: Expression | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Nearest(Step):
    """Step that adds a column with the rows whose vectors have the highest cosine similarity to the row's.

    Attributes:
        column: name of the new column, a list of {value, similarity}, the most similar first.
        vector: expression for a row's vector, a list of numbers.
        among: condition for candidates; exclude these rows from the step with `when`, as a row is nearest to itself.
        value: expression over each candidate.
        count: number of candidates in the list.
    """

    kind = "nearest"
    VALUES = ("when", "vector", "among", "value")
    column: str
    vector: Expression
    among: Expression
    value: Expression
    count: Count = 5


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Spread(Step):
    """Step that orders rows in hierarchical round robin, so that the first N are diverse (Nemotron 3 Nano, 2.2.4).

    Rows are taken in turn from the groups that share the first entry of `by`, within each group in turn from those
    that share the second entry, and so on.

    Attributes:
        by: expression for the list of a row's topics, from broad to narrow.
        most: maximum number of rows to keep, the first in this order; None for all.
    """

    kind = "spread"
    VALUES = ("by",)
    by: Expression
    most: Count | None = None

    def __post_init__(self) -> None:
        if self.when is not None:
            raise ValueError(
                "a step with kind=spread does not support the key `when`: remove it, as the step orders all rows"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Unique(Step):
    """Step that removes duplicates and near duplicates; of equal or similar rows, it keeps the first.

    Attributes:
        text: expression for the string to compare.
        near: minimum Jaccard similarity of word 5-grams for near duplicates; None removes only exact duplicates.
    """

    kind = "unique"
    VALUES = ("when", "text")
    text: Expression
    near: Annotated[float, Field(gt=0, le=1)] | None = 0.8


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Screen(Step):
    """Step that applies the filters of `nemo-ext sft_data` (docs/data/sft_filters.md).

    Attributes:
        messages: expression for the conversation; a string is a single user message.
        filters: filters with their settings.
        language: expression for the expected language, which the filter `language` uses; None if there is none.
        tools: expression for the declared tools.
    """

    kind = "screen"
    VALUES = ("when", "messages", "language", "tools")
    messages: Expression
    filters: Mapping[str, Any]
    language: Expression | None = None
    tools: Expression | None = None


KINDS: Mapping[str, type[Step]] = {
    kind.kind: kind for kind in (Ask, Converse, Verify, Set, Keep, Expand, Group, Draw, Nearest, Spread, Unique, Screen)
}

OutputKind = Literal["conversations", "generations", "tasks", "documents", "prompts"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OutputSettings:
    """Settings of an output file.

    Attributes:
        kind: conversations for `sft_data`, generations for `preference_data`, tasks for `rl`, documents for `curate`
            and `tokenize`, prompts for other recipes.
        record: expressions for the keys of a record; null values are omitted.
        of: step whose rows are written; None for the last step.
        where: condition for writing a row; None writes all rows.
        once: expression whose value must be unique: only the first row with each value is written; None writes all.
        pairing: kind of the `preference_data` source for generations, shown on the card.
    """

    kind: OutputKind
    record: Named
    of: str | None = None
    where: Expression | None = None
    once: Expression | None = None
    pairing: Literal["judged", "pairs", "safety", "tool_hallucination"] = "judged"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WorkSettings(BatchSettings):
    """Settings in the `synthesize` section, which apply to every step that sends requests.

    Attributes:
        canaries: share of rows that get a canary; overrides the recipe's share, and 0 disables canaries.
    """

    canaries: Share | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(AskingSettings):
    """Settings of `nemo-ext synthesize`; `Recipe` validates roles, steps and outputs.

    Attributes:
        input: files with the input rows, or globs.
        output: output folder.
        recipe: name of the recipe.
        about: description and source of the recipe, for the card.
        license: licence of the data, for the card.
        seed: seed for the answers and for all random decisions.
        roles: mapping from name to role.
        steps: mapping from name to step, in order.
        outputs: mapping from name to output file.
        synthesize: requests, retries and canaries.
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
    """Validated recipe.

    Attributes:
        name: name of the recipe.
        about: description and source, for the card.
        roles: mapping from name to role.
        steps: mapping from name to step, in order.
        outputs: mapping from name to output file.
    """

    name: str
    about: str
    roles: Mapping[str, Role]
    steps: Mapping[str, Any]
    outputs: Mapping[str, OutputSettings]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Recipe":
        """Create the recipe described by a composed config.

        Raises:
            ValueError: a key is invalid; the message names the step, the key, its value and the expected values.
        """
        for key in ("roles", "steps", "outputs"):
            if not isinstance(config[key], Mapping):
                raise ValueError(f"{key}={config[key]!r}: expected a mapping from names to settings")
        roles = {str(name): checked(Role, role or {}, where=f"roles.{name}") for name, role in config["roles"].items()}
        known = [name for name, step in config["steps"].items() if isinstance(step, Mapping) and "kind" in step]
        steps = {str(name): _step(str(name), step, known) for name, step in config["steps"].items() if step is not None}
        if not steps:
            raise ValueError("steps is empty: choose a recipe, such as recipe=verified_traces")
        outputs = {
            str(name): checked(OutputSettings, output, where=f"outputs.{name}")
            for name, output in config["outputs"].items()
            if output is not None
        }
        if not outputs:
            raise ValueError("outputs is empty: add an output with kind and record")
        recipe = cls(
            name=str(config["recipe"]), about=str(config["about"] or ""), roles=roles, steps=steps, outputs=outputs
        )
        recipe._check()
        return recipe

    def _check(self) -> None:
        multiply = list[str]()
        for name, role in self.roles.items():
            if role.like is not None and (role.like not in self.roles or self.roles[role.like].like is not None):
                others = set(self.roles) - {name}
                raise ValueError(
                    f"roles.{name}.like={role.like}: expected another role without `like`: {nearest(role.like, others)}"
                )
        for name, step in self.steps.items():
            where = f"steps.{name}"
            _check_name(where, name)
            if "id" in step.makes():
                raise ValueError(f"{where}: the column name id is reserved for the row's id; use another name")
            for role in step.roles():
                if role not in self.roles:
                    raise ValueError(f"{where}: unknown role {role!r}: {nearest(role, self.roles)}")
            if isinstance(step, Group) and step.by not in multiply:
                known = nearest(step.by, multiply) if multiply else "no earlier step does; add such a step"
                raise ValueError(
                    f"{where}.by={step.by}: expected an earlier step that makes several rows from one: {known}"
                )
            for key, text in _entries(step, step.TEXTS):
                TEMPLATES.check(f"{where}.{key}", text=text)
            for key, value in _entries(step, step.VALUES):
                TEMPLATES.check(f"{where}.{key}", value=value)
            if isinstance(step, Expand | Converse) or (isinstance(step, Ask) and step.samples is not None):
                multiply.append(name)
        for name, output in self.outputs.items():
            _check_name(f"outputs.{name}", name)
            if output.of is not None and output.of not in self.steps:
                raise ValueError(f"outputs.{name}.of: unknown step {output.of!r}: {nearest(output.of, self.steps)}")
            for key, value in _entries(output, ("record", "where", "once")):
                TEMPLATES.check(f"outputs.{name}.{key}", value=value)

    def place(self, role: str) -> Role:
        """Return a role with its own endpoint, or else with the endpoint of the role in `like`; it may be None."""
        own = self.roles[role]
        if own.endpoint is not None or own.like is None:
            return own
        other = self.roles[own.like]
        named = {key: getattr(own, key) or getattr(other, key) for key in ("model", "key_variable")}
        return Role(endpoint=other.endpoint, **named)

    def asked(self) -> list[str]:
        """Return the distinct roles (models) that the steps query."""
        return list(dict.fromkeys(role for step in self.steps.values() for role in step.roles()))


def _check_name(where: str, name: str) -> None:
    if not name.replace("_", "").isalnum():
        raise ValueError(f"{where}: a name may contain only letters, digits and underscores")


def _step(name: str, section: Any, known: Sequence[str]) -> Step:
    if not isinstance(section, Mapping):
        raise ValueError(f"steps.{name}={section!r}: expected a section with keys")
    own = dict(section)
    if "kind" not in own:
        raise ValueError(
            f"steps.{name} is not a step of the recipe: {nearest(name, known)}; to add a new step, set its kind"
        )
    kind = own.pop("kind")
    if kind not in KINDS:
        raise ValueError(f"steps.{name}.kind: unknown kind {kind!r}: {nearest(str(kind), KINDS)}")
    return checked(KINDS[kind], own, where=f"steps.{name}")


def _entries(section: Any, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, string) for each of a section's keys that is set; a mapping yields one pair per entry.

    Keys with dots refer to nested sections, and keys of a mapping's entries are appended after a dot.
    """
    for key in keys:
        value = section
        for part in key.split("."):
            value = None if value is None else getattr(value, part)
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", text) for name, text in value.items())
        elif value is not None:
            yield key, value
