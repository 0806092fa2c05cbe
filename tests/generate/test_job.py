"""`nemo-ext generate` with an endpoint over real HTTP."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.data.text.documents import Part
from nemo_ext.data.text.user_files import pyarrow_module
from nemo_ext.endpoint.client import Answer
from nemo_ext.generate.columns import ANSWER
from nemo_ext.generate.output import OpenRange, Output
from nemo_ext.generate.rows import Range
from nemo_ext.job.leases import Leases

Generate = Callable[..., tuple[int, str]]
Answers = Callable[..., list[dict[str, Any]]]
Written = Callable[..., Path]
QUESTIONS = [{"question": f"What is {n} plus {n}?", "id": f"q{n}"} for n in range(25)]
TEMPLATE = "generate.template=Solve: {{ question }}"


def test_answers_come_back_beside_the_rows(
    generate: Generate, answers: Answers, written: Written, answering: Any, tmp_path: Path
) -> None:
    code, output = generate(
        f"input={written(QUESTIONS)}", TEMPLATE, "samples=3", "generate.key=id", "generate.part_rows=10"
    )

    assert (code, "75 answers" in output) == (0, True), output
    found = answers()
    assert [(row["key"], row["sample"]) for row in found] == [(f"q{n}", s) for n in range(25) for s in range(3)]
    assert list(found[0]) == ["question", "id", *(name for name in ANSWER if name != "seconds")]
    assert len({row["seed"] for row in found}) == len({row["answer"] for row in found}) == 75
    assert {(row["finish_reason"], row["prompt_tokens"], row["completion_tokens"]) for row in found} == {
        ("stop", 7, 16)
    }
    assert answering.requests[0]["messages"][0]["content"].startswith("Solve: What is")
    assert sorted(path.name for path in (tmp_path / "answers").glob("part-*")) == [
        f"part-00000{number}.parquet" for number in range(3)
    ]
    report = json.loads((tmp_path / "answers" / "report.json").read_text())
    assert (report["answers"], report["completion_tokens"], report["finish_reasons"]) == (75, 1200, {"stop": 75})


def test_a_second_run_asks_nothing(generate: Generate, written: Written, answering: Any) -> None:
    words = (f"input={written(QUESTIONS)}", TEMPLATE)
    generate(*words)
    asked = len(answering.requests)

    assert generate(*words)[0] == 0
    assert asked == len(answering.requests) == 25


def test_rows_that_repeat_are_answered_once(generate: Generate, answers: Answers, written: Written) -> None:
    code, output = generate(f"input={written([*QUESTIONS, *QUESTIONS[:3]])}", TEMPLATE, "generate.part_rows=4")

    assert (code, len(answers())) == (0, 25)
    assert "3 rows are equal to an earlier one" in output


def test_an_output_has_one_set_of_settings(generate: Generate, written: Written, answering: Any) -> None:
    file = written(QUESTIONS)
    generate(f"input={file}", TEMPLATE)
    asked = len(answering.requests)

    for words, named in (
        (["generate.template=Other: {{ question }}"], "generate.template"),
        ([TEMPLATE, "samples=2"], "samples: 1 -> 2"),
        ([TEMPLATE, "generate.temperature=0.5"], "generate.temperature"),
        ([TEMPLATE, "generate.key=id"], "generate.key"),
        ([TEMPLATE, "seed=1"], "seed"),
        ([TEMPLATE, "generate.format=jsonl"], "generate.format"),
    ):
        code, output = generate(f"input={file}", *words)

        assert (code, output.count("\n")) == (2, 1), output
        assert "was started with different settings" in output and named in output
        assert len(answering.requests) == asked


def test_omitted_fields_are_not_sent(
    generate: Generate, answers: Answers, written: Written, answering: Any, reply: Any
) -> None:
    ours = answering.reply
    answering.reply = lambda payload: reply(status=422, body=b"no seed") if "seed" in payload else ours(payload)
    words = (f"input={written(QUESTIONS)}", TEMPLATE, "generate.temperature=0.5")

    code, output = generate(*words, "generate.omit=[seed]")

    assert code == 0, output
    assert {(row["seed"], row["answer"] is not None) for row in answers()} == {(None, True)}
    code, output = generate(*words, "generate.omit=[seed, temperature]")
    assert code == 2 and "was started with different settings (omit: " in output


def test_another_input_is_refused(generate: Generate, written: Written) -> None:
    generate(f"input={written(QUESTIONS)}", TEMPLATE)

    code, output = generate(f"input={written([*QUESTIONS, {'question': 'one more', 'id': 'x'}])}", TEMPLATE)

    assert (code, output.count("\n"), "input: " in output) == (2, 1, True), output


def test_refused_requests_become_dead_letters(
    generate: Generate, answers: Answers, written: Written, answering: Any, tmp_path: Path
) -> None:
    rows = [*QUESTIONS, {"question": "refuse me", "id": "bad"}]
    words = (f"input={written(rows)}", TEMPLATE, "generate.key=id", "generate.part_rows=5")

    code, output = generate(*words)

    assert (code, len(answers()), "1 failed" in output) == (0, 25, True), output
    (line,) = [json.loads(line) for file in (tmp_path / "answers" / "dead").iterdir() for line in file.open()]
    assert (line["key"], line["sample"], line["status"]) == ("bad", 0, 400)
    assert "refused for its content" in line["problem"]
    assert line["row"] == rows[-1]
    assert sum("refuse me" in str(request) for request in answering.requests) == 1

    served = answering.reply
    answering.reply = lambda payload: served({**payload, "messages": []})
    assert generate(*words)[0] == 0
    assert len(answers()) == 25
    assert generate(*words, "generate.retry_dead=true")[0] == 0
    assert sorted(row["key"] for row in answers()) == sorted(row["id"] for row in rows)
    assert "0 failed" not in output


def test_too_many_failures_end_the_job(generate: Generate, written: Written, answering: Any) -> None:
    rows = [{"question": f"refuse me {n}"} for n in range(50)] + QUESTIONS

    code, output = generate(f"input={written(rows)}", TEMPLATE, "generate.max_dead=0.2", "generate.concurrency=1")

    assert (code, "generate.max_dead=0.2" in output, "HTTP 400" in output) == (1, True, True), output
    assert len(answering.requests) < 30


def test_failures_of_earlier_starts_count_too(
    generate: Generate, written: Written, answers: Answers, answering: Any, tmp_path: Path
) -> None:
    rows = [{"question": f"refuse me {n}"} for n in range(20)] + QUESTIONS
    words = (f"input={written(rows)}", TEMPLATE, "generate.concurrency=1", "generate.max_dead=0.2")
    generate(*words)
    dead = [json.loads(line) for file in (tmp_path / "answers" / "dead").iterdir() for line in file.open()]
    assert len(dead) == 10
    asked = len(answering.requests)

    code, output = generate(*words)

    assert (code, "counted over earlier starts" in output, len(answering.requests)) == (1, True, asked), output
    code, output = generate(*words[:2], "generate.retry_dead=true", "generate.max_dead=0.5")
    assert (code, len(answers())) == (0, 25), output


def test_failures_are_retried_however_long_that_takes(
    generate: Generate, written: Written, answers: Answers, answering: Any, reply: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_ext.generate.work._LONGEST_BEAT", 0.1)
    answer = answering.reply
    answering.reply = lambda payload: reply(status=400)
    words = (f"input={written(QUESTIONS)}", TEMPLATE, "generate.max_dead=1")
    generate(*words)

    def slow(payload: dict[str, Any]) -> Any:
        return replace(reply(status=400) if "What is 7 " in str(payload) else answer(payload), seconds=0.3)

    answering.reply = slow
    code, output = generate(*words, "generate.retry_dead=true", "generate.concurrency=4")

    assert (code, len(answers()), "1 failed" in output) == (0, 24, True), output


def test_rows_that_arrow_has_no_type_for(generate: Generate, written: Written, answers: Answers) -> None:
    rows = [{"question": "a", "tools": [{"function": {"properties": {}}}], "n": 2**60 + 1, "nested": {"n": 2**60 + 1}}]
    rows += [{"question": f"b{n}", "tools": None, "n": 0.5, "nested": {"n": 0.5}} for n in range(1020)]

    code, output = generate(f"input={written(rows)}", TEMPLATE)

    assert code == 0, output
    first = next(row for row in answers() if row["question"] == "a")
    assert json.loads(first["tools"]) == rows[0]["tools"]
    assert (json.loads(first["n"]), json.loads(first["nested"])) == (2**60 + 1, {"n": 2**60 + 1})


def test_odd_rows_are_dead_letters_and_the_output_stays_readable(
    generate: Generate, answers: Answers, answering: Any, tmp_path: Path
) -> None:
    pyarrow = pyarrow_module()
    image = [{"role": "user", "content": b"\xff"}]
    texts = ["[INST] hello", "[" * 100_000, json.dumps([{"role": "user", "content": "hi"}]), "refuse me \u2028 \x85"]
    chats = pyarrow.array(
        [None, None, None, None, image], pyarrow.list_(pyarrow.struct({"role": "string", "content": "binary"}))
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": [*texts, None], "chat": chats}), tmp_path / "rows.parquet")

    for _ in range(2):
        code, output = generate(f"input={tmp_path / 'rows.parquet'}", "generate.messages=text", "generate.max_dead=1")
        assert (code, len(answers()), "2 failed" in output) == (0, 3, True), output
    asked = [request["messages"][0]["content"] for request in answering.requests]
    assert {"[INST] hello", "[" * 100_000, "hi"} <= set(asked)
    words = (f"input={tmp_path / 'rows.parquet'}", f"output={tmp_path / 'chats'}", "generate.max_dead=1")
    code, output = generate(*words, "generate.messages=chat")
    assert (code, "0 answers, 5 failed" in output) == (0, True), output


def test_a_failing_template_starts_no_output(generate: Generate, written: Written) -> None:
    words = (f"input={written(QUESTIONS)}",)

    assert generate(*words, "generate.template={{ nope }}")[0] == 2
    assert generate(*words, TEMPLATE)[0] == 0


def test_unreadable_journal_lines_are_requested_again(
    generate: Generate, written: Written, answers: Answers, answering: Any, reply: Any, tmp_path: Path
) -> None:
    answer = answering.reply
    answering.reply = lambda payload: answer(payload) if len(answering.requests) < 20 else reply(status=401)
    words = (f"input={written(QUESTIONS)}", TEMPLATE, "generate.concurrency=2")
    assert generate(*words)[0] == 2
    (journal,) = (tmp_path / "answers" / ".job" / "journals").iterdir()
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([lines[0], b"\0" * 40, *lines[2:]]))
    answering.reply = answer

    code, output = generate(*words)

    assert (code, len(answers()), "a line cannot be read" in output) == (0, 25, True), output


def test_a_part_without_the_one_before_it_is_set_aside(
    generate: Generate, written: Written, answers: Answers, answering: Any, reply: Any, tmp_path: Path
) -> None:
    answer = answering.reply
    answering.reply = lambda payload: reply(status=400) if "What is 7 " in str(payload) else answer(payload)
    words = (f"input={written(QUESTIONS)}", TEMPLATE)
    generate(*words)
    answering.reply = answer
    generate(*words, "generate.retry_dead=true")
    assert len(list((tmp_path / "answers").glob("part-*"))) == 2
    (tmp_path / "answers" / "part-000000.parquet").unlink()

    code, output = generate(*words)

    assert (code, len(answers()), len({row["key"] for row in answers()})) == (0, 25, 25), output


def two_workers(folder: Path) -> tuple[list[Output], Range, list[OpenRange]]:
    """Outputs of two workers that both have a range of two rows open."""
    rows = [{"question": "a"}, {"question": "b"}]
    range_ = Range(number=0, part=Part(name="f", path="f", size=1), skip=0, rows=2)
    schema = pyarrow_module().schema([("question", "string")])
    outputs = [
        Output(folder, "parquet", schema, {"question": "question"}, Leases(folder / ".job" / "leases", 60))
        for _ in range(2)
    ]
    return outputs, range_, [output.open(range_, rows, ["a", "b"], 1) for output in outputs]


def test_two_holders_of_one_lease_do_no_harm(tmp_path: Path) -> None:
    outputs, range_, opened = two_workers(tmp_path)
    for output, one in zip(outputs, opened, strict=True):
        for pair in one.pairs:
            output.add(one, pair, Answer(answer=output.worker))

    assert [output.commit(one) for output, one in zip(outputs, opened, strict=True)] == [True, True]
    assert outputs[0].answered(range_) == {("a", 0), ("b", 0)}
    assert not outputs[0].failures(range_)


def test_an_answer_in_one_journal_counts_more_than_a_failure_in_another(tmp_path: Path) -> None:
    outputs, range_, opened = two_workers(tmp_path)
    for output, one, answered in zip(outputs, opened, (0, 1), strict=True):
        for number, pair in enumerate(one.pairs):
            output.add(one, pair, Answer(answer="yes") if number == answered else Answer(problem="HTTP 500"))

    assert outputs[0].commit(opened[0])
    assert outputs[0].answered(range_) == {("a", 0), ("b", 0)}
    assert not outputs[0].failures(range_)


FAULTS = ("silent", "dropped", "cut", "no_http")


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_fifth_of_all_requests_fail_somehow_and_nothing_is_lost_or_twice(
    generate: Generate, answers: Answers, written: Written, answering: Any, reply: Any, tmp_path: Path, format: str
) -> None:
    rows = [{"question": f"What is {n}?", "id": n} for n in range(100)] + [
        {"question": f"refuse me {n}"} for n in range(9)
    ]
    words = (f"input={written(rows)}", TEMPLATE, "generate.part_rows=20", f"generate.format={format}")
    generate(*words, f"output={tmp_path / 'calm'}")
    calm, draw = answering.reply, random.Random(0)

    def faulty(payload: dict[str, Any]) -> Any:
        if draw.random() > 0.2:
            return calm(payload)
        choices = [reply(fault=fault) for fault in FAULTS]
        choices += [reply(status=500), reply(status=429, headers={"Retry-After": "0.05"}), reply(body=b'{"choi')]
        return draw.choice([*choices, reply(text="late", seconds=0.01, status=503)])

    answering.reply = faulty
    code, output = generate(*words, "generate.attempt_seconds=0.5", "generate.attempts=30")

    def lines(folder: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for file in sorted((tmp_path / folder).glob("*.jsonl")) for line in file.open()]
        return [{name: value for name, value in line.items() if name != "seconds"} for line in found]

    assert code == 0, output
    if format == "parquet":
        assert answers() == answers(tmp_path / "calm")
        assert len(answers()) == 100
    else:
        assert lines("answers") == lines("calm")
        assert len(lines("answers")) == 100
    assert lines("answers/dead") == lines("calm/dead")
    assert len(lines("answers/dead")) == 9


def test_a_part_that_cannot_be_read_is_set_aside_and_made_again(
    generate: Generate, answers: Answers, written: Written, tmp_path: Path
) -> None:
    words = (f"input={written(QUESTIONS)}", TEMPLATE, "generate.part_rows=5")
    generate(*words)
    before, part = answers(), tmp_path / "answers" / "part-000002.parquet"
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])

    code, output = generate(*words)

    assert (code, "part-000002.parquet" in output, "moved to" in output) == (0, True, True), output
    assert answers() == before
    assert len(list((tmp_path / "answers" / ".job" / "damaged").iterdir())) == 1


def test_batch_files_in_and_out(generate: Generate, written: Written, answering: Any, tmp_path: Path) -> None:
    lines = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "x", "messages": [{"role": "user", "content": f"hello {n}"}], "max_tokens": 5},
        }
        for n in range(3)
    ]

    code, output = generate(f"input={written(lines)}", "generate.format=openai_batch")

    assert code == 0, output
    (part,) = (tmp_path / "answers").glob("part-*.jsonl")
    out = [json.loads(line) for line in part.open()]
    assert [line["custom_id"] for line in out] == ["r0", "r1", "r2"]
    assert all(line["response"]["body"]["choices"][0]["finish_reason"] == "stop" for line in out)
    assert {(request["model"], request["max_tokens"]) for request in answering.requests} == {("m", 5)}


def test_messages_of_a_table_are_sent_without_their_nulls(generate: Generate, written: Written, answering: Any) -> None:
    nothing = dict.fromkeys(("tool_calls", "tool_call_id", "name"))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [{"role": "user", "content": "hi", **nothing}, {**nothing, **asks}]

    assert generate(f"input={written([{'messages': messages}])}")[0] == 0

    assert answering.requests[0]["messages"] == [{"role": "user", "content": "hi"}, asks]


def test_messages_tools_and_a_system_message(generate: Generate, written: Written, answering: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [{"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "answer": "an older one"}]

    code, output = generate(f"input={written(rows)}", "generate.system=Be brief.", "generate.tools=tools")

    assert code == 0, output
    (request,) = answering.requests
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert request["tools"] == [tool]


def test_columns_with_our_names_are_renamed(generate: Generate, written: Written, answers: Answers) -> None:
    generate(f"input={written([{'prompt': 'a', 'answer': 'old', 'seed': 3, 'mixed': n or 'x'} for n in range(2)])}")

    assert [(row["input_answer"], row["input_seed"], row["mixed"]) for row in answers()] == [
        ("old", 3, '"x"'),
        ("old", 3, "1"),
    ]


def test_a_dry_run_shows_prompts_and_sends_nothing(
    generate: Generate, written: Written, answering: Any, tmp_path: Path
) -> None:
    code, output = generate(
        f"input={written(QUESTIONS)}", TEMPLATE, "samples=4", "generate.dry_run=true", "generate.max_tokens=100"
    )

    assert code == 0, output
    assert output.count("Solve: What is") == 3
    assert "25 rows x 4 samples = 100 answers" in output and "at most 10,000 answer tokens" in output
    assert not answering.requests and not (tmp_path / "answers").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate.template={{ nothing }}"], "'nothing' is undefined; use only the columns question, id"),
        (["generate.template={{ question"], "generate.template is not valid Jinja in line 1"),
        (["generate.template=/no/such.jinja"], "cannot be read"),
        ([], "has no column messages or prompt, only question, id"),
        ([TEMPLATE, "generate.key=idd"], "did you mean 'id'"),
        ([TEMPLATE, "generate.messages=question"], "cannot both be set"),
        (["generate.messages=questions"], "did you mean 'question'"),
        ([TEMPLATE, "generate.max_dead=2"], "generate.max_dead=2"),
        ([TEMPLATE, "generate.concurrency=0"], "generate.concurrency=0"),
        ([TEMPLATE, "generate.attemps=3"], "generate has no such key; `nemo-ext generate --help` lists its keys: did"),
        ([TEMPLATE, "generate.max_token=3"], "did you mean 'max_tokens'?"),
        ([TEMPLATE, "serving.max_lenght=3"], "did you mean 'max_length'?"),
        ([TEMPLATE, "+generate.max_token=3"], "unknown key 'generate.max_token': did you mean 'max_tokens'?"),
        ([TEMPLATE, "+generate.client=3"], "unknown key 'generate.client'"),
        ([TEMPLATE, "samples=0"], "samples"),
        ([TEMPLATE, "model=other"], "unknown model 'other'"),
        ([TEMPLATE, "endpoint=runs/none"], "runs/none does not exist; check the path, or wait until"),
        ([TEMPLATE, "endpoint=null"], "set endpoint to a run directory"),
        ([TEMPLATE, "input=/no/rows.jsonl"], "/no/rows.jsonl does not exist"),
        ([TEMPLATE, "key_variable=NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE is not set"),
        ([TEMPLATE, "generate.extra={n: 3}"], "extra.n is not allowed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_reported_in_one_line(
    generate: Generate, written: Written, answering: Any, words: list[str], message: str
) -> None:
    code, output = generate(f"input={written(QUESTIONS)}", *words)

    assert (code, output.count("\n")) == (2, 1), output
    assert message in output
    assert not answering.requests


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": 1, "question": "a"}, {"id": 1, "question": "b"}], "has the same key '1' as"),
        ([{"id": 1, "question": "a"}, {"question": "b"}], "the row has no value in its key column 'id'"),
        ([{"question": "a"}], "the row has no value in its key column 'id'"),
        ([], "no rows"),
        ([{"id": 1, "question": "a"}, {"id": 2, "custom_id": "x", "body": {}}], "mixes lines of OpenAI batch files"),
    ],
    ids=["another row", "no key", "none in the first", "empty", "mixed"],
)
def test_invalid_input_is_reported_in_one_line(
    generate: Generate, written: Written, rows: list[dict[str, Any]], message: str
) -> None:
    code, output = generate(f"input={written(rows)}", TEMPLATE, "generate.key=id")

    assert (code, output.count("\n"), message in output) == (2, 1, True), output


def test_a_line_with_invalid_json_is_named(generate: Generate, written: Written) -> None:
    file = written(QUESTIONS[:2])
    file.write_text(file.read_text() + "{oh no\n")

    code, output = generate(f"input={file}", TEMPLATE)

    assert (code, output.count("\n"), "rows.jsonl:3" in output) == (2, 1, True), output


def test_a_key_that_is_refused_ends_the_job(generate: Generate, written: Written, answering: Any, reply: Any) -> None:
    answering.reply = lambda payload: reply(status=401)

    code, output = generate(f"input={written(QUESTIONS)}", TEMPLATE)

    assert (code, output.count("\n"), "no API key was sent" in output) == (2, 1, True), output


def test_a_job_whose_endpoint_disappears_can_be_resumed(
    generate: Generate, answers: Answers, written: Written, answering: Any, reply: Any
) -> None:
    words = (f"input={written(QUESTIONS)}", TEMPLATE, "generate.part_rows=5", "generate.concurrency=2")
    calm = answering.reply

    def dying(payload: dict[str, Any]) -> Any:
        if len(answering.requests) > 10:
            answering.models = None
            return reply(fault="dropped")
        return calm(payload)

    answering.reply = dying
    code, output = generate(*words, "generate.attempts=2")
    assert (code, "the same command resumes" in output) in ((1, True), (1, False)), output

    answering.reply, answering.models = calm, ["m"]
    assert generate(*words, "generate.retry_dead=true")[0] == 0
    assert len(answers()) == 25


@pytest.mark.parametrize("format", ["parquet", "jsonl", "openai_batch"])
def test_odd_values_are_kept(
    generate: Generate, written: Written, answering: Any, reply: Any, tmp_path: Path, format: str
) -> None:
    odd = [{"n": 2**70}, {"n": float("nan")}, {"n": {"a": []}}, {"n": ["", 1]}, {}, {"n": "x" * 100_000}]
    rows = [{"question": f"{number}", "é\n": None} | row for number, row in enumerate(odd)]
    message = {"message": {"role": "assistant", "content": "half \ud83d"}, "finish_reason": 7}
    usage = {"prompt_tokens": 10**30, "completion_tokens": "two"}
    body = json.dumps({"id": "\udc00", "choices": [message], "usage": usage}).encode()
    answering.reply = lambda payload: reply(body=body)

    code, output = generate(f"input={written(rows)}", TEMPLATE, f"generate.format={format}")

    assert code == 0, output
    (part,) = (tmp_path / "answers").glob("part-*")
    if format == "parquet":
        table = pyarrow_module().parquet.read_table(part).to_pylist()
        assert [row["answer"] for row in table] == ["half ?"] * len(odd)
        assert [row["prompt_tokens"] for row in table] == [None] * len(odd)
        assert json.loads(table[0]["n"]) == 2**70
    else:
        assert len([json.loads(line) for line in part.open()]) == len(odd)


def test_a_lone_surrogate_is_named(generate: Generate, written: Written) -> None:
    file = written([{"question": "whole"}, {"question": "half \ud83d"}])

    code, output = generate(f"input={file}", TEMPLATE)

    assert (code, output.count("\n"), "rows.jsonl:2: the row has a string with" in output) == (
        2,
        1,
        True,
    ), output
