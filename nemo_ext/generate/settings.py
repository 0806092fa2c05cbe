"""Settings of `nemo-ext generate`."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.endpoint.client import ClientSettings, Seconds
from nemo_ext.job.settings import FLAT, STRICT, Count, Extra, Place, Places, Share, Text
from nemo_ext.serving.settings import AskingSettings

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
    extra: Extra = Field(default_factory=dict)

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
    client: Annotated[ClientSettings, FLAT] = Field(default_factory=ClientSettings)


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
    template: Text | None = None
    system: Text | None = None
    complete: bool = False
    tools: str | None = None
    sampling: Annotated[Sampling, FLAT] = Field(default_factory=Sampling)
    format: Format = "parquet"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(AskingSettings):
    """Settings of `nemo-ext generate`.

    Attributes:
        input: .parquet or .jsonl files; globs too.
        output: folder of the answers.
        samples: number of answers to each row.
        seed: seed of the answers.
        generate: requests, sampling and the output's files.
    """

    input: Places
    output: Place
    samples: Count = 1
    seed: int = 1234
    generate: GenerateSettings = Field(default_factory=GenerateSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint is None and self.served is None:
            raise ValueError("endpoint: name one (a run directory of `nemo-ext serve`, or a URL), or a folder in model")
        if Path(self.output).expanduser().is_file():
            raise ValueError(f"output={self.output}: is a file: name a folder")
