"""Settings of `nemo-ext evaluate` and of evaluations during training."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass

from nemo_ext.endpoint.client import ClientSettings
from nemo_ext.job.settings import FLAT, STRICT, Count, Place, StringsOrNone, Whole
from nemo_ext.serving.settings import AskingSettings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateSettings:
    """Settings in the `evaluate` section.

    Attributes:
        suite: names or paths of suites; empty to run only `tasks`.
        benchmarks: the suites' benchmarks to run; empty for all.
        limit: maximum number of problems per benchmark; the subset is fixed, and larger subsets contain smaller ones.
        samples: number of answers per problem; None takes each benchmark's own.
        modes: modes to run; empty for all that a benchmark has.
        data_root: folder with the benchmarks' data.
        tasks: names of lm-evaluation-harness tasks to run in addition to the suites.
        harness_tasks: folder with the files of lm-evaluation-harness tasks.
        judge: settings of the judge (`nemo_ext.rl.judge.JudgeSettings`), for benchmarks that require one.
        python: True, or settings of the environment `python_tool`, to let answers run Python in benchmarks that the
            environment `math` verifies, except those that continue plain text.
        seed: seed for answers and generated problems.
        draws: number of bootstrap resamples.
        retry: True to repeat requests that the endpoint refused (HTTP 4xx, except time-outs and 429) in earlier runs.
        inspect: True to also write logs for `inspect view`.
        client: retries, timeouts and rate limits of requests to the endpoint.
    """

    suite: StringsOrNone = ("quick",)
    benchmarks: StringsOrNone = ()
    limit: Count | None = None
    samples: Count | None = None
    modes: StringsOrNone = ()
    data_root: Place = "data/benchmarks"
    tasks: StringsOrNone = ()
    harness_tasks: Place | None = None
    judge: Mapping[str, JsonValue] | None = None
    python: bool | Mapping[str, JsonValue] = False
    seed: Whole = 1234
    draws: Count = 10_000
    retry: bool = False
    inspect: bool = False
    client: Annotated[ClientSettings, FLAT] = Field(default_factory=ClientSettings)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(AskingSettings):
    """Settings of `nemo-ext evaluate`.

    Attributes:
        run_dir: folder for the store and the results.
        evaluate: benchmarks to run, and request settings.
    """

    run_dir: Place
    evaluate: EvaluateSettings = Field(default_factory=EvaluateSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint is None and self.served is None:
            raise ValueError(
                "model and endpoint are both null: set model to a folder, or endpoint to a URL or a run of `nemo-ext "
                "serve`"
            )
