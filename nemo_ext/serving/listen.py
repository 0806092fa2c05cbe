"""Sockets and servers of endpoints."""

import socket

import uvicorn
from starlette.types import ASGIApp


def bind(host: str, port: int) -> socket.socket:
    """Listening socket at an address; with port 0 at a free port.

    Raises:
        ValueError: the address is not available.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        how = "set port=0 for a free port" if port else "set serving.host to an address of this machine"
        raise ValueError(f"serving.host={host} port={port}: cannot listen there ({error.strerror}): {how}") from None


def url_of(host: str, port: int) -> str:
    """URL of an endpoint, with `/v1`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def server(app: ASGIApp) -> uvicorn.Server:
    """Server of an application, which on Ctrl-C refuses new requests and completes those in progress."""
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
