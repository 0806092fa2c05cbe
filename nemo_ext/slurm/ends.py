"""Reasons why jobs are no longer in the queue, from Slurm's records and the first error in a job's output."""

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
"""Files in a run's folder `slurm` with the id of the last submitted job, and its sbatch command."""
CANCELLED = "cancelled.json"
"""File in a run's folder `slurm` that records who cancelled its newest job with `nemo-ext cancel`, and when."""
_STATES = {
    "TIMEOUT": "time limit",
    "OUT_OF_MEMORY": "out of memory",
    "NODE_FAIL": "node failure",
    "BOOT_FAIL": "node failure: it did not boot",
    "PREEMPTED": "preempted by another job",
    "DEADLINE": "Slurm's deadline passed",
}
DISK_FULL = errno.ENOSPC
"""Exit code of a start that could not write its record and possibly not even its output."""
_NO_OUTPUT = "0:53"
"""Exit code that slurmd sets for a job whose output file cannot be opened."""
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
    # Missing or unreadable files, folders and modules, and full disks.
    r"(?:FileNotFound|NotADirectory|IsADirectory|Permission|ModuleNotFound|Import)Error\b|"
    r"(?:OS|Runtime)Error: .*(?:No space left on device|Disk quota exceeded|Read-only file system)|"
    # Settings, data and code.
    r"(?:Attribute|Name|Type|Key|Index|Value|Assertion|NotImplemented|ZeroDivision|Syntax|Recursion)Error\b|"
    r"(?:UnicodeDecode|UnicodeEncode|JSONDecode|Validation|Unpickling|Config\w*)Error\b|"
    # Checkpoints of a different model, and models that exceed the memory.
    r"Checkpoint(?:ing)?(?:Error|Exception)\b|RuntimeError: (?:Error\(s\) in loading state_dict|.*size mismatch)|"
    r"OutOfMemoryError\b|RuntimeError: CUDA out of memory)"
)
"""Pattern of errors that recur in the next start if they occurred before the first step. Others, such as network or
device errors or a killed process, may be transient."""
_LONGEST = 300


def first_error(log: Path, position: int = 0) -> str:
    """Return the first error of the last start in a log, as one line; "" if there is none.

    An error is the exception in a rank's traceback, or a line "error: ...". Running out of memory takes precedence, as
    it makes other ranks fail. If there is neither, Slurm's message about the job's end is returned. The log is read
    from the byte offset `position`.
    """
    if not log.is_file():
        return ""
    errors: dict[str, str] = {}
    prefix: str | None = None
    with log.open("rb") as stream:
        stream.seek(position)
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            if _START.match(line):
                errors, prefix = {}, None
            elif prefix is not None and line.startswith(prefix) and line[len(prefix) :].strip():
                text = line[len(prefix) :]
                if not text[0].isspace():
                    errors.setdefault("error", text)
                    prefix = None
            elif line.endswith(_TRACEBACK) and "error" not in errors:
                prefix = line.removesuffix(_TRACEBACK)
            elif failure := _OWN.match(line):
                errors.setdefault("error", failure[1])
            elif refused := _REFUSED.match(line):
                errors.setdefault("error", refused[1])
            elif "error: " in line:
                _of_slurm(line, errors)
    best = next((errors[kind] for kind in ("memory", "error", "node", "ended", "killed") if kind in errors), "")
    return best if len(best) <= _LONGEST else f"{best[:_LONGEST]} ..."


def lasts(error: str) -> bool:
    """True if an error recurs in every start, because something is missing, invalid or too large."""
    return _LASTING.match(error) is not None


def _of_slurm(line: str, errors: dict[str, str]) -> None:
    if _MEMORY.search(line):
        errors.setdefault("memory", f"out of memory ({line.partition('error: ')[2]})")
    elif node := _NODE.search(line):
        errors["node"] = f"node failure ({node[1]})"
    elif ended := _ENDED.search(line):
        due = (ended[2] or "").strip().lower()
        if due == "job requeue":
            errors.pop("ended", None)
        else:
            errors["ended"] = f"{due.split(',')[0]} at {ended[1]}" if due else f"cancelled at {ended[1]}"
    elif killed := _KILLED.search(line):
        more = ": node out of memory, unless somebody killed it" if killed[1].endswith("Killed") else ""
        errors.setdefault("killed", killed[1] + more)


def why(folder: Path, job: str) -> str:
    """Reason why a job ended, as one line; "" if neither Slurm nor the job's output gives one.

    Args:
        folder: folder `slurm` of the job's run.
        job: job id.
    """
    fields = _fields(job)
    if not _is_of(folder, job, fields):
        fields = {}  # the id belongs to another job now
    output = folder / f"{job}.out"
    error = first_error(output)
    state = fields.get("JobState", "").partition(" ")[0].rstrip("+")
    if state == "CANCELLED" or not state:
        by = noted(folder, job) or (_cancelled(fields) if state else "")
        if by:
            return f"cancelled {by}".strip()
        return error
    if fields.get("ExitCode") == _NO_OUTPUT:
        return (
            f"the output file could not be opened on its node: {fields.get('StdOut') or output}; "
            "create its folder on a disk that all nodes share"
        )
    reason = _STATES.get(state, "")
    if not reason and state == "FAILED":
        code, _, number = fields.get("ExitCode", "").partition(":")
        names = {str(item.value): item.name for item in signal.Signals}
        reason = f"exit code {code}" if number in ("", "0") else f"killed by {names.get(number, f'signal {number}')}"
        reason = f"no space left in {folder.parent}" if code == str(DISK_FULL) else reason
    if state == "TIMEOUT" and fields.get("TimeLimit"):
        reason += f" of {fields['TimeLimit']}"
    if not reason:
        return error
    # Slurm's line in the output repeats the reason, with the time.
    return reason if not error or error.startswith(reason.partition(" of ")[0]) else f"{reason}: {error}"


def unknown(folder: Path, job: str) -> str:
    """Explain the end of a job for which `why` finds no reason, by its last line of output, or because it has none."""
    output = folder / f"{job}.out"
    if not output.is_file():
        return (
            f"Slurm has no record of job {job}, and there is no {output}: it was cancelled while queued, or that file "
            "could not be opened on its node"
        )
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    last = f"its output ends: {lines[-1][:_LONGEST]}" if lines else f"{output} is empty"
    return f"killed, or its node failed: Slurm has no record of job {job}, and {last}"


def note(folder: Path, job: str, *, by: str) -> None:
    """Record in a run's folder `slurm` that the user `by` is cancelling a job now."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S")
    write_text(folder / CANCELLED, json.dumps({"job": job, "by": by, "at": at}) + "\n")


def noted(folder: Path, job: str) -> str:
    """Return who cancelled a job and when, as "by NAME at TIME", if `note` recorded it in this folder; otherwise ""."""
    path = folder / CANCELLED
    note = json.loads(path.read_text()) if path.is_file() else {}
    return f"by {note['by']} at {note['at']}" if note.get("job") == job else ""


def _cancelled(fields: dict[str, str]) -> str:
    """Describe a cancellation by user and time, and whether the job was still queued, from Slurm's fields."""
    if fields.get("Reason") == "DependencyNeverSatisfied":
        return "by Slurm: a job that it depends on failed"
    number = fields.get("By", "")
    words = []
    if number.isdecimal():
        try:
            words.append(f"by {pwd.getpwuid(int(number)).pw_name}")
        except KeyError:
            words.append(f"by user {number}")
    if fields.get("EndTime", "Unknown") != "Unknown":
        words.append(f"at {fields['EndTime']}")
    if fields.get("NodeList") in ("(null)", "None assigned"):
        words.append("while it was queued" + (" and held" if fields.get("Reason", "").startswith("JobHeld") else ""))
    return " ".join(words) or "by somebody"


def is_own(folder: Path, job: str) -> bool:
    """Return False if Slurm has reused a job id for another run's job; `folder` is the folder `slurm` of this run."""
    return _is_of(folder, job, _shown(job))


def _is_of(folder: Path, job: str, fields: Mapping[str, str]) -> bool:
    """Return False if Slurm's fields give a job name or an output file that does not belong to the run's job.

    Times cannot be compared, as requeueing changes them.
    """
    starts = [start for start in attempts.read(folder.parent) if start.job == job]
    known = {"JobName": {start.name for start in starts}, "StdOut": {start.output for start in starts}}
    file, submitted, (array, _, task) = folder / JOB, folder / SUBMITTED, job.partition("_")
    if file.is_file() and file.read_text().strip() == job and submitted.is_file():
        parts = {"%": "%", "j": job, "A": array, "a": task}
        for field, options in (("JobName", ("--job-name", "-J")), ("StdOut", ("--output", "-o"))):
            set_by = [word for word in shlex.split(submitted.read_text()) if word.startswith(options)]
            if len(set_by) == 1:  # otherwise slurm.options sets it as well
                name = set_by[0].partition("=")[2]
                known[field].add(re.sub("%([%jAa])", lambda found: parts[found[1]], name))
    expected = {name: {_real(value) for value in values if value} for name, values in known.items()}
    return all(not values or name not in fields or _real(fields[name]) in values for name, values in expected.items())


def _real(text: str) -> str:
    """Resolve symbolic links and Slurm's escape %% in a path, as scontrol prints it; return a job name unchanged."""
    return str(Path(text.replace("%%", "%")).resolve()) if text.startswith("/") else text


def _shown(job: str) -> dict[str, str]:
    """Return what `scontrol` shows about a job, by field name (JobState, ExitCode, ...).

    Slurm's controller forgets a job a few minutes after it ends; the result is then empty.
    """
    fields: dict[str, str] = {}
    if shutil.which("scontrol"):
        shown = call(["scontrol", "show", "job", job, "--oneliner"]).stdout
        names = ("JobName", "JobState", "Reason", "ExitCode", "TimeLimit", "EndTime", "NodeList", "StdOut")
        for name in names:
            # Paths may contain spaces.
            if found := re.search(rf"(?:^| ){name}=(.*?)(?= \w+(?::\w+)*=|\s*$)", shown, re.MULTILINE):
                fields[name] = found[1]
    return fields


def _fields(job: str) -> dict[str, str]:
    """Return what Slurm's controller and, if available, its accounting know about a job; keys are as in `_shown`."""
    shown = _shown(job)
    if shown.get("JobState", "CANCELLED") == "CANCELLED" and shutil.which("sacct"):
        names = ("State", "ExitCode", "Timelimit", "End", "NodeList", "JobName")
        query = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", f"--format={','.join(names)}"]
        lines = call(query).stdout.splitlines()
        if lines and lines[-1].count("|") >= len(names) - 1:
            state, *values = lines[-1].split("|", len(names) - 1)
            word, _, by = state.partition(" by ")
            keys = ("ExitCode", "TimeLimit", "EndTime", "NodeList", "JobName")
            accounted = {"JobState": word, "By": by, **dict(zip(keys, values, strict=True))}
            shown = {**accounted, **shown}
    return shown
