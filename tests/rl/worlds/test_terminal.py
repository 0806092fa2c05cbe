"""Tasks in a shell in the sandbox."""

import asyncio
import pickle
from typing import Any

import pytest

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.rl.environments import make
from nemo_ext.rl.episodes import Episode, Episodes
from nemo_ext.rl.sandbox.isolation import SandboxError
from nemo_ext.rl.task import Task
from nemo_ext.rl.worlds.terminal import TOOL, Conversation

REFERENCE = {
    "files": {"data/prices.csv": "apple,3\npear,4\n", "data/it's empty": ""},
    "setup": "chmod 600 data/prices.csv; echo ready > log",
    "test": "sh check.sh",
    "test_files": {"check.sh": '[ "$(cat total.txt)" = 7 ] || { echo "wrong total"; exit 3; }\n'},
}
QUESTION = {"files": {"task/question.txt": "What is 6 * 7?"}, "answers": {"task/answer.txt": "42 apples"}}
COMPARED = {"test": "sleep 0.1; diff -q task/answer.txt task/expected.txt", "test_files": {"task/expected.txt": "42\n"}}
COPY = "until [ -s task/expected.txt ]; do :; done; cp task/expected.txt task/answer.txt"
SCRIPT = {"test": "sh check.sh", "test_files": {"check.sh": "exit 3"}}


def call(*commands: str) -> Response:
    return Response(text="", tool_calls=tuple(ToolCall(name=TOOL.name, arguments={"command": c}) for c in commands))


def begun(reference: dict[str, Any], **settings: Any) -> Conversation:
    made = make("terminal", settings)
    assert made.begin is not None
    conversation = made.begin(made.check(reference))
    assert isinstance(conversation, Conversation)
    return conversation


def outputs(conversation: Conversation, *commands: str) -> list[str]:
    return [message.content for message in conversation.step(call(*commands))]


def test_files_persist_and_the_test_is_the_verdict() -> None:
    sums = "awk -F, '{ total += $2 } END { print total }' data/prices.csv > total.txt"

    right, wrong, idle = (begun(REFERENCE, seconds=5) for _ in range(3))
    found = outputs(
        right, f"cd data && ls; {sums.replace('data/', '')}; mv total.txt ..", "cat total.txt log; ls check.sh"
    )
    right = pickle.loads(pickle.dumps(right))
    failed = outputs(wrong, "cat nothing", "echo {8} > total.txt; sed -i 's/[{}]//g' total.txt")

    assert found[0] == "it's empty\nprices.csv" and found[1].startswith("7\nready\n") and "[exit status 2]" in found[1]
    assert "nothing" in failed[0] and failed[0].endswith("[exit status 1]") and failed[1] == "[no output]"
    assert right.verdict().outcome == "correct"
    verdict = wrong.verdict()
    assert (verdict.outcome, verdict.more) == ("wrong", {"calls": 2, "failed_calls": 1})
    assert verdict.reason == "the test failed: wrong total [exit status 3]"
    assert "wrong total" in idle.verdict().reason


@pytest.mark.parametrize(
    ("reference", "command"),
    [
        (COMPARED, "mkdir task; ln -s answer.txt task/expected.txt"),
        (COMPARED, "mkdir task; echo 1 | tee task/answer.txt > task/expected.txt; chmod 444 task/expected.txt"),
        (COMPARED, "mkdir -p task/expected.txt; echo 1 | tee task/answer.txt > task/expected.txt/answer.txt"),
        (COMPARED, "mkdir task; : > task/answer.txt; cat /dev/zero > task/fill 2> /dev/null"),
        (COMPARED, "mkdir real; ln -s real task; ln -s answer.txt real/expected.txt"),
        (COMPARED, f"mkdir task; ({COPY}) &> /dev/null &"),
        (COMPARED, f"mkdir task; setsid bash -c '{COPY}' &> /dev/null &"),
        (SCRIPT, "echo exit 0 > check.sh; chmod 444 check.sh"),
        (
            {"test": "python3 -c 'raise SystemExit(3)'"},
            "folder=$(python3 -m site --user-site); mkdir -p $folder; "
            "echo 'import os; os._exit(0)' > $folder/usercustomize.py",
        ),
        (QUESTION, "echo 'raise SystemExit' | tee json.py > subprocess.py"),
        (QUESTION, "echo 42 apple s > task/answer.txt"),
        (QUESTION, "ln -s /dev/zero task/answer.txt"),
        (QUESTION, "mkfifo task/answer.txt"),
    ],
)
def test_a_verdict_cannot_be_forged(reference: dict[str, Any], command: str) -> None:
    conversation = begun(reference, seconds=1, limits={"disk_megabytes": 4})

    outputs(conversation, command)

    assert conversation.verdict().outcome == "wrong"


def test_answers_are_compared_without_case_and_white_space() -> None:
    conversation = begun({**QUESTION, "test": "test ! -e process.txt"})

    outputs(conversation, "printf '42\\n\\n  Apples' > task/answer.txt; (sleep 0.05; touch process.txt) > /dev/null &")

    assert conversation.verdict().outcome == "correct"


def test_commands_that_cannot_be_started_are_reported_to_the_model() -> None:
    conversation = begun(QUESTION)

    long, null = outputs(conversation, "echo " + "\u4e2d" * 49_000, "echo \0")

    assert long == "OSError: [Errno 7] Argument list too long: 'bash'" and null == "ValueError: embedded null byte"


def test_a_task_that_cannot_be_set_up_is_an_error_and_not_a_wrong_answer() -> None:
    verdict = begun({"test": "true", "setup": "ls nothing"}).verdict()

    assert verdict.outcome == "error" and "reference.setup failed" in verdict.reason


def test_files_with_unusual_names_and_sizes() -> None:
    conversation = begun({"test": "cat -- -a/b | wc -c | grep -qx 300000", "files": {"-a/b": "x" * 300_000}})

    assert conversation.verdict().outcome == "correct"


@pytest.mark.parametrize(
    ("settings", "reference", "message"),
    [
        ({"limits": {"wall_seconds": 3}}, {}, "set seconds"),
        ({}, {"files": {}}, "reference.*set one of them"),
        ({}, {"test": "true", "image": "debian"}, "image"),
        ({}, {"test": "true", "files": {"../x": ""}}, r"reference.*files.*invalid path '../x'"),
        ({}, {"test": "true", "test_files": {"x": "", "x/y": ""}}, "'x' is a file and also the folder of 'x/y'"),
        ({}, {"test": "true", "setup": "\u4e2d" * 50_000}, "setup has a null character or more than 120 kB"),
        ({}, {"answers": {"x": " "}}, "answers.x is empty or too large"),
    ],
)
def test_invalid_settings_and_references_are_reported(
    settings: dict[str, Any], reference: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make("terminal", settings).check(reference)


@pytest.mark.parametrize("name", ["terminal", "command"])
def test_without_namespaces_the_environment_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **settings: Any) -> Any:
        raise SandboxError("no namespaces here")

    monkeypatch.setattr("nemo_ext.rl.sandbox.sandbox.Box", fails)

    with pytest.raises(SandboxError, match=r"namespaces are not available: no namespaces here\. Allow user namespaces"):
        make(name)


def test_an_episode_in_a_shell() -> None:
    episodes = Episodes({"name": "terminal"})
    prompt = (Message(role="user", content="Write 7 into total.txt."),)
    task = Task(id="1", environment="terminal", prompt=prompt, reference=REFERENCE, tools=(TOOL.schema,))
    episodes.check(task)

    async def play() -> Any:
        turn = await episodes.turn(Episode(task=task, thinking_opened=False), call("echo 7 > total.txt"))
        assert turn.following is not None
        return await episodes.turn(turn.following, Response(text="Done.", answer="Done."))

    assert asyncio.run(play()).verdict.outcome == "correct"
