"""Prompts without a correct answer; rewards come only from a judge that compares a group's responses.

Nemotron 3 Nano, section 3.3.2. The judge and the length control are configured in `rl.group`.
"""

from collections.abc import Mapping
from typing import Any

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import check_keys
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict


def check(reference: Mapping[str, Any]) -> None:
    """Check that the reference is empty.

    Raises:
        ValueError: the reference has a key.
    """
    check_keys(reference, (), required=(), where="reference")


def verify(response: Response, reference: None) -> Verdict:
    """Return the verdict `correct` if there is an answer; the reward comes from comparing the group's responses."""
    return Verdict.correct() if response.answer.strip() else Verdict.wrong("no answer")


def environment() -> Environment:
    """Create the environment `chat`, for prompts without a correct answer."""
    return Environment(name="chat", check=check, verify=verify, judged_in_groups=True)
