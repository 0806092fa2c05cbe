"""Tasks of lm-evaluation-harness over an endpoint, compared with its own back end."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.endpoint.client import Client, ClientSettings
from nemo_ext.evaluation.benchmark import Benchmark
from nemo_ext.evaluation.likelihood import Likelihoods
from nemo_ext.evaluation.results import results
from nemo_ext.evaluation.store import Store

pytest.importorskip("lm_eval")

WORDS = ["red", "green", "blue", "amber", "teal", "coral", "ivory", "olive", "plum", "rust", "sand", "wine"]
CHOICE = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: "%s", train: "%s"}}
output_type: multiple_choice
training_split: train
test_split: test
fewshot_split: train
num_fewshot: 2
doc_to_text: "Colour {{ n }}: {{ word | upper }}\\nIt is"
doc_to_target: gold
doc_to_choice: options
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
ANSWER = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
output_type: generate_until
test_split: test
doc_to_text: "Say {{ word }}:"
doc_to_target: "{{ starts }}"
generation_kwargs: {until: ["M"], max_gen_toks: 12, do_sample: false}
filter_list:
  - name: start
    filter: [{function: regex, regex_pattern: '^(.)'}, {function: take_first}]
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}
"""
TEXT = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{ text }}"
"""
# Choices are contexts here, as in Winogrande.
CONTEXTS = """
task: contexts
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
output_type: multiple_choice
test_split: test
doc_to_text: gold
doc_to_choice: options
doc_to_target: word
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
GROUP = "group: everything\ntask: [colours, texts]\n"
SAMPLED = """
include: answers.yaml
task: sampled
repeats: 3
generation_kwargs: {until: ["M"], max_gen_toks: 12, do_sample: true, temperature: 1.0}
filter_list:
  - name: start
    filter: [{function: regex, regex_pattern: '^(.)'}, {function: take_first}]
  - name: maj
    filter: [{function: regex, regex_pattern: '^(.)'}, {function: majority_vote}, {function: take_first}]
"""

Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of task files over local data."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {
            "n": number,
            "word": word,
            "options": [f" {each}" for each in (WORDS * 2)[number : number + 4]],
            "gold": number % 4,
            "starts": word[0],
            "text": f"{word}, naïve " * (3 + 9 * (number % 3)),
        }
        for number, word in enumerate(WORDS)
    ]
    places = []
    for name, taken in (("test", rows[:8]), ("train", rows[8:])):
        place = tmp_path / f"{name}.jsonl"
        place.write_text("".join(json.dumps(row) + "\n" for row in taken))
        places.append(str(place))
    made = tmp_path / "tasks"
    made.mkdir()
    (made / "colours.yaml").write_text(CHOICE % tuple(places))
    (made / "answers.yaml").write_text(ANSWER % places[0])
    (made / "texts.yaml").write_text(TEXT % places[0])
    (made / "contexts.yaml").write_text(CONTEXTS % places[0])
    (made / "everything.yaml").write_text(GROUP)
    (made / "sampled.yaml").write_text(SAMPLED)
    return made


@pytest.fixture
def run(folder: Path, served_folder: Path, served_model: str, tmp_path: Path) -> Run:
    """Evaluates tasks by name; returns the outcome and the entries of results.json."""
    from nemo_ext.evaluation import harness

    def ran(*names: str, url: str = served_model, tokenizer: Path | None = served_folder, **settings: Any) -> Any:
        benchmarks = [Benchmark(name=f"h_{name}", kind="harness", task=name) for name in names]

        async def work(store: Store) -> harness.Ran:
            async with Client(url, ClientSettings(attempts=1, patience=0), model="tiny") as client:
                return await harness.run(benchmarks, folder, Likelihoods(client, tokenizer), store, **settings)

        with Store(tmp_path / "store") as store:
            found = asyncio.run(work(store))
            return found, results(store, found.plans, draws=100, seed=1)["benchmarks"]

    return ran


def harness_alone(folder: Path, served_folder: Path, names: list[str]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Metrics of lm-evaluation-harness with its own back end, and its answers to the task `answers`."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(served_folder), device="cpu", batch_size=1, max_length=254, dtype="float32"),
        tasks=list(names),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    metrics = {
        name: {key.partition(",")[0]: value for key, value in row.items() if isinstance(value, float)}
        for name, row in found["results"].items()
    }
    rows = sorted(found["samples"]["answers"], key=lambda row: row["doc_id"])
    return metrics, [row["resps"][0][0] for row in rows]


@pytest.mark.slow
def test_results_match_the_harness_itself(run: Run, folder: Path, served_folder: Path, tmp_path: Path) -> None:
    names = ["colours", "answers", "texts", "contexts"]
    expected, answers = harness_alone(folder, served_folder, names)

    ran, entries = run(*names)

    assert not ran.missing
    for name, metrics in (
        ("colours", ("acc", "acc_norm")),
        ("answers", ("exact_match",)),
        ("texts", ("bits_per_byte", "byte_perplexity")),
        ("contexts", ("acc",)),
    ):
        for metric in metrics:
            relative = pytest.approx(expected[name][metric], rel=1e-6, abs=1e-6)
            assert ran.metrics[f"h_{name}"][metric] == relative, metric
    assert entries["h_colours"]["accuracy"] == pytest.approx(expected["colours"]["acc"])
    assert entries["h_colours"]["metrics"]["acc_norm"] == pytest.approx(expected["colours"]["acc_norm"])
    assert entries["h_answers"]["accuracy"] == pytest.approx(expected["answers"]["exact_match"])
    assert entries["h_texts"]["accuracy"] == pytest.approx(expected["texts"]["bits_per_byte"], abs=1e-6)
    # The server shows reasoning tags that are special tokens; the harness does not.
    ours = {
        sample.key: re.sub("</?think>|</?tool_call>", "", sample.answer)
        for sample in Store(tmp_path / "store").answers()
    }
    assert [ours[key] for key in sorted(ours) if key.benchmark == "h_answers"] == answers
    assert [entries[f"h_{name}"]["higher_is_better"] for name in names] == [True, True, False, True]
    assert [entries[f"h_{name}"]["metric"] for name in names] == ["acc", "avg@1", "bits_per_byte", "acc"]


def test_no_request_is_repeated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    ask = Client.ask

    async def counted(self: Client, request: Any, **settings: Any) -> Any:
        sent.append(request.path)
        return await ask(self, request, **settings)

    monkeypatch.setattr(Client, "ask", counted)
    _, few = run("colours", "answers", limit=3)
    first = len(sent)
    ran, more = run("colours", "answers")
    second = len(sent)
    again, same = run("colours", "answers")

    assert (few["h_colours"]["n"], more["h_colours"]["n"]) == (3, 8)
    assert (first, second) == (3 * 4 + 3, 8 * 4 + 8)
    assert len(sent) == second
    assert (again.metrics, same) == (ran.metrics, more)


def test_repeats_have_distinct_seeds(run: Run, tmp_path: Path) -> None:
    ran, found = run("sampled")

    assert not ran.missing
    samples = list(Store(tmp_path / "store").answers())
    assert len(samples) == len({sample.seed for sample in samples}) == 24
    assert (found["h_sampled"]["samples"], found["h_sampled"]["n"]) == (24, 8)
    scores = [score.score for score in Store(tmp_path / "store").scores().values()]
    assert found["h_sampled"]["accuracy"] == pytest.approx(sum(map(float, scores)) / 24)
    assert set(ran.metrics["h_sampled"]) == {"exact_match", "exact_match,maj"}


def test_a_group_of_tasks(run: Run) -> None:
    ran, _ = run("everything")

    assert not ran.missing
    assert {name.split("/")[0] for name in ran.metrics["h_everything"]} == {"colours", "texts"}


def test_a_failing_task_does_not_affect_others(run: Run, folder: Path) -> None:
    (folder / "hub.yaml").write_text((folder / "texts.yaml").read_text().replace("path: json", "path: some/where"))
    text = (folder / "answers.yaml").read_text()
    (folder / "long.yaml").write_text(text.replace("answers", "long").replace("max_gen_toks: 12", "max_gen_toks: 300"))
    (folder / "hub.yaml").write_text(
        (folder / "hub.yaml").read_text().replace("task: texts", "task: hub").replace("dataset_kwargs", "metadata")
    )

    ran, found = run("colour", "hub", "long", "colours", limit=2)

    assert list(found) == ["h_colours"]
    assert "colours" in ran.missing["h_colour"]
    assert "nothing is downloaded" in ran.missing["h_hub"] and "some/where" in ran.missing["h_hub"]
    assert "max_gen_toks=300 leaves no room for a prompt in the model's 256 tokens" in ran.missing["h_long"]


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("process_docs: !function other.run", "names the function other.run"),
        ("include: other.yaml", "bad.yaml is rejected, as it names the function other.run"),
        ("class: !function other.Task", "its key class runs code"),
        ("metric_list: [{metric: someones/metric}]", "metric someones/metric is not part of lm-evaluation-harness"),
        ("dataset_path: pandas", "is pandas, which reads pickles"),
        ("dataset_kwargs: {data_files: 'https://example.org/x.json'}", "would be downloaded"),
        ("unsafe_code: true", "its key unsafe_code runs code"),
    ],
)
def test_code_of_task_files_does_not_run(run: Run, folder: Path, tmp_path: Path, key: str, why: str) -> None:
    lines = [line for line in TEXT.strip().splitlines() if not line.startswith(key.split(":")[0] + ":")]
    text = "\n".join([*lines, key]).replace("task: texts", "task: bad").replace("%s", str(tmp_path / "test.jsonl"))
    (folder / "bad.yaml").write_text(text)
    (folder / "other.yaml").write_text("process_docs: !function other.run\n")
    (folder / "other.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef run(docs): return docs\n")

    ran, _ = run("bad")

    assert why in ran.missing["h_bad"]
    assert not (tmp_path / "ran").exists()


def test_trusted_code_runs(run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "trusted.yaml").write_text("include: texts.yaml\ntask: trusted\nprocess_docs: !function other.run\n")
    (folder / "other.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef run(docs): return docs\n")

    ran, found = run("trusted", limit=1, trust_code=True)

    assert not ran.missing and found["h_trusted"]["n"] == 1
    assert (tmp_path / "ran").exists()


def test_templates_run_in_a_sandbox(run: Run, folder: Path) -> None:
    (folder / "sly.yaml").write_text(
        'include: texts.yaml\ntask: sly\ndoc_to_target: "{{ text.__class__.__mro__[1].__subclasses__() }}"\n'
    )

    ran, _ = run("sly")

    assert "SecurityError" in ran.missing["h_sly"]


def test_a_missing_folder_is_refused(run: Run, folder: Path) -> None:
    folder.rename(folder.with_name("moved"))

    with pytest.raises(ValueError, match=r"harness_tasks=.*: no such folder"):
        run("colours")
