"""Replace-one-block scores: what the whole parent loses when one block is replaced by one of its variants.

For every variant: the KL divergence of the parent's next-token distribution from the changed model's, the language
model loss, and the cosine distance of the last hidden states, means over all tokens of the calibration set. Blocks
before the replaced one run once for all of its variants. Results are lines of JSON; what is there is not scored again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax

from nemo_ext.puzzle.parent import Parent
from nemo_ext.puzzle.variants import KEEP, Variant


@dataclass(frozen=True)
class Score:
    """What one replacement costs.

    Attributes:
        block: 1-based number of the block.
        variant: its name.
        kl: nats a token.
        loss: language model loss, nats a token.
        cosine: 1 - cosine similarity of the last hidden states.
        tokens: of the calibration set.
    """

    block: int
    variant: str
    kl: float
    loss: float
    cosine: float
    tokens: int


def score_blocks(
    parent: Parent,
    found: Sequence[Sequence[Variant]],
    layer_of: Callable[[Variant], torch.nn.Module | None],
    calibration: Sequence[Tensor],
    file: Path,
    *,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Score]:
    """Score every variant that has no line in `file` yet; a block's lines are written together.

    Args:
        parent: the model.
        found: of `variants`.
        layer_of: the layer of a variant, None for a no-op (`Library.layer`).
        calibration: tokens `[batch, seq]`; the next token is the label.
        file: scores.jsonl.
        advance: told of every variant that is dealt with.

    Raises:
        ValueError: a line of `file` that is not a score, or of another calibration set.
    """
    if not calibration:
        raise ValueError("the calibration set is empty: scores need tokens")
    total = sum(tokens.shape[0] * (tokens.shape[1] - 1) for tokens in calibration)
    known = {(score.block, score.variant): score for score in read_scores(file)}
    other = next((score for score in known.values() if score.tokens != total), None)
    if other is not None:
        raise ValueError(
            f"{file} holds scores of {other.tokens} tokens, the calibration set has {total}: remove the file"
        )
    for each in found:
        new = [variant for variant in each if (variant.number + 1, variant.name) not in known]
        if new:
            scored = _score_block(parent, new, layer_of, calibration, total)
            _append(file, scored)
            known |= {(score.block, score.variant): score for score in scored}
        advance(len(each))
    return [known[variant.number + 1, variant.name] for each in found for variant in each]


def _score_block(
    parent: Parent,
    new: Sequence[Variant],
    layer_of: Callable[[Variant], torch.nn.Module | None],
    calibration: Sequence[Tensor],
    total: int,
) -> list[Score]:
    number = new[0].number
    layers = {variant.name: layer_of(variant) for variant in new}
    sums = {variant.name: torch.zeros(3, dtype=torch.double) for variant in new}
    with torch.no_grad():
        for tokens in calibration:
            with parent.recorded() as record, parent.last_hidden() as last:
                logits = parent.logits(tokens)
            hidden, labels = record[number][0], tokens[:, 1:]
            reference = log_softmax(logits[:, :-1].float(), -1)
            for name, layer in layers.items():
                with parent.last_hidden() as changed:
                    made = parent.logits_from(number, hidden, {number: layer})
                sums[name] += _losses(reference, made[:, :-1], labels, last[0][:-1], changed[0][:-1])
    scores = []
    for variant in new:
        kl, loss, cosine = (sums[variant.name] / total).tolist()
        scores.append(Score(block=number + 1, variant=variant.name, kl=kl, loss=loss, cosine=cosine, tokens=total))
    return scores


def _losses(reference: Tensor, logits: Tensor, labels: Tensor, hidden: Tensor, changed: Tensor) -> Tensor:
    """Sums over tokens: KL, loss, cosine distance."""
    found = log_softmax(logits.float(), -1)
    divergence = kl_div(found, reference, log_target=True, reduction="sum")
    loss = cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="sum")
    distance = (1 - cosine_similarity(hidden.float(), changed.float(), dim=-1)).sum()
    return torch.stack([divergence.double(), loss.double(), distance.double()])


def read_scores(file: Path) -> list[Score]:
    """The scores of a file; a last line that a kill cut short is left out.

    Raises:
        ValueError: another line is not a score.
    """
    if not file.is_file():
        return []
    scores = []
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            values: Mapping[str, object] = json.loads(line)
            scores.append(Score(**values))  # type: ignore[arg-type]
        except (json.JSONDecodeError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{file}:{number}: not a score ({error}): remove the line") from None
    return scores


def _append(file: Path, scores: Sequence[Score]) -> None:
    """Add lines, after whatever whole lines there are."""
    kept = "".join(json.dumps(asdict(score)) + "\n" for score in [*read_scores(file), *scores])
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text(kept)
    unfinished.replace(file)


def parent_loss(scores: Sequence[Score]) -> float:
    """The parent's own loss: any block kept as it is."""
    return next(score.loss for score in scores if score.variant == KEEP)
