"""Slips that tests must catch: applies each of mutations.toml alone to a copy of the tree, and runs its tests.

python tests/mutations/run.py [--list] [--only 3,17]

The tests must pass without them. Results are kept in build/mutations.json: a second call goes on after an interrupted
one, and runs those again whose source or tests have changed since.
"""

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutations.toml")
RESULTS = ROOT / "build" / "mutations.json"
SECONDS = 240  # for one run of tests
CAUGHT, BY_DEFAULT = 57, 52  # by default and slow tests together, and by default tests alone, at least
# What tests import and no mutation changes; not Megatron, which nemo_ext has to come before.
IMPORTED = ("absl.logging", "hydra", "hypothesis", "psutil", "pydantic", "tokenizers", "torch")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)

Mutation = dict[str, Any]


def read() -> list[Mutation]:
    """The mutations, numbered from 1; ends the program if one does not fit the tree."""
    mutations, wrong = list(tomllib.loads(LIST.read_text())["mutation"]), []
    for number, each in enumerate(mutations, 1):
        file = ROOT / "nemo_ext" / each["file"]
        count = file.read_text().count(each["before"]) if file.is_file() else 0
        if count != 1:
            told = f"nemo_ext/{each['file']} has its text {count} times, not once"
            wrong.append(f"{number} ({each['what']}): {told}: write the same slip in today's text into {LIST.name}")
        gone = [test for test in files_of(each) if not test.exists()]
        wrong += [f"{number} ({each['what']}): there is no {test}: name the tests that catch it now" for test in gone]
    if wrong:
        sys.exit("\n".join(wrong))
    return mutations


def files_of(mutation: Mutation) -> list[Path]:
    """Files or folders of a mutation's tests."""
    return [ROOT / test.partition("::")[0] for test in (*mutation["tests"], *mutation.get("slow", ()))]


def digest_of(mutation: Mutation) -> str:
    """Digest of a mutation, the file that it changes and its tests."""
    digest = hashlib.sha256(json.dumps(mutation, sort_keys=True).encode())
    for place in (ROOT / "nemo_ext" / mutation["file"], ROOT / "tests" / "conftest.py", *files_of(mutation)):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def copy_tree(to: Path) -> None:
    """Copy the files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def failure(copy: Path, tests: list[str], *more: str) -> str:
    """The first test that fails in the copy; "" if all pass, do not run, or do not end, as on a busy machine."""
    words = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--basetemp={copy.parent / 'made'}", *more, *tests]
    log = copy.parent / "log"
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(copy, words, log))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    said = log.read_text(errors="replace")
    if process.exitcode == 1 and (found := _FAILED.search(said)):
        return found[1]
    if process.exitcode:
        print(f"pytest {' '.join(words)} ended with {process.exitcode} (-9: after {SECONDS} s):\n{said[-2000:]}")
    return ""


def run_tests(copy: Path, words: list[str], log: Path) -> None:
    """Run pytest in this process, forked from one that has imported what takes most of the time."""
    os.setsid()
    os.chdir(copy)
    os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
    with log.open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    code = int(pytest.main(words))
    sys.stdout.flush()
    os._exit(code)


def outcome(copy: Path, mutation: Mutation) -> dict[str, str]:
    """Which run catches a mutation, and its test."""
    file = Path("nemo_ext") / mutation["file"]
    (copy / file).write_text((ROOT / file).read_text().replace(mutation["before"], mutation["after"]))
    try:
        by, test = "default", failure(copy, mutation["tests"])
        if not test and "slow" in mutation:
            by, test = "slow", failure(copy, mutation["slow"], "-m", "slow")
    finally:
        shutil.copy2(ROOT / file, copy / file)
    return {"by": by if test else "survived", "test": test}


def main() -> int:
    """Run, and print the table; 1 if fewer are caught than have to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutations, run nothing")
    parser.add_argument("--only", metavar="N,M", help="numbers of the mutations to run")
    given, mutations = parser.parse_args(), read()
    if given.list:
        print("\n".join(f"{number:2}  {each['file']}: {each['what']}" for number, each in enumerate(mutations, 1)))
        return 0
    chosen = [int(each) for each in given.only.split(",")] if given.only else range(1, len(mutations) + 1)
    known: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # as in tests/conftest.py, before torch
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy_tree(copy := Path(folder) / "tree")
        for number in chosen:
            digest = digest_of(mutation := mutations[number - 1])
            if digest not in known:
                known[digest] = outcome(copy, mutation)
                RESULTS.write_text(json.dumps(known, indent=1) + "\n")
            found = known[digest]
            print(f"{number:2}  {found['by']:8}  {mutation['file']}: {mutation['what']}  {found['test']}", flush=True)
    found_all = [known[digest]["by"] for each in mutations if (digest := digest_of(each)) in known]
    default, slow = (found_all.count(run) for run in ("default", "slow"))
    print(f"{len(found_all)} of {len(mutations)} were run: {default} caught by default, {slow} by slow tests alone")
    return int(len(found_all) == len(mutations) and (default < BY_DEFAULT or default + slow < CAUGHT))


if __name__ == "__main__":
    sys.exit(main())
