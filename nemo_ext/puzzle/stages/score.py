"""Replace-one-block scores: the parent's loss when one block is replaced by one of its variants.

For every variant: KL(parent || changed model) of the next token, the language model loss, and the cosine distance of
the last hidden states, as means over the tokens of the calibration set. Blocks before the replaced one are not run
again, as their outputs are cached, and sharded blocks after it are gathered once for all variants. Results are lines of
JSON; variants with a line are not scored again.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, einsum
from torch.nn.functional import cosine_similarity, log_softmax

from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.cached_inputs import CachedInputs
from nemo_ext.blockwise.parent import Parent
from nemo_ext.puzzle.score_file import Score, append_scores, read_scores
from nemo_ext.puzzle.variants import Variant

CACHED, ON_GPU = 1 << 20, 1 << 26
"""Number of logits processed at a time: on a CPU, few enough for its cache; on a GPU, more."""


def score_blocks(
    parent: Parent,
    by_block: Sequence[Sequence[Variant]],
    layer_of: Callable[[Variant], torch.nn.Module | None],
    calibration: Sequence[Tensor],
    file: Path,
    *,
    together: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Score]:
    """Score every variant that has no line in `file` yet, and return all scores; a block's lines are written together.

    Args:
        by_block: variants of each block, from `variants`.
        layer_of: function that returns a variant's layer, or None for a no-op, such as `Library.layer`.
        calibration: this rank's tokens `[batch, seq]`; the next token is the label.
        together: maximum number of variants in memory at a time; None for all of a block.
        advance: called after every block with its number of variants.

    Raises:
        ValueError: a line of `file` is not a score, or is from another calibration set.
    """
    if not calibration:
        raise ValueError("the calibration set is empty; raise puzzle.calibration.sequences")
    total = sum(tokens.shape[0] * (tokens.shape[1] - 1) for tokens in calibration)
    total = int(data_parallel.summed(torch.tensor(total)))
    known = data_parallel.agreed(lambda: {(score.block, score.variant): score for score in read_scores(file)})
    stale = next((score for score in known.values() if score.tokens != total), None)
    if stale is not None:
        raise ValueError(
            f"{file} has scores on {stale.tokens} tokens, but the calibration set has {total}: remove the file "
            "to score again"
        )
    cache = CachedInputs(parent, calibration)
    for block_variants in by_block:
        new = [variant for variant in block_variants if (variant.number + 1, variant.name) not in known]
        if new:
            size = together or len(new)
            groups = [new[start : start + size] for start in range(0, len(new), size)]
            scored = [score for group in groups for score in _score_block(parent, group, layer_of, cache, total)]
            data_parallel.written(partial(append_scores, file, scored))
            known |= {(score.block, score.variant): score for score in scored}
        advance(len(block_variants))
    return [known[variant.number + 1, variant.name] for each in by_block for variant in each]


def _score_block(
    parent: Parent,
    new: Sequence[Variant],
    layer_of: Callable[[Variant], torch.nn.Module | None],
    cache: CachedInputs,
    total: int,
) -> list[Score]:
    number = new[0].number
    layers = {variant.name: layer_of(variant) for variant in new}
    sums = {name: torch.zeros(3, dtype=torch.double) for name in layers}
    with torch.no_grad():
        for tokens, hidden, last in cache.at(number):
            reference, labels = log_softmax(parent.logits_of(last)[:, :-1].float(), -1), tokens[:, 1:]
            changed = {name: layer for name, layer in layers.items() if layer is not parent.layers[number]}
            for name in layers.keys() - changed.keys():  # unchanged: reuse the parent's log-probabilities
                sums[name][1] -= token_log_probabilities(reference, labels, normalised=True).sum().cpu()
            outputs = (parent.block_output(number, hidden, layer) for layer in changed.values())
            for name, states in zip(changed, parent.each_hidden_from(number + 1, outputs), strict=True):
                logits = parent.logits_of(states)[:, :-1]
                sums[name] += loss_sums(reference, logits, labels, last[:-1], states[:-1]).cpu()
    scores = []
    for variant in new:
        kl, loss, cosine = (data_parallel.summed(sums[variant.name]) / total).tolist()
        scores.append(Score(block=number + 1, variant=variant.name, kl=kl, loss=loss, cosine=cosine, tokens=total))
    return scores


def loss_sums(reference: Tensor, logits: Tensor, labels: Tensor, hidden: Tensor, changed: Tensor) -> Tensor:
    """Sum KL divergence, loss and cosine distance over tokens, `[3]` in FP64.

    Args:
        reference: the parent's log-probabilities `[batch, seq, vocabulary]`, in FP32.
        logits: logits of the changed model, of the same shape.
        labels: next tokens `[batch, seq]`.
        hidden, changed: last hidden states `[seq, batch, hidden]` of the parent and of the changed model.
    """
    sums = torch.zeros(2, dtype=torch.double, device=logits.device)
    for expected, chunk, label in _chunks(reference, logits, labels):
        actual = log_softmax(chunk.float(), -1)
        sums[1] -= actual.gather(-1, label[:, None]).sum()
        sums[0] += einsum("tv,tv->t", expected.exp(), expected - actual).double().sum()
    distance = (1 - cosine_similarity(hidden.float(), changed.float(), dim=-1)).sum()
    return torch.cat([sums, distance.double()[None]])


def token_log_probabilities(logits: Tensor, labels: Tensor, *, normalised: bool = False) -> Tensor:
    """Return each label's log-probability `[batch, seq]` in FP64, from logits `[batch, seq, vocabulary]`.

    The logits may be `normalised`, that is, log-probabilities already.
    """
    if normalised:
        return logits.gather(-1, labels[..., None])[..., 0].double()
    parts = [log_softmax(chunk.float(), -1).gather(-1, label[:, None]) for chunk, label in _chunks(logits, labels)]
    return torch.cat(parts).reshape(labels.shape).double()


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors `[batch, seq, ...]` into chunks of rows, whose size depends on the first tensor, the logits."""
    size = tensors[0].shape[-1]
    rows = max(1, (CACHED if tensors[0].device.type == "cpu" else ON_GPU) // size)
    for each in zip(*tensors, strict=True):  # by sample, so that no memory layout needs a copy
        yield from zip(*(one.split(rows) for one in each), strict=True)
