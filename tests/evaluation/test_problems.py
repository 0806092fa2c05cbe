"""Problems made from rows: templates, shots, domains, and refused settings."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.data.text.user_files import pyarrow_module
from nemo_ext.evaluation.benchmark import Benchmark, names, read_benchmark, read_suite
from nemo_ext.evaluation.problems import Missing, problems

Folder = Callable[..., Path]

ROWS = [
    {"id": n, "question": f"Which is {n}?", "options": [str(n), str(n + 1)], "right": n % 2, "subject": "ab"[n % 2]}
    for n in range(10)
]
CHOICE: dict[str, Any] = {
    "name": "which",
    "kind": "choice",
    "data": ["which*.jsonl"],
    "id": "id",
    "domain": "subject",
    "prompt": "{{ question }}\nAnswer:",
    "choices": "options | spaced",
    "gold": "right",
}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Sequence[Any] = ROWS, name: str = "which.jsonl") -> Path:
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return tmp_path

    return write


def test_rows_become_contexts_with_choices(folder: Folder) -> None:
    found = {each.id: each for each in problems(Benchmark(**CHOICE), folder(), seed=1)}

    assert len(found) == 10
    three = found["3"]
    assert three.prompts == {"default": "Which is 3?\nAnswer:"}
    assert (three.choices, three.gold, three.domain) == ((" 3", " 4"), 1, "b")


def test_shots_are_of_the_same_domain_and_never_the_question(folder: Folder) -> None:
    for problem in problems(Benchmark(**CHOICE, shots=4), folder(), seed=1):
        *shots, question = str(problem.prompts["default"]).split("\n\n")
        assert question == f"Which is {problem.id}?\nAnswer:"
        assert len(set(shots)) == 4
        numbers = {int(shot.split("?")[0].removeprefix("Which is ")) for shot in shots}
        assert {number % 2 for number in numbers} == {int(problem.id) % 2}
        assert int(problem.id) not in numbers
        assert all(shot.endswith(f" {int(shot.split('?')[0][9:]) + int(problem.id) % 2}") for shot in shots)


def test_shots_of_a_file_come_in_its_order(folder: Folder) -> None:
    folder([{**row, "subject": "a"} for row in ROWS[:2]], "dev.jsonl")
    rows = [{**row, "subject": "a"} for row in ROWS[5:]]
    found = problems(Benchmark(**CHOICE, shots=2, shots_data=["dev.jsonl"]), folder(rows), seed=1)

    assert str(found[0].prompts["default"]).startswith("Which is 0?\nAnswer: 0\n\nWhich is 1?\nAnswer: 2\n\nWhich")


def test_too_few_shots_are_reported(folder: Folder) -> None:
    with pytest.raises(ValueError, match="shots=5: only 4 examples of"):
        problems(Benchmark(**CHOICE, shots=5), folder(), seed=1)


def test_the_first_pattern_with_files_counts(folder: Folder) -> None:
    folder(ROWS[:3], "other.jsonl")

    found = problems(Benchmark(**CHOICE | {"data": ["none/*", "other.jsonl", "which.jsonl"]}), folder(), seed=1)

    assert len(found) == 3


def test_parquet_and_datasets_are_the_same_rows(folder: Folder, tmp_path: Path) -> None:
    pyarrow = pyarrow_module()
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "which.parquet")
    (tmp_path / "saved" / "test").mkdir(parents=True)
    with (
        pyarrow.OSFile(str(tmp_path / "saved" / "test" / "data-00000-of-00001.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)

    expected = problems(Benchmark(**CHOICE), folder(), seed=1)
    for data in ("which.parquet", "saved"):
        assert problems(Benchmark(**CHOICE | {"data": [data]}), tmp_path, seed=1) == expected


def test_rows_twice_are_one_problem_and_a_name_twice_an_error(folder: Folder) -> None:
    assert len(problems(Benchmark(**CHOICE), folder([*ROWS, ROWS[0]]), seed=1)) == 10
    with pytest.raises(ValueError, match=r"which.jsonl:11: .*has the same id '0' as .*which.jsonl:1"):
        problems(Benchmark(**CHOICE), folder([*ROWS, {**ROWS[0], "right": 1}]), seed=1)


def test_missing_data_is_reported_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"which\*.jsonl: no such file; get it from the shop"):
        problems(Benchmark(**CHOICE, source="the shop"), tmp_path, seed=1)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"prompt": "{{ ''.__class__.__mro__ }}"}, "prompt.default"),
        ({"prompt": "{{ question.__init__.__globals__ }}"}, "prompt.default"),
        ({"choices": "().__class__"}, "choices"),
        ({"gold": "question"}, "expected the index of a choice"),
        ({"prompt": "{{ row.get('nothing') }}"}, "a value is null"),
        ({"where": "id > 99"}, "no row of its data satisfies id > 99"),
        ({"choices": "question"}, "expected a list of strings"),
        ({"choices": "row.get('nothing')"}, "expected a list of strings"),
        ({"prompt": "{{ [records] | lettered('{1.__globals__}. {}') }}"}, "prompt.default"),
    ],
)
def test_an_invalid_expression_is_reported_and_runs_no_code(folder: Folder, keys: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        problems(Benchmark(**CHOICE | keys), folder(), seed=1)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"generator": "arithmetic", "shots": 3}, "shots is not used with generator=arithmetic"),
        ({"generator": "arithmetic", "kind": "bits"}, "kind is bits"),
        ({"generator": "needles", "prompt": "{{ question }}"}, "environment is missing"),
        ({"generator": "needles", "environment": "contains"}, "prompt is missing"),
        ({"data": "x", "kind": "bits", "messages": "m"}, "messages requires kind=generate"),
        ({"data": "x", "kind": "choice", "prompt": "p"}, "kind=choice requires choices and gold"),
        (
            {"generator": "needles", "settings": {"seed": 3}, "prompt": "p", "environment": "contains"},
            "settings.seed is not allowed",
        ),
    ],
)
def test_incompatible_keys_are_refused(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        problems(Benchmark(name="b", **keys), tmp_path, seed=1)


def test_lists_of_filters_and_the_files_name_are_values(folder: Folder) -> None:
    keys = {"choices": "options | map('upper')", "domain": "file.removesuffix('.jsonl')", "where": "id in [3]"}
    (found,) = problems(Benchmark(**CHOICE | keys), folder(), seed=1)

    assert (found.choices, found.domain) == (("3", "4"), "which")


def test_a_benchmark_inherits_keys_with_like(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("like: arithmetic\ncount: 3\n")
    (tmp_path / "suite.yaml").write_text(f"benchmarks: [{{name: {tmp_path / 'mine.yaml'}, samples: 2}}]\n")

    (mine,) = read_suite(str(tmp_path / "suite.yaml"))[1]

    assert (mine.name, mine.count, mine.samples) == ("mine", 3, 2)
    assert mine.generator == read_benchmark("arithmetic").generator


def test_modes_on_and_off_need_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("like: arithmetic\nmodes: {on: {system: /think}, off: {}}\n")

    assert list(read_benchmark(str(tmp_path / "mine.yaml")).modes) == ["on", "off"]


def test_circular_inheritance_is_reported(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{one}.yaml").write_text(f"like: {tmp_path / other}.yaml\n")

    with pytest.raises(ValueError, match="circle"):
        read_benchmark(str(tmp_path / "a.yaml"))


def test_all_suites_of_the_package_can_be_read() -> None:
    for name in names("suite"):
        assert read_suite(name)[1]
