"""Verdicts of environments that verify single responses."""

import asyncio
from typing import Any, cast

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict


def verdict_on(environment: Environment, given: str | Response, reference: Any) -> Verdict:
    """The environment's verdict on a response, or its text, to a task with this reference."""
    assert environment.verify is not None
    response = parse_response(given) if isinstance(given, str) else given
    found = environment.verify(response, environment.check(reference))
    return found if isinstance(found, Verdict) else asyncio.run(cast(Any, found))
