"""Tensors that stand-ins save, and their lifetime."""

import numpy as np
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


def test_sorted_chunks_of_tokens_take_the_memory_of_megatrons() -> None:
    from megatron.core.transformer.moe import moe_utils

    from nemo_ext.rehearsal import kernels

    found = []
    for sort in (moe_utils.sort_chunks_by_idxs, kernels._sort_chunks):
        tracker = Tracker()
        with FakeTensorMode(), tracker:
            leaf, chances = torch.zeros(12, 5, requires_grad=True), torch.zeros(12, requires_grad=True)
            with tracker.during("forward", "activations"):
                tokens, probs = sort(leaf * 1, np.array([3, 4, 5]), np.array([2, 0, 1]), probs=chances * 1)
                loss = tokens.sum() + probs.sum()
                del tokens, probs
            kept = tracker.live["activations"]
            tracker.forget_peak()
            with tracker.during("backward", "temporary"):
                loss.backward()
            found.append((kept, dict(tracker.peak)))

    assert found[0] == found[1]
