"""Replace-one-block scores: the loss of the whole parent when one block is replaced by one of its variants.

For every variant: the KL divergence of the parent's next-token distribution from the changed model's, the language
model loss, and the cosine distance of the last hidden states, means over all tokens of the calibration set. Blocks
before the replaced one are not run again: their outputs are cached. Results are lines of JSON; existing ones are not
scored again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax

from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.cached_inputs import CachedInputs
from nemo_ext.blockwise.parent import Parent
from nemo_ext.puzzle.score_file import Score, append_scores, read_scores
from nemo_ext.puzzle.variants import Variant


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
            reference = log_softmax(parent.logits_of(last)[:, :-1].float(), -1)
            for name, layer in layers.items():
                changed = parent.hidden_from(number, hidden, {number: layer})
                made = parent.logits_of(changed)[:, :-1]
                sums[name] += loss_sums(reference, made, tokens[:, 1:], last[:-1], changed[:-1]).cpu()
    scores = []
    for variant in new:
        kl, loss, cosine = (data_parallel.summed(sums[variant.name]) / total).tolist()
        scores.append(Score(block=number + 1, variant=variant.name, kl=kl, loss=loss, cosine=cosine, tokens=total))
    return scores


def loss_sums(reference: Tensor, logits: Tensor, labels: Tensor, hidden: Tensor, changed: Tensor) -> Tensor:
    """Sums of KL, loss and cosine distance over tokens."""
    found = log_softmax(logits.float(), -1)
    divergence = kl_div(found, reference, log_target=True, reduction="sum")
    loss = cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="sum")
    distance = (1 - cosine_similarity(hidden.float(), changed.float(), dim=-1)).sum()
    return torch.stack([divergence.double(), loss.double(), distance.double()])
