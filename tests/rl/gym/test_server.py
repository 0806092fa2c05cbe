"""Servers over HTTP, with the requests of Gym's agents."""

import asyncio
import importlib
import json
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemo_ext.rl.gym.rows import to_gym
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import generate, python_tool
from nemo_ext.rl.worlds.python_tool import TOOL

pytestmark = pytest.mark.gym

Serve = Callable[..., Any]
MATH = Task.from_record({"id": "1", "environment": "math", "prompt": "1 + 1?", "reference": {"answer": "2"}})


def verified(client: Any, row: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/verify", json={**row, "response": response})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stepped(client: Any, row: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/step", json={**row, "response": response})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def bank(level: int) -> tuple[Task, dict[str, Any]]:
    task = next(generate("bank", 1, seed=5, level=level))
    return task, to_gym(task)


def last_word(task: Task) -> str:
    return str(task.reference.get("answer") or "Done.")


class TestVerify:
    def test_the_reply_has_a_reward_and_metrics(self, serve: Serve, openai: SimpleNamespace) -> None:
        client, row = serve(environment="math"), to_gym(MATH)
        assert client.post("/seed_session", json=row).json() == {}

        right = verified(client, {**row, "_ng_task_index": 3}, openai.response(openai.said(r"\boxed{2}")))
        wrong = verified(client, row, openai.response(openai.said(r"\boxed{3}")))

        assert (right["reward"], right["correct"], right["verifier_error"]) == (1.0, True, False)
        assert right["_ng_task_index"] == 3 and right["verifier_metadata"] == row["verifier_metadata"]
        assert (wrong["reward"], wrong["verdict"]["outcome"], wrong["verdict"]["answer"]) == (0.0, "wrong", "3")
        assert "_ng_failure_class" not in wrong and not wrong.get("mask_sample")

    def test_domyns_reward_counts_tokens_and_tags(self, serve: Serve, openai: SimpleNamespace) -> None:
        client = serve(environment="math", reward={"name": "domyn_math", "max_tokens": 8192})
        row = to_gym(Task.from_record({**MATH.record(), "thinking": True}))
        thought = (openai.thought("so"), openai.said(r"\boxed{2}"))

        whole = verified(client, row, openai.response(*thought, usage=openai.usage(4096)))
        bare = verified(client, row, openai.response(openai.said("2"), usage=openai.usage(8192)))
        uncounted = client.post("/verify", json={**row, "response": openai.response(*thought)})

        assert whole["reward"] == pytest.approx(3 + 1 - 0.125)
        assert bare["reward"] == bare["reward/length"] == pytest.approx(-0.25)
        assert uncounted.status_code == 500 and "reports no usage" in uncounted.text

    def test_a_malformed_call_is_wrong(self, serve: Serve, openai: SimpleNamespace) -> None:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        task = {"id": "1", "environment": "tool_calls", "prompt": "?", "tools": tools, "reference": {"expected": []}}
        client, row = serve(environment="tool_calls"), to_gym(Task.from_record(task))
        said = openai.said("None.")

        assert verified(client, row, openai.response(said))["reward"] == 1
        assert verified(client, row, openai.response(said, openai.called("f", "{")))["reward"] == 0

    @pytest.mark.parametrize(
        "text",
        ["", "\x00" * 9, "x" * (1 << 20), r"\boxed{" * 5000, "[" * 100_000, r"\boxed{NaN}", r"\boxed{٢}", "𝟚"],
        ids=["empty", "nul", "long", "boxes", "brackets", "nan", "arabic", "styled"],
    )
    def test_hostile_answers_are_wrong(self, serve: Serve, openai: SimpleNamespace, text: str) -> None:
        for environment, task in (("math", MATH), ("structured_output", next(generate("schemas", 1, seed=1)))):
            made = verified(serve(environment=environment), to_gym(task), openai.response(openai.said(text)))

            assert (made["reward"], made["verdict"]["outcome"]) == (0.0, "wrong")

    def test_no_output_at_all_is_wrong(self, serve: Serve, openai: SimpleNamespace) -> None:
        assert verified(serve(environment="math"), to_gym(MATH), openai.response())["reward"] == 0

    def test_a_row_of_another_environment_is_refused(self, serve: Serve, openai: SimpleNamespace) -> None:
        client, answer = serve(environment="math"), openai.response(openai.said("2"))
        other = to_gym(next(generate("tables", 1, seed=1)))
        broken = to_gym(Task.from_record({**MATH.record(), "reference": {"anwser": "2"}}))

        for row, message in ((other, "must be 'math' for this server"), (broken, "did you mean 'answer'")):
            refused = client.post("/verify", json={**row, "response": answer})

            assert refused.status_code == 422 and message in refused.json()["detail"]


class TestJudge:
    TASK = Task.from_record(
        {"id": "1", "environment": "judge", "prompt": "Who?", "reference": {"question": "Who?", "answer": "Ada"}}
    )

    def settings(self, url: str) -> dict[str, Any]:
        return {"judge": {"endpoint": url, "model": "judge", "attempts": 2, "attempt_seconds": 5, "total_seconds": 0.5}}

    def test_a_silent_judge_does_not_block_a_request(
        self, serve: Serve, openai: SimpleNamespace, endpoint: Any, reply: Any
    ) -> None:
        endpoint.reply = lambda payload: reply(fault="silent")
        client = serve(environment="judge", settings=self.settings(endpoint.url))

        began = time.monotonic()
        made = verified(client, to_gym(self.TASK), openai.response(openai.said("Ada")))

        assert (made["reward"], made["verifier_error"], made["_ng_failure_class"]) == (0, True, "verifier_error")
        assert (made["mask_sample"], made["failure_kind"]) == (True, "verifier_error")
        assert made["failure_reason"] == made["verdict"]["reason"]
        assert "no answer within 0.5 s" in made["verdict"]["reason"] and time.monotonic() - began < 60

    def test_the_judge_decides(self, serve: Serve, openai: SimpleNamespace, endpoint: Any, reply: Any) -> None:
        endpoint.reply = lambda payload: reply(text="The same.\n[[correct]]")
        client = serve(environment="judge", settings=self.settings(endpoint.url))

        assert verified(client, to_gym(self.TASK), openai.response(openai.said("Ada")))["reward"] == 1


class TestTools:
    """Routes for agents that execute single calls."""

    def test_calls_change_the_state_of_their_session(self, serve: Serve, openai: SimpleNamespace) -> None:
        (task, row), server = bank(1), serve(environment="bank")
        (clients := [type(server)(server.app), type(server)(server.app)])
        for client in clients:
            client.post("/seed_session", json=row)

        for call in task.reference["calls"]:
            assert clients[0].post(f"/{call['name']}", json=call["arguments"]).status_code == 200
        ends = openai.response(openai.said(last_word(task)))

        assert verified(clients[0], row, ends)["reward"] == 1
        assert verified(clients[0], row, ends)["reward"] == 1  # a request that is sent again
        assert verified(clients[1], row, ends)["reward"] == 0

    def test_python_keeps_the_variables_of_its_session(self, serve: Serve, openai: SimpleNamespace) -> None:
        (task,), client = generate("python_tool", 1, seed=5), serve(environment="python_tool")
        tools = [{"type": "function", "strict": False, **task.tools[0]["function"]}]
        row = {"responses_create_params": {"input": "?", "tools": tools}, "expected_answer": task.reference["answer"]}
        client.post("/seed_session", json=row)  # a row of Gym's ns_tools

        codes = [call.arguments["code"] for call in python_tool.solution(task)]
        outputs = [client.post(f"/{TOOL.name}", json={"code": code}).text for code in [*codes, "1 / 0"]]
        made = verified(client, row, openai.response(openai.said(f"\\boxed{{{outputs[1]}}}")))

        assert outputs[0] == "[no output]" and outputs[2].endswith("ZeroDivisionError: division by zero")
        assert made["reward"] == 1

    @pytest.mark.parametrize(
        ("name", "body"),
        [
            ("no_such_tool", b"{}"),
            ("verify_identity", b"[1, 2]"),
            ("verify_identity", b""),
            ("verify_identity", b'{"customer_id": 1e999}'),
            ("verify_identity", b'{"customer_id": "\\ud800", "birth_date": "\\u0000"}'),
            ("verify_identity", b"\xff\xfe\x00"),
            ("verify_identity", b"[" * 200_000),
            ("verify_identity", b'{"customer_id": "' + b"x" * (1 << 20) + b'"}'),
            ("../verify_identity", b"null"),
        ],
    )
    def test_every_call_gets_a_text_reply(self, serve: Serve, name: str, body: bytes) -> None:
        client = serve(environment="bank")
        client.post("/seed_session", json=bank(1)[1])

        answer = client.post(f"/{name}", content=body)

        assert answer.status_code == 200 and answer.text.startswith("Error") and len(answer.text) < 5000

    def test_a_model_cannot_begin_another_task(self, serve: Serve, openai: SimpleNamespace) -> None:
        (task, row), client = bank(1), serve(environment="bank")
        client.post("/seed_session", json=row)
        reference = {"seed": 1, "calls": [], "answer": "x"}
        easy = to_gym(Task.from_record({**task.record(), "id": "mine", "reference": reference}))

        for route in ("/seed_session", "/reset"):
            assert client.post(route, json=easy).status_code == 409
        answered = client.post("/verify", json={**easy, "response": openai.response(openai.said("x"))})
        assert answered.status_code == 400 and "another task" in answered.text

        for call in task.reference["calls"]:
            client.post(f"/{call['name']}", json=call["arguments"])
        assert client.post("/seed_session", json=row).status_code == 409  # it must not undo what was done, either
        assert verified(client, row, openai.response(openai.said(last_word(task))))["reward"] == 1

    @pytest.mark.parametrize(("text", "reward"), [("The answer is 12.", 1.0), ("The answer is 13.", 0.0)])
    def test_the_last_message_counts_if_the_task_requires_one(
        self, serve: Serve, openai: SimpleNamespace, text: str, reward: float
    ) -> None:
        reference = {"seed": 1, "calls": [], "answer": "12"}
        row = to_gym(Task.from_record({"id": "1", "environment": "bank", "prompt": "?", "reference": reference}))
        client = serve(environment="bank")
        client.post("/seed_session", json=row)
        output = {"type": "function_call_output", "call_id": "c", "output": "12"}

        ends = openai.response(openai.said("12?"), openai.called("list_accounts", "{}"), output, openai.said(text))

        assert verified(client, row, ends)["reward"] == reward

    def test_a_missing_session_is_reported(self, serve: Serve, openai: SimpleNamespace) -> None:
        client = serve(environment="bank")

        assert client.post("/list_accounts", json={}).status_code == 400
        answered = client.post("/verify", json={**bank(1)[1], "response": openai.response(openai.said("x"))})
        assert answered.status_code == 400 and "no conversation" in answered.text


class TestSteps:
    """Routes for Gym's gymnasium_agent."""

    def calls(self, openai: SimpleNamespace, task: Task) -> list[dict[str, Any]]:
        return [
            openai.called(call["name"], json.dumps(call["arguments"]), f"c{number}")
            for number, call in enumerate(task.reference["calls"])
        ]

    def test_a_customer_is_served(self, serve: Serve, openai: SimpleNamespace) -> None:
        (task, row), client = bank(2), serve(environment="bank")
        client.post("/reset", json=row)

        asked = stepped(client, row, openai.response(openai.said("When were you born?"), id="1"))
        done = stepped(client, row, openai.response(*self.calls(openai, task), id="2"))
        again = stepped(client, row, openai.response(*self.calls(openai, task), id="2"))
        over = stepped(client, row, openai.response(openai.said("Yes?"), id="3"))
        ended = stepped(client, row, openai.response(openai.said(last_word(task)), id="4"))

        assert asked["observation"].startswith("I was born") and not asked["info"]["tool_outputs"]
        outputs = done["info"]["tool_outputs"]
        assert [each["call_id"] for each in outputs] == ["c0", "c1"] and done["observation"] is None
        assert not any(each["output"].startswith("Error") for each in outputs) and again == done
        assert "reward" not in over
        assert (ended["reward"], ended["terminated"], ended["info"]["correct"]) == (1.0, True, True)

    def test_tools_and_traces_are_not_stored(self, serve: Serve, openai: SimpleNamespace) -> None:
        (_, row), client = bank(2), serve(environment="bank")
        client.post("/reset", json=row)
        stepped(client, row, openai.response(openai.thought("a secret"), openai.said("Birth date?"), id="1"))

        (server,) = (route.endpoint.__self__ for route in client.app.routes if route.path == "/step")
        ((play,),) = (list(kept.values()) for kept in vars(server._plays).values())
        (reply,) = play.replies.values()

        assert row["responses_create_params"]["tools"] and not play.episode.task.tools
        assert play.episode.turn == 1 and "secret" not in repr(reply.result())

    def test_turns_end(self, serve: Serve, openai: SimpleNamespace) -> None:
        (_, row), client = bank(1), serve(environment="bank", settings={"max_turns": 2})
        client.post("/reset", json=row)

        first = stepped(client, row, openai.response(openai.called("nothing", "{"), id="1"))
        second = stepped(client, row, openai.response(openai.called("list_accounts", "{}"), id="2"))

        assert first["info"]["tool_outputs"][0]["output"].startswith("Error: arguments")
        assert second["terminated"] and second["reward"] == 0

    def test_the_user_does_not_get_text_next_to_a_malformed_call(self, serve: Serve, openai: SimpleNamespace) -> None:
        (_, row), client = bank(2), serve(environment="bank")
        client.post("/reset", json=row)
        said = openai.said("When were you born?")

        broken = stepped(client, row, openai.response(said, openai.called("list_accounts", "{"), id="1"))
        asked = stepped(client, row, openai.response(said, id="2"))

        assert broken["observation"] is None and len(broken["info"]["tool_outputs"]) == 1
        assert asked["observation"].startswith("I was born")

    def test_single_turns_end_at_once(self, serve: Serve, openai: SimpleNamespace) -> None:
        client, row = serve(environment="math"), to_gym(MATH)
        assert client.post("/reset", json=row).status_code == 200

        assert stepped(client, row, openai.response(openai.said(r"\boxed{2}")))["reward"] == 1


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"environment": "math"}, "stateless"),
        ({"environment": "bank"}, "unsupported"),
        ({"group_size": 2, "judge": {"endpoint": "http://x/v1", "model": "m"}}, "unsupported"),
    ],
)
def test_a_server_without_conversations_supports_reverify(serve: Serve, config: dict[str, Any], mode: str) -> None:
    client = serve(**config)

    assert asyncio.run(client.app.state.server.get_reverify_mode()) == mode
    answered = client.get("/reverify_mode")
    if hasattr(base_resources_server(), "ReverifyMode"):
        assert answered.json() == mode
    else:
        assert answered.status_code in {404, 405}  # before Gym 0.7


def base_resources_server() -> ModuleType:
    return importlib.import_module("nemo_gym.base_resources_server")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"environment": "maths"}, "did you mean 'math'"),
        ({"environment": "math", "rewards": "score"}, "did you mean 'reward'"),
        ({"environment": "bank", "num_workers": 2}, "num_workers must be 1"),
        ({"group_size": 4, "judge": {"endpoint": "http://x/v1", "model": "m"}, "num_workers": 2}, "num_workers must"),
        ({"group_size": 1, "judge": {"endpoint": "http://x/v1", "model": "m"}}, "group_size"),
        ({"group_size": 4, "judge": {"endpoint": "x://y", "model": "m"}}, "judge: endpoint"),
        (
            {"group_size": 4, "judge": {"endpoint": "http://x/v1", "model": "m"}, "show": "gen"},
            "'genrm' or 'instructed'",
        ),
        ({"group_size": 4, "judge": {"endpoint": "http://x/v1", "model": "m"}, "wait_seconds": 0}, "wait_seconds"),
    ],
)
def test_an_invalid_config_is_refused(serve: Serve, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve(**config)


def test_rows_of_programs_keep_all_their_tests(serve: Serve, openai: SimpleNamespace) -> None:
    client = serve(environment="code")
    said = openai.response(openai.said("```python\nprint(int(input()) ** 2)\n```"))
    for many, status in ((120, 200), (1001, 422)):
        numbers = [str(n) for n in range(many)]
        tests = {"inputs": numbers, "outputs": [str(int(n) ** 2) for n in numbers]}
        row = {"responses_create_params": {"input": "Square."}, "verifier_metadata": {"unit_tests": tests}}
        answer = client.post("/verify", json={**row, "response": said})
        assert answer.status_code == status, answer.text
        assert status == 422 or answer.json()["reward"] == 1
