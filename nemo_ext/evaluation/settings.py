"""Settings of `nemo-ext evaluate`, and of evaluations during training."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass

from nemo_ext.endpoint.client import ClientSettings
from nemo_ext.job.settings import STRICT, Count, Place, StringsOrNone, Whole, checked_flat


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
    client: ClientSettings = Field(default_factory=ClientSettings)

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> "EvaluateSettings":
        """Settings from a config's section `evaluate`, where the keys of `client` stand beside others.

        Raises:
            ValueError: a setting is wrong; names the key, what it holds and what it may hold.
        """
        return checked_flat(cls, section, "evaluate", client=ClientSettings)
