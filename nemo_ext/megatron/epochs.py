"""Sequences of a stream epoch by epoch, in an order independent of how many of them a run reads.

Megatron's GPTDataset shuffles all epochs of a run together, so the order depends on the number of epochs. Here every
epoch has an order of its own; the first is Megatron's for a run of one epoch. So a phase can begin with any sequence of
a stream, and later phases may change without changing what earlier ones have read.
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
"""Least number of sequences in an order; its end, which fills no sequence, is lost: less than a hundredth."""


@dataclass
class StreamConfig(GPTDatasetConfig):
    """Megatron's config, and which part of each stream is read.

    Attributes:
        contents: digest of a stream's index file, in the config of that stream's dataset.
        drawn: number of sequences read before, by prefix; "" for synthetic data.
        documents: part of every stream's documents to read.
    """

    drawn: Mapping[str, int] = field(default_factory=dict)
    documents: Documents = ALL
    contents: str | None = None


class StreamDataset(GPTDataset):
    """Megatron's GPTDataset whose cached indices belong to the data as they are.

    Megatron names the cache by the path of the data and the settings, so data written again to the same path would be
    read by the indices of the old ones (gpt_dataset.py, `_build_document_sample_shuffle_indices`).
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
    """Sequences of one stream, starting after the `config.drawn` already read, in place of Megatron's GPTDataset.

    An order covers one epoch, or as many as give `ROUND` sequences.

    Args:
        dataset, dataset_path, indices, num_samples, index_split: see upstream; without `num_samples`, one order.
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
        """See upstream."""
        return cls.kind.numel_low_level_dataset(low_level_dataset)

    @classmethod
    def build_low_level_dataset(cls, dataset_path: str, config: GPTDatasetConfig) -> Any:
        """See upstream."""
        return cls.kind.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        number, place = divmod(self.first + int(idx), self.per_round)
        return self.rounds[number][place]


class MockEpochs(StreamEpochs):
    """`StreamEpochs` for Megatron's synthetic data."""

    kind = MockGPTDataset


def sequences_in_a_round(tokens: int, length: int) -> int:
    """Number of sequences in the fewest epochs that have `ROUND` of them; the last label needs one more token."""
    epochs = -(-(ROUND * length + 1) // tokens)
    return (epochs * tokens - 1) // length


def part_of(
    documents: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], part: Documents, *, seed: int
) -> npt.NDArray[np.int32]:
    """The documents in a part of a shuffled order, by tokens; all of them if that part is empty.

    `lengths` are those of all documents, in tokens; `part` is start and end, as shares of the tokens.
    """
    if part == ALL:
        return documents
    order = generator(seed, "parts of the documents").permutation(len(documents))
    sizes = lengths[documents[order]].astype(np.int64)
    middles = (np.cumsum(sizes) - sizes / 2) / max(1, int(sizes.sum()))
    chosen = order[(middles >= part[0]) & (middles < part[1])]
    return documents[np.sort(chosen)] if lengths[documents[chosen]].any() else documents
