"""Logs for Inspect, as Inspect itself reads them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.evaluation.store import Key, Sample, Score, Store

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}


def filled(folder: Path) -> Store:
    """A store with answers, a conversation, choices, a failure and an unscored answer."""
    store = Store(folder)
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]}
    store.add_prompt("sum", chat)
    store.add_prompt("pick", {"context": "The sky is", "choices": [" blue", " red"]})
    for number in range(3):
        key = Key("sums", "one", "default", "default", number)
        store.add(
            Sample(
                key=key,
                asked="sum",
                seed=number,
                answer=f"It is {number}.",
                reasoning="Let me see." if number else None,
                finish_reason="length" if number == 2 else "stop",
                prompt_tokens=7,
                completion_tokens=9,
                reasoning_tokens=3,
                seconds=0.5,
            )
        )
        if number < 2:
            why, found = ("", "2") if number else ("expected 2", "0")
            store.add_scores([Score(key=key, asked="sum", digest="v", score=float(number), why=why, found=found)])
            store.add_scores([Score(key=key, asked="sum", digest="another", score=0.5)])
    store.add(Sample(key=Key("sums", "two", "default", "default", 0), asked="sum", problem="HTTP 500: down"))
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "Where?"},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is y."},
    ]
    key = Key("sums", "three", "short", "on", 0)
    store.add(Sample(key=key, asked="sum", answer="It is y.", turns=turns, finish_reason="stop"))
    store.add_scores([Score(key=key, asked="sum", digest="v", score=1.0)])
    key = Key("picks", "a", "default", "default", 0)
    store.add(Sample(key=key, asked="pick", logprobs=[-1.5, -2.5], sizes=[5, 4], greedy=[True, False]))
    more = {"acc": 1.0, "acc_norm": 0.0}
    store.add_scores([Score(key=key, asked="pick", digest="w", score=0.0, found="0", reference="r", more=more)])
    return store


FOUND: dict[str, Any] = {
    "model": "tiny",
    "endpoint": "http://localhost:1/v1",
    "digest": "abc",
    "seed": 1,
    "benchmarks": {
        "sums": {"verifier": "v", "metric": "avg@3", "accuracy": 2 / 3, "metrics": {"pass@3": 1.0}, "interval": [0, 1]},
        "picks": {"verifier": "w", "metric": "acc_norm", "accuracy": 0.0, "metrics": {"acc": 1.0}},
    },
}


ASKED = {
    ("sums", "one", "default", "default"): "sum",
    ("sums", "two", "default", "default"): "sum",
    ("sums", "three", "short", "on"): "sum",
    ("picks", "a", "default", "default"): "pick",
}


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Folder with the logs of the store."""
    from nemo_ext.evaluation import inspect_logs

    async def write() -> None:  # within an event loop, as in the job
        inspect_logs.write(FOUND, filled(tmp_path / "store"), tmp_path / "inspect", asked=ASKED)

    asyncio.run(write())
    return tmp_path / "inspect"


def test_inspect_reads_the_logs(logs: Path) -> None:
    from inspect_ai.log import list_eval_logs, read_eval_log

    assert sorted(path.name for path in logs.iterdir()) == ["picks.eval", "sums.eval", "sums_short_on.eval"]
    assert {log.task for log in list_eval_logs(str(logs))} == {"picks", "sums", "sums/short/on"}
    log = read_eval_log(str(logs / "sums.eval"))
    assert (log.status, log.eval.model, log.eval.config.epochs) == ("success", "tiny", 3)
    assert {name: metric.value for name, metric in log.results.scores[0].metrics.items()} == {
        "avg@3": 2 / 3,
        "pass@3": 1.0,
    }
    samples = {(sample.id, sample.epoch): sample for sample in log.samples}
    assert set(samples) == {("one", 1), ("one", 2), ("one", 3), ("two", 1)}
    wrong, right = (samples["one", epoch].scores["nemo_ext"] for epoch in (1, 2))
    assert (wrong.value, wrong.explanation, wrong.answer, right.value) == (0.0, "expected 2", "0", 1.0)
    assert not samples["one", 3].scores
    assert [message.role for message in samples["one", 2].messages] == ["system", "user", "assistant"]
    assert samples["one", 2].messages[-1].content[0].reasoning == "Let me see."
    assert samples["one", 3].output.stop_reason == "max_tokens"
    assert (samples["one", 1].output.usage.output_tokens, samples["one", 1].output.usage.reasoning_tokens) == (9, 3)
    assert samples["two", 1].error.message == "HTTP 500: down"
    (talk,) = read_eval_log(str(logs / "sums_short_on.eval")).samples
    assert [message.role for message in talk.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert talk.messages[2].tool_calls[0].arguments == {"at": "x"}
    (pick,) = read_eval_log(str(logs / "picks.eval")).samples
    assert (pick.input, pick.choices) == ("The sky is", [" blue", " red"])


def test_only_answers_to_current_requests_are_logged(tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log

    from nemo_ext.evaluation import inspect_logs

    with filled(tmp_path / "store") as store:
        key = Key("picks", "a", "default", "default", 0)
        store.add(Sample(key=key, asked="another question", answer="stale"))
        inspect_logs.write(FOUND, store, tmp_path / "inspect", asked=ASKED)

        asked = {("picks", "a", "default", "default"): "another question"}
        (now,) = inspect_logs.write(FOUND, store, tmp_path / "now", asked=asked)

    (pick,) = read_eval_log(str(tmp_path / "inspect" / "picks.eval")).samples
    assert (pick.metadata["asked"], pick.metadata["logprobs"]) == ("pick", [-1.5, -2.5])
    (pick,) = read_eval_log(str(now)).samples
    assert (pick.output.completion, pick.scores) == ("stale", None)
