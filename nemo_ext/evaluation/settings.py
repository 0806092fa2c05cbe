"""Settings of `nemo-ext evaluate`, and of evaluations during training."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass

from nemo_ext.endpoint.client import ClientSettings
from nemo_ext.job.settings import FLAT, STRICT, Count, Place, StringsOrNone, Whole
from nemo_ext.serving.settings import AskingSettings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateSettings:
    """Settings of the section `evaluate`.

    Attributes:
        suite: suites by name or path; none where only tasks are wanted.
        benchmarks: the only ones of them to ask; empty for all.
        limit: most problems of a benchmark: always the same ones.
        samples: answers to each problem; None takes each benchmark's.
        modes: the only modes to ask in; empty for all that a benchmark has.
        data_root: folder of the benchmarks' data.
        tasks: tasks of lm-evaluation-harness, by name, beside the suites.
        harness_tasks: folder of their files.
        judge: settings of the judge (`nemo_ext.rl.judge.JudgeSettings`), for benchmarks that want one.
        seed: seed of answers and of generated problems.
        draws: draws of the bootstrap.
        retry: whether problems without an answer are asked again.
        inspect: whether to write logs for `inspect view` too.
        client: how the endpoint is asked.
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
    seed: Whole = 1234
    draws: Count = 10_000
    retry: bool = False
    inspect: bool = False
    client: Annotated[ClientSettings, FLAT] = Field(default_factory=ClientSettings)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(AskingSettings):
    """Settings of `nemo-ext evaluate`.

    Attributes:
        run_dir: folder of the store and the results.
        evaluate: benchmarks, and how they are asked.
    """

    run_dir: Place
    evaluate: EvaluateSettings = Field(default_factory=EvaluateSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint is None and self.served is None:
            raise ValueError("model: name a folder; or endpoint: a run directory of `nemo-ext serve`, or a URL")
