"""Slips that tests must catch: applies each of mutations.toml alone to a copy of the tree, and runs its tests.

python tests/mutations/run.py [--list] [--only 3,17]

The tests must pass without them, which is tried first. Results are kept in build/mutations.json: a second call goes on
after an interrupted one, and runs those again whose source or tests have changed since.
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
from collections.abc import Callable
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


def copy_tree(to: Path) -> str:
    """Copy the files that git knows; their digest."""
    digest = hashlib.sha256()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
            digest.update(name.encode() + (to / name).read_bytes())
    return digest.hexdigest()[:16]


def ended(copy: Path, tests: list[str], *more: str) -> tuple[int | None, str]:
    """pytest's exit code in the copy up to the first test that fails, and its output; -9 if it does not end in time."""
    words = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--basetemp={copy.parent / 'made'}", *more, *tests]
    log = copy.parent / "log"
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(copy, words, log))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return process.exitcode, log.read_text(errors="replace")


def failure(copy: Path, tests: list[str], *more: str) -> str:
    """The first test that fails in the copy; "" if all pass, do not run, or do not end, as on a busy machine."""
    code, said = ended(copy, tests, *more)
    if code == 1 and (found := _FAILED.search(said)):
        return found[1]
    if code:
        print(f"pytest {' '.join([*more, *tests])} ended with {code} (-9: after {SECONDS} s):\n{said[-2000:]}")
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


def outcome(copy: Path, mutation: Mutation, refuse_failing: Callable[..., None]) -> dict[str, str]:
    """Which run catches a mutation, and its test; tests are first given to a function that refuses those that fail."""
    file = Path("nemo_ext") / mutation["file"]
    for by, tests, more in (("default", mutation["tests"], ()), ("slow", mutation.get("slow"), ("-m", "slow"))):
        if not tests:
            continue
        refuse_failing(tests, *more)
        (copy / file).write_text((ROOT / file).read_text().replace(mutation["before"], mutation["after"]))
        try:
            test = failure(copy, tests, *more)
        finally:
            shutil.copy2(ROOT / file, copy / file)
        if test:
            return {"by": by, "test": test}
    return {"by": "survived", "test": ""}


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

    def keep(name: str, result: dict[str, str]) -> None:
        known[name] = result
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")

    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # as in tests/conftest.py, before torch
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = copy_tree(copy := Path(folder) / "tree")

        def refuse_failing(tests: list[str], *more: str) -> None:
            name = " ".join([*more, *tests])
            if known.get(name) == {"passed in": tree}:
                return
            code, said = ended(copy, tests, *more)
            if code:
                sys.exit(
                    f"{name}: without a mutation pytest ended with {code} (-9: after {SECONDS} s):\n{said[-2000:]}"
                )
            keep(name, {"passed in": tree})

        for number in chosen:
            digest = digest_of(mutation := mutations[number - 1])
            if digest not in known:
                keep(digest, outcome(copy, mutation, refuse_failing))
            found = known[digest]
            print(f"{number:2}  {found['by']:8}  {mutation['file']}: {mutation['what']}  {found['test']}", flush=True)
    found_all = [known[digest]["by"] for each in mutations if (digest := digest_of(each)) in known]
    default, slow = (found_all.count(run) for run in ("default", "slow"))
    print(f"{len(found_all)} of {len(mutations)} were run: {default} caught by default, {slow} by slow tests alone")
    return int(len(found_all) == len(mutations) and (default < BY_DEFAULT or default + slow < CAUGHT))


if __name__ == "__main__":
    sys.exit(main())
