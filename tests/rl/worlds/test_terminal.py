"""Tasks in a shell: in the sandbox, and in containers of a stand-in engine."""

import asyncio
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.rl.environments import make
from nemo_ext.rl.episodes import Episode, Episodes
from nemo_ext.rl.task import Task
from nemo_ext.rl.worlds.terminal import TOOL, Conversation

REFERENCE = {
    "files": {"data/prices.csv": "apple,3\npear,4\n", "data/it's empty": ""},
    "setup": "chmod 600 data/prices.csv; echo ready > log",
    "test": "sh check.sh",
    "test_files": {"check.sh": '[ "$(cat total.txt)" = 7 ] || { echo "wrong total"; exit 3; }\n'},
}
ENGINE = """\
#!/bin/bash
case $1 in
    start) [ -d "$2" ] || { echo "no image $2"; exit 1; }; cp -r "$2" "$0.$3" ;;
    run) cd "$0.$2" 2>/dev/null || { echo "no container $2"; exit 125; }; shift 2; exec "$@" ;;
    stop) rm -rf "$0.$2" ;;
esac
"""


@pytest.fixture
def engine(tmp_path: Path) -> dict[str, Any]:
    """Settings with a stand-in for a container engine: an image is a folder, a container its copy."""
    script = tmp_path / "engine"
    script.write_text(ENGINE)
    script.chmod(0o755)
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "README").write_text("of the image\n")
    commands = {"start": ["start", "{image}", "{name}"], "run": ["run", "{name}"], "stop": ["stop", "{name}"]}
    return {"container": {name: [str(script), *words] for name, words in commands.items()}}


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


@pytest.mark.parametrize("where", ["sandbox", "container"])
def test_files_persist_and_the_test_is_the_verdict(where: str, engine: dict[str, Any], tmp_path: Path) -> None:
    settings = engine if where == "container" else {}
    reference = {**REFERENCE, "image": str(tmp_path / "image")}
    sums = "awk -F, '{ total += $2 } END { print total }' data/prices.csv > total.txt"

    right, wrong, idle = (begun(reference, seconds=5, **settings) for _ in range(3))
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
    assert not list(tmp_path.glob("engine.*")), "no container is left"


def test_limits_end_a_command_but_not_the_container(engine: dict[str, Any], tmp_path: Path) -> None:
    conversation = begun({"test": "test -e made", "image": str(tmp_path / "image")}, seconds=0.5, **engine)

    slow, long = outputs(conversation, "touch made; sleep 9", "yes | head -c 9000000")

    assert slow == "[stopped after 0.5 s]"
    assert "characters omitted" in long and len(long) < 9000
    assert outputs(conversation, "cat README") == ["of the image"]
    assert conversation.verdict().outcome == "correct"


def test_an_abandoned_container_ends_with_its_process(engine: dict[str, Any], tmp_path: Path) -> None:
    program = (
        "import json, sys\n"
        "from nemo_ext.chat.response import Response\n"
        "from nemo_ext.chat.sample import ToolCall\n"
        "from nemo_ext.rl.environments import make\n"
        "made = make('terminal', json.loads(sys.argv[1]))\n"
        "conversation = made.begin(made.check({'test': 'true', 'image': sys.argv[2]}))\n"
        "call = ToolCall(name='bash', arguments={'command': 'pwd'})\n"
        "print(conversation.step(Response(text='', tool_calls=(call,)))[0].content)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(engine), str(tmp_path / "image")],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "engine.nemo_ext_" in done.stdout and not list(tmp_path.glob("engine.*"))


def test_a_container_that_fails_is_an_error_and_not_a_wrong_answer(engine: dict[str, Any], tmp_path: Path) -> None:
    missing = begun({"test": "true", "image": "nowhere"}, **engine)
    setup = begun({"test": "true", "setup": "ls nothing"})
    lost = begun({"test": "true", "image": str(tmp_path / "image")}, **engine)
    outputs(lost, "ls")
    for folder in tmp_path.glob("engine.*"):
        folder.rename(tmp_path / "gone")

    assert "no image nowhere" in missing.verdict().reason
    assert "reference.setup failed" in setup.verdict().reason
    assert "no container" in lost.verdict().reason
    assert {each.verdict().outcome for each in (missing, setup, lost)} == {"error"}


@pytest.mark.parametrize(
    ("settings", "reference", "message"),
    [
        ({"container": {"start": ["docker", "{image}"], "run": ["docker"]}}, {}, "container.*stop"),
        ({"limits": {"wall_seconds": 3}}, {}, "set seconds"),
        ({}, {"files": {}}, "reference.*test"),
        ({}, {"test": "true", "test_files": {"x": "x" * 90_000}}, "reference.test_files: more than 60 kB"),
    ],
)
def test_invalid_settings_and_references_are_reported(
    settings: dict[str, Any], reference: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make("terminal", settings).check(reference)


def test_containers_need_an_image(engine: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reference.image is missing: container.start"):
        make("terminal", engine).check({"test": "true"})


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
