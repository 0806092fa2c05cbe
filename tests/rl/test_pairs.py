"""Preference pairs in both forms of a file; that engines read the same tokens is tested with TRL (tests/rl/trl)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.chat.template import names
from nemo_ext.rl.pairs import Pair, read_pairs, with_short_prompts
from nemo_ext.rl.prompts import Prompts


def said(role: str, content: str, **more: str) -> dict[str, str]:
    return {"role": role, "content": content, **more}


def pair(chosen: dict[str, Any], rejected: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Pair in NeMo-RL's form."""
    completions = [{"rank": rank, "completion": [side]} for rank, side in enumerate((chosen, rejected))]
    return {"context": [said("user", "2 + 2?")], "completions": completions, **more}


def as_trl(record: dict[str, Any]) -> dict[str, Any]:
    chosen, rejected = (given["completion"] for given in record["completions"])
    rest = {key: value for key, value in record.items() if key not in ("context", "completions")}
    return {"prompt": record["context"], "chosen": chosen, "rejected": rejected, **rest}


@pytest.mark.parametrize("form", [dict, as_trl])
def test_a_pair_is_read_by_the_template(form: Callable[..., Any], jsonl: Callable[..., Path]) -> None:
    path = jsonl("pairs.jsonl", [form(pair(said("assistant", "4"), said("assistant", "5")))])

    (read,) = read_pairs(path, Prompts.load("nemotron3_nano"))

    assert read.prompt.endswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think></think>")
    assert (read.chosen, read.rejected, read.rewards) == ("4<|im_end|>", "5<|im_end|>", None)


@pytest.mark.parametrize("form", [dict, as_trl])
def test_the_mode_comes_from_the_pair_or_its_responses(form: Callable[..., Any], jsonl: Callable[..., Path]) -> None:
    trace = {"reasoning_content": "hm"}
    plain, thought = (said("assistant", "4", **more) for more in ({}, trace))
    records = [
        form(pair(plain, plain)),
        form(pair(thought, plain)),
        form(pair(plain, plain, chat_template_kwargs={"enable_thinking": True})),
        form(pair(plain, plain, chat_template_kwargs={"enable_thinking": False})),
        form(pair(plain, plain, chat_template_kwargs=None, tools=None)),
    ]

    read = read_pairs(jsonl("pairs.jsonl", records), Prompts.load("llama_nemotron"))

    modes = ["thinking on" if "detailed thinking on" in made.prompt else "thinking off" for made in read]
    assert modes == ["thinking off", "thinking on", "thinking on", "thinking off", "thinking off"]
    assert (read[1].chosen, read[1].rejected) == (
        "<think>\nhm\n</think>\n\n4<|eot_id|>",
        "<think>\n\n</think>\n\n4<|eot_id|>",
    )


@pytest.mark.parametrize("template", names())
def test_tools_and_earlier_turns_are_in_the_prompt(template: str, jsonl: Callable[..., Path]) -> None:
    record = pair(said("assistant", "4"), said("assistant", "5"))
    record["context"] = [said("user", "earlier"), said("assistant", "yes"), said("user", "2 + 2?")]
    tool = {"type": "function", "function": {"name": "add_up", "parameters": {"type": "object", "properties": {}}}}
    record["tools"] = json.dumps([tool])

    (read,) = read_pairs(jsonl("pairs.jsonl", [record]), Prompts.load(template))

    assert all(text in read.prompt for text in ("earlier", "yes", "2 + 2?", "add_up"))
    assert read.chosen.replace("4", "5", 1) == read.rejected


def test_rendered_texts_are_unchanged(jsonl: Callable[..., Path]) -> None:
    record = {"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5", "chosen_score": 1, "rejected_score": 0.5}

    (read,) = read_pairs(jsonl("pairs.jsonl", [record]), Prompts.load("domyn"), with_rewards=True)

    assert read == Pair("2 + 2?", " 4", " 5", (1.0, 0.5))


def test_parquet_holds_the_same(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    records = [as_trl(pair(said("assistant", "4"), said("assistant", str(n)))) for n in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "pairs.parquet")

    prompts = Prompts.load("olmo3")

    assert read_pairs(tmp_path / "pairs.parquet", prompts) == read_pairs(jsonl("pairs.jsonl", records), prompts)
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(ValueError, match="is not a readable Parquet file"):
        read_pairs(tmp_path / "no.parquet", prompts)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"context": []}, "pairs.jsonl:1: expected a pair with"),
        (["a"], "pairs.jsonl:1: not a JSON object but a list"),
        (pair(said("assistant", "a"), said("assistant", "b")), "requires a numeric `reward`"),
        ({**pair(said("assistant", "a"), said("assistant", "b")), "completions": []}, "expected a pair with"),
        (as_trl(pair(said("assistant", "a"), said("assistant", "b"))), "requires a numeric `reward`"),
    ],
)
def test_a_malformed_pair_is_reported(jsonl: Callable[..., Path], record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pairs(jsonl("pairs.jsonl", [record]), None, with_rewards=True)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": [said("assistant", "b")], "rejected": []}, "pairs.jsonl:1: "),
        (as_trl(pair(said("narrator", "b"), said("assistant", "b"))), "pairs.jsonl:1: .*role"),
        (
            pair(said("assistant", "4"), said("assistant", "5"), chat_template_kwargs={"enable_thinking": "?"}),
            "thinking",
        ),
        (
            pair(
                *(said("assistant", "4", reasoning_content="hm") for _ in "ab"),
                chat_template_kwargs={"enable_thinking": False},
            ),
            "thinking is off, but its last turn has reasoning",
        ),
    ],
)
def test_conversations_that_a_template_cannot_render_are_reported(
    jsonl: Callable[..., Path], record: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_pairs(jsonl("pairs.jsonl", [record]), Prompts.load("llama_nemotron"))


def test_reasoning_on_one_side_is_refused_where_the_prompt_opens_a_trace(jsonl: Callable[..., Path]) -> None:
    path = jsonl("pairs.jsonl", [pair(said("assistant", "4", reasoning_content="hm"), said("assistant", "5"))])

    with pytest.raises(ValueError, match="does not start answers with its generation prompt"):
        read_pairs(path, Prompts.load("nemotron3_nano"))


def test_a_conversation_requires_a_template(jsonl: Callable[..., Path]) -> None:
    path = jsonl("pairs.jsonl", [as_trl(pair(said("assistant", "4"), said("assistant", "5")))])

    with pytest.raises(ValueError, match="set template="):
        read_pairs(path, None)


def test_a_file_without_pairs(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text("{\n")

    with pytest.raises(ValueError, match="no pairs"):
        read_pairs(tmp_path / "empty.jsonl", None)
    with pytest.raises(ValueError, match=r"broken\.jsonl:1: not JSON"):
        read_pairs(tmp_path / "broken.jsonl", None)
    with pytest.raises(ValueError, match="no such file"):
        read_pairs(tmp_path / "nowhere.jsonl", None)


def test_pairs_with_long_prompts_are_excluded(capsys: pytest.CaptureFixture[str]) -> None:
    def words(text: str, add_special_tokens: bool) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    pairs = [Pair(prompt="a " * count, chosen="c", rejected="r") for count in (1, 3, 5)]

    assert with_short_prompts(pairs, words, None) == pairs
    assert with_short_prompts(pairs, words, 3) == pairs[:2]
    assert "excluded 1 pairs with prompts of more than rl.lengths.prompt=3 tokens" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"all 3 pairs .* raise rl\.lengths\.prompt"):
        with_short_prompts(pairs, words, 0)
