"""Pairs from the answers to one prompt, made by pure functions of a group, the settings and the seed.

A group without a pair is counted in a report with the reason, so pairs and reasons together account for all groups.
The draw among equal answers depends on the seed, the group and the answers' content, not on their order.
"""

import fnmatch
import math
from collections.abc import Iterator, Sequence

from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.preference.group import Generation, Group, Pair
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.seeds import digest
from nemo_ext.job.settings import STRICT, StringsOrNone

HARMFUL, HARMLESS = "harmful", "safe"
SAFE, UNSAFE, REFUSAL = "safe", "unsafe", "refusal"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Rules:
    """Settings for making pairs from a group.

    Attributes:
        strong_models: patterns (`*` matches anything) of models whose answers are chosen, in delta learning.
        weak_models: patterns of models whose answers are rejected; in judged pools, of the deliberately weak models.
        pairs_per_prompt: maximum number of pairs per prompt.
        min_margin: minimum difference between the best and the worst score; equal scores never make a pair.
        require_weak: True if a judged pool must contain an answer by one of `weak_models`.
    """

    strong_models: StringsOrNone = ()
    weak_models: StringsOrNone = ()
    pairs_per_prompt: PositiveInt = 1
    min_margin: NonNegativeFloat = 0.0
    require_weak: bool = False


def delta(group: Group, rules: Rules, seed: int, report: ReadReport) -> list[Pair]:
    """Pair answers of strong models (chosen) with answers of weak ones (rejected), whatever they contain.

    This is delta learning (Geng et al. 2025; OLMo 3; Domyn-Small 4.3).
    """
    strong = [answer for answer in group.generations if _is(answer, "strong", rules.strong_models)]
    weak = [answer for answer in group.generations if _is(answer, "weak", rules.weak_models)]
    both = [answer for answer in strong if answer in weak]
    if both:
        raise ValueError(
            f"sources.{group.source}: model {both[0].model!r} matches both strong_models and weak_models: make their "
            "patterns disjoint"
        )
    if not strong or not weak:
        report.skip("no strong answer" if not strong else "no weak answer", group.id)
        return []
    return balanced(group, strong, weak, limit=rules.pairs_per_prompt, kind="delta", seed=seed)


def judged(group: Group, rules: Rules, seed: int, report: ReadReport) -> list[Pair]:
    """Pair the best-scored answers (chosen) with the worst-scored ones (rejected), as in Domyn-Small, section 4.3.

    The list is empty, and the reason counted in `report`, if the scores are equal or differ by less than
    `rules.min_margin`, or if no scored answer is by a weak model although `rules.require_weak` is set.
    """
    scored = [answer for answer in group.generations if answer.score is not None]
    if len(scored) < len(group.generations):
        report.skip("answers without a score", group.id, count=len(group.generations) - len(scored))
    if rules.require_weak and not any(_is(answer, "weak", rules.weak_models) for answer in scored):
        report.skip("no deliberately weak answer", group.id)
        return []
    scores = [answer.score for answer in scored if answer.score is not None]
    if len(scores) < 2 or max(scores) == min(scores):
        report.skip("fewer than two scored answers" if len(scores) < 2 else "equal scores", group.id)
        return []
    if max(scores) - min(scores) < rules.min_margin:
        report.skip("margin too small", group.id)
        return []
    best = [answer for answer in scored if answer.score == max(scores)]
    worst = [answer for answer in scored if answer.score == min(scores)]
    return balanced(group, best, worst, limit=rules.pairs_per_prompt, kind="judged", seed=seed)


def safety(group: Group, rules: Rules, seed: int, report: ReadReport) -> list[Pair]:
    """Pair safe answers (chosen) with unsafe ones for harmful prompts, and with refusals for safe prompts.

    A refusal is a safe answer to a harmful prompt (Nemotron 3 Nano, appendix D).
    """
    if group.label not in (HARMFUL, HARMLESS):
        report.skip(f"prompt not labelled {HARMFUL} or {HARMLESS}", f"{group.id}: {group.label!r}")
        return []
    labels = {answer.label for answer in group.generations}
    if unknown := labels - {SAFE, UNSAFE, REFUSAL}:
        report.skip("answers not labelled safe, unsafe or refusal", f"{group.id}: {min(unknown)!r}")
    harmful = group.label == HARMFUL
    good = [answer for answer in group.generations if answer.label == SAFE or (harmful and answer.label == REFUSAL)]
    bad = [answer for answer in group.generations if answer.label == (UNSAFE if harmful else REFUSAL)]
    if not good or not bad:
        wanted = "unsafe" if harmful else "over-refusing"
        report.skip("no safe answer" if not good else f"no {wanted} answer", group.id)
        return []
    kind = "safety_harmful" if harmful else "safety_over_refusal"
    return balanced(group, good, bad, limit=rules.pairs_per_prompt, kind=kind, seed=seed)


def ready(group: Group, rules: Rules, seed: int, report: ReadReport) -> list[Pair]:
    """Return the pair of the answers labelled chosen and rejected, for data that already consist of pairs."""
    good = [answer for answer in group.generations if answer.label == "chosen"]
    bad = [answer for answer in group.generations if answer.label == "rejected"]
    return balanced(group, good, bad, limit=rules.pairs_per_prompt, kind="pairs", seed=seed)


def balanced(
    group: Group, good: Sequence[Generation], bad: Sequence[Generation], *, limit: int, kind: str, seed: int
) -> list[Pair]:
    """Pair good answers (chosen) with bad ones (rejected), each pair once and all answers about equally often.

    The matching is random, determined by the seed.

    Args:
        limit: maximum number of pairs; above 1, the pairs' ids end with a number.
        kind: kind of the pairs, which is part of their ids.
    """
    places = grid(len(good), len(bad))
    good, bad = (
        _shuffled(side, group.id, f"{kind}/{name}", seed) for side, name in ((good, "chosen"), (bad, "rejected"))
    )
    pairs = []
    for number, (left, right) in zip(range(limit), places, strict=False):
        identifier = f"{group.id}/{kind}" + (f"/{number + 1}" if limit > 1 else "")
        pairs.append(Pair(id=identifier, group=group, chosen=good[left], rejected=bad[right], kind=kind))
    return pairs


def grid(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield every (row, column) once, in an order that uses all rows, and all columns, equally often to within one."""
    if rows and columns:
        # Along the diagonals: each closes after the least common multiple, and the next starts one column to the right.
        period = math.lcm(rows, columns)
        for step in range(rows * columns):
            yield step % rows, (step + step // period) % columns


def _shuffled(side: Sequence[Generation], group: str, purpose: str, seed: int) -> list[Generation]:
    if len(side) < 2:
        return list(side)
    keys = [answer.key for answer in side]
    order = sorted(range(len(side)), key=lambda place: (digest(seed, group, purpose, keys[place]), keys[place]))
    return [side[place] for place in order]


def _is(answer: Generation, side: str, patterns: tuple[str, ...]) -> bool:
    if answer.side:
        return answer.side == side
    return any(fnmatch.fnmatchcase(answer.model, pattern) for pattern in patterns)
