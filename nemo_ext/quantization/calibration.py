"""Calibration data: random samples from an SFT set, as batches of token ids without padding.

The data are packs from `nemo-ext sft_data` (a prefix, or the directory that contains `train`), or conversations in
JSONL or Parquet, rendered with the model's chat template. Padding would affect the scales of inputs, so all samples in
a batch have the same length.
"""

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.chat.sample import Sample, has_reasoning
from nemo_ext.chat.template import Template
from nemo_ext.data.packs.packed_files import is_packed, read_packed_manifest
from nemo_ext.data.sft.masks import ChatEncoder
from nemo_ext.data.sft.sources import ConversationReport, ConversationSource, load_conversations
from nemo_ext.data.text.indexed_dataset import read_index
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.seeds import digest, generator
from nemo_ext.job.settings import STRICT

Ids = npt.NDArray[np.int64]
_PART_RECORDS = 5000
_PART_BYTES = 32_000_000
_SHORTEST = 2
_TRACE = re.compile(r"<think>\s*(?!</think>)\S")
"""Start of a reasoning trace that is not empty, in the text of a sample."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class CalibrationSettings:
    """Source and amount of calibration data.

    Attributes:
        data: prefix of packs, output directory of `nemo-ext sft_data`, or files of conversations.
        samples: number of calibration samples; 1024 as for Nemotron 3 Nano (paper section 4).
        held_out: number of additional samples, on which the model is compared before and after quantisation.
        max_length: maximum tokens per sample; longer samples are truncated.
        batch_tokens: maximum tokens per batch.
        template: chat template for conversations; null to use the one in the model's directory.
        thinking: True to use only samples with a reasoning trace, as for Nemotron 3 Nano (section 4.1); None for all.
        seed: seed of the selection.
    """

    data: str
    samples: PositiveInt = 1024
    held_out: NonNegativeInt = 64
    max_length: Annotated[int, Field(ge=_SHORTEST)] = 4096
    batch_tokens: PositiveInt = 16384
    template: str | None = None
    thinking: Literal[True] | None = None
    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """Selected and truncated samples.

    Attributes:
        samples: token ids of the calibration samples.
        held_out: token ids of the held-out samples.
        available: number of samples in the data.
    """

    samples: Sequence[Ids]
    held_out: Sequence[Ids]
    available: int

    @property
    def tokens(self) -> int:
        """Number of tokens in the calibration samples."""
        return sum(map(len, self.samples))


def load(settings: CalibrationSettings, *, model: Path, vocab_size: int) -> CalibrationData:
    """Select the calibration and held-out samples.

    Args:
        settings: source and amount of the data.
        model: Hugging Face directory with the tokenizer, and the chat template for conversations.
        vocab_size: vocabulary size of the model.

    Raises:
        ValueError: the data are missing, too few, or made with a tokenizer other than the model's.
    """
    prefix = _packed(settings.data)
    drawn = _of_packs(settings, prefix, model) if prefix else _of_conversations(settings, model)
    selected, available = drawn
    required = settings.samples + settings.held_out
    if len(selected) < required:
        raise ValueError(
            f"calibration.data={settings.data} has {len(selected):,} distinct samples of {_SHORTEST} tokens or more"
            f"{' with a reasoning trace' if settings.thinking else ''}, but calibration.samples + "
            f"calibration.held_out is {required:,}: lower them, or provide more data"
        )
    if (highest := max(int(ids.max()) for ids in selected)) >= vocab_size:
        raise ValueError(
            f"calibration.data={settings.data} has the token id {highest}, but the model has {vocab_size:,} tokens: "
            "make the data with the model's tokenizer"
        )
    return CalibrationData(
        samples=selected[: settings.samples], held_out=selected[settings.samples :], available=available
    )


def batches(samples: Sequence[Ids], *, batch_tokens: int) -> Iterator[Ids]:
    """Yield batches `[batch, seq]` of samples of equal length, the longest first.

    Args:
        samples: token ids of each sample.
        batch_tokens: maximum tokens per batch; a longer sample forms its own batch.
    """
    for length, group in groupby(sorted(samples, key=len, reverse=True), key=len):
        rows = list(group)
        size = max(1, batch_tokens // length)
        for start in range(0, len(rows), size):
            yield np.stack(rows[start : start + size])


def data_files(settings: CalibrationSettings) -> list[Path]:
    """List the files of the calibration data.

    Raises:
        ValueError: the files do not exist.
    """
    if prefix := _packed(settings.data):
        return [prefix.with_name(f"{prefix.name}{ending}") for ending in (".bin", ".idx", ".json")]
    try:
        return [path for _, path in _conversations(settings).check()]
    except ValueError as error:
        raise ValueError(
            f"calibration.data={settings.data} contains neither packs of `nemo-ext sft_data` nor conversations: {error}"
        ) from None


def _conversations(settings: CalibrationSettings) -> ConversationSource:
    return load_conversations({"name": "calibration", "path": settings.data})


def _packed(data: str) -> Path | None:
    """Return the prefix of the packs at a path; None if there are none, as for conversations."""
    path = Path(data).expanduser()
    prefix = path / "train" if path.is_dir() else path
    return prefix if is_packed(prefix) else None


def _of_packs(settings: CalibrationSettings, prefix: Path, model: Path) -> tuple[list[Ids], int]:
    """Read distinct samples from packs in random order, as many as the settings require.

    Prints a note if the packs were made with another tokenizer than the one in the directory `model`.

    Returns:
        Token ids of the samples, each truncated to the maximum length, and the number of samples in the packs.
    """
    manifest = read_packed_manifest(prefix)
    identity = manifest.tokenizer_identity
    if identity.startswith("huggingface-") and (model / "tokenizer.json").is_file():
        # The identity includes the name of the end-of-document token and how special tokens are parsed.
        expected = {HuggingFaceTokenizer(model, parse_special_tokens=parse).identity for parse in (False, True)}
        if identity not in expected:
            notice(f"note: {prefix} was made with a tokenizer.json that differs from {model / 'tokenizer.json'}")
    lengths, starts, dtype = read_index(prefix.with_name(f"{prefix.name}.idx"))
    ids = np.memmap(prefix.with_name(f"{prefix.name}.bin"), dtype=dtype, mode="r")
    width = np.dtype(dtype).itemsize
    tokenizer = HuggingFaceTokenizer(model) if settings.thinking else None
    samples: list[Ids] = []
    seen = set[bytes]()
    for number in generator(settings.seed, "calibration").permutation(len(lengths)):
        if len(samples) == settings.samples + settings.held_out:
            break
        begin, length = int(starts[number]) // width, int(lengths[number])
        content = blake2b(ids[begin : begin + length].tobytes(), digest_size=16).digest()
        if tokenizer is not None and not _TRACE.search(tokenizer.decode(ids[begin : begin + length])):
            continue
        if length >= _SHORTEST and content not in seen:
            seen.add(content)
            samples.append(ids[begin : begin + min(length, settings.max_length)].astype(np.int64))
    return samples, len(lengths)


def _of_conversations(settings: CalibrationSettings, model: Path) -> tuple[list[Ids], int]:
    """Tokenise conversations in random order, as many as the settings require; repeated conversation ids are skipped.

    Args:
        settings: source and amount of the data.
        model: directory with the tokenizer and, unless the settings name one, the chat template.

    Returns:
        Token ids of the samples, each truncated to the maximum length, and the number of distinct conversations.
    """
    source, size = _conversations(settings), sum(path.stat().st_size for path in data_files(settings))
    template = Template.load(settings.template if settings.template is not None else model)
    encoder = ChatEncoder(template, HuggingFaceTokenizer(model), allow_missing=True)
    report, required = ConversationReport(), settings.samples + settings.held_out
    # More samples than required, since some texts may be refused or too short.
    spare = required + max(16, required // 4)
    candidates: list[tuple[int, Sample]] = []
    seen = set[int]()
    with progress_of("conversations", size) as advance:
        for part in source.parts(max_documents=_PART_RECORDS, max_size=_PART_BYTES):
            for sample, *_ in source.read(part, report):
                rank = digest(settings.seed, "calibration", sample.id)
                if rank in seen or (settings.thinking and not has_reasoning(sample.messages)):
                    continue
                seen.add(rank)
                heapq.heappush(candidates, (-rank, sample))
                if len(candidates) > spare:
                    heapq.heappop(candidates)
            advance(part.size)
    samples: list[Ids] = []
    refused: list[str] = []
    for _, sample in sorted(candidates, key=lambda pair: -pair[0]):
        if len(samples) == required:
            break
        try:
            ids = encoder.tokens(template.render(sample, control=encoder.control)).ids
        except ValueError as error:
            refused.append(str(error))
            continue
        if len(ids) >= _SHORTEST:
            samples.append(ids[: settings.max_length].astype(np.int64))
    if refused:
        notice(
            f"note: {len(refused):,} conversations are skipped, as the chat template rejects them; the first error: "
            f"{refused[0]}"
        )
    return samples, len(seen)
