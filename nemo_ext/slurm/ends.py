"""Why a job is no longer in the queue: what Slurm still knows of it, and the first error in its output."""

import errno
import json
import pwd
import re
import shlex
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from nemo_ext.job.files import write_text
from nemo_ext.slurm import attempts
from nemo_ext.slurm.cluster import call

JOB, SUBMITTED = "job", "submit.txt"
"""Files in a run's folder `slurm`: the id of the job that was submitted last, and the sbatch command."""
CANCELLED = "cancelled.json"
"""File in a run's folder `slurm`: who cancelled its newest job with `nemo-ext cancel`, and when."""
_STATES = {
    "TIMEOUT": "time limit",
    "OUT_OF_MEMORY": "out of memory",
    "NODE_FAIL": "node failure",
    "BOOT_FAIL": "node failure: it did not boot",
    "PREEMPTED": "preempted by another job",
    "DEADLINE": "Slurm's deadline passed",
}
DISK_FULL = errno.ENOSPC
"""Exit code of a start that could not write its record, nor perhaps its output."""
_NO_OUTPUT = "0:53"
"""Exit code that slurmd gives to a job whose output file it cannot open."""
_TRACEBACK = "Traceback (most recent call last):"
_START = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d start \d+ of ")
_OWN = re.compile(r"(?:\d+: )?error: (.*)")
_MEMORY = re.compile(r"exceeded \w*\s?memory limit|oom[_-]kill|Out Of Memory", re.IGNORECASE)
_NODE = re.compile(r"error: Node failure on (\S+)")
_ENDED = re.compile(r"error: \*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT (\S+)(?: DUE TO ([A-Z ]+))?")
_KILLED = re.compile(r"srun: error: (.*(?:Killed|Segmentation fault|Bus error|Aborted).*)")
_REFUSED = re.compile(r"(?:\d+: )?(srun: fatal: .*)")
_LASTING = re.compile(
    r"out of memory \(|no (?:space|inode) left|(?:[\w.]+\.)?(?:"
    # Files, folders and modules that are not there or not readable, and disks without room.
    r"(?:FileNotFound|NotADirectory|IsADirectory|Permission|ModuleNotFound|Import)Error\b|"
    r"(?:OS|Runtime)Error: .*(?:No space left on device|Disk quota exceeded|Read-only file system)|"
    # Settings, data and code.
    r"(?:Attribute|Name|Type|Key|Index|Value|Assertion|NotImplemented|ZeroDivision|Syntax|Recursion)Error\b|"
    r"(?:UnicodeDecode|UnicodeEncode|JSONDecode|Validation|Unpickling|Config\w*)Error\b|"
    # Checkpoints of another model, and models that do not fit.
    r"Checkpoint(?:ing)?(?:Error|Exception)\b|RuntimeError: (?:Error\(s\) in loading state_dict|.*size mismatch)|"
    r"OutOfMemoryError\b|RuntimeError: CUDA out of memory)"
)
"""Kinds of errors of a start that made no step, which the next start would have as well. Others, such as those of a
network, a device or a process that was killed, may not come again."""
_LONGEST = 300


def first_error(log: Path, position: int = 0) -> str:
    """First error of the last start in a log from a byte position on, in one line; "" if there is none.

    The error is the exception of any rank's traceback or a line "error: ..."; running out of memory takes precedence,
    as it makes ranks elsewhere fail. If there is neither, it is what Slurm says of the end.
    """
    if not log.is_file():
        return ""
    found: dict[str, str] = {}
    prefix: str | None = None
    with log.open("rb") as stream:
        stream.seek(position)
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            if _START.match(line):
                found, prefix = {}, None
            elif prefix is not None and line.startswith(prefix) and line[len(prefix) :].strip():
                said = line[len(prefix) :]
                if not said[0].isspace():
                    found.setdefault("error", said)
                    prefix = None
            elif line.endswith(_TRACEBACK) and "error" not in found:
                prefix = line.removesuffix(_TRACEBACK)
            elif own := _OWN.match(line):
                found.setdefault("error", own[1])
            elif refused := _REFUSED.match(line):
                found.setdefault("error", refused[1])
            elif "error: " in line:
                _of_slurm(line, found)
    best = next((found[kind] for kind in ("memory", "error", "node", "ended", "killed") if kind in found), "")
    return best if len(best) <= _LONGEST else f"{best[:_LONGEST]} ..."


def lasts(error: str) -> bool:
    """True for a first error that a new start cannot mend: what is missing, wrong or too large stays so."""
    return _LASTING.match(error) is not None


def _of_slurm(line: str, found: dict[str, str]) -> None:
    if _MEMORY.search(line):
        found.setdefault("memory", f"out of memory ({line.partition('error: ')[2]})")
    elif node := _NODE.search(line):
        found["node"] = f"node failure ({node[1]})"
    elif ended := _ENDED.search(line):
        due = (ended[2] or "").strip().lower()
        if due == "job requeue":
            found.pop("ended", None)
        else:
            found["ended"] = f"{due.split(',')[0]} at {ended[1]}" if due else f"cancelled at {ended[1]}"
    elif killed := _KILLED.search(line):
        more = ": out of its node's memory, if nobody killed it" if killed[1].endswith("Killed") else ""
        found.setdefault("killed", killed[1] + more)


def why(folder: Path, job: str) -> str:
    """Reason why a job of a run (its folder `slurm`) ended, in one line; "" if neither Slurm nor its output says."""
    asked = _asked(job)
    if not _is_of(folder, job, asked):
        asked = {}  # another job has the number now
    output = folder / f"{job}.out"
    error = first_error(output)
    state = asked.get("JobState", "").partition(" ")[0].rstrip("+")
    if state == "CANCELLED" or not state:
        by = noted(folder, job) or (_cancelled(asked) if state else "")
        if by:
            return f"cancelled {by}".strip()
        return error
    if asked.get("ExitCode") == _NO_OUTPUT:
        return (
            f"the output file could not be opened on its node: {asked.get('StdOut') or output}; "
            "make its folder, on a disk that all nodes have"
        )
    said = _STATES.get(state, "")
    if not said and state == "FAILED":
        code, _, number = asked.get("ExitCode", "").partition(":")
        names = {str(each.value): each.name for each in signal.Signals}
        said = f"exit code {code}" if number in ("", "0") else f"killed by {names.get(number, f'signal {number}')}"
        said = f"no space left in {folder.parent}" if code == str(DISK_FULL) else said
    if state == "TIMEOUT" and asked.get("TimeLimit"):
        said += f" of {asked['TimeLimit']}"
    if not said:
        return error
    # Slurm's line in the output repeats the reason, with the time.
    return said if not error or error.startswith(said.partition(" of ")[0]) else f"{said}: {error}"


def unknown(folder: Path, job: str) -> str:
    """Explanation for a job of which `why` knows nothing: its last output, or that there is none."""
    output = folder / f"{job}.out"
    if not output.is_file():
        return (
            f"Slurm has forgotten job {job}, and there is no {output}: cancelled while it was queued, or that file "
            "could not be opened on its node"
        )
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    last = f"its output ends: {lines[-1][:_LONGEST]}" if lines else f"{output} is empty"
    return f"killed, or its node failed: Slurm has forgotten job {job}, and {last}"


def note(folder: Path, job: str, *, by: str) -> None:
    """Record that `by` cancels a job now."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S")
    write_text(folder / CANCELLED, json.dumps({"job": job, "by": by, "at": at}) + "\n")


def noted(folder: Path, job: str) -> str:
    """Who cancelled the job and when, "by NAME at TIME"; "" if not recorded."""
    path = folder / CANCELLED
    said = json.loads(path.read_text()) if path.is_file() else {}
    return f"by {said['by']} at {said['at']}" if said.get("job") == job else ""


def _cancelled(asked: dict[str, str]) -> str:
    """Who cancelled the job, when, and whether it was still queued, from Slurm's fields."""
    if asked.get("Reason") == "DependencyNeverSatisfied":
        return "by Slurm: a job that it waited for failed"
    number = asked.get("By", "")
    words = []
    if number.isdecimal():
        try:
            words.append(f"by {pwd.getpwuid(int(number)).pw_name}")
        except KeyError:
            words.append(f"by user {number}")
    if asked.get("EndTime", "Unknown") != "Unknown":
        words.append(f"at {asked['EndTime']}")
    if asked.get("NodeList") in ("(null)", "None assigned"):
        words.append("while it was queued" + (" and held" if asked.get("Reason", "").startswith("JobHeld") else ""))
    return " ".join(words) or "by somebody"


def is_own(folder: Path, job: str) -> bool:
    """False if the job that has this number in Slurm now is not the run's: Slurm's numbers may begin again."""
    return _is_of(folder, job, _shown(job))


def _is_of(folder: Path, job: str, asked: Mapping[str, str]) -> bool:
    """True unless the name or the output in Slurm's fields is not the run's job's; requeueing changes the times."""
    starts = [each for each in attempts.read(folder.parent) if each.job == job]
    known = {"JobName": {each.name for each in starts}, "StdOut": {each.output for each in starts}}
    file, submitted, (array, _, task) = folder / JOB, folder / SUBMITTED, job.partition("_")
    if file.is_file() and file.read_text().strip() == job and submitted.is_file():
        parts = {"%": "%", "j": job, "A": array, "a": task}
        for field, options in (("JobName", ("--job-name", "-J")), ("StdOut", ("--output", "-o"))):
            given = [word for word in shlex.split(submitted.read_text()) if word.startswith(options)]
            if len(given) == 1:  # else slurm.options has another
                name = given[0].partition("=")[2]
                known[field].add(re.sub("%([%jAa])", lambda found: parts[found[1]], name))
    told = {name: {_real(each) for each in values if each} for name, values in known.items()}
    return all(not values or name not in asked or _real(asked[name]) in values for name, values in told.items())


def _real(text: str) -> str:
    """A path without symbolic links and without Slurm's escapes, as scontrol leaves %% alone; or a name."""
    return str(Path(text.replace("%%", "%")).resolve()) if text.startswith("/") else text


def _shown(job: str) -> dict[str, str]:
    """The controller's fields of a job, which it has for some minutes after the job's end; empty if it has none."""
    said: dict[str, str] = {}
    if shutil.which("scontrol"):
        shown = call(["scontrol", "show", "job", job, "--oneliner"]).stdout
        names = ("JobName", "JobState", "Reason", "ExitCode", "TimeLimit", "EndTime", "NodeList", "StdOut")
        for name in names:
            # A path may have spaces.
            if found := re.search(rf"(?:^| ){name}=(.*?)(?= \w+(?::\w+)*=|\s*$)", shown, re.MULTILINE):
                said[name] = found[1]
    return said


def _asked(job: str) -> dict[str, str]:
    """Slurm's fields of an ended job, from the controller and from accounting if there is any."""
    said = _shown(job)
    if said.get("JobState", "CANCELLED") == "CANCELLED" and shutil.which("sacct"):
        names = ("State", "ExitCode", "Timelimit", "End", "NodeList", "JobName")
        asked = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", f"--format={','.join(names)}"]
        lines = call(asked).stdout.splitlines()
        if lines and lines[-1].count("|") >= len(names) - 1:
            state, *values = lines[-1].split("|", len(names) - 1)
            word, _, by = state.partition(" by ")
            fields = ("ExitCode", "TimeLimit", "EndTime", "NodeList", "JobName")
            told = {"JobState": word, "By": by, **dict(zip(fields, values, strict=True))}
            said = {**told, **said}
    return said
