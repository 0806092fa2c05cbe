"""Functions that Megatron's trainer expects from its caller: datasets, forward step and loss."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import StragglerDetector
from megatron.training import get_args
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from nemo_ext.data.packs.mixed_lengths import MixedLengths, Reading
from nemo_ext.megatron import transformer_engine, versions
from nemo_ext.megatron.distillation import KL, Distillation
from nemo_ext.megatron.epochs import MockEpochs, StreamConfig, StreamDataset, StreamEpochs
from nemo_ext.megatron.mixed_lengths import mixed_rows
from nemo_ext.megatron.packed import PackedDataset, all_packed, on_this_cp_rank, take_packing
from nemo_ext.megatron.stability import Z_LOSS, ZLoss

LOSS = "lm loss"
"""Megatron's name for the loss, in its log and in TensorBoard."""
_stragglers = StragglerDetector()
"""Megatron's singleton, which times batches and forward passes if `megatron.log_straggler` is set."""


def datasets(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, None]:
    """Build the training and validation datasets from Megatron's data arguments.

    There is no test set, because the trainer would evaluate it at the end under the validation set's name. Without
    evaluations there is no validation set, because the trainer rejects an empty blend.

    Args:
        samples: minimum numbers of training, validation and test sequences.
        vp_stage: not used.
    """
    arguments = get_args()
    train, valid, none = build_datasets(arguments, samples)
    return train, valid if arguments.eval_iters else None, none


def build_datasets(
    arguments: argparse.Namespace, samples: list[int], *, drawn: Mapping[Reading, Mapping[str, int]] | None = None
) -> tuple[Any, Any, None]:
    """Build datasets as `datasets` does, but from the given arguments and without Megatron's trainer.

    In a run with phases or mixed lengths, every epoch of a stream has its own order (`nemo_ext.megatron.epochs`). In a
    run with phases, `drawn` maps each way of reading (sequence length and part of the documents) to the number of
    sequences already read from each stream, keyed by path prefix.

    A blend of packs (`nemo_ext.data.packs.packed_files`) is recognised by its manifests, separately for each split, so
    that a phase of packs can be validated on the run's text. If the trainer has set `arguments.mixed_lengths` (the
    config's `data.mixed_lengths`), the blend's sequences have two lengths.
    """
    lengths = getattr(arguments, "mixed_lengths", None)
    mixed = None if lengths is None else MixedLengths(**lengths)
    blend, blend_per_split = get_blend_and_blend_per_split(arguments)
    kind: type = MockGPTDataset if arguments.mock_data else StreamDataset
    if drawn is not None or mixed is not None:
        kind = MockEpochs if arguments.mock_data else StreamEpochs
    splits = [blend] if blend_per_split is None else list(blend_per_split)
    kinds = [chosen and (PackedDataset if all_packed(chosen[0]) else kind) for chosen in splits]

    masked = getattr(arguments, "dataloader_inter_document_masking", False)  # not in every version, like the field
    masked = masked or (mixed is not None and mixed.document_boundaries)
    if masked and (why := versions.lack(["dataloader_inter_document_masking"])):
        raise versions.TooOld(f"data.mixed_lengths.document_boundaries is not supported: {why}; set it to false")
    boundaries: dict[str, Any] = {"inter_document_masking": True} if masked else {}

    def build(samples: Sequence[int], reading: Reading) -> Sequence[Any]:
        present = list(dict.fromkeys(filter(None, kinds))) or [kind]
        if len(present) == 1:
            return build_as(present[0], samples, reading, blend_per_split)
        pairs = list(zip(kinds, splits, strict=True))
        built = {
            kind: build_as(kind, samples, reading, [split if other is kind else None for other, split in pairs])
            for kind in present
        }
        return [kind and built[kind][number] for number, kind in enumerate(kinds)]

    def build_as(
        kind: type, samples: Sequence[int], reading: Reading, per_split: Sequence[Any] | None
    ) -> Sequence[Any]:
        config = StreamConfig(
            random_seed=arguments.seed,
            sequence_length=reading.length,
            documents=reading.documents,
            drawn=(drawn or {}).get(reading, {}),
            blend=blend,
            blend_per_split=per_split,
            split=arguments.split,
            path_to_cache=arguments.data_cache_path,
            num_dataset_builder_threads=arguments.num_dataset_builder_threads,
            mmap_bin_files=arguments.mmap_bin_files,
            tokenizer=build_tokenizer(arguments),
            reset_position_ids=arguments.reset_position_ids,
            reset_attention_mask=arguments.reset_attention_mask,
            eod_mask_loss=arguments.eod_mask_loss,
            create_attention_mask=False,
            **boundaries,
        )
        return BlendedMegatronDatasetBuilder(kind, list(samples), lambda: True, config).build()

    if mixed is None:
        train, valid, _ = build(samples, Reading(arguments.seq_length))
        return train, valid, None
    if kinds[0] is PackedDataset:
        raise ValueError("data.mixed_lengths has no effect on packs, whose samples have their own lengths; remove it")
    train, valid, _ = mixed_rows(mixed, samples, seq_length=arguments.seq_length, build=build)
    return train, valid, None


# Every rank reads its own batches: the ranks of a tensor- or pipeline-parallel group build equal samplers.
datasets.is_distributed = True  # type: ignore[attr-defined]


def loss_function(
    loss_mask: Tensor,
    output: Tensor,
    *,
    distillation: Distillation | None = None,
    divergence: Tensor | None = None,
    z_loss: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the token losses, and count the tokens by which Megatron divides the sum.

    With `megatron.calculate_per_token_loss`, Megatron first sums both over the batch. Otherwise each rank divides each
    micro-batch's loss by that micro-batch's tokens (core/pipeline_parallel/schedules.py).

    Args:
        loss_mask: `[batch, seq]`, 0 for masked tokens.
        output: per-token LM losses `[batch, seq]`.
        distillation: weights of LM loss and divergence; None without a teacher.
        divergence: per-token divergence from the teacher `[batch, seq]`, or None.
        z_loss: per-token z-loss `[batch, seq]`, already weighted, or None.

    Returns:
        Loss sum `[]`, number of tokens `[]`, and a mapping for the log from `LOSS`, `KL` and `Z_LOSS` to the sum of
        that loss and the number of tokens, `[2]`.
    """
    mask = loss_mask.reshape(-1).float()
    tokens = mask.sum().to(torch.int)

    def logged(total: Tensor) -> Tensor:
        return torch.stack([total.detach(), tokens.to(total.dtype)])

    loss = (output.reshape(-1).float() * mask).sum()
    report = {LOSS: logged(loss)}
    if distillation is not None and divergence is not None:
        kl = (divergence.reshape(-1) * mask).sum()
        report[KL] = logged(kl)
        loss = distillation.loss(loss, kl)
    if z_loss is not None:
        z = (z_loss.reshape(-1) * mask).sum()
        report[Z_LOSS] = logged(z)
        loss = loss + z
    return loss, tokens, report


def forward_step(
    iterator: Iterator[dict[str, Tensor]],
    model: torch.nn.Module,
    *,
    distillation: Distillation | None = None,
    z_loss: ZLoss | None = None,
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """Run one micro-batch from Megatron's datasets through one pipeline stage.

    Args:
        iterator: source of the micro-batches.
        model: the stage.
        distillation: the run's distillation; None without a teacher.
        z_loss: the run's z-loss, or None.

    Returns:
        The stage's output (per-token losses `[batch, seq]` on the last stage), and the loss function to apply to it.
    """
    with _stragglers(bdata=True):
        batch = dict(next(iterator))
        packing = take_packing(batch)
        batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}
    if parallel_state.get_context_parallel_world_size() > 1:
        batch = on_this_cp_rank(batch, packing)
    bounds = {} if packing is None else {"packed_seq_params": packing}
    if distillation is not None:
        distillation.before_student(batch, bounds)
    with _stragglers, transformer_engine.explained():
        # The mask is for multi-token prediction; without it, every token would count in its losses.
        targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
        output = model(batch["tokens"], batch["position_ids"], None, **targets, **bounds)
    divergence = None
    if distillation is not None:
        divergence, output = distillation.take(), distillation.after_student(output)
    z = None if z_loss is None else z_loss.take()
    return output, partial(
        loss_function, batch["loss_mask"], distillation=distillation, divergence=divergence, z_loss=z
    )
