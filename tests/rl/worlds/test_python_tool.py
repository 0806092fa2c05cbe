"""Conversations with Python as a tool."""

import asyncio
import gc
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.rl.environments import make
from nemo_ext.rl.episodes import Episode, Episodes
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import generate
from nemo_ext.rl.tasks.job import solved_task
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.worlds.python_tool import TOOL, Conversation

ANSWER = parse_response(r"<think>So it is.</think>It is \boxed{42}.")


def call(*codes: str) -> Response:
    return Response(text="", tool_calls=tuple(ToolCall(name=TOOL.name, arguments={"code": code}) for code in codes))


def begun(**settings: Any) -> Conversation:
    made = make("python_tool", settings)
    assert made.begin is not None
    conversation = made.begin(made.check({"answer": "42"}))
    assert isinstance(conversation, Conversation)
    return conversation


def outputs(conversation: Conversation, *codes: str) -> list[str]:
    return [message.content for message in conversation.step(call(*codes))]


def verdict(conversation: Conversation) -> Verdict:
    found = conversation.verdict()
    assert isinstance(found, Verdict)
    return found


def interpreters(conversation: Conversation) -> int:
    """Number of interpreters, after those that are ending have ended."""
    nursery = conversation.tool.sessions._sandbox._nursery._process
    return 0 if nursery is None else len(psutil.wait_procs(psutil.Process(nursery.pid).children(), timeout=1)[1])


@pytest.fixture
def conversation() -> Iterator[Conversation]:
    made = begun(seconds=1, characters=200)
    yield made
    made.tool.sessions.close()


def test_a_model_computes_and_answers(conversation: Conversation) -> None:
    code = "<parameter=code>\nx = 6 * 7\nx\n</parameter>"
    text = f"<think>Compute.</think><tool_call>\n<function={TOOL.name}>\n{code}\n</function>\n</tool_call>"

    assert [message.content for message in conversation.step(parse_response(text))] == ["42"]
    assert outputs(conversation, "x += 1", "print(x)") == ["[no output]", "43"]
    assert conversation.step(ANSWER) == ()
    found = verdict(conversation)
    assert (found.outcome, found.answer, found.more) == ("correct", "42", {"calls": 3, "failed_calls": 0})
    assert not interpreters(conversation)


def test_the_model_sees_its_errors(conversation: Conversation) -> None:
    conversation.step(call("x = 1"))
    (trace,) = outputs(conversation, "print('so')\n1 / 0")
    (stopped,) = outputs(conversation, "x = 2\nwhile True: pass")
    (state,) = outputs(conversation, "x")
    (unknown,) = conversation.step(Response(text="", tool_calls=(ToolCall(name="bash", arguments={}),)))
    (wrong,) = conversation.step(Response(text="", tool_calls=(ToolCall(name=TOOL.name, arguments={"cod": "1"}),)))
    (malformed,) = conversation.step(parse_response("<tool_call>{</tool_call>"))

    assert trace.startswith("so\nTraceback") and trace.endswith("ZeroDivisionError: division by zero")
    assert stopped == "Error: the call took more than 1 s and was stopped; it had no effect on variables and files"
    assert state == "1"
    assert unknown.content == f"Error: unknown tool 'bash': the only tool is {TOOL.name}"
    assert wrong.content.startswith("Error: code: Field required") and malformed.content.startswith("Error: ")
    assert verdict(conversation).more == {"calls": 7, "failed_calls": 5}


def test_long_output_is_shortened_in_the_middle(conversation: Conversation) -> None:
    (some,) = outputs(conversation, "print('a' * 300)\n1 / 0")
    (endless,) = outputs(conversation, "while True: print('b' * 1000)")

    assert some.startswith("a" * 100 + "\n[... ") and some.endswith("ZeroDivisionError: division by zero")
    assert " characters omitted ...]" in some and "more than" not in some
    assert "[... more than 1,048," in endless and "took more than 1 s" in endless and len(endless) < 300


def test_calls_and_turns_are_limited() -> None:
    few = begun(max_calls=2)

    assert outputs(few, "1") == ["1"]
    second, third = outputs(few, "2", "3")
    assert second == "2"
    assert third == "Error: at most 2 calls are allowed\n[no calls are left: give the final answer]"
    assert few.step(call("4")) == ()
    assert verdict(few).more["calls"] == 2

    short = begun(max_turns=3)
    outputs(short, "x = 1")
    assert outputs(short, "x") == ["1\n[no calls are left: give the final answer]"]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import socket\nsocket.create_connection(('1.1.1.1', 80))",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1')",
        "print(open('/etc/shadow').read())",
        "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
        "import sys\nsys.stdout = sys.stderr = None\nprint(1)\n1 / 0",
        "import os\nos.write(3, b'not json\\n')",
        "print('\\ud800\\x00')\nraise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()",
        "x = 'x' * (1 << 32)",
    ],
)
def test_hostile_code_is_contained(conversation: Conversation, code: str) -> None:
    outputs(conversation, "x = 41")
    (said,) = outputs(conversation, code)

    assert ("Error" in said or "not json" in code) and "root:" not in said
    said.encode()
    assert outputs(conversation, "x + 1") == ["42"]
    conversation.step(ANSWER)
    assert verdict(conversation).outcome == "correct"
    assert not interpreters(conversation)


def test_a_session_ends_with_its_conversation(conversation: Conversation) -> None:
    other = begun(seconds=1, characters=200)
    outputs(other, "x = 1")
    assert interpreters(other) == 1

    tool = other.tool
    del other
    gc.collect()
    assert not interpreters(Conversation(tool, None))


def test_an_interrupted_conversation_is_resumed_in_another_process(conversation: Conversation) -> None:
    source = """
import pickle, sys
from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import ToolCall
state = pickle.loads(sys.stdin.buffer.read())
(output,) = state.step(Response(text="", tool_calls=(ToolCall(name=sys.argv[1], arguments={"code": "x += 1\\nx"}),)))
assert output.content == "42", output
sys.stdout.buffer.write(pickle.dumps(state))
sys.stdout.flush()
import os; os.kill(os.getpid(), 9)
"""
    outputs(conversation, "x = 41")
    outputs(conversation, "while True: pass")
    killed = subprocess.run(
        [sys.executable, "-c", source, TOOL.name], input=pickle.dumps(conversation), stdout=subprocess.PIPE, check=False
    )

    again = pickle.loads(killed.stdout)

    assert killed.returncode == -9
    assert outputs(again, "x") == ["42"]
    again.step(ANSWER)
    assert verdict(again).more == {"calls": 4, "failed_calls": 1} and again.turns == 5


def test_a_failing_sandbox_is_not_the_models_fault(conversation: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(conversation.tool.sessions, "call", fail)

    assert conversation.step(call("1")) == ()
    assert verdict(conversation).outcome == "error"


def test_any_verifier_judges_the_last_response(endpoint: Any, reply: type[Any]) -> None:
    body = {"choices": [{"message": {"content": "[[correct]]"}, "finish_reason": "stop"}]}
    endpoint.reply = lambda payload: reply(body=json.dumps(body).encode())
    judge = {"endpoint": endpoint.url, "model": "judge"}
    episodes = Episodes({"name": "python_tool", "settings": {"verifier": "judge", "judge": judge}})
    reference = {"question": "Who?", "answer": "Ada"}
    task = Task(id="1", environment="python_tool", prompt=(Message(role="user", content="Who?"),), reference=reference)

    async def play() -> Verdict | None:
        first = await episodes.turn(Episode(task=task, thinking_opened=False), call("'A' + 'da'"))
        assert first.following is not None and [message.content for message in first.answers] == ["'Ada'"]
        return (await episodes.turn(first.following, Response(text="Ada", answer="Ada"))).verdict

    found = asyncio.run(play())

    assert found is not None and (found.outcome, found.more["calls"]) == ("correct", 1)
    assert episodes.take_metrics()["calls"] == 1
    with pytest.raises(ValueError, match="'python_tool' requires stateful_python_code_exec; add"):
        episodes.check(task)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"verifier": "bank"}, "verifier=bank holds conversations itself"),
        ({"settings": {"time_limt": 1}}, "did you mean 'time_limit'"),
        ({"limits": {"cpu_seconds": 3}}, "limits.cpu_seconds is not used: set seconds"),
        ({"limits": {"memory_megabyte": 3}}, "did you mean 'memory_megabytes'"),
        ({"seconds": 0}, "wall_seconds"),
        ({"max_calls": 0}, "max_calls"),
        ({"style": "xml"}, "style must be one of"),
    ],
)
def test_invalid_settings_are_reported(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make("python_tool", settings)


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_solutions_of_generated_tasks_are_right(level: int) -> None:
    (task,) = generate("python_tool", 1, seed=3, level=level)

    first, output, last = solved_task(task, "python_tool").messages[1], *solved_task(task, "python_tool").messages[-2:]

    assert task.tools == (TOOL.schema,) and len(first.tool_calls) == 2
    assert last.content == f"\\boxed{{{output.content}}}"
