"""Sampled mixtures: a larger number keeps the earlier mixtures, and no stream is read too often."""

import numpy as np
import pytest

from nemo_ext.mixture.sampling import sample

PRIOR = np.array([0.7, 0.2, 0.1])
OPEN = np.ones(3)


def test_more_mixtures_start_with_the_same_ones() -> None:
    few, many = (sample(n, PRIOR, strengths=(0.1, 5), least=0.002, most=OPEN, seed=1) for n in (5, 40))

    assert len(many) == 41
    assert many[0].tolist() == [0.7, 0.2, 0.1]
    assert all((one == other).all() for one, other in zip(few, many, strict=False))
    assert all(one.sum() == pytest.approx(1) for one in many)
    assert all(((one == 0) | (one >= 0.002)).all() for one in many)
    assert len({tuple(np.round(one, 3)) for one in many}) == 41
    assert np.mean(many[1:], axis=0) == pytest.approx([0.7, 0.2, 0.1], abs=0.15)


def test_low_strengths_give_few_streams() -> None:
    low, high = (sample(30, PRIOR, strengths=(s, s), least=0.002, most=OPEN, seed=1) for s in (0.5, 50))

    spread = [np.mean([np.abs(one - many[0]).sum() for one in many[1:]]) for many in (low, high)]
    assert spread[0] > 4 * spread[1]


def test_no_stream_is_read_too_often() -> None:
    found = sample(20, PRIOR, strengths=(1, 5), least=0.002, most=np.array([1, 0.25, 0.12]), seed=1)

    assert max(one[1] for one in found) <= 0.25
    assert max(one[2] for one in found) <= 0.12


def test_an_exhausted_set_of_mixtures_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no new mixture for run 1.*mixture\.repeats"):
        sample(1, PRIOR, strengths=(1, 5), least=0.002, most=np.full(3, 0.2), seed=1)
