"""Settings of `nemo-ext generate`."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.endpoint.client import ClientSettings, Seconds
from nemo_ext.job.settings import FLAT, STRICT, Count, Extra, Place, Places, Share, Text
from nemo_ext.serving.settings import AskingSettings

Format = Literal["parquet", "jsonl", "openai_batch"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sampling:
    """Sampling parameters of requests; None leaves a parameter to the endpoint.

    Attributes:
        temperature, top_p, max_tokens, stop: as in OpenAI's API.
        extra: additional fields of the request, such as chat_template_kwargs.
    """

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Share | None = None
    max_tokens: Count | None = None
    stop: str | tuple[str, ...] | None = None
    extra: Extra = Field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = {"model", "messages", "prompt", "stream", "n", "seed"} & set(self.extra)
        if taken:
            raise ValueError(f"extra.{min(taken)} is not allowed, as requests set it themselves: remove it")

    def body(self) -> dict[str, Any]:
        """Return the parameters that are set, as request fields."""
        values = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens", "stop")}
        return {name: value for name, value in values.items() if value is not None} | dict(self.extra)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BatchSettings:
    """Settings shared by batch jobs.

    Attributes:
        part_rows: number of input rows per output file.
        max_dead: share of failed answers above which the job fails.
        retry_dead: True to retry requests that failed in earlier starts.
        lease: seconds without a heartbeat after which a worker's rows are given to other workers.
        dry_run: True to show requests without sending any.
        client: retries, timeouts and rate limits of requests to the endpoint.
    """

    part_rows: Count = 1000
    max_dead: Share = 0.1
    retry_dead: bool = False
    lease: Seconds = 60.0
    dry_run: bool = False
    client: Annotated[ClientSettings, FLAT] = Field(default_factory=ClientSettings)


BATCH = tuple(setting.name for setting in fields(BatchSettings))
"""Names of the settings shared by batch jobs."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenerateSettings(BatchSettings):
    """Settings in the `generate` section.

    Attributes:
        key: column with a unique key for each row; if None, a hash of the row is the key.
        messages: column with chat messages or one user message; default without `template`: `messages`, else `prompt`.
        template: Jinja template for the user message, filled in from the row's columns, or the path of a .jinja file.
        system: system message.
        complete: True to send the prompt to /v1/completions, without a chat template.
        tools: column with the declared tools.
        sampling: see `Sampling`.
        format: file format of the output.
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
        input: .parquet or .jsonl files, or globs.
        output: folder for the answers.
        samples: number of answers per row.
        seed: seed from which the answers' seeds are derived.
        generate: requests, sampling and output format.
    """

    input: Places
    output: Place
    samples: Count = 1
    seed: int = 1234
    generate: GenerateSettings = Field(default_factory=GenerateSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint is None and self.served is None:
            raise ValueError(
                "no model is named: set endpoint to a run directory of `nemo-ext serve` or a URL, or model to a folder"
            )
        if Path(self.output).expanduser().is_file():
            raise ValueError(f"output={self.output} is a file: choose a folder")
