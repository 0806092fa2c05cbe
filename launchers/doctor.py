"""Which engines work on this machine, and what the others lack; each is imported in a process of its own.

Exit code 1 if hydra, torch or megatron-core does not work. With --install, before an installation: what is here by
metadata alone, what pip would change, and commands that change nothing; exit code 1 if packages that are here would
change, or if that is not known.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

import argparse
import json

from nemo_ext import __version__, doctor, install


def main() -> None:
    """Prints the findings, or the report of `--install`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", nargs="*", help=f"only these and what they need; known: {', '.join(doctor.ROWS)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="time limit of an import or of pip")
    parser.add_argument("--install", action="store_true", help="what an installation would change")
    parser.add_argument("--extra", nargs="+", action="extend", default=[], metavar="NAME", help="extras to install")
    asked = parser.parse_args()
    if asked.time_limit is not None and not asked.time_limit > 0:
        parser.error(f"expected a number of seconds above 0, got {asked.time_limit:g}")
    if (asked.install and asked.engine) or (asked.extra and not asked.install):
        parser.error("--install takes no engines, and --extra belongs to --install")
    try:
        if asked.install:
            told = install.report(asked.extra, time_limit=asked.time_limit or install.TIME_LIMIT)
            print(install.shown(json.dumps(told, indent=2) if asked.json else install.text(told)))
            sys.exit(told["changes"] is not False)
        findings = doctor.examine(asked.engine, time_limit=asked.time_limit or doctor.TIME_LIMIT)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if asked.json:
        base, engines = ([row._asdict() for row in findings if (row.name in doctor.BASE) is of] for of in (True, False))
        works = doctor.works(findings)
        print(json.dumps({"nemo_ext": __version__, "works": works, "base": base, "engines": engines}, indent=2))
    else:
        _print(findings)
    sys.exit(not doctor.works(findings))


def _print(findings: list[doctor.Finding]) -> None:
    """A table, and below it what unusable engines lack with the command to copy."""
    from rich import box, console, table

    style = box.SIMPLE_HEAD if sys.stdout.isatty() else None
    rows = table.Table("", "version", "here", "what for", box=style, show_header=style is not None, pad_edge=False)
    for finding in findings:
        what = f"{finding.enables}: {finding.note}" if finding.note else finding.enables
        here = "[green]yes" if finding.usable else "[red]no" if finding.required else "[yellow]no"
        rows.add_row(finding.name, finding.version or "-", here, what, end_section=finding.name == doctor.BASE[-1])
    console.Console(highlight=False, width=None if style else 500).print(rows)
    for finding in (finding for finding in findings if not finding.usable):
        print(f"  {finding.name} lacks {finding.missing}\n      {finding.command}")
    broken = ", ".join(finding.name for finding in findings if finding.required and not finding.usable)
    print(f"\ntraining does not work here: {broken}" if broken else "\nnemo-ext works here")


if __name__ == "__main__":
    main()
