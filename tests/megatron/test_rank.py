"""Processes that a rank starts, and signals to them."""

import os
import signal

import pytest
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from nemo_ext.megatron.rank import keep_workers


class Signalled(Dataset[int]):
    """Numbers, and a SIGTERM to the worker that reads them."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return number


@pytest.mark.parametrize("kept", [True, False])
def test_workers_outlive_a_signal_to_the_process_group(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", signal_handling._set_worker_signal_handlers)
    if kept:
        keep_workers()
        assert [int(each) for each in DataLoader(Signalled(), batch_size=None, num_workers=1)] == [0, 1, 2]
    else:  # as it would be
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            list(DataLoader(Signalled(), batch_size=None, num_workers=1))
