import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_ext.chat.sample import Sample
from nemo_ext.data.sft.filters.base import Texts
from nemo_ext.data.sft.filters.decontamination import Decontamination
from nemo_ext.data.text.test_sets import index_of
from nemo_ext.job.settings import checked

Make = Callable[..., Sample]
Prose = Callable[..., str]


def rule_for(path: Path, items: list[dict[str, Any]], **settings: Any) -> Decontamination:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    config = {"test_sets": [{"name": "bench", "path": str(path)}], **settings}
    rule = checked(Decontamination, config, where="filters.decontamination")
    rule.check()
    return rule


def test_an_item_in_any_text_is_found_and_named(tmp_path: Path, texts: Callable[..., Texts], prose: Prose) -> None:
    items = [{"question": prose(40, seed)} for seed in range(5)]
    rule = rule_for(tmp_path / "a.jsonl", items)
    part = " ".join(items[3]["question"].upper().split()[10:23])

    for args in ((f"Please: {part}.", "a"), ("q", f"as in ({part})"), ("q", "a", part)):
        dropped = pickle.loads(pickle.dumps(rule)).drop(texts(*args))
        assert dropped is not None
        assert dropped == ("benchmark", "bench a.jsonl:4")
    assert rule.drop(texts(part.rsplit(" ", 1)[0], "a")) is None
    words = part.split()
    assert rule.drop(texts(" ".join(words[:7]), " ".join(words[7:]))) is None  # not across messages


def test_the_share_of_an_item_can_be_set(tmp_path: Path, chat: Make, prose: Prose) -> None:
    item = prose(27)  # 20 n-grams of 8 words
    rule = rule_for(tmp_path / "a.jsonl", [{"text": item}], ngram=8, share=0.5)

    assert rule.reason(chat(" ".join(item.split()[:16]))) is None  # 9 of them
    assert rule.reason(chat(" ".join(item.split()[:17]))) == "benchmark"


def test_short_items_must_match_whole(tmp_path: Path, chat: Make) -> None:
    rule = rule_for(
        tmp_path / "a.jsonl",
        [
            {"question": "Who wrote the novel Dracula?"},
            {"question": "Who wrote the novel Emma then?"},
            {"question": "Why?"},
        ],
    )

    assert rule.reason(chat("Tell me, who wrote the novel 'Dracula', and when?")) == "benchmark"
    assert rule.reason(chat("Who wrote the novel Emma?")) is None
    assert rule.reason(chat("q", "One asks who wrote the novel Emma then")) == "benchmark"
    assert rule.reason(chat("Who wrote the novel")) is None
    assert rule.reason(chat("why")) == "benchmark"
    assert rule.reason(chat("But why?", "Why?")) is None


def test_ngrams_shared_by_many_items_are_ignored(tmp_path: Path, chat: Make, prose: Prose) -> None:
    asked = "Answer the following multiple choice question with one of the letters A B C or D"
    items = [{"question": f"{asked} {prose(20, seed)}"} for seed in range(12)]
    rule = rule_for(tmp_path / "a.jsonl", items)

    assert index_of(rule).report.skipped == {"common n-gram": 4}
    assert rule.reason(chat(f"{asked}: is it so?")) is None
    assert rule.reason(chat(items[7]["question"])) == "benchmark"
    assert rule_for(tmp_path / "b.jsonl", items, common=12).reason(chat(f"{asked}: is it so?")) == "benchmark"


def test_text_files_parquet_and_keys(tmp_path: Path, chat: Make, prose: Prose) -> None:
    (tmp_path / "a.txt").write_text(f"{prose(20, 1)}\n\n{prose(20, 2)}\n")
    pq.write_table(
        pa.Table.from_pylist([{"id": 1, "stem": prose(20, 3), "choices": [prose(20, 4), "no"]}]), tmp_path / "b.parquet"
    )
    rule = checked(
        Decontamination,
        {
            "test_sets": [
                {"name": "t", "path": str(tmp_path / "*.txt")},
                {"name": "p", "path": str(tmp_path / "b.parquet"), "keys": ["stem", "choices"]},
            ]
        },
        where="x",
    )

    hits = [rule.drop(Texts(chat(prose(20, seed)))) for seed in range(6)]

    assert [hit and hit.detail for hit in hits] == [
        None,
        "t a.txt:1",
        "t a.txt:3",
        "p b.parquet:1",
        "p b.parquet:1",
        None,
    ]


def test_unusable_test_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bench: .*a\.jsonl:1 has none of the usual keys; set `keys` to .*: stem"):
        rule_for(tmp_path / "a.jsonl", [{"stem": "x"}])
    with pytest.raises(ValueError, match=r"decontamination\.test_sets have no items"):
        rule_for(tmp_path / "b.jsonl", [])
    with pytest.raises(ValueError, match=r"unknown key 'test_sets.0.pth': did you mean 'path'"):
        checked(Decontamination, {"test_sets": [{"name": "x", "pth": "y"}]}, where="f")
    with pytest.raises(ValueError, match="min_words=9 must be at most ngram=8"):
        rule_for(tmp_path / "a.jsonl", [{"text": "x"}], ngram=8, min_words=9)
