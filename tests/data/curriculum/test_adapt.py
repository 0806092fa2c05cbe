"""Adaptive shares of domains."""

import numpy as np
import pytest

from nemo_ext.data.curriculum.job import LEAST_TO_TEACH, adapted
from nemo_ext.data.curriculum.plan import Candidates

RATES = {"easy": [1.0, 1.0, 0.9, 1.0], "hard": [0.0, 0.0, 0.0, 0.0], "middle": [0.5, 0.5, 0.25, 0.75]}


def candidates() -> Candidates:
    keys = np.arange(12, dtype=np.uint64)
    return Candidates(
        key=keys,
        text=keys,
        domain=np.repeat(np.arange(3, dtype=np.int16), 4),
        rate=np.array([rate for rates in RATES.values() for rate in rates]),
        used=np.zeros(12, dtype=np.int64),
        domains=tuple(RATES),
    )


def test_a_share_is_multiplied_by_the_domain_s_learning_signal() -> None:
    shares = {"easy": 2.0, "hard": 1.0, "middle": 1.0}

    made = adapted(shares, candidates(), 1.0)

    assert made["easy"] == pytest.approx(2.0 * (4 * 0.9 * 0.1) / 4)
    assert made["middle"] == pytest.approx((1 + 1 + 0.75 + 0.75) / 4)
    assert made["hard"] == LEAST_TO_TEACH, "no domain is forgotten"
    assert adapted(shares, candidates(), 0.5)["middle"] == pytest.approx(made["middle"] ** 0.5)


def test_a_power_of_zero_keeps_the_shares() -> None:
    assert adapted({"easy": 2.0, "middle": 1.0}, candidates(), 0.0) == {"easy": 2.0, "middle": 1.0}
