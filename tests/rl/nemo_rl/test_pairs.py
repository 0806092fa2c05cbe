from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_ext.rl.nemo_rl.data import PairDataset
from nemo_ext.rl.pairs import read_pairs


def test_a_pair_becomes_tokens(jsonl: Callable[..., Path], tokenizer: Any) -> None:
    completions = [
        {"rank": rank, "completion": [{"role": "assistant", "content": content}], "reward": reward}
        for rank, content, reward in ((0, "four", 1.5), (1, "5", -2))
    ]
    record = {"context": [{"role": "user", "content": "2 + 2?"}], "completions": completions}
    path = jsonl("pairs.jsonl", [record])

    dataset = PairDataset(read_pairs(path, None, with_rewards=True), tokenizer, max_length=10)

    datum = dataset[0]
    assert datum["rewards"] == (1.5, -2.0)
    assert [tokenizer.decode(message["token_ids"]) for message in datum["message_log_chosen"]] == ["2 + 2?", "four"]
    assert (datum["length_chosen"], datum["length_rejected"], datum["loss_multiplier"]) == (10, 7, 1.0)
    assert PairDataset(dataset.pairs, tokenizer, max_length=9)[0]["loss_multiplier"] == 0.0
