"""Doctor: `nemo-ext doctor [ENGINE ...] [--json]`, which engines work here and what the others lack.

`nemo-ext doctor --install [--extra NAME ...]`: what an installation would change, before it.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

from nemo_ext import __version__, doctor, install
from nemo_ext.engines import ENGINES, TIME_LIMIT

BROKEN = 1
USER_ERROR = 2


def main() -> None:
    """Prints the findings; exit code 1 where something that every job needs does not work."""
    parser = _parser()
    arguments = parser.parse_args()
    if (arguments.install and arguments.engine) or (arguments.extra and not arguments.install):
        parser.error("--install takes no engines, and --extra belongs to --install")
    if arguments.install:
        _install(arguments)
    try:
        findings = _examine(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(130)
    if arguments.json:
        print(_json(findings))
    else:
        _print(findings)
    sys.exit(0 if doctor.works(findings) else BROKEN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Show which engines work on this machine, and what the others lack. Each is imported in a "
        "process of its own. Exit code 1 if Python, hydra, torch or megatron-core does not work.",
    )
    names = ", ".join(dict.fromkeys([*doctor.BASE, *(engine.name for engine in ENGINES)]))
    parser.add_argument("engine", nargs="*", help=f"only these and what they need; known: {names}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="SECONDS",
        help=f"time limit of each import (default: {TIME_LIMIT:g}) or resolution (default: {install.TIME_LIMIT:g})",
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="before an installation: what is here by metadata alone, what pip would change, and the command that "
        "changes nothing. Exit code 1 if packages that are here would change, or if that is not known",
    )
    parser.add_argument(
        "--extra", nargs="+", action="extend", default=[], metavar="NAME", help="extras to be installed"
    )
    return parser


def _install(arguments: argparse.Namespace) -> NoReturn:
    """Prints the report of `--install`; exit code 0 if an installation would change nothing that is here."""
    words = ["nemo-ext", "doctor", *sys.argv[1:]]
    if sys.stderr.isatty():
        print("asking what an installation would do, without installing ...", file=sys.stderr)
    try:
        told = install.report(words, arguments.extra, time_limit=arguments.time_limit or install.TIME_LIMIT)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        print("interrupted; nothing was changed", file=sys.stderr)
        sys.exit(130)
    print(json.dumps(told, indent=2) if arguments.json else install.text(told))
    sys.exit(0 if told["changes"] is False else BROKEN)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text}")
    return seconds


def _examine(arguments: argparse.Namespace) -> list[doctor.Finding]:
    if arguments.json or not sys.stderr.isatty():
        return doctor.examine(arguments.engine, time_limit=arguments.time_limit or TIME_LIMIT)
    from rich.console import Console

    with Console(stderr=True).status("importing every engine in a process of its own ..."):
        return doctor.examine(arguments.engine, time_limit=arguments.time_limit or TIME_LIMIT)


def _json(findings: Sequence[doctor.Finding]) -> str:
    base = [asdict(finding) for finding in findings if finding.name in doctor.BASE]
    engines = [asdict(finding) for finding in findings if finding.name not in doctor.BASE]
    whole = {"nemo_ext": __version__, "works": doctor.works(findings), "base": base, "engines": engines}
    return json.dumps(whole, indent=2)


def _print(findings: Sequence[doctor.Finding]) -> None:
    """A table, and below it what each unusable engine lacks with the command to copy."""
    if sys.stdout.isatty():
        _print_table(findings)
    else:
        wide = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.name:<{wide}}  {finding.version or '-':<12}  {_here(finding):<3}  {_what(finding)}")
    lacking = [finding for finding in findings if not finding.usable]
    if lacking:
        print("\nmissing")
    shown: set[str] = set()
    for finding in lacking:
        known = finding.command in shown
        print(f"  {finding.name}: {finding.missing}{' (as above)' if known else ''}")
        if not known:
            print(f"      {finding.command}")
        shown.add(finding.command)
    print(f"\n{_verdict(findings)}")


def _print_table(findings: Sequence[doctor.Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "version", "here", "what for"):
        table.add_column(column, overflow="fold", no_wrap=column in ("", "here"))
    for index, finding in enumerate(findings):
        colour = "green" if finding.usable else "red" if finding.required else "yellow"
        last = finding.name in doctor.BASE and findings[min(index + 1, len(findings) - 1)].name not in doctor.BASE
        table.add_row(
            finding.name,
            finding.version or "-",
            Text(_here(finding), style=colour),
            Text(_what(finding), style="" if finding.usable else "dim"),
            end_section=last,
        )
    Console(highlight=False).print(table)


def _here(finding: doctor.Finding) -> str:
    return "yes" if finding.usable else "no"


def _what(finding: doctor.Finding) -> str:
    return f"{finding.enables}: {finding.note}" if finding.note else finding.enables


def _verdict(findings: Sequence[doctor.Finding]) -> str:
    broken = [finding.name for finding in findings if finding.required and not finding.usable]
    if broken:
        if {*broken} <= {"torch", "megatron-core"}:
            return f"training does not work here: {', '.join(broken)} (pip install 'nemo_ext[engine]'); the rest does"
        return f"nemo-ext does not work here: {', '.join(broken)}"
    cuda = next((finding for finding in findings if finding.name == "cuda"), None)
    if cuda is None:
        return "nemo-ext works here"
    return f"nemo-ext works here, on the {'GPU' if cuda.usable else 'CPU'}"


if __name__ == "__main__":
    main()
