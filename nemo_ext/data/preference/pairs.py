"""Pairs from the answers to one prompt: pure functions of a group, the settings and the seed.

A group without a pair is counted in a report with the reason, so pairs and reasons together account for all groups.
The draw among equals depends on the seed, the group and the answer, never on their order.
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
    """Settings for making pairs of a group.

    Attributes:
        strong_models: patterns (`*` for anything) of models whose answers are chosen, in delta learning.
        weak_models: patterns of models whose answers are rejected; in judged pools, of the deliberately weak ones.
        pairs_per_prompt: largest number of pairs per prompt.
        min_margin: least difference of the best and the worst score; equal scores are never a pair.
        require_weak: True if a judged pool must hold an answer of `weak_models`.
    """

    strong_models: StringsOrNone = ()
    weak_models: StringsOrNone = ()
    pairs_per_prompt: PositiveInt = 1
    min_margin: NonNegativeFloat = 0.0
    require_weak: bool = False


def delta(group: Group, rules: Rules, seed: int, report: ReadReport) -> list[Pair]:
    """Pair strong over weak models' answers, whatever their content (Geng et al. 2025; OLMo 3, Domyn-Small 4.3)."""
    strong = [made for made in group.generations if _is(made, "strong", rules.strong_models)]
    weak = [made for made in group.generations if _is(made, "weak", rules.weak_models)]
    both = [made for made in strong if made in weak]
    if both:
        raise ValueError(f"{group.source}: the model {both[0].model!r} is both strong and weak: mend the patterns")
    if not strong or not weak:
        report.skip("no strong answer" if not strong else "no weak answer", group.id)
        return []
    return balanced(group, strong, weak, limit=rules.pairs_per_prompt, kind="delta", seed=seed)


def judged(group: Group, rules: Rules, seed: int, report: ReadReport) -> list[Pair]:
    """Pair the best over the worst of a scored pool (Domyn-Small 4.3); `require_weak` requires a weak answer in it."""
    scored = [made for made in group.generations if made.score is not None]
    if len(scored) < len(group.generations):
        report.skip("answers without a score", group.id, count=len(group.generations) - len(scored))
    if rules.require_weak and not any(_is(made, "weak", rules.weak_models) for made in scored):
        report.skip("no deliberately weak answer", group.id)
        return []
    scores = [made.score for made in scored if made.score is not None]
    if len(scores) < 2 or max(scores) == min(scores):
        report.skip("fewer than two scored answers" if len(scores) < 2 else "equal scores", group.id)
        return []
    if max(scores) - min(scores) < rules.min_margin:
        report.skip("margin too small", group.id)
        return []
    best = [made for made in scored if made.score == max(scores)]
    worst = [made for made in scored if made.score == min(scores)]
    return balanced(group, best, worst, limit=rules.pairs_per_prompt, kind="judged", seed=seed)


def safety(group: Group, rules: Rules, seed: int, report: ReadReport) -> list[Pair]:
    """Pair safe over unsafe for harmful prompts, safe over refusal for safe ones (Nemotron 3 Nano, appendix D).

    A refusal is a safe answer to a harmful prompt.
    """
    if group.label not in (HARMFUL, HARMLESS):
        report.skip(f"prompt is labelled neither {HARMFUL} nor {HARMLESS}", f"{group.id}: {group.label!r}")
        return []
    labels = {made.label for made in group.generations}
    if unknown := labels - {SAFE, UNSAFE, REFUSAL}:
        report.skip("answers labelled neither safe, unsafe nor refusal", f"{group.id}: {min(unknown)!r}")
    harmful = group.label == HARMFUL
    good = [made for made in group.generations if made.label == SAFE or (harmful and made.label == REFUSAL)]
    bad = [made for made in group.generations if made.label == (UNSAFE if harmful else REFUSAL)]
    if not good or not bad:
        wanted = "unsafe" if harmful else "over-refusing"
        report.skip("no safe answer" if not good else f"no {wanted} answer", group.id)
        return []
    kind = "safety_harmful" if harmful else "safety_over_refusal"
    return balanced(group, good, bad, limit=rules.pairs_per_prompt, kind=kind, seed=seed)


def ready(group: Group, rules: Rules, seed: int, report: ReadReport) -> list[Pair]:
    """Pair the answers labelled chosen and rejected, for pairs made elsewhere."""
    good = [made for made in group.generations if made.label == "chosen"]
    bad = [made for made in group.generations if made.label == "rejected"]
    return balanced(group, good, bad, limit=rules.pairs_per_prompt, kind="pairs", seed=seed)


def balanced(
    group: Group, good: Sequence[Generation], bad: Sequence[Generation], *, limit: int, kind: str, seed: int
) -> list[Pair]:
    """Make at most `limit` different pairs, each answer in about equally many; ids end with the pair's number.

    The first ones are a random matching, so that a small limit draws from all answers.
    """
    places = grid(len(good), len(bad))
    good, bad = (
        _shuffled(side, group.id, f"{kind}/{name}", seed) for side, name in ((good, "chosen"), (bad, "rejected"))
    )
    made = []
    for number, (left, right) in zip(range(limit), places, strict=False):
        identifier = f"{group.id}/{kind}" + (f"/{number + 1}" if limit > 1 else "")
        made.append(Pair(id=identifier, group=group, chosen=good[left], rejected=bad[right], kind=kind))
    return made


def grid(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield every (row, column) once; at any step, the uses of two rows differ by at most one, and so for columns."""
    if rows and columns:
        # Down the diagonals: one closes after the least common multiple, and the next begins beside it.
        period = math.lcm(rows, columns)
        for step in range(rows * columns):
            yield step % rows, (step + step // period) % columns


def _shuffled(side: Sequence[Generation], group: str, purpose: str, seed: int) -> list[Generation]:
    if len(side) < 2:
        return list(side)
    keys = [made.key for made in side]
    order = sorted(range(len(side)), key=lambda place: (digest(seed, group, purpose, keys[place]), keys[place]))
    return [side[place] for place in order]


def _is(made: Generation, side: str, patterns: tuple[str, ...]) -> bool:
    return made.side == side or (not made.side and any(fnmatch.fnmatchcase(made.model, one) for one in patterns))
