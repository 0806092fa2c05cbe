"""Penalties for malformed responses, and the share of replayed routes, in NeMo-RL's GRPO loops.

NeMo-RL has these only for responses from NeMo Gym: its environment marks malformed messages, and its rollouts log
missing routes. Here functions of its GRPO module (0.7 and main, sync and async) are replaced during a run: our parsers
mark the messages, and NeMo-RL's own function sets the advantages.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from nemo_ext.chat.response import OPEN
from nemo_ext.chat.tool_calls import Style
from nemo_ext.job.settings import checked
from nemo_ext.rl.algorithms import Penalties
from nemo_ext.rl.nemo_rl import compat
from nemo_ext.rl.rewards.format import malformed

_RATES = {"malformed_thinking_rate": "has_malformed_thinking", "invalid_tool_call_rate": "is_invalid_tool_call"}
"""Mapping from NeMo-RL's metrics to its flags of turns."""


@contextlib.contextmanager
def penalised(
    settings: Mapping[str, Any], tokenizer: Any, ends: frozenset[int], style: Style = "any"
) -> Iterator[None]:
    """Context in which the tokens of malformed responses get the advantages of `Penalties`.

    The rates in NeMo-RL's metrics are the shares of turns with each fault, penalised or not.

    Args:
        ends: token ids that end a response.
        style: format of tool calls.

    Raises:
        ValueError: a setting is invalid, or this NeMo-RL has no penalties.
    """
    penalties, module = checked(Penalties, settings, "penalties"), compat.algorithm("grpo")
    apply = compat.part(module, "_apply_message_level_advantage_penalties")
    name = "_apply_configured_message_level_advantage_penalties"
    compat.part(module, name)

    def penalise(train_data: Any, message_logs: Sequence[Any], master_config: Any, *rest: Any, **named: Any) -> Any:
        for log in message_logs:
            mark(log, tokenizer, ends, style)
        metrics = apply(train_data, message_logs, penalties.tool_call, penalties.thinking)
        # NeMo-RL counts only penalised faults, and only one in a turn with both.
        messages = [message for log in message_logs for message in log if message["role"] == "assistant"]
        turns = [message for message in messages if "generation_logprobs" in message]
        for rate, flag in _RATES.items():
            metrics[rate] = sum(bool(turn.get(flag)) for turn in turns) / max(1, len(turns))
        return metrics

    with patch.object(module, name, penalise):
        yield


def mark(log: Sequence[dict[str, Any]], tokenizer: Any, ends: frozenset[int], style: Style) -> None:
    """Set NeMo-RL's flags of malformed responses in a conversation's messages, in place."""
    for before, message in pairwise(log):
        tokens = message["token_ids"].tolist()
        if message["role"] != "assistant" or not tokens or tokens[-1] not in ends:
            continue
        # The message's content has no special tokens, but tags may be special.
        text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        opened = tokenizer.decode(before["token_ids"], skip_special_tokens=False).rstrip().endswith(OPEN)
        thinking, calls = malformed(text, opened=opened, style=style)
        message |= {"has_malformed_thinking": thinking, "is_invalid_tool_call": calls}


@contextlib.contextmanager
def replayed() -> Iterator[dict[str, float]]:
    """Context that measures routing replay.

    Yields:
        Metrics of the newest batch: `replayed_routes`, the share of generated tokens with known experts. vLLM returns
        none for some tokens (prefix caching with chunked prefill), and Megatron's routers then select them.
    """
    module, shares = compat.algorithm("grpo"), dict[str, float]()
    name = "_preserve_router_replay_routed_experts"
    preserve = compat.part(module, name)

    def measured(target: Any, flat_messages: Any, policy_config: Any) -> None:
        preserve(target, flat_messages, policy_config)
        if "routed_experts" in target:
            generated = flat_messages["token_loss_mask"].bool()
            missing = (target["routed_experts"] < 0).flatten(2).all(dim=-1)
            shares["replayed_routes"] = 1 - float(missing[generated].double().mean())

    with patch.object(module, name, measured):
        yield shares
