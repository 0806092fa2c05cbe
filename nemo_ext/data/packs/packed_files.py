"""Packs on disk: Megatron's indexed files, with one sequence per sample and one document per pack, and a loss mask.

    PREFIX.bin, PREFIX.idx              token ids
    PREFIX_loss.bin, PREFIX_loss.idx    loss mask: uint8, 1 for tokens to train on
    PREFIX.json                         manifest with settings and counts, written last, after all other files

While they are written, the files are in a folder `.NAME.packing` next to PREFIX, locked by one process.
The input is sample files (`nemo_ext.data.packs.sample_files`). Packing reads the lengths of all samples, and then their
tokens in the order of the packs, one window of packs at a time. So memory depends on the number of samples and hardly
on their tokens.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.data.packs.packing import Fitted, Lengths, Longer, Packs, fit, pack
from nemo_ext.data.packs.sample_files import Mask, SampleFile
from nemo_ext.data.text.indexed_dataset import ids_type, write_index
from nemo_ext.data.text.manifest import stored
from nemo_ext.data.text.tokenizers import check_vocabulary, load_tokenizer, megatron_arguments
from nemo_ext.job.files import folder_for_one, publish
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.settings import STRICT, Count, check_keys

KIND = "packed sequences"
FORMAT_VERSION = 1
_WINDOW_TOKENS = 1 << 24


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class PackingSettings:
    """Packing settings.

    Attributes:
        capacity: capacity of a pack in tokens; `megatron.seq_length` in training.
        even: True for packs with the same mix of lengths, which take equal time, if this needs at most 1 % more packs.
        longer: what to do with samples longer than a pack: `drop`, `truncate` (keep the beginning), or `error`.
        max_samples: maximum number of samples in a pack; None for no limit.
        align: each sample is padded to a multiple of this: 2 x context_parallel_size, or 1 without context parallelism.
        seed: seed of the order of the packs.
    """

    capacity: Count
    even: bool = True
    longer: Longer = "drop"
    max_samples: Count | None = None
    align: PositiveInt = 1
    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class PackedManifest:
    """Manifest of a finished set of packs; `prefix` is the path from which it was read and is not stored.

    Attributes:
        config_hash: hash of the settings and the sample files.
        samples: number of packed samples.
        tokens: number of their tokens, without padding.
        trained_tokens: number of tokens that count in the loss: marked in the mask, and not the first token of a
            sample.
        without_loss: number of samples without a token that counts in the loss.
        dropped: number of samples dropped because of their length.
        fill: share of the packs' capacity that is filled with tokens.
    """

    prefix: str
    config_hash: str
    capacity: int
    even: bool
    longer: str
    max_samples: int | None
    align: int
    seed: int
    vocab_size: int
    tokenizer_identity: str
    packs: int
    samples: int
    tokens: int
    trained_tokens: int
    without_loss: int
    dropped: int
    truncated: int
    truncated_tokens: int
    most_samples: int
    fill: float

    def contents(self) -> str:
        """Return a one-line summary of the packs for the user."""
        text = (
            f"{self.samples:,} samples in {self.packs:,} packs of {self.capacity:,} (fill {self.fill:.2%}, up to "
            f"{self.most_samples:,} samples per pack), {self.tokens:,} tokens, {self.trained_tokens:,} of them trained"
        )
        if self.dropped:
            text += f"; {self.dropped:,} longer samples dropped"
        if self.truncated:
            text += f"; {self.truncated:,} samples truncated by {self.truncated_tokens:,} tokens"
        if self.without_loss:
            text += f"; {self.without_loss:,} samples without a token in the loss"
        return text


def write_packed(
    prefix: Path,
    files: Sequence[SampleFile],
    settings: PackingSettings,
    *,
    vocab_size: int,
    rows: Lengths | None = None,
    tokenizer_identity: str = "",
    progress: bool = True,
) -> PackedManifest:
    """Pack the samples of all files, or a selection of them, unless packs with the same settings and samples exist.

    Args:
        prefix: prefix of the files to write; its folder is created.
        files: sample files; their order matters only for the shuffled order of the packs.
        rows: numbers of the samples to pack, counted over all files, repeats allowed; None for all samples once.
        tokenizer_identity: identity of the tokenizer, so that training can reject a different one; "" if unknown.
        progress: True to show progress on stderr.

    Raises:
        ValueError: no samples are left, a sample is too long under `longer=error`, a setting is invalid, or another
            process is writing these packs. Earlier packs are then unchanged.
    """
    config_hash = _hash(files, settings, vocab_size, tokenizer_identity, rows)
    if Path(f"{prefix}.json").exists():
        existing = read_packed_manifest(prefix)
        if existing.config_hash == config_hash and _is_complete(existing):
            return existing
        notice(f"{prefix}: the existing packs are incomplete or have other samples or settings; starting over")
    lengths = np.concatenate([file.lengths for file in files]) if files else np.empty(0, dtype=np.int64)
    if rows is not None:
        lengths = lengths[rows]
    fitted = fit(lengths, settings.capacity, settings.longer)
    packs = pack(
        fitted.lengths,
        settings.capacity,
        even=settings.even,
        max_samples=settings.max_samples,
        align=settings.align,
        seed=settings.seed,
    )
    if not len(packs):
        raise ValueError(
            f"{prefix}: none of the {len(lengths):,} samples can be packed ({fitted.dropped:,} are longer than "
            f"{settings.capacity:,} tokens); add shorter samples, raise capacity or set longer=truncate"
        )
    numbers = fitted.samples if rows is None else rows[fitted.samples]
    with folder_for_one(prefix, "packing") as folder:
        trained, without_loss = _write_tokens(
            folder / prefix.name,
            files,
            replace(fitted, samples=numbers),
            packs,
            ids_type(vocab_size),
            progress=progress,
        )
        manifest = PackedManifest(
            prefix=str(prefix),
            config_hash=config_hash,
            **dataclasses.asdict(settings),
            vocab_size=vocab_size,
            tokenizer_identity=tokenizer_identity,
            packs=len(packs),
            samples=len(packs.samples),
            tokens=packs.tokens,
            trained_tokens=trained,
            without_loss=without_loss,
            dropped=fitted.dropped,
            truncated=fitted.truncated,
            truncated_tokens=fitted.truncated_tokens,
            most_samples=int(np.diff(packs.starts).max()),
            fill=packs.fill,
        )
        values = {"kind": KIND, "format_version": FORMAT_VERSION} | dataclasses.asdict(manifest)
        del values["prefix"]
        (folder / f"{prefix.name}.json").write_text(json.dumps(values, indent=2) + "\n")
        # Removed first, since the old manifest does not describe the new files.
        Path(f"{prefix}.json").unlink(missing_ok=True)
        for ending in (".bin", ".idx", "_loss.bin", "_loss.idx", ".json"):
            publish(folder / f"{prefix.name}{ending}", Path(f"{prefix}{ending}"))
    return manifest


def is_packed(prefix: str | Path) -> bool:
    """Return whether the manifest `<prefix>.json` exists and describes packs."""
    values = stored(Path(f"{prefix}.json"), ())
    return values is not None and values.get("kind") == KIND


def read_packed_manifest(prefix: str | Path) -> PackedManifest:
    """Read the manifest of a finished set of packs.

    Raises:
        ValueError: the manifest does not exist or does not describe packs.
    """
    values = stored(Path(f"{prefix}.json"), ())
    if values is None:
        raise ValueError(f"{prefix}.json does not exist: pack samples first (docs/data/packing.md)")
    if values.pop("kind", None) != KIND:
        raise ValueError(f"{prefix}.json is not a manifest of packs: choose another prefix")
    if values.pop("format_version", None) != FORMAT_VERSION:
        raise ValueError(f"{prefix}.json was written by another version: pack the samples again")
    try:
        return PackedManifest(prefix=str(prefix), **values)
    except TypeError as error:
        raise ValueError(f"{prefix}.json is damaged ({error}): remove it and pack the samples again") from error


def packed_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's data and tokenizer arguments for a config's `data.packed`, without those that the user has set.

    `data.packed` is `{train: PREFIX, valid: PREFIX}`; without `valid`, evaluation is disabled. `data.tokenizer` must be
    the packs' tokenizer; by default, the vocabulary size is read from the packs.

    Raises:
        ValueError: packs are missing, truncated, of a different length than `megatron.seq_length`, or made with a
            different tokenizer. See also `check_packed`.
    """
    check_packed(config)
    data, megatron = config["data"], ChainMap[str, Any]({}, config["megatron"])
    for split, prefix in data["packed"].items():
        if prefix is not None:
            megatron.setdefault(f"{split}_data_path", [str(prefix)])
    manifests = [
        (f"megatron.{split}_data_path", read_packed_manifest(prefix))
        for split in ("train", "valid")
        for prefix in _prefixes(megatron.get(f"{split}_data_path"))
    ]
    parts = 2 * int(megatron.get("context_parallel_size") or 1)
    for argument, manifest in manifests:
        where = f"{argument}={manifest.prefix}"
        if not _is_complete(manifest):
            raise ValueError(
                f"{where}: the .bin or .idx file is missing or truncated; copy it, or pack the samples again"
            )
        if manifest.capacity != int(megatron["seq_length"]):
            raise ValueError(
                f"{where}: the packs require megatron.seq_length={manifest.capacity}, not {megatron['seq_length']}"
            )
        if parts > 2 and manifest.align % parts:
            raise ValueError(
                f"{where}: context_parallel_size={parts // 2} requires packs with align={parts}, not {manifest.align}; "
                f"pack the samples again with align={parts}"
            )
    megatron.setdefault("calculate_per_token_loss", True)
    if not megatron.get("valid_data_path"):
        megatron["eval_iters"] = 0
    _use_tokenizer(config, megatron, [manifest for _, manifest in manifests])
    return dict(megatron.maps[0])


def check_packed(config: Mapping[str, Any]) -> None:
    """Reject settings that do not work with `data.packed`; the packs need not exist yet.

    Raises:
        ValueError: a setting is invalid; the message names the key.
    """
    data, megatron = config["data"], config["megatron"]
    packed = data["packed"]
    if not isinstance(packed, dict):
        raise ValueError(f"data.packed must be {{train: PREFIX, valid: PREFIX}}, not {packed!r}")
    check_keys(packed, ("train", "valid"), required=("train",), where="data.packed")
    for other in ("streams", "blend", "mixed_lengths"):
        if data.get(other):
            raise ValueError(f"data.packed and data.{other} are both set: remove one")
    if packed["train"] is None:
        raise ValueError("data.packed.train=null: set it to the prefix of the packs to train on")
    if int(megatron.get("micro_batch_size") or 1) != 1:
        raise ValueError(
            f"data.packed requires megatron.micro_batch_size=1, not {megatron['micro_batch_size']}; use longer packs "
            "instead of several per micro-batch"
        )
    # Packs differ in their number of tokens in the loss, and every token of a global batch should have the same weight.
    if megatron.get("calculate_per_token_loss", True) is not True:
        raise ValueError("data.packed requires megatron.calculate_per_token_loss=true, to weight all tokens equally")


def _prefixes(words: Sequence[object] | None) -> list[str]:
    """Return the prefixes in Megatron's list: weight, prefix, weight, prefix, ..., or a single prefix."""
    listed = [words] if isinstance(words, str) else [str(word) for word in words or ()]
    return listed if len(listed) == 1 else listed[1::2]


def one_tokenizer(manifests: Sequence[PackedManifest]) -> None:
    """Check that all packs of a run were made with the same tokenizer.

    Raises:
        ValueError: packs were made with different tokenizers.
    """
    known = {manifest.tokenizer_identity: manifest.prefix for manifest in manifests if manifest.tokenizer_identity}
    if len(known) > 1:
        raise ValueError(
            f"{' and '.join(known.values())} were packed with different tokenizers: use one tokenizer for all packs"
        )


def _use_tokenizer(config: Mapping[str, Any], megatron: ChainMap[str, Any], packs: Sequence[PackedManifest]) -> None:
    one_tokenizer(packs)
    data, vocab_size = config["data"], max(manifest.vocab_size for manifest in packs)
    check_vocabulary(vocab_size, config)
    if data.get("tokenizer") is not None:
        tokenizer = load_tokenizer(data["tokenizer"])
        for manifest in packs:
            if manifest.tokenizer_identity not in ("", tokenizer.identity):
                raise ValueError(
                    f"{manifest.prefix} was not packed with data.tokenizer: set data.tokenizer to its tokenizer, or "
                    "pack the samples again"
                )
        if megatron.get("tokenizer_type") is None:
            megatron.update(megatron_arguments(tokenizer, ids_only=True))
    elif megatron.get("tokenizer_type") is None:
        megatron.update({"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size})


def _write_tokens(
    prefix: Path,
    files: Sequence[SampleFile],
    fitted: Fitted,
    packs: Packs,
    dtype: type[np.uint16] | type[np.int32],
    *,
    progress: bool,
) -> tuple[int, int]:
    """Write the .bin and .idx of tokens and loss mask; return the manifest's `trained_tokens` and `without_loss`.

    Args:
        fitted: samples to pack, and their lengths.
        packs: assignment of these samples to packs.
        progress: True to show progress on stderr.
    """
    lengths = fitted.lengths[packs.samples]
    samples = fitted.samples[packs.samples]
    outputs = {"": dtype, "_loss": np.uint8}
    paths = {name: Path(f"{prefix}{name}.bin") for name in outputs}
    trained = without_loss = 0
    ends = np.cumsum(lengths)
    with contextlib.ExitStack() as stack:
        streams = {name: stack.enter_context(open(path, "wb")) for name, path in paths.items()}
        advance = stack.enter_context(progress_of("packing", packs.tokens, enabled=progress, unit="tokens"))
        for first, last in _windows(ends):
            tokens, mask = _gather(files, samples[first:last], lengths[first:last], dtype)
            starts = np.cumsum(lengths[first:last]) - lengths[first:last]
            marked = np.add.reduceat(mask, starts, dtype=np.int64) - mask[starts]
            trained += int(marked.sum())
            without_loss += int((marked == 0).sum())
            tokens.tofile(streams[""])
            mask.tofile(streams["_loss"])
            advance(len(tokens))
    for name, path in paths.items():
        write_index(path.with_suffix(".idx"), lengths, outputs[name], documents=packs.starts)
    return trained, without_loss


def _windows(ends: Lengths) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) of samples with about `_WINDOW_TOKENS` tokens each; `last` is exclusive.

    `ends` is the total number of tokens up to the end of each sample, [samples].
    """
    first, before = 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, before + _WINDOW_TOKENS, side="right")))
        yield first, last
        first, before = last, int(ends[last - 1])


def _gather(
    files: Sequence[SampleFile], samples: Lengths, lengths: Lengths, dtype: type[np.uint16] | type[np.int32]
) -> tuple[npt.NDArray[Any], Mask]:
    """Read samples, opening each file once and reading it forwards; return their tokens and loss mask, concatenated.

    Samples are numbered over all files; `lengths` is the number of tokens to read from the start of each.
    """
    targets = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    tokens, mask = np.empty(total, dtype=dtype), np.empty(total, dtype=np.uint8)
    before = 0
    for file in files:
        rows = np.flatnonzero((samples >= before) & (samples < before + len(file.lengths)))
        if len(rows):
            rows = rows[np.argsort(samples[rows])]
            offsets = (np.cumsum(file.lengths) - file.lengths)[samples[rows] - before]
            for path, out in ((file.tokens, tokens), (file.loss, mask)):
                _read_pieces(path, offsets, out, targets[rows], lengths[rows])
        before += len(file.lengths)
    return tokens, mask


def _read_pieces(path: Path, offsets: Lengths, out: npt.NDArray[Any], targets: Lengths, lengths: Lengths) -> None:
    """Copy pieces of a binary file into `out`.

    Args:
        path: file of items of the same type as `out`.
        offsets: start of each piece in the file, in items.
        out: array to write to.
        targets: start of each piece in `out`, in items.
        lengths: length of each piece, in items.
    """
    # One read per piece, directly into its place: a memory map reads whole pages, with 1.7 times the CPU time.
    width, into = out.itemsize, memoryview(out).cast("B")
    pieces = zip((offsets * width).tolist(), (targets * width).tolist(), (lengths * width).tolist(), strict=True)
    with open(path, "rb", buffering=0) as file:
        descriptor = file.fileno()
        for offset, target, size in pieces:
            if os.preadv(descriptor, (into[target : target + size],), offset) != size:
                raise ValueError(f"{path} is truncated: tokenise its samples again")


def _hash(
    files: Sequence[SampleFile],
    settings: PackingSettings,
    vocab_size: int,
    tokenizer_identity: str,
    rows: Lengths | None,
) -> str:
    digest = hashlib.sha256()
    values = [FORMAT_VERSION, dataclasses.asdict(settings), vocab_size, tokenizer_identity]
    digest.update(json.dumps(values, sort_keys=True).encode())
    if rows is not None:
        digest.update(rows.tobytes())
    for file in files:
        times = [path.stat().st_mtime_ns for path in (file.tokens, file.loss)]
        digest.update(json.dumps([len(file.lengths), times]).encode() + file.lengths.tobytes())
    return digest.hexdigest()[:16]


def _is_complete(manifest: PackedManifest) -> bool:
    """Return whether all files of the packs exist, with .bin files of the expected size."""
    width = np.dtype(ids_type(manifest.vocab_size)).itemsize
    sizes = {"": width, "_loss": 1}
    binaries = {Path(f"{manifest.prefix}{name}.bin"): manifest.tokens * size for name, size in sizes.items()}
    return all(path.exists() and path.stat().st_size == size for path, size in binaries.items()) and all(
        Path(f"{manifest.prefix}{name}.idx").exists() for name in sizes
    )
