"""Shards: parts of sources after a worker has filtered them, applied reasoning control, and encoded them.

FOLDER/NNNNNN.tokens, .loss, .lengths.npy   the texts (`nemo_ext.data.packs.sample_files`)
FOLDER/NNNNNN.npz                           arrays for the selection over all samples
FOLDER/NNNNNN.json                          counts of records read, skipped and changed; written last
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.chat.reasoning import Control, ReasoningReport, mode_of, stripped
from nemo_ext.chat.sample import Sample
from nemo_ext.chat.template import Template
from nemo_ext.data.packs.sample_files import SampleFile, open_samples, write_samples
from nemo_ext.data.sft.filters.base import Texts
from nemo_ext.data.sft.filters.near_duplicates import Sketches
from nemo_ext.data.sft.masks import ChatEncoder, Encoded
from nemo_ext.data.sft.settings import SftSettings
from nemo_ext.data.sft.sources import ConversationReport
from nemo_ext.data.text.documents import Part
from nemo_ext.data.text.tokenizers import load_tokenizer
from nemo_ext.job.files import complete_file, write_text
from nemo_ext.job.seeds import digest
from nemo_ext.job.units import Units

FORMAT = 4
"""Version of these files; shards of other versions are regenerated."""
MODES = ("off", "on")
KINDS = ("off", "fixed", "on", "stripped")
"""The `Mode` of a row's sample; a `stripped` row is an alternative text for an `on` sample, without its reasoning."""
_SKETCHED_TOGETHER = 256


@dataclass(frozen=True)
class Work:
    """The job's settings and shard folder, as sent to workers."""

    settings: SftSettings
    units: Units

    @property
    def encoder(self) -> ChatEncoder:
        """Encoder for the job's template and tokenizer."""
        return encoder_of(self.settings.template, json.dumps(self.settings.tokenizer))


@dataclass(frozen=True)
class Piece:
    """Part of a source that becomes one shard: the shard's number, the source's number, and the part."""

    number: int
    source: int
    part: Part

    @property
    def size(self) -> int:
        """Number of input bytes."""
        return self.part.size


@dataclass(frozen=True)
class Shard:
    """A finished shard. A sample is one conversation of the input; a row is one of its texts.

    Attributes:
        piece: part of the input.
        file: tokens and masks of the rows.
        ids: [samples] uint64 digest of source and id.
        contents: [samples] uint64 digest of the messages.
        numbers: [samples] number of the sample's record in the input file.
        sketches: MinHash sketches of the samples; None if near duplicates are kept.
        samples: [rows] index of the row's sample.
        modes: [rows] index into `MODES`.
        kinds: [rows] index into `KINDS`.
        tasks: [rows] index into `task_names`.
        languages: [rows] index into `language_names`.
        trained: [rows] number of tokens that count in the loss.
        task_names: names of the shard's tasks.
        language_names: names of the shard's languages.
        report: counts of the records read and skipped.
        reasoning: counts of the changes made by reasoning control.
    """

    piece: Piece
    file: SampleFile
    ids: npt.NDArray[np.uint64]
    contents: npt.NDArray[np.uint64]
    numbers: npt.NDArray[np.int64]
    sketches: Sketches | None
    samples: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int64]
    tasks: npt.NDArray[np.int64]
    languages: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int64]
    task_names: list[str]
    language_names: list[str]
    report: ConversationReport
    reasoning: ReasoningReport


@lru_cache(maxsize=4)
def encoder_of(template: str, tokenizer: str) -> ChatEncoder:
    """Return the encoder for a template and a tokenizer (its config as JSON), cached per process."""
    return ChatEncoder(Template.load(template), load_tokenizer(json.loads(tokenizer), "tokenizer"))


def make_shard(work: Work, piece: Piece) -> None:
    """Write the files of one shard."""
    _Writer(work, piece).write()


def open_shard(work: Work, piece: Piece) -> Shard:
    """Open a finished shard and read its arrays and counts."""
    base = work.units.file(piece.number, "")
    vocab_size = work.encoder.tokenizer.vocab_size
    with np.load(base.with_suffix(".npz")) as arrays:
        loaded = {name: arrays[name] for name in arrays.files}
    sketches = Sketches(loaded.pop("bands"), loaded.pop("slots")) if "bands" in loaded else None
    facts = json.loads(work.units.file(piece.number).read_text())
    facts |= {"report": ConversationReport(**facts["report"]), "reasoning": ReasoningReport(**facts["reasoning"])}
    return Shard(piece=piece, file=open_samples(base, vocab_size=vocab_size), sketches=sketches, **facts, **loaded)


def _controlled(
    work: Work, piece: Piece, report: ConversationReport, reasoning: ReasoningReport
) -> Iterator[tuple[int, Texts, list[Sample]]]:
    """Yield each sample that passes the filters: record number, texts, and the samples that `Control` makes of it."""
    settings, encoder = work.settings, work.encoder
    control = None
    if settings.reasoning is not None:
        control = Control(settings.reasoning, truncate=encoder.truncated)
        control.report = reasoning
    screened = ConversationReport()
    mode_lines = not encoder.template.has_modes
    for located in settings.sources[piece.source].read(piece.part, report, mode_lines=mode_lines):
        texts = settings.screen.kept(located, screened)
        if texts is not None:
            yield located.number, texts, [located.sample] if control is None else control.apply(located.sample)
    screened.records = 0  # already counted when they were read
    report.add(screened)


@dataclass
class _Writer:
    """Writer of a shard's files, which collects the arrays and counts while it writes the texts."""

    work: Work
    piece: Piece
    report: ConversationReport = field(default_factory=ConversationReport)
    reasoning: ReasoningReport = field(default_factory=ReasoningReport)
    ids: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    waiting: list[Texts] = field(default_factory=list)
    sketches: list[Sketches] = field(default_factory=list)
    rows: dict[str, list[int]] = field(
        default_factory=lambda: {name: [] for name in ("samples", "modes", "kinds", "tasks", "languages", "trained")}
    )
    names: dict[str, dict[str, int]] = field(default_factory=lambda: {"tasks": {}, "languages": {}})

    def write(self) -> None:
        base = self.work.units.file(self.piece.number, "")
        write_samples(base, self._texts(), vocab_size=self.work.encoder.tokenizer.vocab_size)
        self._sketch()
        arrays: dict[str, Any] = {name: np.array(values, dtype=np.int64) for name, values in self.rows.items()}
        arrays |= {name: np.array(getattr(self, name), dtype=np.uint64) for name in ("ids", "contents")}
        arrays["numbers"] = np.array(self.numbers, dtype=np.int64)
        if self.work.settings.near_duplicates is not None:
            joined = Sketches.joined(self.sketches)
            arrays |= {"bands": joined.bands, "slots": joined.slots}
        with complete_file(base.with_suffix(".npz")) as file:
            np.savez(file, **arrays)
        facts = {"report": self.report, "reasoning": self.reasoning}
        facts |= {f"{name}_names": list(self.names[f"{name}s"]) for name in ("task", "language")}
        write_text(self.work.units.file(self.piece.number), json.dumps(facts, default=vars))

    def _texts(self) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        for number, texts, samples in _controlled(self.work, self.piece, self.report, self.reasoning):
            encoded = []
            for sample in samples:
                try:
                    encoded += self._encoded(sample)
                except ValueError as error:
                    self.report.skip("template", str(error))
            if not encoded:
                continue
            self._note(number, texts)
            for sample, kind, text in encoded:
                self._note_row(sample, kind, text)
                yield text.ids, text.mask

    def _encoded(self, sample: Sample) -> list[tuple[Sample, str, Encoded]]:
        """Encode a sample's texts and, with `thinking_shares`, those without reasoning that may replace them.

        Returns:
            (sample or its stripped version, kind of row, encoded text) for each text.
        """
        settings, encoder = self.work.settings, self.work.encoder
        versions: dict[str, Sample] = {mode_of(sample): sample}
        if settings.thinking_shares and "on" in versions:
            versions["stripped"] = stripped(sample)
        return [
            (version, kind, text)
            for kind, version in versions.items()
            for text in encoder.encode(version, turns=settings.turns)
        ]

    def _note(self, number: int, texts: Texts) -> None:
        sample = texts.sample
        self.numbers.append(number)
        self.ids.append(digest(0, sample.source, sample.id))
        contents = [(turn.role, turn.reasoning or "", turn.content, repr(turn.tool_calls)) for turn in sample.messages]
        self.contents.append(digest(0, *(text for content in contents for text in content)))
        self.waiting.append(texts)
        if len(self.waiting) == _SKETCHED_TOGETHER:
            self._sketch()

    def _note_row(self, sample: Sample, kind: str, text: Encoded) -> None:
        numbers = {"samples": len(self.ids) - 1, "modes": int(text.thinking), "kinds": KINDS.index(kind)}
        for name, value in (numbers | {"trained": int(np.count_nonzero(text.mask[1:]))}).items():
            self.rows[name].append(value)
        for name, word in (("tasks", sample.task), ("languages", sample.language)):
            self.rows[name].append(self.names[name].setdefault(word, len(self.names[name])))

    def _sketch(self) -> None:
        near = self.work.settings.near_duplicates
        if near is not None:
            self.sketches.append(near.sketch(self.waiting))
        self.waiting = []
