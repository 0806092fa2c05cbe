"""Text files that a task needs in the sandbox."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator

WRITE = """\
import os, shutil
def write(files):
    for path, text in files.items():
        parts = path.split("/")
        for number in range(1, len(parts)):
            folder = "/".join(parts[:number])
            if os.path.islink(folder) or not os.path.isdir(folder):
                remove(folder)
                os.mkdir(folder)
        remove(path)
        with open(path, "x", encoding="utf-8", newline="") as file:
            file.write(text)
def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
"""
"""Code for the sandbox that defines `write(files)`, which replaces whatever exists at the paths, symbolic links too."""


def check_files(files: Mapping[str, str]) -> Mapping[str, str]:
    """Check a mapping from relative path to content, and return it.

    Raises:
        ValueError: a path is not relative, or two paths conflict.
    """
    for path in files:
        parts = path.split("/")
        if "\0" in path or {"", ".", ".."} & set(parts):
            raise ValueError(f"invalid path {path!r}: use a relative path without empty parts, '.' and '..'")
        for number in range(1, len(parts)):
            if (folder := "/".join(parts[:number])) in files:
                raise ValueError(f"{folder!r} is a file and also the folder of {path!r}: rename one of them")
    return files


Files = Annotated[Mapping[str, str], AfterValidator(check_files)]
"""Mapping from relative path to content."""
