"""Logs of Inspect: what is written is read back, by Inspect and into a store."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.evaluation.store import Key, Sample, Score, Store

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}


def filled(folder: Path) -> Store:
    """A store with answers, a conversation, choices, a failure and an answer that is not scored."""
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


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Folder with the logs of the store."""
    from nemo_ext.evaluation import inspect_logs

    async def write() -> None:  # as the job does, within a loop
        inspect_logs.write(FOUND, filled(tmp_path / "store"), tmp_path / "inspect")

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


def test_a_store_again(logs: Path, tmp_path: Path) -> None:
    from nemo_ext.evaluation import inspect_logs

    before, again = Store(tmp_path / "store"), Store(tmp_path / "again")

    assert inspect_logs.add(logs, again) == 6
    assert inspect_logs.add(logs, again) == 0
    again.close()
    assert sorted(again.answers(), key=lambda sample: sample.key) == sorted(
        before.answers(), key=lambda sample: sample.key
    )
    assert again.scores() == {name: score for name, score in before.scores().items() if name[2] != "another"}


def test_only_answers_to_the_question_of_today(tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log

    from nemo_ext.evaluation import inspect_logs

    with filled(tmp_path / "store") as store:
        key = Key("picks", "a", "default", "default", 0)
        store.add(Sample(key=key, asked="another question", answer="stale"))
        inspect_logs.write(FOUND, store, tmp_path / "inspect")

        asked = {("picks", "a", "default", "default"): "another question"}
        (now,) = inspect_logs.write(FOUND, store, tmp_path / "now", asked=asked)

    (pick,) = read_eval_log(str(tmp_path / "inspect" / "picks.eval")).samples
    assert pick.metadata["asked"] == "pick"
    (pick,) = read_eval_log(str(now)).samples
    assert (pick.output.completion, pick.scores) == ("stale", None)


def test_logs_of_others(tmp_path: Path) -> None:
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSample, EvalSpec, write_eval_log
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelOutput
    from inspect_ai.scorer import Score as InspectScore

    from nemo_ext.evaluation import inspect_logs

    values = ["C", "I", 0.25, {"f1": 0.5, "em": "I"}, "P"]
    samples = [
        EvalSample(
            id=number,
            epoch=1,
            input="Why?",
            target="so",
            messages=[ChatMessageUser(content="Why?"), ChatMessageAssistant(content="So.")],
            output=ModelOutput.from_content("m", "So."),
            scores={"match": InspectScore(value=value, answer="So.")},
        )
        for number, value in enumerate(values)
    ]
    spec = EvalSpec(
        created="2026-01-01T00:00:00+00:00",
        task="someones/task",
        model="m",
        dataset=EvalDataset(name="d"),
        config=EvalConfig(),
    )
    write_eval_log(EvalLog(status="success", eval=spec, samples=samples), str(tmp_path / "theirs.json"))

    rows = list(inspect_logs.read(tmp_path / "theirs.json"))

    assert [score.score for _, score in rows if score] == [1.0, 0.0, 0.25, 0.5, 0.5]
    assert [sample.key for sample, _ in rows] == [
        Key("someones-task", str(number), "default", "default", 0) for number in range(5)
    ]
    assert {(sample.answer, sample.finish_reason, len(sample.turns)) for sample, _ in rows} == {("So.", "stop", 0)}
    assert rows[3][1] is not None and rows[3][1].more == {"f1": 0.5, "em": 0.0}


def test_a_file_that_is_no_log(tmp_path: Path) -> None:
    from nemo_ext.evaluation import inspect_logs

    (tmp_path / "x.eval").write_text("nothing")

    with pytest.raises(ValueError, match=r"x\.eval: no log of Inspect that can be read"):
        list(inspect_logs.read(tmp_path / "x.eval"))
