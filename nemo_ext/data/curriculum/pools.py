"""Pools of one domain's undrawn prompts, one per pass-rate level."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nemo_ext.data.curriculum.prompts import Keys, Numbers
from nemo_ext.data.curriculum.schedule import from_the_largest


def ordering_keys(keys: Keys, seed: int) -> Keys:
    """Hash keys with a seed by SplitMix64's finaliser; sorting by the result is a random but reproducible order."""
    mixed = keys ^ np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass
class _Epoch:
    """One pass over the domain: its prompts by level, and the number that each step took from each level."""

    items: Numbers
    begin: Numbers
    steps: list[int] = field(default_factory=list)
    taken: list[Numbers] = field(default_factory=list)


class DomainPools:
    """Pools of one domain, one per level.

    The first pass is over the prompts that were not used before or, with `repeat`, over the least used ones.

    Args:
        used: number of times that each member was used before.
        repeat: True to start a new pass when all members have been drawn.
    """

    def __init__(
        self, *, members: Numbers, level: Numbers, levels: int, key: Keys, used: Numbers, repeat: bool, seed: int
    ) -> None:
        self.members = members
        self.begun_again = 0
        self.present = np.bincount(level, minlength=levels) > 0
        self._level, self._levels, self._key, self._seed = level, levels, key, seed
        self._repeat = repeat
        self._pass = int(used.min()) if len(used) and repeat else 0
        self._epochs: list[_Epoch] = []
        which = used <= self._pass
        self._begin(members[which], level[which])

    def _begin(self, members: Numbers, level: Numbers, *, carried: int = 0) -> None:
        """Start a pass over `members`, given each one's level; the first `carried` members lead their levels."""
        keys = ordering_keys(ordering_keys(self._key[members], self._seed), self._pass)
        order = np.argsort(keys)
        group = 2 * level + (np.arange(len(members)) >= carried)
        small = np.min_scalar_type(2 * self._levels)  # up to 16 bits, numpy's stable sort takes linear time
        order = order[np.argsort(group[order].astype(small), kind="stable")]
        sizes = np.bincount(level, minlength=self._levels)
        ends = np.cumsum(sizes)
        self._epochs.append(_Epoch(items=members[order], begin=ends - sizes))
        self.left = sizes
        self._front = self._epochs[-1].begin.copy()

    def draw(
        self,
        want: Numbers,
        quota: int,
        *,
        step: int,
        texts: Keys,
        repeated: npt.NDArray[np.bool_] | None,
        in_step: set[int] | None,
    ) -> int | None:
        """Draw `quota` prompts for a step.

        Args:
            want: [levels] number of prompts wanted from each level.
            quota: sum of `want`.
            step: number of the step.
            texts: key of each candidate's text.
            repeated: mask of the candidates that share their text with another candidate; None if no candidates do.
            in_step: texts that are already in the step and must not be drawn again; drawn texts are added. None if no
                text can be drawn twice.

        Returns:
            Number of prompts from levels other than requested; None if there are not enough prompts.
        """
        off_target = 0
        check, refilled = repeated, False
        blocked = np.zeros(len(want), dtype=np.bool_)
        while True:
            available = self.left if not blocked.any() else np.where(blocked, 0, self.left)
            take = np.minimum(want, available)
            short = quota - int(take.sum())
            if short:
                rest = available - take
                from_others = min(short, int(rest.sum()))
                if from_others:
                    take = take + from_the_largest(rest, from_others)
                off_target += from_others
            got = self._take(take, step, texts, check, in_step)
            quota -= got
            if not quota:
                return off_target
            if got < int(take.sum()):
                # All prompts left in some level repeat a text of the step: draw from other levels.
                blocked |= self._last_taken < take
                want = _still_wanted(want, self._last_taken, quota)
                continue
            if not self._repeat or refilled or in_step is None:
                return None
            want = _still_wanted(want, self._last_taken, quota)
            in_step |= self._texts_of(step, texts)
            self._begin_again()
            # The new pass may start with prompts that the step drew at the end of the last pass.
            check = np.ones(len(texts), dtype=np.bool_)
            blocked[:] = False
            refilled = True

    def _begin_again(self) -> None:
        """Start a new pass over all members; prompts left over from the last pass come first."""
        epoch = self._epochs[-1]
        left = [epoch.items[front : front + count] for front, count in zip(self._front, self.left, strict=True)]
        carried = np.concatenate(left)
        self._pass += 1
        self.begun_again += 1
        levels = np.concatenate([np.repeat(np.arange(self._levels), self.left), self._level])
        self._begin(np.concatenate([carried, self.members]), levels, carried=len(carried))

    def _take(
        self,
        take: Numbers,
        step: int,
        texts: Keys,
        check: npt.NDArray[np.bool_] | None,
        in_step: set[int] | None,
    ) -> int:
        """Take prompts for a step from the front of each level; see `draw`.

        Args:
            take: [levels] number of prompts to take.
            check: mask of the candidates whose text may already be in the step; None to check none.
            in_step: texts in the step; see `draw`.

        Returns:
            Number of prompts taken, fewer than requested if texts are already in the step.
        """
        epoch = self._epochs[-1]
        if check is not None and in_step is not None:
            take = take.copy()
            for level in np.flatnonzero(take).tolist():
                take[level] = self._bring_forward(level, int(take[level]), texts, check, in_step)
        self._last_taken = take
        if epoch.steps and epoch.steps[-1] == step:
            epoch.taken[-1] = epoch.taken[-1] + take
        else:
            epoch.steps.append(step)
            epoch.taken.append(take)
        self._front += take
        self.left = self.left - take
        return int(take.sum())

    def _bring_forward(
        self, level: int, count: int, texts: Keys, check: npt.NDArray[np.bool_], in_step: set[int]
    ) -> int:
        """Move up to `count` prompts whose text is not in the step to the front of a level; return their number.

        Only candidates in the mask `check` are compared with `in_step`, and their texts are added to it.
        """
        items, front = self._epochs[-1].items, int(self._front[level])
        marked = check[items[front : front + count]]
        if not marked.any():
            return count
        end = front + int(self.left[level])
        chosen, deferred, at = list[int](), list[int](), front
        while len(chosen) < count and at < end:
            item = int(items[at])
            text = int(texts[item])
            if check[item] and text in in_step:
                deferred.append(item)
            else:
                chosen.append(item)
                if check[item]:
                    in_step.add(text)
            at += 1
        if deferred:
            items[front:at] = chosen + deferred
        return len(chosen)

    def _texts_of(self, step: int, texts: Keys) -> set[int]:
        """Return the keys of the texts that a step drew from the current pass."""
        epoch = self._epochs[-1]
        if not epoch.steps or epoch.steps[-1] != step:
            return set()
        fronts = zip(self._front, epoch.taken[-1], strict=True)
        pieces = [epoch.items[front - taken : front] for front, taken in fronts if taken]
        return set(texts[np.concatenate(pieces)].tolist()) if pieces else set()

    def drawn(self, steps: int) -> list[tuple[Numbers, Numbers]]:
        """Return the candidates drawn in the first `steps` steps, as pairs of arrays: indices, and the step of each."""
        pieces = []
        for epoch in self._epochs:
            numbers = np.array(epoch.steps, dtype=np.int64)
            rows = numbers < steps
            if not rows.any():
                continue
            numbers = numbers[rows]
            taken = np.stack(epoch.taken)[rows]
            for level in np.flatnonzero(taken.sum(axis=0)):
                counts, begin = taken[:, level], int(epoch.begin[level])
                pieces.append((epoch.items[begin : begin + int(counts.sum())], np.repeat(numbers, counts)))
        return pieces


def _still_wanted(want: Numbers, taken: Numbers, quota: int) -> Numbers:
    """Return how many prompts a step still wants from each level after `taken`, [levels]; at most `quota` in total."""
    rest = np.maximum(want - taken, 0)
    over = int(rest.sum()) - quota
    return rest - from_the_largest(rest, over) if over > 0 else rest
