"""Files in a curriculum's directory, including one file per domain for dataloaders that read domains separately."""

import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.job.files import complete_file
from nemo_ext.job.made_of import note, noted

CURRICULUM, STATS, ARRAYS = "curriculum.jsonl", "curriculum.json", "curriculum.npz"
PROFILE, REPORT = "profile.parquet", "report.md"
DOMAINS, ORDER, WRITTEN = "domains", "order.npz", "written.json"


@dataclass(frozen=True)
class Order:
    """The domain of every prompt in every step.

    Attributes:
        names: names of the domain files, without suffix.
        domain: [steps, batch] index into `names`.
        before: [steps + 1, domains] number of each domain's prompts in all earlier steps.
        anchor: index of a domain that has a prompt in every step.
    """

    names: tuple[str, ...]
    domain: npt.NDArray[np.int16]
    before: npt.NDArray[np.int64]
    anchor: int


def stored_arrays(path: Path, *names: str) -> tuple[npt.NDArray[Any], ...]:
    """Load the arrays called `names` from a curriculum's .npz file.

    Raises:
        ValueError: the file does not belong to a curriculum, or is damaged.
    """
    try:
        with np.load(path) as stored:
            return tuple(stored[name] for name in names)
    except (KeyError, TypeError, AttributeError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged, or does not belong to a curriculum ({', '.join(names)} cannot be read from it): give "
            "the directory that `nemo-ext curriculum` wrote, or make the curriculum again"
        ) from error


def domain_files(output: Path, domains: Sequence[str], drawn: npt.NDArray[np.int16]) -> dict[int, Path]:
    """Return the file path of each domain that has drawn prompts, keyed by domain number, and create their folder.

    An earlier curriculum's files are removed, unless an error is raised.

    Args:
        drawn: [steps, batch] number of each drawn prompt's domain.

    Raises:
        ValueError: two domains would have the same file name, no domain is in every step, or the folder has .jsonl
            files that this job did not write.
    """
    files: dict[int, Path] = {}
    for number in np.unique(drawn).tolist():
        path = output / DOMAINS / f"{re.sub(r'[^A-Za-z0-9_-]', '_', domains[number])}.jsonl"
        if others := [other for other, file in files.items() if file == path]:
            raise ValueError(
                f"split_domains=true would write domains {domains[others[0]]!r} and {domains[number]!r} to the same "
                f"file, {path.name}: rename one of them"
            )
        files[number] = path
    if not any((drawn == number).any(axis=1).all() for number in files):
        raise ValueError(
            "split_domains=true requires a domain with a prompt in every step, from which dataloaders know the "
            "step: raise batch"
        )
    ours = _written(output)
    if foreign := sorted(path for path in (output / DOMAINS).glob("[!.]*.jsonl") if path.stem not in ours):
        raise ValueError(f"{foreign[0]} was not written by this job: move it, or choose another output")
    remove_order(output)
    (output / DOMAINS).mkdir(parents=True, exist_ok=True)
    # Written before the files, in case the job is killed.
    note(output / DOMAINS / WRITTEN, {"names": [path.stem for path in files.values()]})
    return files


def remove_order(output: Path) -> None:
    """Remove an earlier curriculum's order file and domain files, including those left by a killed job."""
    names = _written(output)
    (output / DOMAINS / ORDER).unlink(missing_ok=True)
    for name in names:
        file = output / DOMAINS / f"{name}.jsonl"
        if file.parent == output / DOMAINS:  # the names in the file are not trusted
            file.unlink(missing_ok=True)
    (output / DOMAINS / WRITTEN).unlink(missing_ok=True)


def _written(output: Path) -> set[str]:
    """Return the names of the domain files that earlier curricula wrote, without their suffix."""
    names = set((noted(output / DOMAINS / WRITTEN) or {"names": ()})["names"])
    if (order := output / DOMAINS / ORDER).is_file():
        names |= set(stored_arrays(order, "names")[0].tolist())
    return names


def save_order(output: Path, files: Mapping[int, Path], drawn: npt.NDArray[np.int16]) -> None:
    """Write the order file next to the domain `files`: the domain of every prompt, given as `drawn`, [steps, batch]."""
    number = np.full(max(files) + 1, -1, dtype=np.int16)
    number[list(files)] = np.arange(len(files))
    with complete_file(output / DOMAINS / ORDER) as file:
        np.savez(file, domain=number[drawn], names=np.array([path.stem for path in files.values()]))


def read_order(directory: Path) -> Order:
    """Read the order of a curriculum made with `split_domains=true`.

    Raises:
        ValueError: the curriculum was made without `split_domains`.
    """
    path = directory / DOMAINS / ORDER
    if not path.is_file():
        raise ValueError(f"{path} does not exist: make the curriculum with split_domains=true")
    domain, stems = stored_arrays(path, "domain", "names")
    names = tuple(stems.tolist())
    counts = np.stack([(domain == number).sum(axis=1) for number in range(len(names))], axis=1)
    before = np.concatenate([np.zeros((1, len(names)), dtype=np.int64), np.cumsum(counts, axis=0)])
    (anchors,) = np.nonzero((counts > 0).all(axis=0))
    return Order(names, domain, before, int(anchors[0]))
