"""Prompts as arrays: the location of each record, and eight-byte keys of its id and its text."""

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from nemo_ext.data.curriculum.records import (
    Malformed,
    check_share,
    checked_id,
    digest,
    lines_of,
    new_hash,
    note_malformed,
    parse,
    parts_of,
    plain_lines_of,
    prompt_bytes,
    read_parts,
    required,
)
from nemo_ext.data.curriculum.settings import LINE, PROMPT, PromptKeys
from nemo_ext.data.text.documents import Part, ReadReport
from nemo_ext.data.text.user_files import value_at

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
NO_DOMAIN = "(none)"
MOST_DOMAINS = 1 << 15
DUPLICATE = "id seen before"


@dataclass(frozen=True)
class Prompts:
    """All prompts; every array has one entry per prompt, in file order. About 40 bytes per prompt.

    Attributes:
        files: plain JSONL files, which are distinct.
        file: index into `files`.
        span: [prompts, 2] byte offsets of the record's first byte and of its end, before the line break.
        key: key of the id.
        text: key of the prompt's text; equal for identical prompts.
        domain: index into `domains`.
        domains: names of the domains, sorted.
        report: counts of the records read and skipped.
    """

    files: tuple[Path, ...]
    file: npt.NDArray[np.int32]
    span: Numbers
    key: Keys
    text: Keys
    domain: npt.NDArray[np.int16]
    domains: tuple[str, ...]
    report: ReadReport

    def __len__(self) -> int:
        return len(self.key)


def key_of(identity: str) -> np.uint64:
    """Return the key of one id: its eight-byte digest as an integer."""
    return np.frombuffer(digest(identity.encode()), dtype=np.uint64)[0]


def read_prompts(files: Sequence[Path], keys: PromptKeys, *, max_bad_share: float = 0.01, workers: int = 1) -> Prompts:
    """Read plain JSONL files; if several records have the same id, the first is kept.

    Raises:
        ValueError: a file is damaged, there are no records, too many are malformed, or there are too many domains.
    """
    parts = parts_of(files)
    firsts = [0] * len(parts)
    if keys.id == LINE:
        firsts = _first_lines(parts)
    read = functools.partial(_read_part, keys=keys)
    pieces = []
    report, names = ReadReport(), dict[str, int]()
    for first, piece in zip(firsts, read_parts(parts, read, workers=workers, label="prompts"), strict=True):
        report.add(piece.report)
        codes = np.array([_number(name, names, keys) for name in piece.names], dtype=np.int16)
        key = piece.key
        if keys.id == LINE:
            key = _joined([digest(str(number).encode()) for number in (piece.line + first).tolist()])
        domains = codes[piece.domain] if len(codes) else piece.domain
        pieces.append((piece.span, key, piece.text, domains))
    check_share(report, "prompts", max_bad_share)
    numbers = {str(path.absolute()): number for number, path in enumerate(files)}  # as in parts
    number_of_file = np.repeat(
        np.array([numbers[part.path] for part in parts], dtype=np.int32), [len(piece[0]) for piece in pieces]
    )
    spans, ids, texts, domains = (np.concatenate(column) for column in zip(*pieces, strict=True))
    # Domains are numbered in the order of their names, so that the order of the files does not matter.
    ordered = sorted(names)
    rank = np.array([ordered.index(name) for name in names], dtype=np.int16)
    keep = _first_of_each(ids, report)
    return Prompts(
        files=tuple(files),
        file=number_of_file[keep],
        span=spans[keep],
        key=ids[keep],
        text=texts[keep],
        domain=rank[domains[keep]],
        domains=tuple(ordered),
        report=report,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Prompts in one part of a file.

    Attributes:
        span, key, text: see `Prompts`.
        domain: index into `names`.
        line: number of the record's line within its part.
        names: names of the part's domains, in order of appearance.
        report: counts of the records read and skipped.
    """

    span: Numbers
    key: Keys
    text: Keys
    domain: npt.NDArray[np.int16]
    line: Numbers
    names: tuple[str, ...]
    report: ReadReport


def _read_part(part: Part, *, keys: PromptKeys) -> _Piece:
    """Read the prompts in one part of a file."""
    sizes, lengths, domains, blank, malformed = array("q"), array("q"), array("h"), array("q"), array("q")
    ids, texts, names, report = bytearray(), bytearray(), dict[str, int](), ReadReport()
    flat = not any("." in key for key in (keys.id, keys.prompt, keys.domain or ""))
    plain = flat and keys.domain is not None and keys.id not in (PROMPT, LINE)
    id_key, prompt_key, domain_key = keys.id, keys.prompt, keys.domain
    loads, new = orjson.loads, new_hash
    for index, line in enumerate(plain_lines_of(part)):
        sizes.append(len(line))
        lengths.append(len(line.rstrip(b"\r\n")))
        try:
            # Speed matters for ten million records: the common case makes no function calls of ours.
            record: Any = loads(line) if plain else None
            identity, prompt, domain = record[id_key], record[prompt_key], record[domain_key]
            code = names[domain]
            id_hash, text_hash = new(), new()
            id_hash.update(identity.encode())
            text_hash.update(prompt.encode())
            text = text_hash.digest()
            identity = id_hash.digest() if identity else None
        except (TypeError, ValueError, LookupError, AttributeError):
            identity = None
        if identity is None:
            if line.isspace():
                blank.append(index)
                continue
            try:
                identity, text, domain = _entry(parse(line), keys)
            except Malformed as problem:
                malformed.append(index)
                note_malformed(report, part, part.first + index, str(problem))
                continue
            code = _number(domain, names, keys)
        ids += identity
        texts += text
        domains.append(code)
    report.records = len(sizes) - len(blank)
    rows = np.delete(np.arange(len(sizes)), np.array(blank + malformed))
    begins = part.start + np.cumsum(sizes) - np.array(sizes)
    return _Piece(
        span=np.stack([begins, begins + np.array(lengths)], axis=1)[rows],
        key=np.frombuffer(ids, dtype=np.uint64),
        text=np.frombuffer(texts, dtype=np.uint64),
        domain=np.array(domains, dtype=np.int16),
        line=rows - np.searchsorted(np.array(blank), rows),
        names=tuple(names),
        report=report,
    )


def _joined(digests: Sequence[bytes]) -> Keys:
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _entry(record: dict[str, object], keys: PromptKeys) -> tuple[bytes, bytes, str]:
    """Return the digests of a record's id and text, and the name of its domain; raises Malformed."""
    text = digest(prompt_bytes(required(record, keys.prompt)))
    if keys.id == PROMPT:
        identity = digest(text.hex().encode())  # as in a profile, where the id is the text's digest in hex
    elif keys.id == LINE:
        identity = b"\0" * 8  # set later: line numbers are known only after all earlier parts are read
    else:
        identity = digest(checked_id(required(record, keys.id), keys.id).encode())
    return identity, text, _domain(record, keys.domain)


def _domain(record: dict[str, object], key: str | None) -> str:
    if key is None:
        return "all"
    if (value := value_at(record, key)) is None:
        return NO_DOMAIN
    if isinstance(value, str) and value:
        return value
    raise Malformed(f"{key!r}: expected the name of a domain, not {value!r}")


def _number(domain: str, names: dict[str, int], keys: PromptKeys) -> int:
    """Return the domain's number in `names`, adding the domain if it is new; `keys` is for the error message."""
    if domain not in names and len(names) == MOST_DOMAINS:
        raise ValueError(
            f"keys.domain={keys.domain} has more than {MOST_DOMAINS:,} values, such as {next(iter(names))!r} and "
            f"{domain!r}: set it to the key that holds the domain's name, or to null to put all prompts into one domain"
        )
    return names.setdefault(domain, len(names))


def _first_lines(parts: Sequence[Part]) -> list[int]:
    """Return the number of the first non-blank line of each part, counted over all files."""
    firsts, lines = [], 0
    for part in parts:
        firsts.append(lines)
        lines += sum(1 for _ in lines_of(part))
    return firsts


def _first_of_each(keys: Keys, report: ReadReport) -> npt.NDArray[np.bool_]:
    """Return the mask of the first entry with each key; further entries are counted in `report`."""
    keep = np.ones(len(keys), dtype=np.bool_)
    if len(repeated_values(keys)):
        keep[:] = False
        keep[np.unique(keys, return_index=True)[1]] = True
        report.skip(DUPLICATE, count=int((~keep).sum()))
    return keep


def repeated_values(keys: Keys) -> Keys:
    """Return the values that occur more than once, sorted."""
    ordered = np.sort(keys)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
