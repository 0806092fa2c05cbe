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
from typing import Annotated, Any, cast

from pydantic import Field

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import checked
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.sandbox.isolation import SandboxError
from nemo_ext.rl.sandbox.limits import Limits
from nemo_ext.rl.sandbox.sandbox import Sandbox
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.code import program

_SHOWN = 2000
"""Maximum number of characters of the command's output in a verdict, from which a model may repair its program."""
_NOT_STARTED = 125
_START = f"""\
import json, os, sys
work = json.loads(sys.stdin.read())
for name, text in work["files"].items():
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "w") as file:
        file.write(text)
os.dup2(1, 2)
try:
    os.execvpe(work["command"][0], work["command"], work["variables"])
except OSError as error:
    print(error)
    os._exit({_NOT_STARTED})
"""
Name = Annotated[str, Field(pattern=r"^\w[\w./-]*$")]
Nonempty = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Conditions that the program must meet before the command is run.

    Attributes:
        start: text that the program must start with, such as the theorem; white space is ignored.
        excludes: texts that the program must not contain, such as `sorry`.
        files: further files for the command, from relative path to content.
    """

    start: str = ""
    excludes: tuple[Nonempty, ...] = ()
    files: Mapping[Name, str] = field(default_factory=dict)


check = partial(checked, Reference, where="reference", strict=True)
"""Parses a task's reference; raises ValueError if it is invalid."""


def environment(
    *,
    command: Sequence[str] = ("lean", "Main.lean"),
    file: str = "Main.lean",
    languages: Sequence[str] = ("lean", "lean4"),
    readable: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    limits: Mapping[str, Any] | None = None,
    concurrency: int | None = None,
    isolation: str = "auto",
    strict: bool = False,
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
        concurrency, isolation, strict: see `nemo_ext.rl.sandbox.sandbox.Sandbox`.

    Raises:
        ValueError: a setting is invalid.
        SandboxError: `strict` is set and namespaces are not available.
    """
    if isinstance(command, str) or not command:
        raise ValueError(
            f"command must be a list such as [lean, Main.lean], a program and its arguments, not {command!r}"
        )
    for folder in readable:
        if not Path(folder).is_dir():
            raise ValueError(f"readable: {folder!r} is not a folder: list only folders that exist")
    sandbox = Sandbox(
        limits=Limits().changed(limits or {}),
        concurrency=concurrency,
        isolation=cast(Any, isolation),
        strict=strict,
        packages=list(readable),
    )
    work = {"command": list(command), "variables": {"PATH": "/usr/local/bin:/usr/bin:/bin", **(variables or {})}}
    return Environment(
        name="command",
        check=check,
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
    if not "".join(source.split()).startswith("".join(reference.start.split())):
        return Verdict.wrong("the program does not start with the required text", source)
    if (excluded := next((text for text in reference.excludes if text in source), None)) is not None:
        return Verdict.wrong(f"the program contains {excluded!r}", source)
    name, variables = work["command"][0], work["variables"]
    if which(name, path=variables["PATH"]) is None:
        return Verdict.error(f"the command {name!r} is not installed: set command, or PATH in variables")
    given = {**work, "files": {**reference.files, file: source}, "variables": {"HOME": ".", **variables}}
    try:
        run = await sandbox.run_async(_START, stdin=json.dumps(given))
    except SandboxError as error:
        return Verdict.error(str(error), source)
    if run.ok:
        return Verdict.correct(source)
    output = run.stdout.decode(errors="replace").strip()[:_SHOWN]
    if run.ended == "exit" and run.status == _NOT_STARTED:
        return Verdict.error(f"the command {name!r} cannot be started in the sandbox: {output}: set readable", source)
    return Verdict.wrong(f"{run}: {output}", source)
