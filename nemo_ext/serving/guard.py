"""API key check for all routes, error responses in OpenAI's format, and the metrics page."""

import hmac

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = "/health"
"""The only path that requires no key, as health checks have none."""


class Guard:
    """ASGI middleware that requires an API key.

    Args:
        key: the key; if None, all requests are accepted.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app, self.expected = app, None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 401, or forward the request to the application."""
        if scope["type"] == "http" and self.expected is not None and scope["path"] != OPEN:
            header = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(header, self.expected):
                refused = refusal(401, "the API key is missing or invalid; send the header `Authorization: Bearer KEY`")
                await refused(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def gone(request: Request) -> None:
    """Wait until the client disconnects; the request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def refusal(status: int, message: str) -> Response:
    """Create an error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)


def metrics_page(registry: CollectorRegistry) -> Response:
    """Create a response with metrics in Prometheus's text format."""
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
