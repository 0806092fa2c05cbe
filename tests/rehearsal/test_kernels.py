"""Tensors that stand-ins save, and their lifetime."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_ext.rehearsal.tracker import Tracker


def test_tensors_saved_by_a_scan_are_freed_in_its_backward_pass() -> None:
    from nemo_ext.rehearsal import kernels

    tracker = Tracker()
    with FakeTensorMode(), tracker:
        heads, size, channels = 4, 16, 96  # x 64, and 8 numbers of B and C in each of 2 groups
        leaf = torch.zeros(1, 256, 64 + channels + heads, requires_grad=True)
        rest = [torch.zeros(shape, requires_grad=True) for shape in ((channels, 4), channels, heads, heads)]
        weight, bias, dt_bias, decay = rest
        with tracker.during("forward", "activations"):
            projected = leaf * 1
            given = {"D": torch.zeros(heads), "chunk_size": 128, "headdim": size, "ngroups": 2}
            loss = kernels._scan(tracker)(projected, weight, bias, dt_bias, decay, **given).sum()
            del projected, given
        kept = tracker.live["activations"]
        with tracker.during("backward", "temporary"):
            loss.backward()

    # The projection, the output before gating, D, and the sum of the output.
    assert kept == 4 * (256 * (64 + channels + heads) + 256 * 64 + heads + 1)
    assert tracker.live["activations"] == 4 == loss.nbytes
