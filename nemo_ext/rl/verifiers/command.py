"""Verifier that runs a user-supplied command, such as a proof checker or a compiler, on the answer's program.

Nemotron 3 Nano, section 3.1.2 (formal proofs): a Lean proof counts if the compiler accepts it. The command runs in the
sandbox, in a folder with the program and the reference's files, and exit status 0 means that the answer is correct. A
program that is executed while it is checked, as Lean's commands are, could end the checker itself with status 0:
exclude those commands in the reference.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import which
from typing import Annotated, Any

from pydantic import Field

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import checked
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.sandbox.files import WRITE, Files, check_files
from nemo_ext.rl.sandbox.isolation import SandboxError
from nemo_ext.rl.sandbox.limits import Limits
from nemo_ext.rl.sandbox.sandbox import Sandbox
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.code import program

_SHOWN = 2000
"""Maximum number of characters of the command's output in a verdict, from which a model may repair its program."""
# The command has no access to the original standard error, so output there means that it was not started.
_START = f"""\
{WRITE}
import json, sys
work = json.loads(sys.stdin.read())
write(work["files"])
errors = os.dup(2)
os.dup2(1, 2)
try:
    os.execvpe(work["command"][0], work["command"], work["variables"])
except BaseException as error:
    os.write(errors, str(error).encode())
"""
Nonempty = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Conditions that the program must meet before the command is run.

    Attributes:
        start: text that the program must start with, such as the theorem; white space must follow it.
        excludes: texts that the program must not contain, such as `sorry`.
        files: further files for the command, from relative path to content.
    """

    start: str = ""
    excludes: tuple[Nonempty, ...] = ()
    files: Files = field(default_factory=dict)


def check(reference: Mapping[str, Any], *, file: str) -> Reference:
    """Parse a task's reference; raise ValueError if it is invalid or its files conflict with `file`, the program."""
    parsed = checked(Reference, reference, where="reference", strict=True)
    if file in parsed.files:
        raise ValueError(f"reference.files: {file!r} is the path of the program: rename it")
    try:
        check_files({**parsed.files, file: ""})
    except ValueError as error:
        raise ValueError(f"reference.files: {error}") from None
    return parsed


def environment(
    *,
    command: Sequence[str] = ("lean", "Main.lean"),
    file: str = "Main.lean",
    languages: Sequence[str] = ("lean", "lean4"),
    readable: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    limits: Mapping[str, Any] | None = None,
    concurrency: int | None = None,
) -> Environment:
    """Create the environment `command`, which checks programs with a user-supplied command.

    Args:
        command: command and its arguments.
        file: relative path at which the command finds the program.
        languages: names of the answer's code block; the last block with one of them is the program, otherwise the last
            block without a name.
        readable: folders that the command may read in addition to the system's, such as a toolchain.
        variables: the command's environment variables, in addition to PATH and HOME.
        limits: changes to `nemo_ext.rl.sandbox.limits.Limits`. Lean with Mathlib needs more than 4 GB of memory.
        concurrency: see `nemo_ext.rl.sandbox.sandbox.Sandbox`.

    Raises:
        ValueError: a setting is invalid.
        SandboxError: namespaces are not available, without which the command cannot start processes.
    """
    if isinstance(command, str) or not command or not all(map(_is_text, command)):
        raise ValueError(
            f"command must be a list of strings such as [lean, Main.lean], a program and its arguments, not {command!r}"
        )
    for name, value in (variables or {}).items():
        if not _is_text(name) or not _is_text(value) or not name or "=" in name:
            raise ValueError(
                f"variables: {name!r}: {value!r} is invalid: use a name without '=' and a value that is a string"
            )
    try:
        check_files({file: ""})
    except ValueError as error:
        raise ValueError(f"file: {error}") from None
    for folder in readable:
        if not Path(folder).is_dir():
            raise ValueError(f"readable: {folder!r} is not a folder: list only folders that exist")
    sandbox = Sandbox(
        limits=Limits().changed(limits or {}),
        concurrency=concurrency,
        strict=True,
        packages=list(readable),
    )
    work = {"command": list(command), "variables": {"PATH": "/usr/local/bin:/usr/bin:/bin", **(variables or {})}}
    return Environment(
        name="command",
        check=partial(check, file=file),
        verify=partial(verify, sandbox=sandbox, work=work, file=file, languages=tuple(languages)),
        waits=True,
    )


async def verify(
    response: Response,
    reference: Reference,
    *,
    sandbox: Sandbox,
    work: Mapping[str, Any],
    file: str,
    languages: Sequence[str],
) -> Verdict:
    """Run the command on the answer's program; the start of its output is the reason for a `wrong` verdict.

    Args:
        response: response whose answer contains the program in a code block.
        reference: conditions on the program.
        sandbox: sandbox to run the command in.
        work: mapping with `command` and `variables`, as in `environment`.
        file: relative path at which the command finds the program.
        languages: accepted names of the program's code block.
    """
    source = program(response.answer, languages)
    if source is None:
        return Verdict.wrong(f"no answer in a ```{languages[0]} block" if response.answer else "no answer")
    start, text = reference.start.strip(), source.strip()
    if start and not (text.startswith(start) and text[len(start) : len(start) + 1].isspace()):
        return Verdict.wrong("the program does not start with the required text and white space", source)
    if (excluded := next((text for text in reference.excludes if text in source), None)) is not None:
        return Verdict.wrong(f"the program contains {excluded!r}", source)
    name, variables = work["command"][0], work["variables"]
    if which(name, path=variables["PATH"]) is None:
        return Verdict.error(f"the command {name!r} is not installed: set command, or PATH in variables")
    files = {**reference.files, file: source.encode(errors="replace").decode()}
    given = {**work, "files": files, "variables": {"HOME": ".", **variables}}
    try:
        run = await sandbox.run_async(_START, stdin=json.dumps(given))
    except SandboxError as error:
        return Verdict.error(str(error), source)
    if run.stderr:
        problem = run.stderr.decode(errors="replace").strip()[-_SHOWN:]
        return Verdict.error(f"the command {name!r} cannot be started in the sandbox: {problem}: set readable", source)
    if run.ok:
        return Verdict.correct(source)
    return Verdict.wrong(f"{run}: {run.stdout.decode(errors='replace').strip()[:_SHOWN]}", source)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value
