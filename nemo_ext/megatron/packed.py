"""Packs (several samples in one row) in Megatron's trainer: their dataset, and sequence bounds for the layers.

A micro-batch is one pack: `[1, seq]` tokens, and `cu_seqlens`, the bounds of its sequences. Attention and RoPE use the
bounds (Megatron's `thd` format); Mamba's convolution and scan use each token's sequence number (`seq_idx`).
"""

from collections.abc import MutableMapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from nemo_ext.data.packs.packed_files import is_packed, one_tokenizer, read_packed_manifest
from nemo_ext.job.seeds import generator
from nemo_ext.megatron.epochs import StreamConfig

BOUNDS = "cu_seqlens"
"""Key of the sequence bounds in a batch: all starts and the last end, `[1, sequences + 1]` int32."""


class PackedSamples:
    """Samples of a set of packs, read from the files with a path prefix (`nemo_ext.data.packs.packed_files`).

    Raises:
        ValueError: the files are not packs, or tokens and mask do not match.
    """

    def __init__(self, prefix: str) -> None:
        self.manifest = read_packed_manifest(prefix)
        self.tokens, self.loss = (IndexedDataset(f"{prefix}{name}") for name in ("", "_loss"))
        self.bounds = self.tokens.document_indices
        if len(self) != self.manifest.packs or not np.array_equal(
            self.tokens.sequence_lengths, self.loss.sequence_lengths
        ):
            raise ValueError(f"{prefix}.idx, _loss.idx and .json are from different packs: pack the samples again")

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, pack: int) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[np.uint8]]]:
        """Return the tokens and the loss mask of each sample in a pack, as two lists of arrays."""
        rows = slice(int(self.bounds[pack]), int(self.bounds[pack + 1]))
        return self.tokens[rows], self.loss[rows]


class PackedDataset(MegatronDataset):
    """Dataset of packs as rows of one length, reshuffled every epoch.

    A token's label is the next token of its sample; it counts towards the loss if the mask marks that next token. A
    pack's free space is filled by repeating its first samples, masked in the loss. Thousands of identical padding
    tokens would instead all go to the same experts and distort their balance, and Megatron-Core 0.19's `padding_mask`
    fails with an expert bias.

    Each row has `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), all `[seq]`, and `cu_seqlens`
    `[sequences + 1]` int32. Megatron's blended dataset builder builds the dataset, so packs can be blended by weight.
    """

    def __init__(
        self,
        dataset: PackedSamples,
        dataset_path: str | None,
        indices: npt.NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: StreamConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.first = config.drawn.get(dataset_path or "", 0)
        if dataset.manifest.capacity != config.sequence_length:
            raise ValueError(
                f"{dataset_path} has packs of {dataset.manifest.capacity} tokens, but seq_length="
                f"{config.sequence_length}: set megatron.seq_length={dataset.manifest.capacity}, or pack them again"
            )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: PackedSamples) -> int:
        """Return the number of packs."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: StreamConfig) -> PackedSamples:
        """Open the packs whose files have the path prefix `dataset_path`."""
        return PackedSamples(dataset_path)

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else max(self.num_samples, len(self.indices))

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        epoch, position = divmod(self.first + int(idx), len(self.indices))
        order = _order(self.config.random_seed, epoch, len(self.indices))
        return packed_row(
            *self.dataset[int(self.indices[order[position]])],
            seq_length=self.config.sequence_length,
            align=self.dataset.manifest.align,
        )


@lru_cache(maxsize=64)  # a blend has a dataset for each of its streams
def _order(seed: int, epoch: int, packs: int) -> npt.NDArray[np.int64]:
    return generator(seed, "order of packs", epoch).permutation(packs)


def packed_row(
    samples: Sequence[npt.ArrayLike], marks: Sequence[npt.ArrayLike], *, seq_length: int, align: int = 1
) -> dict[str, Tensor]:
    """Build a row of `seq_length` tokens from samples (see `PackedDataset`).

    Args:
        samples: token ids of each sample.
        marks: loss mask of each sample, 1 for tokens to learn.
        seq_length: length of the row, into which the samples must fit.
        align: every sample is padded to a multiple of this length by repeating its last token.
    """
    tokens = np.empty(seq_length, dtype=np.int64)
    labels = np.empty(seq_length, dtype=np.int64)
    loss = np.zeros(seq_length, dtype=np.float32)
    positions = np.empty(seq_length, dtype=np.int64)
    bounds = [0]
    while bounds[-1] < seq_length:
        padding = len(bounds) > len(samples)
        number = (len(bounds) - 1) % len(samples)
        ids, start = np.asarray(samples[number]), bounds[-1]
        places = min(-(-len(ids) // align) * align, seq_length - start)
        assert padding or places >= len(ids), "samples do not fit into the row"
        count, end = min(len(ids), places), start + places
        tokens[start : start + count], tokens[start + count : end] = ids[:count], ids[count - 1]
        labels[start : end - 1], labels[end - 1] = tokens[start + 1 : end], tokens[end - 1]
        if not padding:
            loss[start : start + count - 1] = np.asarray(marks[number])[1:]
        positions[start:end] = np.arange(places)
        bounds.append(end)
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(loss),
        "position_ids": torch.from_numpy(positions),
        BOUNDS: torch.tensor(bounds, dtype=torch.int32),
    }


def all_packed(prefixes: Sequence[str]) -> bool:
    """Return whether the files with these path prefixes are packs.

    Raises:
        ValueError: only some of them are packs, or they have different tokenizers.
    """
    packed = [is_packed(prefix) for prefix in prefixes]
    if any(packed) and not all(packed):
        both = prefixes[packed.index(True)], prefixes[packed.index(False)]
        raise ValueError(f"{both[0]} holds packs, but {both[1]} does not: a blend must hold only packs, or none")
    if any(packed):
        one_tokenizer([read_packed_manifest(prefix) for prefix in prefixes])
    return any(packed)


def take_packing(batch: MutableMapping[str, Tensor]) -> PackedSeqParams | None:
    """Remove the sequence bounds from a batch, and return them in Megatron's form; None if there are none.

    Raises:
        ValueError: there are several rows. A micro-batch must be one pack, because Megatron's pipeline does not support
            flattened rows; a longer pack is equivalent to several.
    """
    padded = batch.pop(BOUNDS, None)
    batch.pop("max_seqlen", None)
    if padded is None:
        return None
    if padded.shape[0] != 1:
        raise ValueError(
            f"megatron.micro_batch_size={padded.shape[0]} must be 1 for packed sequences; pack them into longer packs "
            "instead (megatron.seq_length)"
        )
    bounds = torch.unique_consecutive(padded[0])  # Megatron's own datasets repeat the last bound
    return packing_of(bounds)


def packing_of(bounds: Tensor) -> PackedSeqParams:
    """Return Megatron's parameters for packed sequences with these bounds `[sequences + 1]`; the last is the row's end.

    `max_seqlen` is exactly the longest sequence's length. With the row's length, Megatron's rotary embedding would
    continue counting positions across bounds.
    """
    longest = int(bounds.diff().max())
    on_device = bounds.to(torch.int32).cuda(non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=int(bounds[-1]),  # PackedSeqParams computes seq_idx from it
    )


def on_this_cp_rank(batch: dict[str, Tensor], packing: PackedSeqParams | None) -> dict[str, Tensor]:
    """Return this context-parallel rank's part of a batch: two chunks of each row, or of each packed sequence.

    Entries of the batch other than `[batch, seq]` tensors are dropped. `packing` is None for data without packs.

    Raises:
        ValueError: a packed sequence cannot be split into 2 x context_parallel_size equal parts.
    """
    group = parallel_state.get_context_parallel_group()
    batch = {name: tensor for name, tensor in batch.items() if tensor.dim() == 2}  # without a blend's dataset_id
    if packing is None:
        return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    parts = 2 * group.size()
    lengths = packing.cu_seqlens_q[1:] - packing.cu_seqlens_q[:-1]
    if bool((lengths % parts).any()):
        raise ValueError(
            f"megatron.context_parallel_size={group.size()} needs packs with sequence lengths that are multiples of "
            f"{parts}: pack with align={parts}, or set this size to 1"
        )
    whole = {**batch, BOUNDS: packing.cu_seqlens_q[None], "cu_seqlens_padded": None}
    cut = get_batch_on_this_cp_rank(whole, is_hybrid_cp=False, cp_group=group)
    return {name: cut[name] for name in batch}
