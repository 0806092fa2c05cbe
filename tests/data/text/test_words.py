import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.text import words as module
from nemo_ext.data.text.words import Words, ngram_hashes, word_hashes, words_of

ANY = st.text(st.sampled_from("aAbß_1 .,-é大小ไ\u0301\n\ufb01"), max_size=40)


def test_words_are_lower_case_and_single_characters_in_scripts_without_spaces() -> None:
    assert words_of("The x_1, isn't - 3.5!") == ["the", "x_1", "isn", "t", "3", "5"]
    assert words_of("Größe ＡＢ ﬁn 大小abc") == ["grösse", "ab", "fin", "大", "小", "abc"]


@given(ANY, ANY)
def test_hashes_are_equal_where_words_are(first: str, second: str) -> None:
    words = words_of(first) + words_of(second)
    hashes = [*word_hashes(first).tolist(), *word_hashes(second).tolist()]

    assert len(hashes) == len(words)
    assert len(set(zip(words, hashes, strict=True))) == len(set(words)) == len(set(hashes))


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=20), st.integers(1, 5))
def test_ngram_hashes_are_equal_where_ngrams_are(words: list[str], length: int) -> None:
    hashes = ngram_hashes(word_hashes(" ".join(words)), length).tolist()

    grams = [tuple(words[place : place + length]) for place in range(len(words) - length + 1)]
    assert len(hashes) == len(grams)
    assert len(set(zip(grams, hashes, strict=True))) == len(set(grams)) == len(set(hashes))


@given(st.lists(ANY, max_size=4), st.integers(1, 3), st.data())
def test_ngrams_of_several_texts_equal_those_of_single_texts(
    texts: list[str], length: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(texts))), unique=True).map(sorted)) if texts else []
    words = Words(texts)

    grams, places = words.ngrams(length, texts=chosen)

    expected = [ngram_hashes(word_hashes(texts[index]), length).tolist() for index in chosen]
    assert grams.tolist() == [gram for text_grams in expected for gram in text_grams]
    assert all(
        words.hashes[place] == word_hashes(texts[index])[number]
        for place, (index, number) in zip(
            places.tolist(),
            [(index, number) for index, own in zip(chosen, expected, strict=True) for number in range(len(own))],
            strict=True,
        )
    )
    assert all(words.hashes_of(index).tolist() == word_hashes(text).tolist() for index, text in enumerate(texts))


def test_a_long_text_is_hashed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ein langer größerer text " * 50
    whole = word_hashes(text)

    monkeypatch.setattr(module, "_CHUNK", 7)

    assert word_hashes(text).tolist() == whole.tolist()
    assert word_hashes(text.replace("ö", "o")).tolist() == word_hashes(text.replace("ö", "o")[:-1]).tolist()


def test_hashes_are_the_same_in_every_process() -> None:
    code = "from nemo_ext.data.text.words import word_hashes; print(word_hashes('a Große model').tolist())"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert there.stdout == f"{word_hashes('a Große model').tolist()}\n"
