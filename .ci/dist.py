"""The sdist and the wheel of this checkout, in dist/: with one Python and one setuptools the same bytes from any clone.

Run it as `make dist`, at any time. Files that git does not know take no part, nor does what an earlier build left.
"""

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(output: Path) -> None:
    """Fills the folder anew."""
    date = int(git("log", "-1", "--format=%ct"))
    os.environ["SOURCE_DATE_EPOCH"] = str(date)  # the wheel's times
    os.umask(0o022)  # the wheel's modes
    if git("status", "--porcelain"):
        print("note: built with changes that are not committed", file=sys.stderr)
    shutil.rmtree(output, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder))
        build("--sdist", "--outdir", str(output), folder)
    (sdist,) = output.glob("*.tar.gz")
    repack(sdist, date)
    build("--wheel", "--outdir", str(output), str(sdist))
    for path in sorted(output.iterdir()):
        print(f"{path.stat().st_size / 1e3:8.0f} kB  {path}")


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def export(folder: Path) -> None:
    """Copies the files that git knows, links as links."""
    for name in filter(None, git("ls-files", "-z").split("\0")):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name, follow_symlinks=False)


def build(*words: str) -> None:
    """Builds with the setuptools that is installed here."""
    ended = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(ended.stdout)


def repack(sdist: Path, date: int) -> None:
    """Writes an sdist again: sorted, one date, plain modes, nobody's files."""
    made = sdist.with_suffix(".part")
    with (
        tarfile.open(sdist) as old,
        open(made, "wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=date) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.linkname, plain.mtime = member.type, member.size, member.linkname, date
            plain.mode = 0o755 if member.isdir() else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    made.replace(sdist)


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else ROOT / "dist").resolve())
