"""`nemo_ext.generate.map` with an endpoint over real HTTP: data frames in and out."""

import asyncio
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nemo_ext.generate
from nemo_ext.job.job import JobFailed

QUESTIONS = {"question": [f"What is {n} plus {n}?" for n in range(12)], "answer": list(range(12))}
TEMPLATE = 'Solve:\n{{ question }}, and "say" why'
SETTINGS = ("generate.part_rows=5", "generate.patience=1")
Map = Callable[..., Any]


@pytest.fixture
def ask(answering: Any, tmp_path: Path) -> Map:
    """`map` with the stand-in endpoint."""

    def run(frame: Any, *settings: str, template: str | None = TEMPLATE) -> Any:
        words = (*SETTINGS, *settings)
        return nemo_ext.generate.map(
            frame, template, output=tmp_path / "answers", endpoint=answering.url, settings=words
        )

    return run


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_frame_comes_back_with_its_answers(library: str, ask: Map, answering: Any) -> None:
    module = pytest.importorskip(library)
    columns = {**QUESTIONS, "notes": [[{"by": "a"}]] * 12}
    frame = module.table(columns) if library == "pyarrow" else module.DataFrame(columns)

    found = ask(frame, "samples=2")

    assert type(found) is type(frame)
    rows = found.to_pylist() if library == "pyarrow" else found.to_dict(*["records"] * (library == "pandas"))
    rows = rows if isinstance(rows, list) else found.to_dicts()
    assert [(row["question"], row["input_answer"], row["sample"]) for row in rows] == [
        (question, answer, sample) for question, answer in zip(*QUESTIONS.values(), strict=True) for sample in range(2)
    ]
    assert len({row["answer"] for row in rows}) == 24
    assert answering.requests[0]["messages"][0]["content"].startswith("Solve:\nWhat is")
    assert 'and "say" why' in answering.requests[0]["messages"][0]["content"]


def test_rows_keep_their_order_and_index_with_repeated_and_failed_ones(ask: Map, answering: Any) -> None:
    pandas = pytest.importorskip("pandas")
    texts = [*QUESTIONS["question"], "refuse me", *QUESTIONS["question"][:2]]
    large = pandas.array([2**60 + (n != 12) for n in range(15)], dtype="Int64")
    large[12] = None
    frame = pandas.DataFrame({"prompt": texts, "error": 1.5, 0: large}, index=[f"row {n}" for n in range(15)])

    found = ask(frame, template=None)

    assert list(found.index) == list(frame.index) and list(found["prompt"]) == texts
    assert found[0].equals(frame[0]) and found[0].iloc[0] == 2**60 + 1
    assert len(answering.requests) == 13
    assert list(found["answer"][:2]) == list(found["answer"][13:])
    assert found["answer"].isna().tolist() == [n == 12 for n in range(15)]
    assert "refused for its content" in found["error"].iloc[12] and set(found["input_error"]) == {1.5}

    served = answering.reply
    answering.reply = lambda payload: served({**payload, "messages": []})
    assert ask(frame, template=None)["answer"].isna().sum() == 1  # dead letters are not retried without being asked
    assert not ask(frame, "generate.retry_dead=true", template=None)["answer"].isna().any()


def test_the_same_call_reads_and_other_rows_or_settings_are_refused(ask: Map, answering: Any, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({**QUESTIONS, "score": math.nan})
    first = ask(frame)
    asked, served, answering.reply = len(answering.requests), answering.reply, None

    assert ask(frame).equals(first) and len(answering.requests) == asked == 12
    (tmp_path / "answers" / "part-000001.parquet").unlink()
    with pytest.raises(JobFailed, match="5 answers are missing"):
        ask(frame)
    answering.reply = served
    assert ask(frame)["answer"].equals(first["answer"]) and len(answering.requests) == asked + 5
    with pytest.raises(ValueError, match="started with other rows"):
        ask(frame.iloc[:5])
    with pytest.raises(ValueError, match=r"different settings \(samples: 1 -> 2\)"):
        ask(frame, "samples=2")
    with pytest.raises(ValueError, match=r"generate\.format"):
        ask(frame, "generate.format=jsonl")
    with pytest.raises(ValueError, match="settings: output=elsewhere: the call sets output"):
        ask(frame, "output=elsewhere")
    with pytest.raises(ValueError, match="expected a pandas or polars data frame"):
        ask([{"question": "a list"}])


def test_the_frame_may_be_corrected_before_the_first_request(ask: Map, answering: Any) -> None:
    pandas, template = pytest.importorskip("pandas"), "Pay ${{ price }} or \\${x}$."

    with pytest.raises(ValueError, match="'price' is undefined"):
        ask(pandas.DataFrame({"cost": [5]}), template=template)
    ask(pandas.DataFrame({"price": [5]}), template=template)

    assert answering.requests[0]["messages"][0]["content"] == "Pay $5 or \\${x}$."


@pytest.mark.parametrize("notebook", [False, True])
def test_an_interrupted_call_resumes(notebook: bool, ask: Map, answering: Any) -> None:
    """Also under the running event loop of a notebook."""
    frame = pytest.importorskip("pandas").DataFrame(QUESTIONS)
    served, received = answering.reply, list[str]()

    def interrupting(payload: dict[str, Any]) -> Any:
        received.append(json.dumps(payload))
        if len(received) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return served(payload)

    async def cell() -> Any:
        return ask(frame, "generate.concurrency=1")

    def run() -> Any:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(cell()) if notebook else ask(frame, "generate.concurrency=1")
        finally:
            loop.close()

    answering.reply = interrupting
    with pytest.raises(KeyboardInterrupt):
        run()
    before = len(received)
    found = run()

    assert 7 <= before < 12 and len(received) - before <= 12 - 6
    assert found["answer"].notna().all()


def test_failures_are_exceptions(ask: Map, tmp_path: Path) -> None:
    frame = pytest.importorskip("pandas").DataFrame({"prompt": [f"refuse me {n}" for n in range(5)]})

    with pytest.raises(JobFailed, match=r"generate\.max_dead=0\.1 is exceeded"):
        ask(frame, template=None)
    assert (tmp_path / "answers" / "dead").is_dir()
