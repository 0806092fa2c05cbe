"""Live bytes by kind at the peak, FLOPs, values of fake tensors."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_ext.rehearsal.tracker import Tracker

KIB = 1024


def test_bytes_by_kind_and_their_peak() -> None:
    tracker = Tracker()
    with FakeTensorMode(), tracker:
        weights = torch.zeros(KIB, dtype=torch.uint8)
        tracker.label([weights], "weights")
        with tracker.during("forward", "activations"):
            kept = torch.zeros(4 * KIB, dtype=torch.uint8)
            view = kept[:KIB]
        with tracker.during("backward", "temporary"):
            work = torch.zeros(2 * KIB, dtype=torch.uint8)
            del work
        del kept
        assert tracker.live.total() == 5 * KIB  # a view keeps the whole storage
        del view

    assert tracker.live.total() == KIB
    assert tracker.peak == {"optimizer": 0, "weights": KIB, "activations": 4 * KIB, "temporary": 2 * KIB}
    assert tracker.peak_phase == "backward"


def test_forgetting_the_peak_keeps_live_storages() -> None:
    tracker = Tracker()
    with FakeTensorMode(), tracker:
        first = torch.zeros(8 * KIB, dtype=torch.uint8)
        second = torch.zeros(KIB, dtype=torch.uint8)
        del first
        tracker.forget_peak()
        third = torch.zeros(KIB, dtype=torch.uint8)

    assert sum(tracker.peak.values()) == 2 * KIB
    assert second.shape == third.shape


def test_operations_after_stop_are_not_counted() -> None:
    tracker = Tracker()
    with FakeTensorMode(), tracker:
        first = torch.zeros(8 * KIB, dtype=torch.uint8)
        tracker.stop()
        tracker.add_collective("group", "send", 1, KIB)
        second = torch.zeros(8, 8) @ torch.zeros(8, 8)
        del first

    assert second.shape == (8, 8)
    assert (sum(tracker.peak.values()), len(tracker.curve)) == (8 * KIB, 1)
    assert not tracker.flops
    assert not tracker.collectives


def test_flops_of_products_forward_and_backward() -> None:
    tracker = Tracker()
    with FakeTensorMode(), tracker:
        a = torch.zeros(8, 16)
        b = torch.zeros(16, 32, requires_grad=True)
        with tracker.during("forward", "activations"):
            out = a @ b
        with tracker.during("backward", "temporary"):
            out.sum().backward()

    assert tracker.flops == {"forward": 2 * 8 * 16 * 32, "backward": 2 * 8 * 16 * 32}


def test_unknown_values_read_as_one() -> None:
    with FakeTensorMode(), Tracker():
        assert torch.zeros(()).item() == 1.0
        assert torch.zeros((), dtype=torch.int64).item() == 1
