"""Messages between host and supervisor: a JSON header, and byte strings after it."""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

Message = tuple[dict[str, Any], list[bytes]]
_LENGTH = struct.Struct("!I")


def send(connection: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Write one message: a header, which is sent as JSON, and byte strings."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    connection.sendall(b"".join([_LENGTH.pack(len(text)), text, *blobs]))


def receive(connection: socket.socket) -> Message | None:
    """Read the next message and return its header and byte strings; None if the connection is closed.

    Raises:
        TimeoutError: the connection timed out.
    """
    length = _exactly(connection, _LENGTH.size)
    text = None if length is None else _exactly(connection, _LENGTH.unpack(length)[0])
    if text is None:
        return None
    header: dict[str, Any] = json.loads(text)
    blobs = []
    for size in header.pop("sizes"):
        blob = _exactly(connection, size)
        if blob is None:
            return None
        blobs.append(blob)
    return header, blobs


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    read = bytearray()
    while len(read) < size:
        try:
            part = connection.recv(min(size - len(read), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        read += part
    return bytes(read)
