"""Sequences of a stream, epoch by epoch, in an order that does not depend on how many of them a run reads.

Megatron's GPTDataset shuffles all epochs of a run together, so its order depends on the number of epochs. Here every
epoch has its own order, and the first equals Megatron's for a run of one epoch. A phase can therefore begin at any
sequence of a stream, and changes to later phases do not affect the sequences of earlier ones.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from torch import Tensor

from nemo_ext.data.packs.mixed_lengths import ALL, Documents
from nemo_ext.data.text.indexed_dataset import index_digest
from nemo_ext.job.seeds import digest, generator

ROUND = 100
"""Minimum number of sequences per round (the epochs that are shuffled together).

Tokens after a round's last full sequence (less than one per cent) are dropped.
"""


@dataclass
class StreamConfig(GPTDatasetConfig):
    """Megatron's dataset config, extended by the part of each stream to read.

    Attributes:
        drawn: mapping from a stream's prefix ("" for synthetic data) to the number of sequences already read.
        documents: part of every stream's documents to read.
        contents: digest of the index file, set only in the config of a single stream's dataset.
    """

    drawn: Mapping[str, int] = field(default_factory=dict)
    documents: Documents = ALL
    contents: str | None = None


class StreamDataset(GPTDataset):
    """Megatron's GPTDataset, with the data's contents as part of the names of its cached indices.

    Megatron names them only by the data's path and the settings, so new data at the same path would be read with the
    old data's indices (gpt_dataset.py, `_build_document_sample_shuffle_indices`).
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: npt.NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: StreamConfig,
    ) -> None:
        index = Path(f"{dataset_path}.idx")
        if index.is_file():  # else in object storage
            config = copy(config)
            config.contents = index_digest(index)
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "contents"]


class StreamEpochs(MegatronDataset):
    """Sequences of one stream, without those already read (`config.drawn`); replaces Megatron's GPTDataset.

    Sequences are shuffled in rounds of one epoch, or of as many epochs as are needed for `ROUND` sequences.

    Args:
        dataset, dataset_path, indices, num_samples, index_split: see GPTDataset; if `num_samples` is None, one round.
        config: config with `drawn` and `documents`.
    """

    kind: type[GPTDataset] = StreamDataset

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: npt.NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: StreamConfig,
    ) -> None:
        lengths = np.asarray(dataset.sequence_lengths)
        indices = part_of(indices, lengths, config.documents, seed=config.random_seed)
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.per_round = sequences_in_a_round(int(lengths[indices].sum(dtype=np.int64)), config.sequence_length)
        self.first = config.drawn.get(dataset_path or "", 0)
        self.count = self.per_round if num_samples is None else num_samples
        rounds = range(self.first // self.per_round, -(-(self.first + self.count) // self.per_round))
        self.rounds = {number: self._round(number) for number in (rounds if self.count else ())}

    def _round(self, number: int) -> GPTDataset:
        config = copy(self.config)
        if number or self.config.documents != ALL:
            # The seed is also part of the name of Megatron's index files, which does not include the documents.
            documents = repr(self.config.documents)
            config.random_seed = digest(config.random_seed, "order of a stream", number, documents) % 2**32
        return self.kind(self.dataset, self.dataset_path, self.indices, self.per_round, self.index_split, config)

    @classmethod
    def numel_low_level_dataset(cls, low_level_dataset: Any) -> int:
        """Return the number of elements in a low-level dataset (see `GPTDataset.numel_low_level_dataset`)."""
        return cls.kind.numel_low_level_dataset(low_level_dataset)

    @classmethod
    def build_low_level_dataset(cls, dataset_path: str, config: GPTDatasetConfig) -> Any:
        """Open the stream with the path prefix `dataset_path` (see `GPTDataset.build_low_level_dataset`)."""
        return cls.kind.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        number, place = divmod(self.first + int(idx), self.per_round)
        return self.rounds[number][place]


class MockEpochs(StreamEpochs):
    """Variant of `StreamEpochs` for Megatron's synthetic data."""

    kind = MockGPTDataset


def sequences_in_a_round(tokens: int, length: int) -> int:
    """Return the number of sequences in the smallest number of epochs that yields at least `ROUND` sequences.

    One token is reserved for the label at the last position.

    Args:
        tokens: number of tokens in one epoch.
        length: sequence length.
    """
    epochs = -(-(ROUND * length + 1) // tokens)
    return (epochs * tokens - 1) // length


def part_of(
    documents: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], part: Documents, *, seed: int
) -> npt.NDArray[np.int32]:
    """Return the documents in a part of their shuffled order; all of them if that part has no tokens.

    Args:
        documents: numbers of the documents.
        lengths: number of tokens of each document, indexed by document number.
        part: start and end of the part, as shares of all tokens.
        seed: random seed of the order.
    """
    if part == ALL:
        return documents
    order = generator(seed, "parts of the documents").permutation(len(documents))
    sizes = lengths[documents[order]].astype(np.int64)
    middles = (np.cumsum(sizes) - sizes / 2) / max(1, int(sizes.sum()))
    chosen = order[(middles >= part[0]) & (middles < part[1])]
    return documents[np.sort(chosen)] if lengths[documents[chosen]].any() else documents
