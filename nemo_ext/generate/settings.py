"""Settings of `nemo-ext generate`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.endpoint.client import ClientSettings, Seconds
from nemo_ext.job.settings import STRICT, Count, Share, checked_flat

Format = Literal["parquet", "jsonl", "openai_batch"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sampling:
    """Sampling of the answers; None leaves a field to the endpoint.

    Attributes:
        temperature, top_p, max_tokens, stop: as in OpenAI's requests.
        extra: further fields of the request, such as chat_template_kwargs.
    """

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Share | None = None
    max_tokens: PositiveInt | None = None
    stop: str | tuple[str, ...] | None = None
    extra: Mapping[str, JsonValue] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = {"model", "messages", "prompt", "stream", "n", "seed"} & set(self.extra)
        if taken:
            raise ValueError(f"extra must be without {', '.join(sorted(taken))}, which each request sets itself")

    def body(self) -> dict[str, Any]:
        """Fields of a request."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens", "stop")}
        return {name: value for name, value in given.items() if value is not None} | dict(self.extra)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BatchSettings:
    """How a batch job is done.

    Attributes:
        part_rows: rows of the input in one file of the output.
        max_dead: share of the answers that may fail before the job does.
        retry_dead: whether what failed in earlier starts is tried again.
        lease: seconds without a sign of life after which a worker's rows go to others.
        dry_run: whether to show what would be asked, and ask nothing.
        client: how the endpoint is asked.
    """

    part_rows: Count = 1000
    max_dead: Share = 0.1
    retry_dead: bool = False
    lease: Seconds = 60.0
    dry_run: bool = False
    client: ClientSettings = Field(default_factory=ClientSettings)

    @classmethod
    def read(cls, section: Mapping[str, Any], where: str, **parts: type[Any]) -> Self:
        """Settings from a config's section, where the keys of `client` and of other parts stand beside others.

        Raises:
            ValueError: a setting is wrong; names the key, what it holds and what it may hold.
        """
        return checked_flat(cls, section, where, client=ClientSettings, **parts)


BATCH = tuple(each.name for each in fields(BatchSettings))
"""Names of its settings."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenerateSettings(BatchSettings):
    """Settings of the section `generate`.

    Attributes:
        key: column with a name for each row; None takes a hash of the row.
        messages: column with the messages; None takes `messages` where there is one and no template is given.
        template: Jinja template of the user's message over the row's columns, or a file that ends in .jinja.
        system: system message before the template's.
        complete: whether the template's text is a prompt of /v1/completions, without a chat template.
        tools: column with declared tools.
        sampling: see `Sampling`.
        format: kind of the output's files.
    """

    key: str | None = None
    messages: str | None = None
    template: str | None = None
    system: str | None = None
    complete: bool = False
    tools: str | None = None
    sampling: Sampling = Field(default_factory=Sampling)
    format: Format = "parquet"

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> "GenerateSettings":
        """Settings from a config's section `generate`; see `read`."""
        return cls.read(section, "generate", sampling=Sampling)
