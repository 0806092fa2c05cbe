"""The verifier `command`: the answer's program, checked by a command in the sandbox."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.rl.environments import Environment, make
from tests.rl.verdicts import verdict_on

CHECKER = """\
text=$(cat "$1")
case "$text" in *"by rfl") exit 0 ;; *spin*) while :; do :; done ;; esac
echo "Main.lean:1: unsolved goals"
cat axioms.txt >&2
exit 1
"""
REFERENCE = {"start": "theorem t : 1 = 1 := ", "excludes": ["sorry", "#eval"], "files": {"axioms.txt": "none\n"}}


@pytest.fixture(scope="module")
def checker() -> Iterator[Environment]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # pytest's folders cannot be read by the sandbox's user
        Path(folder, "check.sh").write_text(CHECKER)
        settings = {"command": ["bash", f"{folder}/check.sh", "Main.lean"], "readable": [folder]}
        yield make("command", {**settings, "limits": {"wall_seconds": 1}})


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("So:\n```lean\ntheorem t : 1 = 1 :=\n  by rfl\n```", ""),
        ("```lean\ntheorem t : 1 = 1 := by simp\n```", "exit status 1: Main.lean:1: unsolved goals\nnone"),
        ("```lean4\ntheorem t : 1 = 1 := by spin\n```", "over its time limit: "),
        (
            "```lean\n/- theorem t : 1 = 1 := -/ theorem t : True := by rfl\n```",
            "does not start with the required text",
        ),
        ("```lean\ntheorem t :\n1 = 1 := by rfl\n```", "does not start with the required text"),
        ("```lean\ntheorem t : 11 = 1 := by rfl\n```", "does not start with the required text"),
        ("```lean\ntheorem t : 1 = 1 :=0 by rfl\n```", "does not start with the required text"),
        ("```lean\ntheorem t : 1 = 1 := by sorry -- by rfl\n```", "contains 'sorry'"),
        ("theorem t : 1 = 1 := by rfl", "no answer in a ```lean block"),
        ("", "no answer"),
    ],
)
def test_the_commands_exit_status_is_the_verdict(checker: Environment, answer: str, why: str) -> None:
    found = verdict_on(checker, answer, REFERENCE)

    assert found.outcome == ("wrong" if why else "correct") and why in found.reason, found


def test_a_command_that_cannot_run_is_an_error_and_not_a_wrong_answer(tmp_path: Path) -> None:
    answer = "```lean\ntheorem t : 1 = 1 := by rfl\n```"
    (tmp_path / "lean").write_text("not a program")
    (tmp_path / "lean").chmod(0o755)

    assert "'lean-4' is not installed" in verdict_on(make("command", {"command": ["lean-4"]}), answer, REFERENCE).reason
    found = verdict_on(make("command", {"command": [f"{tmp_path}/lean"]}), answer, REFERENCE)
    assert found.outcome == "error" and "set readable" in found.reason


def test_a_program_cannot_pretend_that_the_command_was_not_started() -> None:
    made = make("command", {"command": ["python3", "Main.py"], "file": "Main.py", "languages": ["python"]})

    ended = verdict_on(made, "```python\nimport os\nprint(1, flush=True)\nos.write(2, b'2')\nos._exit(125)\n```", {})
    half = verdict_on(made, "```python\nprint('\ud800')\n```", {})

    assert ended.outcome == "wrong" and ended.reason == "exit status 125: 1\n2"
    assert half.outcome == "correct"


@pytest.mark.parametrize(
    ("settings", "reference", "message"),
    [
        ({"command": "lean"}, {}, "command must be a list"),
        ({"readable": ["/nowhere"]}, {}, "'/nowhere' is not a folder"),
        ({"command": ["lean", 1]}, {}, "command must be a list of strings"),
        ({"variables": {"A=B": "1"}}, {}, "variables: 'A=B': '1' is invalid"),
        ({"file": "../Main.lean"}, {}, "file: invalid path"),
        ({}, {"files": {"a/../../x": ""}}, "reference.*files.*invalid path"),
        ({}, {"files": {"Main.lean": ""}}, "'Main.lean' is the path of the program"),
        ({}, {"files": {"Main.lean/x": ""}}, "'Main.lean' is a file and also the folder"),
        ({}, {"excludes": [""]}, "reference.*excludes"),
    ],
)
def test_invalid_settings_and_references_are_reported(
    settings: dict[str, Any], reference: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make("command", settings).check(reference)
