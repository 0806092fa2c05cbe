"""Our marks of malformed responses in NeMo-RL's own penalties, and the share of replayed routes."""

from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_ext.chat.template import end_tokens
from nemo_ext.rl.nemo_rl.guards import penalised, replayed

pytestmark = pytest.mark.nemo_rl


@pytest.fixture
def guarding(nemo_rl: ModuleType) -> ModuleType:
    if not hasattr(nemo_rl, "_apply_message_level_advantage_penalties"):
        pytest.skip("this NeMo-RL has no penalties")
    return nemo_rl


def message(tokenizer: Any, role: str, text: str) -> dict[str, Any]:
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    made = {"role": role, "content": tokenizer.decode(ids, skip_special_tokens=True), "token_ids": ids}
    return made | ({"generation_logprobs": torch.zeros(len(ids))} if role == "assistant" else {})


def test_malformed_turns_get_the_penalties_and_their_shares_are_counted(guarding: ModuleType, tokenizer: Any) -> None:
    end, opened = "<|im_end|>", "<|im_start|>assistant\n<think>\n"
    turns = [
        [f"so</think>2{end}", f"so</think>so</think>3{end}"],  # the second turn has malformed thinking
        [f"so</think><tool_call>{{</tool_call>{end}"],
        ["so</think>so</think>and so on, cut off"],
    ]
    logs = [
        [message(tokenizer, role, text) for turn in row for role, text in (("user", opened), ("assistant", turn))]
        for row in turns
    ]
    width = max(sum(len(each["token_ids"]) for each in log) for log in logs)
    train_data = {"advantages": torch.tensor([[0.5], [0.25], [0.125]]).expand(3, width)}

    with penalised({"thinking": -2.0, "tool_call": -3.0}, tokenizer, end_tokens(tokenizer)):
        metrics = guarding._apply_configured_message_level_advantage_penalties(train_data, logs, None)

    spans = [
        row[: sum(len(each["token_ids"]) for each in log)]
        for row, log in zip(train_data["advantages"], logs, strict=True)
    ]
    lengths = [[len(each["token_ids"]) for each in log] for log in logs]
    first, second, third = (torch.split(span, sizes) for span, sizes in zip(spans, lengths, strict=True))
    assert [part.unique().tolist() for part in first] == [[0.5], [0.5], [0.5], [-2.0]]
    assert [part.unique().tolist() for part in second] == [[0.25], [-3.0]]
    assert [part.unique().tolist() for part in third] == [[0.125], [0.125]]
    assert metrics["malformed_thinking_rate"] == metrics["invalid_tool_call_rate"] == 0.25


def test_faults_without_a_penalty_and_second_faults_of_a_turn_are_counted(guarding: ModuleType, tokenizer: Any) -> None:
    end = "<|im_end|>"
    turns = (f"so</think>so</think><tool_call>{{</tool_call>{end}", f"so</think>so</think>3{end}", f"so</think>4{end}")
    logs = [
        [message(tokenizer, "user", "<|im_start|>assistant\n<think>\n"), message(tokenizer, "assistant", turn)]
        for turn in turns
    ]
    for log in logs:  # as NeMo-RL's loops do
        log[0]["generation_logprobs"] = torch.zeros(len(log[0]["token_ids"]))
    train_data = {"advantages": torch.zeros(3, max(sum(len(part["token_ids"]) for part in log) for log in logs))}

    with penalised({"tool_call": -3.0}, tokenizer, end_tokens(tokenizer)):
        metrics = guarding._apply_configured_message_level_advantage_penalties(train_data, logs, None)

    assert metrics["malformed_thinking_rate"] == 2 / 3 and metrics["invalid_tool_call_rate"] == 1 / 3
    assert train_data["advantages"].amin(dim=1).tolist() == [-3.0, 0.0, 0.0]


def test_the_share_of_replayed_routes_is_that_of_generated_tokens(guarding: ModuleType) -> None:
    routes = torch.tensor([[-1, 3, 3, -1], [-1, 2, 2, 2]])[:, :, None, None].expand(2, 4, 6, 2)
    messages = {"routed_experts": routes, "token_loss_mask": torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]])}

    with replayed() as shares:
        guarding._preserve_router_replay_routed_experts(target := {}, messages, {"router_replay": {"enabled": True}})
        assert shares == {"replayed_routes": 0.75} and target["routed_experts"] is routes
