"""Failed attempts of requests, recognised by the HTTP status or by an error in the response."""

import json
import re
from collections.abc import Mapping
from typing import Any

_AGAIN = frozenset({408, 409, 425, 429})
"""Status codes, other than server errors, after which a retry may succeed: timeouts, conflicts, too many requests."""
REFUSED = frozenset({401, 403})
"""Status codes that indicate a missing or invalid key."""
_OVERLOAD = frozenset({429, 503, 529})
MISPLACED = frozenset({404, 405, 410, 501})
"""Status codes that indicate a path that the endpoint does not have."""
BROKEN_OFF = frozenset({"error", "abort", "aborted", "cancelled", "insufficient_system_resource"})
"""Finish reasons of answers that the server aborted."""
CUT_OFF = frozenset({"length", "max_tokens", "model_length"})
"""Finish reasons of answers truncated at a length limit, as OpenAI, Anthropic, Gemini and Mistral name them."""
_CODES = {
    "rate.?limit|overloaded|too.?many.?requests|quota|resource.?exhausted": 429,
    "invalid.?request|bad.?request|context.?length|invalid.?argument|validation": 400,
    "too.?large": 413,
    "authentication|unauthorized|api.?key": 401,
    "not.?found": 404,
}
"""Mapping from a pattern of error names to the status code that such errors stand for."""


def is_refusal(problem: str) -> bool:
    """Return whether a failure's description, such as `HTTP 400: ...`, has a status after which a retry is futile."""
    status = re.match(r"HTTP (4\d\d)\b", problem)
    return status is not None and int(status[1]) not in _AGAIN


class Failed(Exception):
    """Raised if an attempt at a request fails.

    Attributes:
        again: whether a retry may succeed.
        after: seconds that the endpoint asks to wait.
        overload: whether the endpoint is overloaded.
        unreached: whether the connection was refused.
        status: HTTP status, or the code of an error in a response; None if there is neither.
    """

    @classmethod
    def from_response(cls, status: int | None, problem: str, words: str, **more: Any) -> "Failed":
        """Create a failure from an error response.

        Args:
            status: HTTP status; None if there was no response, in which case the request may be retried.
            problem: description of the failure, such as `HTTP 503`.
            words: the server's message, which is appended unless it may contain a part of the key.
            more: further arguments of the constructor.
        """
        # A server's message about an invalid key may contain part of the key.
        message = f": {words}" if words and status not in REFUSED else ""
        again = status is None or status in _AGAIN or status >= 500
        return cls(f"{problem}{message}", status=status, again=again, overload=status in _OVERLOAD, **more)

    def __init__(
        self,
        problem: str,
        *,
        again: bool = True,
        after: float = 0.0,
        overload: bool = False,
        unreached: bool = False,
        status: int | None = None,
    ) -> None:
        super().__init__(problem)
        self.again, self.after, self.overload, self.unreached = again, after, overload, unreached
        self.status = status


def body_of(content: bytes, expected: str, key: str | None) -> Any:
    """Parse the JSON of a response with status 200.

    Args:
        expected: kind of response, such as `chat completion`, for messages.
        key: API key, which is removed from messages.

    Raises:
        Failed: the response is an error; the error's code is used as the status if it is a valid one.
        ValueError, RecursionError: the response is not JSON.
    """
    body = json.loads(content)
    parts = body if isinstance(body, list) else [body]
    if isinstance(body, dict) and isinstance(choices := body.get("choices"), list):
        parts = [body, *choices]
    for part in (part for part in parts if isinstance(part, dict)):
        if error := part.get("object") == "error" or part.get("error"):
            error = error if isinstance(error, dict) else {**part, "message": part.get("message") or error}
            raise _error(error, expected, key)
    return body


def _error(error: Mapping[str, Any], expected: str, key: str | None) -> "Failed":
    kinds = [str(error[name]) for name in ("code", "status", "type", "error_type") if error.get(name)]
    status = next((int(kind) for kind in kinds if re.fullmatch("[45][0-9][0-9]", kind)), None)
    if status is None:
        named = (code for words, code in _CODES.items() if re.search(words, " ".join(kinds), re.IGNORECASE))
        status = next(named, None)
    words = ": ".join([*kinds[:1], str(error.get("message") or json.dumps(error))])
    return Failed.from_response(
        status, f"the response is not a {expected} but an error", words_of(words.encode(errors="replace"), key)
    )


def words_of(content: bytes, key: str | None) -> str:
    """Return 200 characters of an endpoint's response as one line, without the key; for an HTML page, its title."""
    text = content.decode(errors="replace").replace(key or "\0", "***")
    if title := re.search(r"<title[^>]*>(.+?)</title>", text, re.IGNORECASE | re.DOTALL):
        text = f"a page: {title[1]}"
    return " ".join(text.split())[:200]
