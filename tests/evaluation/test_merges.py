"""`nemo-ext merge_sweep`: averages of two random models; an endpoint decides which sums each model knows."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_ext.evaluation import job, merges
from nemo_ext.evaluation.merges import Candidate, check, choose, objectives
from nemo_ext.job.config import compose

Sweep = Callable[..., list[str]]

KNOWN = {"a": (0.1, 1.0), "t0.25": (0.0, 0.2), "t0.5": (0.9, 0.9), "b": (1.0, 0.0)}
"""Shares of the first and the second benchmark that each model knows."""


def answer(payload: dict[str, Any], reply: type[Any], shares: tuple[float, float]) -> Any:
    """The requested sum, or the sum plus one."""
    asked = payload["messages"][-1]["content"]
    first, second = map(int, re.findall(r"(\d+) \+ (\d+)", asked)[-1])
    wrong = first >= 20 * shares["Again" in asked]
    message = {"role": "assistant", "content": f"\\boxed{{{first + second + wrong}}}"}
    body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 10}}
    return reply(body=json.dumps(body).encode())


@pytest.fixture
def sweep(
    endpoint: Any,
    reply: type[Any],
    suite: Callable[..., Path],
    random_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., list[str]]:
    """Runs the job; returns the names of the models that were served."""
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        shutil.copytree(random_llama, folder)
    weights = load_file(a / "model.safetensors")
    save_file({name: one + 1 for name, one in weights.items()}, b / "model.safetensors", metadata={"format": "pt"})
    suites = [suite(), suite(name="more", prompt="Again: {{ question }}")]
    served: list[str] = []

    @contextmanager
    def serve(config: dict[str, Any], _: Path) -> Iterator[tuple[str, str, None]]:
        name = Path(config["served"]).name
        served.append(name)
        endpoint.models = [name]
        endpoint.reply = lambda payload: answer(payload, reply, KNOWN[name])
        yield endpoint.url, name, None

    monkeypatch.setattr(job, "endpoint_of", serve)
    words = [f"from=[{a},{b}]", f"run_dir={tmp_path / 'run'}", f"suite=[{','.join(map(str, suites))}]"]
    words += [f"evaluate.data_root={tmp_path / 'data'}", "evaluate.patience=1", "evaluate.draws=50"]

    def run(*more: str) -> list[str]:
        served.clear()
        merges.run(compose("merge_sweep", [*words, "sweep.points=[0,0.25,0.5,1]", *more]))
        return list(served)

    return run


@pytest.mark.slow
def test_averages_are_evaluated_and_the_best_of_the_front_is_chosen(sweep: Sweep, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert sweep() == ["a", "t0.25", "t0.5", "b"]

    found = {one["name"]: one for one in json.loads((folder / "front.json").read_text())}
    assert {name for name, one in found.items() if one["front"]} == {"t0", "t0.5", "t1"}
    assert [name for name, one in found.items() if one["chosen"]] == ["t0.5"]
    assert (folder / "chosen").resolve() == folder / "merges" / "t0.5"
    half = load_file(folder / "chosen" / "model.safetensors")
    ends = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    for name, one in half.items():
        torch.testing.assert_close(one, (ends[0][name] + ends[1][name]) / 2)
    assert "Chosen: **t0.5**" in (folder / "report.md").read_text()
    assert (folder / "front.png").is_file() and (folder / "compare" / "compare.md").is_file()
    assert "adjusted p" in (folder / "compare" / "compare.md").read_text()

    assert sweep("sweep.at_least={more: 0.95}") == [], "no request is repeated"
    assert (folder / "chosen").resolve() == tmp_path / "a"
    with pytest.raises(ValueError, match=r"no average on the Pareto front reaches sums 1\.1; the best values are sums"):
        sweep("sweep.at_least={sums: 1.1}")


def candidate(name: str, *values: float) -> Candidate:
    names = "abc"[: len(values)]
    return Candidate(
        name=name,
        weights=(1.0,),
        model=name,
        objectives=dict(zip(names, values, strict=True)),
        intervals=dict.fromkeys(names),
    )


def test_the_front_has_the_candidates_that_no_other_dominates() -> None:
    found = choose([candidate("x", 1, 0, 0), candidate("y", 0.9, 0, 0), candidate("z", 0, 1, 1)], {})

    assert [(one.name, one.front, one.chosen) for one in found] == [
        ("x", True, False),
        ("y", False, False),
        ("z", True, True),
    ]
    twins = choose([candidate("x", 1, 0), candidate("y", 1, 0)], {})
    assert [(one.front, one.chosen) for one in twins] == [(True, True), (True, False)], "the first of equal ones"


def test_an_objective_is_the_mean_of_its_benchmarks_and_bits_are_negated() -> None:
    entries = {
        "one": {"accuracy": 0.2, "metric": "avg@1", "interval": [0.1, 0.3]},
        "two": {"accuracy": 0.6, "metric": "avg@1", "interval": [0.5, 0.7]},
        "bits": {"accuracy": 0.9, "metric": "bits_per_byte", "interval": [0.8, 1.0]},
    }
    values, intervals, metrics = objectives({"benchmarks": entries}, {"both": ("one", "two"), "text": ("bits",)})

    assert values == {"both": pytest.approx(0.4), "text": -0.9}
    assert intervals == {"both": None, "text": [-1.0, -0.8]}
    assert metrics == {"text": "bits_per_byte"}
    one = Candidate(name="x", weights=[1], model="x", objectives=values, intervals=intervals, metrics=metrics)
    assert [merges._cell(one, name) for name in values] == ["40.0%", "0.9000 [0.8000, 1.0000]"]
    assert set(objectives({"benchmarks": entries}, {})[0]) == {"one", "two"}
    with pytest.raises(ValueError, match="three was not evaluated"):
        objectives({"benchmarks": entries}, {"x": ("three",)})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sweep.points=[0.5]", "give at least two averages"),
        ("sweep.mixtures=[[0.5,0.5,0]]", "has 3 weights for 2 checkpoints"),
        ("sweep.objectives={x: [sum]}", "did you mean 'sums'"),
        ("sweep.at_least={less: 0.1}", "sweep.at_least: unknown name 'less'"),
        ("suite=quick; evaluate.benchmarks=[python_bits]", "no benchmark is part of a grand mean"),
        (
            "suite=[quick,olmo3_think]; evaluate.limit=2; sweep.objectives={x: [aime24]}",
            "sweep.objectives.x: aime24 cannot",
        ),
    ],
)
def test_invalid_settings_are_reported(sweep: Sweep, words: str, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as told:
        sweep(*words.split("; "))

    assert said in str(told.value)


def test_mixtures_are_counted_before_a_checkpoint_is_there() -> None:
    config = compose("merge_sweep", ["from=[]", "sweep.points=[]", "sweep.mixtures=[[0.5,0.5],[1,0]]"])

    for sources in ([], ["nowhere"], ["nowhere", "elsewhere", "third"]):
        with pytest.raises(ValueError, match=f"2 weights for {len(sources)} checkpoints"):
            check({**config, "from": sources})
