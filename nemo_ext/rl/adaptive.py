"""Dataset shares that adapt to the learning signal: adaptive multi-dataset policy optimisation (AMPO).

OLMo 3's slides name AMPO without describing it, so everything here is a (choice). The signal of a group of responses to
one prompt is the mean of its absolute advantages divided by the group's standard deviation: 0 if all rewards are equal,
at most 1, and comparable between datasets with different reward scales. SEC (arXiv 2505.14970) and DUMP (arXiv
2504.09710) also choose data by mean absolute advantage. A dataset's weight is its configured share times its signal,
mixed with the configured share as Exp3 mixes with the uniform distribution (Auer et al., 2002). So no dataset starves,
and a returning signal is noticed.

The module is independent of the engine, which calls `draw`, generates responses and calls `learn`. Checkpoints hold
`state`.
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
    """Return the signal of each group: its mean absolute advantage, divided by the standard deviation of its rewards.

    Args:
        rewards: rewards, `[groups, responses]`.

    Returns:
        Signals from 0 to 1, `[groups]`.
    """
    signals: Floats = np.abs(group_advantages(rewards, baseline="mean", normalise="std")).mean(axis=-1)
    return signals


class AdaptiveShares:
    """Adaptive dataset weights, and the choice of a dataset for each prompt.

    Draws are deterministic: after `restore`, the same calls draw the same prompts.

    Args:
        shares: mapping from dataset names to their configured shares, which are scaled to sum to 1.
        settings: `keep`, the fraction of its configured share that every dataset keeps, and `groups`, the number of a
            dataset's groups over which its signal is averaged.
        seed: seed for the order of datasets within a step.
    """

    def __init__(self, shares: Mapping[str, float], settings: Adapt, *, seed: int) -> None:
        self.names = tuple(shares)
        self._given = fixed(shares, self.names)
        self._settings, self._seed = settings, seed
        # Before the first group, the weights are the configured shares.
        self._signal = np.ones(len(self.names))
        self._owed = np.zeros(len(self.names))
        self._drawn = np.zeros(len(self.names), dtype=np.int64)

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the datasets; they sum to 1, and each is at least `settings.keep` times the configured share."""
        return dict(zip(self.names, self._weights().tolist(), strict=True))

    @property
    def signals(self) -> dict[str, float]:
        """Averaged signals of the datasets, in [0, 1]; each is 1 before the dataset's first group."""
        return dict(zip(self.names, self._signal.tolist(), strict=True))

    @property
    def drawn(self) -> int:
        """Number of prompts drawn so far."""
        return int(self._drawn.sum())

    def draw(self, count: int) -> list[tuple[int, int]]:
        """Draw the next prompts.

        Each dataset contributes in proportion to its weight; rounding errors are carried over to the next call.

        Returns:
            For each prompt, the index of its dataset in `names` and its position in that dataset's order, from 0.
        """
        order = generator(self._seed, "adaptive", self.drawn)
        self._owed += self._weights() * count
        counts = rounded(self._owed, count)
        self._owed -= counts
        prompts = []
        for dataset in order.permutation(np.repeat(np.arange(len(self.names)), counts)).tolist():
            prompts.append((dataset, int(self._drawn[dataset])))
            self._drawn[dataset] += 1
        return prompts

    def learn(self, datasets: Sequence[int], signals: Sequence[float] | Floats) -> None:
        """Update the datasets' signals with a moving average over their groups.

        After n groups of a dataset, in any order, its old signal has the weight `exp(-n / settings.groups)`. The
        average is equally precise for small and large shares, but takes more steps to change for small ones.

        Args:
            datasets: index of each group's dataset, as returned by `draw`.
            signals: signal of each group, as computed by `signals_of`.

        Raises:
            ValueError: a signal is not between 0 and 1, or the numbers of signals and groups differ.
        """
        values, indices = np.asarray(signals, dtype=np.float64), np.asarray(datasets, dtype=np.int64)
        if values.shape != indices.shape or not ((values >= 0) & (values <= 1)).all():
            raise ValueError(
                f"signals must be {indices.size} numbers from 0 to 1, one per group, not {signals!r}; please report "
                "this"
            )
        for dataset in np.unique(indices):
            new = values[indices == dataset]
            decay = np.exp(-len(new) / self._settings.groups)
            self._signal[dataset] = decay * self._signal[dataset] + (1 - decay) * new.mean()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which can be written as JSON."""
        return {
            "names": list(self.names),
            "signal": self._signal.tolist(),
            "owed": self._owed.tolist(),
            "drawn": self._drawn.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the state from a checkpoint; raise ValueError if it belongs to different datasets."""
        if state["names"] != list(self.names):
            raise ValueError(
                f"the checkpoint's adaptive shares are for the datasets {state['names']}, but the run has "
                f"{list(self.names)}; restore tasks.train.blend (or streams), or set another run_dir"
            )
        self._signal = np.array(state["signal"], dtype=np.float64)
        self._owed = np.array(state["owed"], dtype=np.float64)
        self._drawn = np.array(state["drawn"], dtype=np.int64)

    def _weights(self) -> Floats:
        products = self._given * self._signal
        total = products.sum()
        adapted = products / total if total > 0 else self._given
        return self._settings.keep * self._given + (1 - self._settings.keep) * adapted
