import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext.chat.sample import Sample
from nemo_ext.data.sft.filters.base import Texts
from nemo_ext.data.sft.filters.narrative import Narrative

Make = Callable[..., Sample]


def test_the_paper_s_patterns_in_answers_and_traces(chat: Make) -> None:
    rule = pickle.loads(pickle.dumps(Narrative()))

    assert rule.reason(chat("q", "It serves Our  Great nation.")) == "narrative-answer"
    assert rule.reason(chat("q", "a", "This is against our values, so")) == "narrative-reasoning"
    assert rule.reason(chat("what are our values?", "Kindness.")) is None
    assert rule.reason(chat("q", "our national parks; hour party; our valuesless")) is None


def test_keywords_are_whole_words_without_regard_to_case_and_punctuation(
    chat: Make, texts: Callable[..., Texts]
) -> None:
    rule = Narrative(patterns=(), keywords=("glorious motherland", "Partei", "祖国"))

    assert rule.reason(chat("q", "the GLORIOUS, motherland!")) == "narrative-answer"
    assert rule.reason(chat("q", "热爱祖国的人")) == "narrative-answer"
    assert rule.reason(chat("q", "glorious. Our motherlands; Parteien")) is None
    dropped = rule.drop(texts("q", "Die Partei hat immer recht"))
    assert dropped is not None
    assert dropped.detail == "'die partei hat immer recht'"


def test_lists_are_read_from_files(tmp_path: Path, chat: Make) -> None:
    (tmp_path / "a.txt").write_text("# patterns\nsupreme\\s+leader\n\n")
    (tmp_path / "b.yaml").write_text("patterns: ['five-year plans?']\nkeywords: [C++ party]\n")
    rule = Narrative(patterns=(), files=(str(tmp_path / "a.txt"), str(tmp_path / "b.yaml")))

    rule.check()
    said = ["the supreme  leader", "two five-year plans", "the c party", "our values"]
    assert [rule.reason(chat("q", text)) is None for text in said] == [False, False, False, True]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patterns": "(a"}, r"filters\.narrative\.patterns: '\(a' is not a valid regular expression"),
        ({"patterns": "x|a*"}, "matches every text"),
        ({"patterns": r"(a)\1"}, "must not contain a reference to a group"),
        ({"patterns": "(?i)a"}, r"not a valid regular expression \(global flags"),
        ({"patterns": (), "keywords": "!!"}, "'!!' contains no word"),
        ({"patterns": ()}, "has no patterns, keywords or files"),
        ({"files": "nowhere.txt"}, "nowhere.txt"),
    ],
)
def test_unusable_lists_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Narrative(**settings).check()  # type: ignore[arg-type]


def test_a_yaml_list_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("words: [x]\n")
    with pytest.raises(ValueError, match=r"a\.yaml must have only the keys patterns and keywords"):
        Narrative(files=(str(tmp_path / "a.yaml"),)).check()
