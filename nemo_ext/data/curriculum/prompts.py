"""Prompts as arrays: the place of each record, and eight bytes for its id and for its text."""

import functools
import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from nemo_ext.data.curriculum.records import (
    MALFORMED,
    Malformed,
    blocks_of,
    check_share,
    checked_id,
    digest,
    lines_of,
    note_malformed,
    parse,
    parts_of,
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
    """All prompts, one entry of every array each, in the order of the files; about 36 bytes per prompt.

    Attributes:
        files: plain JSONL files.
        file: index into `files`.
        offset: first byte of the record.
        length: number of bytes of the record, without the line's end.
        key: key of the id.
        text: key of the prompt; equal for identical ones.
        domain: index into `domains`.
        domains: names of the domains, sorted.
        report: records read and left out.
    """

    files: tuple[Path, ...]
    file: npt.NDArray[np.int32]
    offset: Numbers
    length: npt.NDArray[np.int32]
    key: Keys
    text: Keys
    domain: npt.NDArray[np.int16]
    domains: tuple[str, ...]
    report: ReadReport

    def __len__(self) -> int:
        return len(self.key)


def key_of(identity: str) -> np.uint64:
    """Key of one id."""
    return np.frombuffer(digest(identity.encode()), dtype=np.uint64)[0]


def read_prompts(files: Sequence[Path], keys: PromptKeys, *, max_bad_share: float = 0.01, workers: int = 1) -> Prompts:
    """Read plain JSONL files; of several records with one id the first is kept.

    Raises:
        ValueError: a file is damaged, there is no record, too many are malformed, or there are too many domains.
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
            key = np.frombuffer(
                b"".join([digest(str(number).encode()) for number in (piece.line + first).tolist()]), dtype=np.uint64
            )
        domains = codes[piece.domain] if len(codes) else piece.domain
        pieces.append((piece.offset, piece.length, key, piece.text, domains))
    check_share(report, "prompts", max_bad_share)
    numbers = {str(path): number for number, path in enumerate(files)}
    number_of_file = np.repeat(
        np.array([numbers[part.path] for part in parts], dtype=np.int32), [len(piece[0]) for piece in pieces]
    )
    offsets, lengths, ids, texts, domains = (np.concatenate(column) for column in zip(*pieces, strict=True))
    # Domains are numbered by name, so that the order of the files does not matter.
    ordered = sorted(names)
    rank = np.array([ordered.index(name) for name in names], dtype=np.int16)
    keep = _first_of_each(ids, report)
    return Prompts(
        files=tuple(files),
        file=number_of_file[keep],
        offset=offsets[keep],
        length=lengths[keep],
        key=ids[keep],
        text=texts[keep],
        domain=rank[domains[keep]],
        domains=tuple(ordered),
        report=report,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Prompts of one part of a file.

    Attributes:
        offset, length, key, text: see `Prompts`.
        domain: index into `names`.
        line: number of the record's line in its part.
        names: names of the part's domains, in order of appearance.
        report: records read and left out.
    """

    offset: Numbers
    length: npt.NDArray[np.int32]
    key: Keys
    text: Keys
    domain: npt.NDArray[np.int16]
    line: Numbers
    names: tuple[str, ...]
    report: ReadReport


def _read_part(part: Part, *, keys: PromptKeys) -> _Piece:
    """Read the prompts of a part."""
    offsets, lengths, domains, numbers = array("q"), array("i"), array("h"), array("q")
    ids, texts, names, report = bytearray(), bytearray(), dict[str, int](), ReadReport()
    flat = not any("." in key for key in (keys.id, keys.prompt, keys.domain or ""))
    plain = flat and keys.domain is not None and keys.id not in (PROMPT, LINE)
    first = 0
    for begin, lines in blocks_of(part):
        entries = _plain_entries(lines, keys) if plain else None
        if entries is not None:
            offsets.extend(accumulate(map(len, lines[:-1]), initial=begin))
            lengths.extend([len(line.rstrip(b"\r\n")) for line in lines])
            numbers.extend(range(first, first + len(lines)))
            ids += entries[0]
            texts += entries[1]
            for name in dict.fromkeys(entries[2]):
                _number(name, names, keys)
            domains.extend(map(names.__getitem__, entries[2]))
            first += len(lines)
            continue
        offset = begin
        for line in lines:
            at, offset = offset, offset + len(line)
            if line.isspace():
                continue
            first += 1
            try:
                identity, text, domain = _entry(parse(line), keys)
            except Malformed as problem:
                note_malformed(report, part, at, str(problem))
                continue
            offsets.append(at)
            lengths.append(len(line.rstrip(b"\r\n")))
            domains.append(_number(domain, names, keys))
            numbers.append(first - 1)
            ids += identity
            texts += text
    report.records = len(offsets) + report.skipped.get(MALFORMED, 0)
    return _Piece(
        offset=np.array(offsets, dtype=np.int64),
        length=np.array(lengths, dtype=np.int32),
        key=np.frombuffer(ids, dtype=np.uint64),
        text=np.frombuffer(texts, dtype=np.uint64),
        domain=np.array(domains, dtype=np.int16),
        line=np.array(numbers, dtype=np.int64),
        names=tuple(names),
        report=report,
    )


def _plain_entries(lines: Sequence[bytes], keys: PromptKeys) -> tuple[bytes, bytes, list[str]] | None:
    """Digests of ids, joined, and of texts, and the domains, where all are texts in every line; else None.

    Ten million records go through here: what is done for each is done without a call of a Python function.
    """
    try:
        records = [*map(orjson.loads, lines)]
        ids, prompts, domains = ([record[key] for record in records] for key in (keys.id, keys.prompt, keys.domain))
        if not all(ids) or not all(map(str.__len__, set(domains))):
            return None
        return digests(ids), digests(prompts), domains
    except (TypeError, ValueError, LookupError):
        return None


def digests(texts: Iterable[str]) -> bytes:
    """`digest` of each text, joined."""
    hashed = map(functools.partial(hashlib.blake2b, digest_size=8), map(str.encode, texts))
    return b"".join([made.digest() for made in hashed])


def _entry(record: dict[str, object], keys: PromptKeys) -> tuple[bytes, bytes, str]:
    """Digests of one record's id and text, and its domain; raises Malformed."""
    text = digest(prompt_bytes(required(record, keys.prompt)))
    if keys.id == PROMPT:
        identity = digest(text.hex().encode())  # as in a profile, whose ids are text
    elif keys.id == LINE:
        identity = b"\0" * 8  # the line's number is known only when all parts before are read
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
    raise Malformed(f"{key!r} is {value!r}, not the name of a domain")


def _number(domain: str, names: dict[str, int], keys: PromptKeys) -> int:
    """Number of the domain, a new one if it has none."""
    if domain not in names and len(names) == MOST_DOMAINS:
        raise ValueError(
            f"keys.domain={keys.domain}: more than {MOST_DOMAINS:,} domains, such as {next(iter(names))!r} and "
            f"{domain!r}: name the key of a domain, or null to put all prompts into one"
        )
    return names.setdefault(domain, len(names))


def _first_lines(parts: Sequence[Part]) -> list[int]:
    """Number of the first non-blank line of every part, counted over all files."""
    firsts, lines = [], 0
    for part in parts:
        firsts.append(lines)
        lines += sum(1 for _ in lines_of(part))
    return firsts


def _first_of_each(keys: Keys, report: ReadReport) -> npt.NDArray[np.bool_]:
    """Mask of the entries that are the first with their key; the others are counted."""
    if not any_twice(keys):
        return np.ones(len(keys), dtype=np.bool_)
    keep = np.zeros(len(keys), dtype=np.bool_)
    keep[np.unique(keys, return_index=True)[1]] = True
    report.skip(DUPLICATE, count=int((~keep).sum()))
    return keep


def any_twice(keys: Keys) -> bool:
    """True if a key comes more than once: sorting alone takes a small part of the time of finding out where."""
    ordered = np.sort(keys)
    return bool((ordered[1:] == ordered[:-1]).any())
