"""Sockets, URLs and servers for endpoints."""

import socket

import uvicorn
from starlette.types import ASGIApp


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket at an address; port 0 selects a free port.

    Raises:
        ValueError: the address is not available.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        how = "set port=0 for a free port" if port else "set serving.host to an address of this machine"
        raise ValueError(f"cannot listen at serving.host={host}, port={port} ({error.strerror}); {how}") from None


def url_of(host: str, port: int) -> str:
    """URL of the endpoint at an address, including `/v1`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def server(app: ASGIApp) -> uvicorn.Server:
    """Create a server for an application; on Ctrl-C, it rejects new requests and completes those in progress."""
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
