"""`nemo-ext evaluate` on an endpoint that knows half of the answers."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.evaluation.store import Store
from nemo_ext.job.ranks import reserve_port

Evaluate = Callable[..., tuple[int, str]]
Read = Callable[..., dict[str, Any]]
Suite = Callable[..., Path]


def test_a_benchmark_in_one_file(evaluate: Evaluate, results: Read, suite: Suite, tmp_path: Path) -> None:
    code, output = evaluate(f"suite={suite()}")

    assert code == 0, output
    found = results()["benchmarks"]["sums"]
    right = [score.score for score in Store(tmp_path / "run" / "store").scores().values()]
    assert found["accuracy"] == sum(right) / 20
    assert 0 < found["accuracy"] < 1
    assert found["interval"][0] < found["accuracy"] < found["interval"][1]
    assert (found["n"], found["samples"], found["wanted"], found["metric"]) == (20, 20, 20, "avg@1")
    assert found["tokens"] == pytest.approx(12)
    assert found["truncated"] == 1 / 20
    assert set(found["domains"]) == {"odd", "even"}
    assert "sums" in output
    for name in ("report.md", "report.html"):
        assert (tmp_path / "run" / name).stat().st_size > 500


def test_the_same_command_repeats_no_request(evaluate: Evaluate, results: Read, suite: Suite, answering: Any) -> None:
    words = f"suite={suite()}"
    evaluate(words)
    first, asked = results(), len(answering.requests)
    evaluate(words)

    assert len(answering.requests) == asked == 20
    assert results() == first


def test_more_samples_add_to_the_store(evaluate: Evaluate, results: Read, suite: Suite, answering: Any) -> None:
    words = [f"suite={suite(sampling={'temperature': 1.0})}", "evaluate.samples=2"]
    evaluate(*words)
    two = results()["benchmarks"]["sums"]
    evaluate(*words, "evaluate.samples=4")
    four = results()["benchmarks"]["sums"]

    assert len(answering.requests) == 80
    assert len({request["seed"] for request in answering.requests}) == 80
    assert four["samples"] == 80
    assert set(four["metrics"]) == {"avg@4", "pass@1", "pass@2", "pass@4", "maj@4"}
    assert four["metrics"]["pass@4"] > four["metrics"]["pass@1"] == pytest.approx(four["accuracy"])
    evaluate(*words)
    assert results()["benchmarks"]["sums"] == two


def test_omitted_fields_are_not_sent(evaluate: Evaluate, suite: Suite, answering: Any) -> None:
    words, ours = f"suite={suite(rows=4, sampling={'temperature': 1.0})}", answering.reply
    answering.reply = lambda payload: ours({"seed": 1, **payload})
    evaluate(words, "evaluate.omit=seed")
    evaluate(words, "evaluate.omit=[seed, temperature]")

    assert not any("seed" in request for request in answering.requests)
    assert ["temperature" in request for request in answering.requests] == [True] * 4 + [False] * 4


def test_a_limit_always_selects_the_same_problems(
    evaluate: Evaluate, suite: Suite, answering: Any, tmp_path: Path
) -> None:
    words = f"suite={suite()}"
    evaluate(words, "evaluate.limit=5")
    few = {key.problem for key, _, _ in Store(tmp_path / "run" / "store").scores()}
    data = tmp_path / "data" / "sums.jsonl"
    data.write_text("".join(reversed(data.read_text().splitlines(keepends=True))))
    evaluate(words, "evaluate.limit=8")

    assert len(few) == 5
    assert few < {key.problem for key, _, _ in Store(tmp_path / "run" / "store").scores()}
    assert len(answering.requests) == 8


def test_modes_and_prompts_are_distinguished(evaluate: Evaluate, results: Read, suite: Suite, answering: Any) -> None:
    prompts = {"plain": "{{ question }}", "polite": "Please: {{ question }}", "short": "{{ question[8:] }}"}
    modes = {"off": {"system": "/no_think"}, "on": {"system": "/think", "body": {"top_k": 3}, "max_tokens": 128}}
    evaluate(f"suite={suite(prompt=prompts, modes=modes)}")

    found = results()["benchmarks"]["sums"]
    assert set(found["modes"]) == {"off", "on"}
    assert set(found["prompts"]) == set(prompts)
    means = [found["prompts"][name]["accuracy"] for name in prompts]
    centre = sum(means) / 3
    assert found["sensitivity"]["std"] == pytest.approx((sum((each - centre) ** 2 for each in means) / 2) ** 0.5)
    on = [request for request in answering.requests if request["messages"][0]["content"] == "/think"]
    assert len(on) == 60
    assert {(request["top_k"], request["max_tokens"]) for request in on} == {(3, 128)}


def test_a_base_model_continues_the_prompt(
    evaluate: Evaluate, results: Read, suite: Suite, answering: Any, reply: type[Any]
) -> None:
    def continued(payload: dict[str, Any]) -> Any:
        choice = {"text": f" {3 if 'Q: What is 1 + 2?' in payload['prompt'][-25:] else 'x'}", "finish_reason": "stop"}
        return reply(body=json.dumps({"choices": [choice]}).encode())

    answering.reply = continued
    keys = {"complete": True, "shots": 2, "prompt": "Q: {{ question }}\nA:", "shot": "Q: {{ question }}\nA: {{ sum }}"}
    reference = {"answer": "sum | string", "format": "'bare'"}
    evaluate(f"suite={suite(rows=5, domain=None, sampling={'stop': 'Q:'}, reference=reference, **keys)}")

    assert results()["benchmarks"]["sums"]["accuracy"] == 0.2
    assert {request["prompt"].count("Q:") for request in answering.requests} == {3}
    assert {request["stop"] for request in answering.requests} == {"Q:"}
    assert not any("messages" in request for request in answering.requests)


def test_refused_requests_are_reported(evaluate: Evaluate, results: Read, suite: Suite, answering: Any) -> None:
    words = f"suite={suite(prompt='{{ question }}{% if sum == 6 %} refuse me{% endif %}')}"
    evaluate(words)

    found = results()["benchmarks"]["sums"]
    assert (found["n"], found["failed"], found["reasons"]) == (19, 1, {"HTTP 400": 1})
    asked = len(answering.requests)
    evaluate(words)
    assert len(answering.requests) == asked
    evaluate(words, "evaluate.retry=true")
    assert len(answering.requests) > asked


def test_requests_that_are_too_many_are_sent_again_by_the_same_command(
    evaluate: Evaluate, results: Read, suite: Suite, answering: Any, reply: type[Any]
) -> None:
    right = answering.reply
    answering.reply = lambda payload: reply(status=429, body=b"{}") if "9" in str(payload) else right(payload)
    words = (f"suite={suite()}", "evaluate.attempts=2")
    evaluate(*words)
    assert results()["benchmarks"]["sums"]["reasons"].keys() == {"HTTP 429"}

    answering.reply = right
    evaluate(*words)

    assert results()["benchmarks"]["sums"]["failed"] == 0


@pytest.mark.parametrize("end", ["length", "content_filter"])
def test_answers_without_text_count_as_wrong(
    evaluate: Evaluate, results: Read, suite: Suite, answering: Any, reply: type[Any], end: str
) -> None:
    def every_other(payload: dict[str, Any]) -> Any:
        number = int(payload["messages"][-1]["content"].split()[2])
        ended = {"message": {"role": "assistant", "content": None}, "finish_reason": end}
        right = {"message": {"content": f"\\boxed{{{3 * number}}}"}, "finish_reason": "stop"}
        return reply(body=json.dumps({"choices": [ended if number % 2 else right]}).encode())

    answering.reply = every_other
    evaluate(f"suite={suite(rows=8)}")

    found = results()["benchmarks"]["sums"]
    assert (found["accuracy"], found["n"], found["failed"]) == (0.5, 8, 0)
    assert (found["truncated"], len(answering.requests)) == (0.5 if end == "length" else 0, 8)


def test_a_judge_that_is_down_leaves_answers_without_a_score(
    evaluate: Evaluate, results: Read, suite: Suite, answering: Any, endpoints: Callable[[], Any], reply: type[Any]
) -> None:
    judge = endpoints()
    judge.models, url = ["j"], judge.url
    judge.reply = lambda payload: reply(status=503)
    reference = {"question": "question", "answer": "sum | string"}
    words = [
        f"suite={suite(rows=4, environment='judge', reference=reference)}",
        f"evaluate.judge={{endpoint: '{url}', model: j, attempts: 1}}",
    ]
    code, said = evaluate(*words)

    assert code == 0, said
    found = results()["benchmarks"]["sums"]
    assert (found["n"], found["unscored"], found["accuracy"]) == (0, 4, None)
    asked = len(answering.requests)
    judge.reply = lambda payload: reply(text="It agrees.\n[[correct]]")
    evaluate(*words)
    assert results()["benchmarks"]["sums"]["accuracy"] == 1
    assert len(answering.requests) == asked


@pytest.mark.parametrize(
    ("keys", "words", "said"),
    [
        ({"prompt": "{{ quesion }}"}, (), "'quesion' is undefined"),
        ({"reference": {"answer": "{{"}}, (), "reference.answer"),
        ({"reference": {"answr": "sum"}}, (), "'answr'"),
        ({"environment": "maths"}, (), "did you mean 'math'?"),
        (
            {"environment": "judge", "reference": {"question": "question", "answer": "sum | string"}},
            (),
            "evaluate.judge",
        ),
        ({"data": ["other/*.parquet"]}, (), "get it from nowhere"),
        ({"colour": 1}, (), "unknown key 'colour'"),
        ({}, ("evaluate.benchmarks=[sum]",), "did you mean 'sums'?"),
        ({}, ("evaluate.modes=[on]",), "unknown mode 'on'"),
        ({}, ("evaluate.limit=0",), "evaluate.limit=0"),
        ({}, ("suite=quik",), "did you mean 'quick'?"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    evaluate: Evaluate, suite: Suite, keys: dict[str, Any], words: tuple[str, ...], said: str, answering: Any
) -> None:
    code, found = evaluate(f"suite={suite(**keys)}", *words)

    assert code == 2
    assert said in found
    assert "Traceback" not in found
    assert not answering.requests


def test_a_malformed_row_excludes_its_benchmark(
    evaluate: Evaluate, results: Read, suite: Suite, tmp_path: Path
) -> None:
    both = json.loads(suite().read_text())["benchmarks"] + json.loads(suite(name="other").read_text())["benchmarks"]
    (tmp_path / "both.yaml").write_text(json.dumps({"benchmarks": both}))
    with open(tmp_path / "data" / "other.jsonl", "a") as file:
        file.write('{"question": \n')
    code, said = evaluate(f"suite={tmp_path / 'both.yaml'}")

    assert code == 0
    assert "other.jsonl:21" in said
    assert list(results()["missing"]) == ["other"]
    assert list(results()["benchmarks"]) == ["sums"]


def test_a_store_of_another_model_is_refused(evaluate: Evaluate, suite: Suite, answering: Any) -> None:
    words = f"suite={suite(rows=3)}"
    evaluate(words)
    answering.models = ["n"]
    code, said = evaluate(words)

    assert code == 2
    assert "another model or seed" in said
    answering.models = ["m"]
    assert evaluate(words, "evaluate.seed=7")[0] == 2


@pytest.mark.parametrize("kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.deep)])
def test_kills_change_nothing(kills: int, suite: Suite, tmp_path: Path) -> None:
    """After SIGKILL at any time, the results equal those of an undisturbed run."""
    held = reserve_port()
    port = held.getsockname()[1]
    stand_in = Path(__file__).parents[2] / "benchmarks" / "stand_in.py"
    server = subprocess.Popen([sys.executable, str(stand_in), f"--port={port}", "--seconds=0.02"])
    reference = {"answers": "['1', '2', '3']", "whole_words": "false", "all": "true"}
    rows = 150 * kills
    place = suite(rows=rows, environment="contains", reference=reference)

    def command(run_dir: Path) -> list[str]:
        words = [f"endpoint=http://127.0.0.1:{port}/v1", f"suite={place}", f"run_dir={run_dir}"]
        words += [f"evaluate.data_root={tmp_path / 'data'}", "evaluate.draws=100", "evaluate.concurrency=8"]
        return [sys.executable, "-m", "nemo_ext.cli", "evaluate", *words]

    try:
        subprocess.run(command(tmp_path / "calm"), check=True, capture_output=True)
        for _ in range(kills):
            run = subprocess.Popen(command(tmp_path / "killed"), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            before = _answers(tmp_path / "killed")
            while run.poll() is None and _answers(tmp_path / "killed") < before + 60:
                time.sleep(0.02)
            run.send_signal(signal.SIGKILL)
            run.wait()
        assert 60 * kills <= _answers(tmp_path / "killed") < rows
        subprocess.run(command(tmp_path / "killed"), check=True, capture_output=True)
    finally:
        server.kill()
        held.close()
    calm, killed = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("calm", "killed"))
    assert killed["benchmarks"] == calm["benchmarks"]
    assert 0 < calm["benchmarks"]["sums"]["accuracy"] < 1


def _answers(run_dir: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in run_dir.glob("store/answers-*"))
