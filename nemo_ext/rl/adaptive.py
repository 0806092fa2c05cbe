"""Shares of datasets that follow what each can still teach: adaptive multi-dataset policy optimisation (AMPO).

OLMo 3's slides name it and do not describe it, so all of this is a (choice). The signal of a group of responses to one
prompt is the mean of its absolute advantages, divided by the group's deviation: 0 if all rewards are equal, at most 1,
and comparable between datasets whose rewards have other scales. SEC (arXiv 2505.14970) and DUMP (arXiv 2504.09710)
choose data by mean absolute advantages, too. A dataset's weight is its given share times its signal, mixed with the
given share as Exp3 mixes with the uniform one (Auer et al., 2002): none starves, and a signal that comes back is seen.

No engine is known here. An engine calls `draw`, generates, and reports by `learn`; a checkpoint holds `state`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.data.curriculum.schedule import fixed, rounded
from nemo_ext.job.seeds import generator
from nemo_ext.rl.rewards.advantages import group_advantages
from nemo_ext.rl.settings import Adapt

Floats = npt.NDArray[np.float64]


def signals_of(rewards: npt.ArrayLike) -> Floats:
    """Signal of each group, `[groups, responses] -> [groups]`: its mean absolute advantage in deviations, from 0 to 1.

    Raises:
        ValueError: a reward is not finite.
    """
    found: Floats = np.abs(group_advantages(rewards, baseline="mean", normalise="std")).mean(axis=-1)
    return found


class AdaptiveShares:
    """Weights of datasets, and which dataset each next prompt is from.

    Everything follows from the arguments and the calls: the same calls after `restore` draw the same prompts.

    Args:
        shares: given shares of the datasets by name; they are scaled to sum to 1.
        settings: settings.
        seed: seed of the order of datasets within a step.
    """

    def __init__(self, shares: Mapping[str, float], settings: Adapt, *, seed: int) -> None:
        self.names = tuple(shares)
        self._given = fixed(shares, self.names)
        self._settings, self._seed = settings, seed
        # With nothing known, the weights are the given shares.
        self._signal = np.ones(len(self.names))
        self._owed = np.zeros(len(self.names))
        self._drawn = np.zeros(len(self.names), dtype=np.int64)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each dataset by name; they sum to 1, and none is below `keep` times its given share."""
        return dict(zip(self.names, self._weights().tolist(), strict=True))

    @property
    def signals(self) -> dict[str, float]:
        """Averaged signal of each dataset by name, in [0, 1]; 1 before its first group."""
        return dict(zip(self.names, self._signal.tolist(), strict=True))

    @property
    def drawn(self) -> int:
        """Number of prompts drawn so far."""
        return int(self._drawn.sum())

    def draw(self, count: int) -> list[tuple[int, int]]:
        """Draw the next prompts.

        Each dataset gets its weight's number of them; what is lost by rounding is carried to the next call.

        Args:
            count: number of prompts.

        Returns:
            For each prompt the index of its dataset in `names`, and its number in that dataset's order, from 0.
        """
        order = generator(self._seed, "adaptive", self.drawn)
        self._owed += self._weights() * count
        row = rounded(self._owed, count)
        self._owed -= row
        made = []
        for dataset in order.permutation(np.repeat(np.arange(len(self.names)), row)).tolist():
            made.append((dataset, int(self._drawn[dataset])))
            self._drawn[dataset] += 1
        return made

    def learn(self, datasets: Sequence[int], signals: Sequence[float] | Floats) -> None:
        """Average the signals of groups into those of their datasets.

        A dataset's old signal counts `exp(-n / groups)` after n groups of its own, in whatever order they come: it is
        as precise for a dataset with a small share as for the others, but takes more steps to change.

        Args:
            datasets: dataset of each group, as `draw` gave it.
            signals: signal of each group, as `signals_of` computes it.

        Raises:
            ValueError: a signal is not between 0 and 1, or there is not one for each group.
        """
        given, at = np.asarray(signals, dtype=np.float64), np.asarray(datasets, dtype=np.int64)
        if given.shape != at.shape or not ((given >= 0) & (given <= 1)).all():
            raise ValueError(f"signals must be {at.size} numbers from 0 to 1, one for each group, not {signals!r}")
        for dataset in np.unique(at):
            own = given[at == dataset]
            old = np.exp(-len(own) / self._settings.groups)
            self._signal[dataset] = old * self._signal[dataset] + (1 - old) * own.mean()

    def state(self) -> dict[str, Any]:
        """Everything that changes, as JSON."""
        return {
            "names": list(self.names),
            "signal": self._signal.tolist(),
            "owed": self._owed.tolist(),
            "drawn": self._drawn.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is the state of other datasets.
        """
        if state["names"] != list(self.names):
            raise ValueError(f"the state is of the datasets {state['names']}, these are {list(self.names)}")
        self._signal = np.array(state["signal"], dtype=np.float64)
        self._owed = np.array(state["owed"], dtype=np.float64)
        self._drawn = np.array(state["drawn"], dtype=np.int64)

    def _weights(self) -> Floats:
        teaching = self._given * self._signal
        total = teaching.sum()
        adapted = teaching / total if total > 0 else self._given
        return self._settings.keep * self._given + (1 - self._settings.keep) * adapted
