"""Length penalties, and the mask for overlong filtering. Lengths are numbers of generated tokens."""

from collections.abc import Iterable

from nemo_ext.chat.response import Response


def linear_length_penalty(tokens: int, *, max_tokens: int = 8192, at_max: float = -0.25) -> float:
    """Return a penalty that falls linearly from 0 at no tokens to `at_max` at `max_tokens`, and stays there.

    Domyn-Small, section 4.2: "decreasing linearly from 0 to -0.25 at the 8,192-token maximum response length".

    Raises:
        ValueError: `tokens` is negative, or `max_tokens` is not positive.
    """
    _check(tokens, max_tokens)
    return at_max * min(tokens / max_tokens, 1.0)


def overlong_penalty(tokens: int, *, max_tokens: int, buffer_tokens: int, at_max: float = -1.0) -> float:
    """Return DAPO's soft overlong penalty: 0 up to `max_tokens - buffer_tokens`, then linear to `at_max`.

    It reaches `at_max` at `max_tokens` and stays there.

    DAPO (arXiv 2503.14476), section 3.4, with L_max = `max_tokens` (20 480 there) and L_cache = `buffer_tokens` (4096).

    Raises:
        ValueError: `tokens` is negative, or the buffer is empty or longer than `max_tokens`.
    """
    _check(tokens, max_tokens)
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must be from 1 to max_tokens={max_tokens}, not {buffer_tokens}")
    return at_max * min(max(tokens - (max_tokens - buffer_tokens), 0) / buffer_tokens, 1.0)


def overlong_mask(responses: Iterable[Response]) -> list[bool]:
    """Return False for each response truncated at the length limit, which overlong filtering excludes from the loss.

    DAPO (arXiv 2503.14476), section 3.4; Nemotron 3 Nano, section 3.2.5. The rewards of these responses still count
    towards the group's baseline, as in NeMo-RL's `overlong_filtering`.
    """
    return [response.finished for response in responses]


def _check(tokens: int, max_tokens: int) -> None:
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, not {tokens}")
    if max_tokens <= 0:
        raise ValueError(f"max_tokens must be positive, not {max_tokens}")
