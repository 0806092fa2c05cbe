"""Ports for processes that have yet to start."""

import socket

import pytest
from torch.distributed import TCPStore

from nemo_ext.job.ranks import reserve_port


def test_a_reserved_port_is_given_to_nobody_but_the_server_that_it_is_for() -> None:
    with reserve_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
