from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.rl.nemo_rl.pairs import PairDataset, read_pairs
from nemo_ext.rl.prompts import Prompts


def said(role: str, content: str, **more: str) -> dict[str, str]:
    return {"role": role, "content": content, **more}


def pair(chosen: dict[str, Any], rejected: dict[str, Any], **more: Any) -> dict[str, Any]:
    completions = [{"rank": rank, "completion": [side]} for rank, side in enumerate((chosen, rejected))]
    return {"context": [said("user", "2 + 2?")], "completions": completions, **more}


def test_a_pair_is_read_by_the_template(jsonl: Callable[..., Path]) -> None:
    path = jsonl("pairs.jsonl", [pair(said("assistant", "4"), said("assistant", "5"))])

    (read,) = read_pairs(path, Prompts.load("nemotron3_nano"))

    assert read.prompt.endswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think></think>")
    assert (read.chosen, read.rejected, read.rewards) == ("4<|im_end|>", "5<|im_end|>", None)


def test_a_pair_becomes_tokens(jsonl: Callable[..., Path], tokenizer: Any) -> None:
    record = pair(said("assistant", "four"), said("assistant", "5"))
    for side, reward in zip(record["completions"], (1.5, -2), strict=True):
        side["reward"] = reward
    path = jsonl("pairs.jsonl", [record])

    dataset = PairDataset(read_pairs(path, None, with_rewards=True), tokenizer, max_length=10)

    datum = dataset[0]
    assert datum["rewards"] == (1.5, -2.0)
    assert [tokenizer.decode(message["token_ids"]) for message in datum["message_log_chosen"]] == ["2 + 2?", "four"]
    assert (datum["length_chosen"], datum["length_rejected"], datum["loss_multiplier"]) == (10, 7, 1.0)
    assert PairDataset(dataset.pairs, tokenizer, max_length=9)[0]["loss_multiplier"] == 0.0


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"context": []}, "pairs.jsonl:1: a pair is"),
        (pair(said("assistant", "a"), said("assistant", "b")), "needs a number as `reward`"),
        ({**pair(said("assistant", "a"), said("assistant", "b")), "completions": []}, "a pair is"),
    ],
)
def test_a_wrong_pair_is_named(jsonl: Callable[..., Path], record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pairs(jsonl("pairs.jsonl", [record]), None, with_rewards=True)


def test_reasoning_on_one_side_alone_is_refused(jsonl: Callable[..., Path]) -> None:
    path = jsonl("pairs.jsonl", [pair(said("assistant", "4", reasoning_content="hm"), said("assistant", "5"))])

    with pytest.raises(ValueError, match="their prompts differ"):
        read_pairs(path, Prompts.load("nemotron3_nano"))


def test_a_file_without_pairs(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")

    with pytest.raises(ValueError, match="no pairs"):
        read_pairs(tmp_path / "empty.jsonl", None)
    with pytest.raises(ValueError, match="no such file"):
        read_pairs(tmp_path / "nowhere.jsonl", None)
