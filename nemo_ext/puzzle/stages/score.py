"""Replace-one-block scores: the loss of the whole parent when one block is replaced by one of its variants.

For every variant: the KL divergence of the parent's next-token distribution from the changed model's, the language
model loss, and the cosine distance of the last hidden states, means over all tokens of the calibration set. Blocks
before the replaced one are not run again: their outputs are cached. Results are lines of JSON; existing ones are not
scored again.
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
"""Logits that are worked on at a time: few, so that they stay in a processor's cache; more on a GPU."""


def score_blocks(
    parent: Parent,
    found: Sequence[Sequence[Variant]],
    layer_of: Callable[[Variant], torch.nn.Module | None],
    calibration: Sequence[Tensor],
    file: Path,
    *,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Score]:
    """Score every variant that has no line in `file` yet; the lines of a block are written together.

    Args:
        parent: the model.
        found: variants of each block, from `variants`.
        layer_of: returns the layer of a variant, None for a no-op (`Library.layer`).
        calibration: this rank's tokens `[batch, seq]`; the next token is the label.
        file: path of scores.jsonl.
        advance: called with the number of variants of every finished block.

    Raises:
        ValueError: a line of `file` is not a score, or is from another calibration set.
    """
    if not calibration:
        raise ValueError("the calibration set is empty: scores need tokens")
    total = sum(tokens.shape[0] * (tokens.shape[1] - 1) for tokens in calibration)
    total = int(data_parallel.summed(torch.tensor(total)))
    known = data_parallel.agreed(lambda: {(score.block, score.variant): score for score in read_scores(file)})
    other = next((score for score in known.values() if score.tokens != total), None)
    if other is not None:
        raise ValueError(
            f"{file} holds scores of {other.tokens} tokens, the calibration set has {total}: remove the file"
        )
    cache = CachedInputs(parent, calibration)
    for each in found:
        new = [variant for variant in each if (variant.number + 1, variant.name) not in known]
        if new:
            scored = _score_block(parent, new, layer_of, cache, total)
            data_parallel.written(partial(append_scores, file, scored))
            known |= {(score.block, score.variant): score for score in scored}
        advance(len(each))
    return [known[variant.number + 1, variant.name] for each in found for variant in each]


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
            for name, layer in layers.items():
                if layer is parent.layers[number]:  # what would be computed is there already
                    sums[name][1] -= token_log_probabilities(reference, labels, normalised=True).sum().cpu()
                    continue
                changed = parent.hidden_from(number, hidden, {number: layer})
                made = parent.logits_of(changed)[:, :-1]
                sums[name] += loss_sums(reference, made, labels, last[:-1], changed[:-1]).cpu()
    scores = []
    for variant in new:
        kl, loss, cosine = (data_parallel.summed(sums[variant.name]) / total).tolist()
        scores.append(Score(block=number + 1, variant=variant.name, kl=kl, loss=loss, cosine=cosine, tokens=total))
    return scores


def loss_sums(reference: Tensor, logits: Tensor, labels: Tensor, hidden: Tensor, changed: Tensor) -> Tensor:
    """Sums of KL, loss and cosine distance over tokens.

    Args:
        reference: the parent's log-probabilities `[batch, seq, vocabulary]`, in FP32.
        logits: the changed model's, of the same shape.
        labels: next tokens `[batch, seq]`.
        hidden, changed: last hidden states of both `[seq, batch, hidden]`.
    """
    sums = torch.zeros(2, dtype=torch.double, device=logits.device)
    for expected, made, label in _chunks(reference, logits, labels):
        found = log_softmax(made.float(), -1)
        sums[1] -= found.gather(-1, label[:, None]).sum()
        sums[0] += einsum("tv,tv->t", expected.exp(), expected - found).double().sum()
    distance = (1 - cosine_similarity(hidden.float(), changed.float(), dim=-1)).sum()
    return torch.cat([sums, distance.double()[None]])


def token_log_probabilities(logits: Tensor, labels: Tensor, *, normalised: bool = False) -> Tensor:
    """Log-probability `[batch, seq]` of each label, in double precision, from logits `[batch, seq, vocabulary]`.

    Args:
        normalised: True if the logits are log-probabilities already.
    """
    if normalised:
        return logits.gather(-1, labels[..., None])[..., 0].double()
    found = [log_softmax(made.float(), -1).gather(-1, label[:, None]) for made, label in _chunks(logits, labels)]
    return torch.cat(found).reshape(labels.shape).double()


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of tensors `[batch, seq, ...]`, the first of which has logits: as many at a time as a cache holds."""
    size = tensors[0].shape[-1]
    rows = max(1, (CACHED if tensors[0].device.type == "cpu" else ON_GPU) // size)
    for each in zip(*tensors, strict=True):  # without a copy, whichever way the batch lies in memory
        yield from zip(*(one.split(rows) for one in each), strict=True)
