"""The job `nemo-ext synthesize`: resuming, sharing work, counts and invalid settings."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from nemo_ext.job.config import compose
from nemo_ext.job.run_directory import OWN
from nemo_ext.rl.verdict import Verdict
from nemo_ext.synthesis.context import Context
from nemo_ext.synthesis.rows import FirstRows
from nemo_ext.synthesis.settings import Canaries, Verify, WorkSettings
from nemo_ext.synthesis.verifying import Verifying

Run = Callable[..., tuple[int, str]]
Model = Callable[..., Any]
Own = Callable[..., list[str]]
Written = Callable[..., Path]
COMMAND = [sys.executable, "-m", "nemo_ext.cli", "synthesize"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
RECIPE = """\
# @package _global_
recipe: mine
about: own
roles: {teacher: {}, judge: {like: teacher}}
steps:
  first: {kind: ask, prompt: "Say {{ n }}.", columns: {first: answer}}
  second: {kind: ask, role: judge, prompt: "Judge {{ first }}.", columns: {second: answer}}
  keep: {kind: keep, require: {odd: "n % 2 == 0"}}
outputs:
  documents: {kind: documents, record: {id: id, text: second}}
"""
EARLY = RECIPE.replace("steps:\n", "steps:\n  early: {kind: keep, require: {many: n < 10}}\n")


@pytest.fixture
def own(tmp_path: Path, written: Written) -> Callable[..., list[str]]:
    """Command line for a user-defined recipe, with rows."""

    def words(text: str = RECIPE, rows: int = 40) -> list[str]:
        folder = tmp_path / "conf" / "synthesize"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mine.yaml").write_text(text)
        file = written([{"id": f"r{number}", "n": number} for number in range(rows)])
        return [f"--config-dir={tmp_path / 'conf'}", "recipe=mine", f"input={file}"]

    return words


def slow(reply: type[Any], seconds: float) -> Callable[[str, Mapping[str, Any]], Any]:
    """Rule like `echo` for a model that takes some seconds per answer."""

    def rule(asked: str, payload: Mapping[str, Any]) -> Any:
        body = {"choices": [{"message": {"role": "assistant", "content": f"said {asked}"}, "finish_reason": "stop"}]}
        return reply(body=json.dumps(body).encode(), seconds=seconds)

    return rule


def echo(asked: str, payload: Mapping[str, Any]) -> str:
    return f"said {asked}"


def asked(served: Any) -> list[str]:
    return [payload["messages"][-1]["content"] for payload in served.requests]


def test_a_recipe_of_the_users_own_is_one_file(
    model: Model, synthesize: Run, own: Own, records: Any, report: Any
) -> None:
    served = model(echo)

    code, output = synthesize(*own(), f"endpoint={served.url}", "license=cc-by-4.0")

    assert code == 0, output
    assert [each["id"] for each in records("documents")] == [f"r{number}" for number in range(0, 40, 2)]
    assert records("documents")[1]["text"] == "said Judge said Say 2.."
    assert report()["models"]["judge"] == {"model": "m", "checkpoint": None}
    assert report()["steps"]["first"]["numbers"]["prompt_tokens"] == 80
    again = len(served.requests)
    assert synthesize(*own(), f"endpoint={served.url}", "license=cc-by-4.0")[0] == 0
    assert len(served.requests) == again


def test_messages_of_a_table_are_sent_without_their_nulls(model: Model, synthesize: Run, own: Own) -> None:
    served = model(echo)
    messages = "[{'role': 'user', 'content': 'Say ' ~ n, 'tool_calls': none}]"
    words = [*own(rows=1), f"endpoint={served.url}", "steps.first.prompt=null", f'steps.first.messages="{messages}"']

    assert synthesize(*words)[0] == 0

    assert served.requests[0]["messages"] == [{"role": "user", "content": "Say 0"}]


def test_the_card_says_what_was_done(model: Model, synthesize: Run, own: Own, tmp_path: Path) -> None:
    synthesize(*own(), f"endpoint={model(echo).url}", "license=cc-by-4.0")

    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: cc-by-4.0\n")
    assert "| keep | keep | 40 | 20 | 20 odd |" in card and "| teacher | m |" in card
    assert (tmp_path / "out" / "rows.png").stat().st_size > 1000
    command = next(re.findall(r"`nemo-ext (.*)`", line)[0] for line in card.splitlines() if "documents: `" in line)
    config = compose("curate", shlex.split(command)[1:])
    assert (config["input"], config["output"]) == (str(tmp_path / "out" / "documents.jsonl"), "data/documents")


def test_later_steps_are_made_again_and_answers_are_not(model: Model, synthesize: Run, own: Own, records: Any) -> None:
    served = model(echo)
    words = [*own(), f"endpoint={served.url}"]
    synthesize(*words)
    before = len(served.requests)

    assert synthesize(*words, "steps.keep.require.odd=null", "steps.keep.require={few: 'n < 3'}")[0] == 0
    assert len(records("documents")) == 3
    assert synthesize(*words, "steps.second.columns={second: answer | upper}")[0] == 0
    assert records("documents")[0]["text"].startswith("SAID")
    assert len(served.requests) == before

    code, output = synthesize(*words, "steps.second.temperature=1")
    assert code == 2 and "second" in output and "temperature" in output and "remove" in output
    assert len(served.requests) == before


def test_garbage_is_counted_by_reason(model: Model, synthesize: Run, own: Own, report: Any) -> None:
    def garbage(asked: str, payload: Mapping[str, Any]) -> Any:
        number = int((re.findall(r"\d+", asked) or ["0"])[0])
        kinds = [
            "",
            "I'm sorry, but I cannot help with that.",
            {"content": "half", "finish_reason": "length"},
            "no json",
        ]
        return kinds[number] if number < len(kinds) else '{"a": 1}'

    recipe = RECIPE.replace("columns: {first: answer}", 'columns: {first: "(answer | json_of).a"}')

    code, output = synthesize(
        *own(recipe, 10),
        f"endpoint={model(garbage).url}",
        "steps.second=null",
        "steps.keep=null",
        "outputs.documents.record.text=first | string",
    )

    assert code == 0, output
    first = report()["steps"]["first"]
    assert first["dropped"] == {"empty answer": 1, "refusal": 1, "truncated": 1, "unreadable answer": 1}
    assert first["rows"] == 10 and first["made"] == 6
    assert first["examples"]["truncated"] == ["r2"]


def test_dropping_all_rows_is_an_error_with_reasons(model: Model, synthesize: Run, own: Own) -> None:
    code, output = synthesize(*own(), f"endpoint={model(echo).url}", "steps.keep.require={odd one: '1 > 2'}")

    assert code == 1 and "steps.keep: no rows remain (" in output and " odd one, such as r" in output


@pytest.mark.parametrize(
    ("before", "now", "messages"),
    [
        ("{first: answer}", "{first: anser}", ("steps.first.columns.first", "anser")),
        ("Say {{ n }}.", "{{ ''.__class__.__mro__ }}", ("steps.first.prompt", "unsafe")),  # templates are sandboxed
        ('"n % 2 == 0"', "n.bit_length", ("bit_length is a function",)),
        ("  documents:", "  ../evil:", ("outputs.../evil: a name may contain only letters",)),
    ],
)
def test_invalid_recipes_are_refused(
    before: str, now: str, messages: tuple[str, ...], model: Model, synthesize: Run, own: Own, tmp_path: Path
) -> None:
    code, output = synthesize(*own(RECIPE.replace(before, now)), f"endpoint={model(echo).url}")

    assert code == 2 and all(message in output for message in messages) and "Traceback" not in output
    assert not (tmp_path / "evil.jsonl").exists()


WRONG = {
    "steps.first.kind=aks": "steps.first.kind: unknown kind 'aks': did you mean 'ask'",
    "steps.frist.max_tokens=9": "steps.frist is not a step of the recipe: did you",
    "steps.first.role=techer": "steps.first: unknown role 'techer': did you mean 'teacher'",
    "steps.first.temprature=1": "steps.first: unknown key 'temprature'",
    "steps.first.prompt={{ n": "steps.first.prompt, line 1",
    "steps.first.prompt={{ m }}": "steps.first.prompt: 'm' is undefined",
    "steps.first.messages=n": "steps.first: prompt (a template) and messages (an expression) are both set",
    "steps.first.samples=0": "steps.first.samples=0",
    "steps.keep.require={odd: n %}": "steps.keep.require.odd, line 1",
    "steps.keep=5": "steps.keep=5",
    "steps.keep.require=5": "steps.keep.require=5",
    "steps.keep={kind: group, by: first}": "steps.keep.by=first",
    "steps.check={kind: verify, environment: maths}": "steps.check: unknown environment 'maths'",
    "steps.check={kind: verify, environment: judge}": "steps.check: environment judge requires a judge: set judge",
    "steps.check={kind: screen, messages: first, filters: {lenght: {}}}": "filters: unknown filter 'lenght'",
    "outputs.documents.of=kep": "outputs.documents.of: unknown step 'kep'",
    "outputs.documents.kind=docs": "outputs.documents.kind='docs'",
    "outputs.documents=null": "outputs is empty",
    "roles.judge.like=teach": "roles.judge.like=teach",
    "synthesize.max_ded=1": "max_ded",
    "steps.first.columns={id: answer}": "steps.first: the column name id is reserved",
    "steps.first.when=[true] | random": "steps.first.when",
    "steps.check={kind: verify, environment: judge, judge: judge, settings: {lenght: 1}}": "unknown key 'lenght'",
    "recipe=verified_trace": "recipe=verified_trace: no such recipe: did you mean 'verified_traces'",
}


@pytest.mark.parametrize("word", WRONG)
def test_invalid_settings_are_reported_in_one_line(model: Model, synthesize: Run, own: Own, word: str) -> None:
    served = model(echo)

    code, output = synthesize(*own(), f"endpoint={served.url}", word)

    assert code == 2 and WRONG[word] in output and "Traceback" not in output
    assert not served.requests


def test_a_role_without_an_endpoint_is_named(synthesize: Run, own: Own) -> None:
    code, output = synthesize(*own(), "roles.teacher.endpoint=http://127.0.0.1:9/v1", "roles.judge.like=null")

    assert code == 2 and "roles.judge.endpoint" in output


def test_a_dry_run_shows_the_first_requests(model: Model, synthesize: Run, own: Own, tmp_path: Path) -> None:
    served = model(echo)

    code, output = synthesize(*own(), f"endpoint={served.url}", "synthesize.dry_run=true")

    assert code == 0 and "1. first: ask teacher" in output and "Say 0." in output
    assert not served.requests and not (tmp_path / "out").exists()


def test_equal_rows_and_equal_ids(model: Model, synthesize: Run, own: Own, written: Written, report: Any) -> None:
    words = own()
    file = written([{"id": "a", "n": 0}, {"id": "a", "n": 0}, {"id": "a", "n": 2}])
    code, output = synthesize(*words, f"input={file}", f"endpoint={model(echo).url}")
    assert code == 2 and "rows.jsonl:3" in output and "'a'" in output

    file = written([{"n": 0}, {"n": 0}, {"n": 2}])
    assert synthesize(*words, f"input={file}", f"endpoint={model(echo).url}")[0] == 0
    assert report()["rows"] == 2 and report()["repeated"] == 1


@pytest.mark.slow
def test_only_requests_in_flight_are_repeated(
    model: Model, own: Own, tmp_path: Path, reply: type[Any], synthesize: Run, records: Any
) -> None:
    served = model(slow(reply, 0.05))
    words = [*own(rows=40), f"endpoint={served.url}", f"output={tmp_path / 'out'}", "synthesize.concurrency=4"]
    command = [*COMMAND, *words]
    for kill_at in (30, 70):
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        while len(served.requests) < kill_at and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()

    subprocess.run(command, env=ENVIRONMENT, check=True, stderr=subprocess.DEVNULL)

    assert len(set(asked(served))) == 80
    assert len(served.requests) <= 80 + 2 * 5
    assert [each["id"] for each in records("documents")] == [f"r{number}" for number in range(0, 40, 2)]


@pytest.mark.deep
def test_two_share_the_work(model: Model, own: Own, tmp_path: Path, reply: type[Any], records: Any) -> None:
    served = model(slow(reply, 0.1))
    words = [*own(rows=100), f"endpoint={served.url}", f"output={tmp_path / 'out'}", "synthesize.concurrency=4"]
    command = [*COMMAND, *words, "synthesize.part_rows=10"]
    workers = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) for _ in range(2)]

    assert [worker.wait() for worker in workers] == [0, 0]
    assert [each["id"] for each in records("documents")] == [f"r{number}" for number in range(0, 100, 2)]
    assert served.most > 4
    assert len(served.requests) <= 200 + 2 * 2 * 10


def test_another_file_of_the_same_glob_is_noticed(
    model: Model, synthesize: Run, own: Own, written: Written, records: Any
) -> None:
    served = model(echo)
    words = [word for word in own() if not word.startswith("input=")]
    words += [f"endpoint={served.url}", "steps.second=null", "outputs.documents.record.text=first"]
    for name in ("q[1].jsonl", "q[2].jsonl"):
        file = written([{"id": name, "n": int(name[2]) * 2}], name)
        code, output = synthesize(*words, f"input='{file}'")
        assert code == 0, output
        assert [each["id"] for each in records("documents")] == [name]


def test_answers_to_unchanged_rows_are_reused(model: Model, synthesize: Run, own: Own, records: Any) -> None:
    served = model(echo)
    words = [*own(EARLY), f"endpoint={served.url}"]
    assert synthesize(*words)[0] == 0
    assert len(served.requests) == 20

    code, output = synthesize(*words, "steps.early.require.many=n > 4 and n < 14")
    assert code == 0 and "10 answers are kept" in output, output
    assert len(served.requests) == 28
    assert [each["id"] for each in records("documents")] == ["r6", "r8", "r10", "r12"]
    assert all(each["text"] == f"said Judge said Say {each['id'][1:]}.." for each in records("documents"))

    assert synthesize(*words)[0] == 0
    assert len(served.requests) == 28
    assert [each["id"] for each in records("documents")] == [f"r{number}" for number in range(0, 10, 2)]


def test_failed_rows_are_named_and_can_be_retried(
    model: Model, synthesize: Run, own: Own, records: Any, report: Any, reply: type[Any]
) -> None:
    broken = True

    def rule(asked: str, payload: Mapping[str, Any]) -> Any:
        return reply(status=400, body=b"no") if broken and asked == "Say 4." else f"said {asked}"

    served = model(rule)
    words = [*own(), f"endpoint={served.url}"]
    assert synthesize(*words)[0] == 0
    first = report()["steps"]["first"]
    assert first["dropped"] == {"no answer": 1} and "r4" in first["examples"]["no answer"][0]
    assert len(records("documents")) == 19
    broken, before = False, len(served.requests)

    code, output = synthesize(*words, "synthesize.retry_dead=true")
    assert code == 0, output
    assert len(records("documents")) == 20 and len(served.requests) == before + 2
    assert [each["id"] for each in records("documents")] == [f"r{number}" for number in range(0, 40, 2)]


def test_a_kill_before_a_step_is_noted_leaves_nothing_stale(
    model: Model, synthesize: Run, own: Own, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*own(rows=4), f"endpoint={model(echo).url}", "steps.second=null"]
    assert synthesize(*words, "outputs.documents.record.text=first")[0] == 0
    changed = [*words, "steps.first.columns={first: answer | upper}", "outputs.documents.record.text=first"]
    with monkeypatch.context() as patch:
        patch.setattr("nemo_ext.synthesis.job.note", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        assert synthesize(*changed)[0] == 1

    assert synthesize(*words, "outputs.documents.record.text=first")[0] == 0
    assert records("documents")[0]["text"] == "said Say 0."


def test_a_role_like_another_may_have_a_model_of_its_own(model: Model, synthesize: Run, own: Own, report: Any) -> None:
    served = model(echo)
    served.models = ["m", "big"]

    code, output = synthesize(*own(), f"endpoint={served.url}", "roles.teacher.model=m", "roles.judge.model=big")

    assert code == 0, output
    assert report()["models"]["judge"]["model"] == "big"
    assert {payload["model"] for payload in served.requests} == {"m", "big"}


def test_the_output_may_move(model: Model, synthesize: Run, own: Own, tmp_path: Path, reply: type[Any]) -> None:
    refuse = True

    def rule(asked: str, payload: Mapping[str, Any]) -> Any:
        return reply(status=400, body=b"no") if refuse else f"said {asked}"

    served = model(rule)
    words = [*own(), f"endpoint={served.url}"]
    assert synthesize(*words)[0] == 1
    (tmp_path / "out").rename(tmp_path / "moved")
    refuse = False

    code, output = synthesize(*words, f"output={tmp_path / 'moved'}", "synthesize.retry_dead=true")
    assert code == 0, output


def test_ids_may_look_like_those_of_canaries(
    model: Model, synthesize: Run, own: Own, written: Written, records: Any
) -> None:
    recipe = RECIPE.replace(
        "columns: {second: answer}",
        "columns: {second: answer}, canaries: {columns: {first: other.first}, fooled: 'false'}",
    )
    file = written([{"id": f"{number}/canary", "n": 2 * number} for number in range(7)], "like.jsonl")

    code, output = synthesize(*own(recipe), f"input={file}", f"endpoint={model(echo).url}")

    assert code == 0, output
    assert len(records("documents")) == 7


def test_an_answer_may_be_anything(model: Model, synthesize: Run, own: Own, report: Any, tmp_path: Path) -> None:
    def rule(asked: str, payload: Mapping[str, Any]) -> str:
        number = int(re.findall(r"\d+", asked)[0])
        return [
            '{"a": "\\ud800"}',
            "[" * 2000 + "]" * 2000,
            '{"a": 1e999}',
            "</a><a>x",
            '{"a": 123456789012345678901234}',
            "<a>ok\u2028\x85</a>",
        ][number % 6]

    recipe = RECIPE.replace(
        "columns: {first: answer}", "columns: {first: \"(answer | json_of or {'a': answer | tagged('a') or none}).a\"}"
    )
    recipe = recipe.replace(
        'second: {kind: ask, role: judge, prompt: "Judge {{ first }}.", columns: {second: answer}}',
        "second: {kind: verify, environment: contains, answer: \"first or ''\", reference: {answers: \"['ok']\"}}",
    )

    code, output = synthesize(
        *own(recipe, 6),
        f"endpoint={model(rule).url}",
        "outputs.documents.record.text=first | string",
        "steps.keep=null",
    )

    assert code == 0, output
    assert report()["outputs"]["documents"]["made"] == 6
    verified = (tmp_path / "out" / "steps" / "second" / "rows.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["why"] for line in verified if b"ok" in line] == [""]


def test_only_the_verdict_cut_short_by_a_kill_is_lost(tmp_path: Path) -> None:
    journal = tmp_path / "verdicts.jsonl"
    whole = b"".join(json.dumps({"id": name, "error": False}).encode() + b"\n" for name in ("a", "b"))
    journal.write_bytes(whole + b'{"id": "c", "er')

    known = Verifying._known(cast(Any, None), journal)

    assert list(known) == ["a", "b"]
    assert journal.read_bytes() == whole


def test_verdicts_that_arrive_with_a_failure_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def verdict(self: Verifying, row: Mapping[str, Any]) -> Verdict:
        if row["id"] == "b":
            raise ValueError("row b names no environment")
        return Verdict.correct()

    monkeypatch.setattr(Verifying, "_verdict", verdict)
    (tmp_path / OWN).mkdir()
    context = Context(name="check", folder=tmp_path, rows=FirstRows([{"id": name} for name in "abc"]), seed=1)
    verifying = Verifying(step=Verify(), context=context, judge=None, work=WorkSettings())

    with pytest.raises(ValueError, match="row b"):
        list(verifying.rows("identity"))

    journal = (tmp_path / OWN / "verdicts.jsonl").read_text().splitlines()
    assert {json.loads(line)["id"] for line in journal} == {"a", "c"}


def test_the_progress_of_verdicts_ends_at_the_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries are verified too, but are not rows; a second start counts the first one's verdicts."""

    async def verdict(self: Verifying, row: Mapping[str, Any]) -> Verdict:
        return Verdict.correct()

    seen: list[int] = []

    @contextmanager
    def progress(label: str, total: int, **settings: Any) -> Iterator[Callable[[int], None]]:
        seen.extend((total, 0))

        def advance(count: int) -> None:
            seen[-1] += count

        yield advance

    monkeypatch.setattr(Verifying, "_verdict", verdict)
    monkeypatch.setattr("nemo_ext.synthesis.verifying.progress_of", progress)
    (tmp_path / OWN).mkdir()
    rows = [{"id": name, "first": name, "used": name != "b"} for name in "abcdef"]
    context = Context(name="check", folder=tmp_path, rows=FirstRows(rows), seed=1)
    canaries = Canaries(columns={"first": "other.first"}, fooled="false", share=1.0)
    verifying = Verifying(step=Verify(canaries=canaries, when="used"), context=context, judge=None, work=WorkSettings())

    for _ in range(2):
        asyncio.run(verifying._verify(tmp_path / "journal", known := {}))
        seen.append(len(known))
        asyncio.run(verifying._verify(tmp_path / "journal", known))

    assert seen == [6, 6, 10, 6, 6] * 2


def test_missing_verdicts_are_requested_again(model: Model, synthesize: Run, own: Own, records: Any) -> None:
    away = True

    def judge(asked: str, payload: Mapping[str, Any]) -> str:
        return "hm" if away else "It is right.\n[[correct]]"

    recipe = RECIPE.replace(
        'second: {kind: ask, role: judge, prompt: "Judge {{ first }}.", columns: {second: answer}}',
        "second: {kind: verify, environment: judge, judge: judge, answer: first, "
        "reference: {question: \"'q'\", answer: first}}",
    )
    words = [*own(recipe, 6), f"roles.teacher.endpoint={model(echo).url}", f"roles.judge.endpoint={model(judge).url}"]
    words += ["outputs.documents.record.text=first"]
    code, output = synthesize(*words)
    assert code == 1 and "steps.second: " in output and " rows have no verdict, more than synthesize.max_dead" in output

    away = False
    code, output = synthesize(*words)
    assert code == 0, output
    assert len(records("documents")) == 3


def test_another_test_set_of_the_same_name_is_noticed(
    model: Model, synthesize: Run, own: Own, report: Any, tmp_path: Path
) -> None:
    held = tmp_path / "held.txt"
    filters = f"{{decontamination: {{test_sets: [{{name: held, path: {held}}}]}}}}"
    words = [*own(), f"endpoint={model(echo).url}", "steps.second=null", "outputs.documents.record.text=first"]
    words += [f"steps.gate={{kind: screen, messages: first, filters: {filters}}}"]
    held.write_text("Nothing that any of these rows has ever said.\n")
    assert synthesize(*words)[0] == 0
    assert report()["steps"]["gate"]["dropped"] == {}

    held.write_text("said Say 0.\n")
    code, output = synthesize(*words, "steps.gate.filters.decontamination.min_words=1")
    assert code == 0, output
    assert report()["steps"]["gate"]["dropped"] == {"decontamination/benchmark": 1}
    held.write_text("said Say 2.\nsaid Say 4.\n")
    assert synthesize(*words, "steps.gate.filters.decontamination.min_words=1")[0] == 0
    assert report()["steps"]["gate"]["dropped"] == {"decontamination/benchmark": 2}


def test_a_dry_run_passes_what_only_the_run_can_decide(
    model: Model, synthesize: Run, own: Own, written: Written
) -> None:
    recipe = RECIPE.replace("steps:\n", "steps:\n  mates: {kind: draw, column: mates, value: n}\n").replace(
        'prompt: "Say {{ n }}."', 'prompt: "Say {{ mates[0] }}.", when: n > 2'
    )
    words = [*own(recipe), f"endpoint={model(echo).url}"]

    code, output = synthesize(*words, "synthesize.dry_run=true")
    assert code == 0 and "Say " in output, output

    code, output = synthesize(*words, f"input={written([])}", "synthesize.dry_run=true")
    assert code == 2 and "has no rows" in output


def test_answers_of_another_model_are_not_reused(
    model: Model, synthesize: Run, own: Own, records: Any, tmp_path: Path
) -> None:
    words = [*own(EARLY), "steps.second=null", "outputs.documents.record.text=first"]
    first, second = model(lambda *_: "first", "a"), model(lambda *_: "second", "b")
    assert synthesize(*words, f"endpoint={first.url}")[0] == 0
    assert synthesize(*words, f"endpoint={first.url}", "steps.early.require.many=n < 20")[0] == 0

    code, output = synthesize(*words, f"endpoint={second.url}", "steps.early.require.many=n < 12")
    assert code == 2 and "model" in output and "steps/first" in output and not second.requests

    shutil.rmtree(tmp_path / "out" / "steps" / "first")
    assert synthesize(*words, f"endpoint={second.url}", "steps.early.require.many=n < 12")[0] == 0
    assert {each["text"] for each in records("documents")} == {"second"} and len(second.requests) == 12


def test_rows_and_a_setting_changed_at_once_can_be_reverted(model: Model, synthesize: Run, own: Own) -> None:
    served = model(echo)
    words = [*own(EARLY), f"endpoint={served.url}"]
    assert synthesize(*words)[0] == 0
    assert synthesize(*words, "steps.early.require.many=n < 20", "steps.first.temperature=1")[0] == 2
    before = len(served.requests)

    assert synthesize(*words)[0] == 0
    assert len(served.requests) == before
    assert synthesize(*words, "synthesize.part_rows=3", "steps.early.require.many=n < 12")[0] == 0
    assert len(served.requests) == before + 4


def test_a_condition_reads_the_answer_and_not_the_rows_column(
    model: Model, synthesize: Run, own: Own, written: Written, records: Any
) -> None:
    recipe = RECIPE.replace(
        "columns: {first: answer}", "columns: {first: answer}, require: {good: \"answer == 'said Say 2.'\"}"
    )
    words = own(recipe)
    file = written([{"id": "a", "n": 2, "answer": "other"}], "answers.jsonl")

    code, output = synthesize(*words, f"input={file}", f"endpoint={model(echo).url}")

    assert code == 0 and len(records("documents")) == 1, output


def test_canaries_are_planted_only_in_matching_rows(
    model: Model, synthesize: Run, own: Own, report: Any, tmp_path: Path
) -> None:
    canaries = "columns: {second: answer}, canaries: {columns: {first: other.first}, fooled: 'true'"
    recipe = RECIPE.replace("columns: {second: answer}", canaries + ", when: n > 100}")

    code, output = synthesize(*own(recipe), f"endpoint={model(echo).url}")
    assert code == 0, output
    assert "canaries" not in report()["steps"]["second"]["numbers"]

    one = RECIPE.replace("columns: {second: answer}", canaries + "}").replace(
        "first: {kind: ask,", "first: {kind: ask, samples: 4,"
    )
    code, output = synthesize(*own(one, 1), f"endpoint={model(echo).url}", f"output={tmp_path / 'one'}")
    assert code == 0, output
