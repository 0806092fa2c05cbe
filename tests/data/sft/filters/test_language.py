import pickle
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.sample import Sample
from nemo_ext.data.sft.filters.base import Texts
from nemo_ext.data.sft.filters.language import _NOT_ASCII_PROSE, _NOT_PROSE, Language

Make = Callable[..., Sample]

PROSE = {
    "en": "The weather is nice today and we are going to the park to walk with our friends before lunch at home.",
    "it": "Oggi il tempo è bello e andiamo a passeggiare al parco con i nostri amici prima di pranzare a casa.",
    "de": "Das Wetter ist heute schön und wir gehen mit unseren Freunden im Park spazieren, bevor wir zu Mittag essen.",
    "fr": "Il fait beau aujourd'hui et nous allons nous promener au parc avec nos amis avant de déjeuner à la maison.",
    "es": "Hoy hace buen tiempo y vamos a pasear por el parque con nuestros amigos antes de comer en nuestra casa.",
    "nl": "Het weer is mooi vandaag en we gaan met onze vrienden in het park wandelen voordat we thuis lunchen.",
    "ru": "Сегодня хорошая погода, и мы идём гулять в парк с друзьями, а потом мы все вместе пообедаем дома.",
    "ar": "الطقس جميل اليوم ونحن ذاهبون إلى الحديقة للتنزه مع أصدقائنا قبل تناول الغداء في المنزل.",
    "zh": "今天天气很好，我们一起去公园散步，然后回家吃饭，晚上再看一部电影，大家都很高兴。",
    "ja": "今日は天気がとても良いので、友達と一緒に公園へ散歩に行きました。その後、家に帰って昼ご飯を食べました。",
    "ko": "오늘은 날씨가 아주 좋아서 친구들과 함께 공원에 산책하러 갔습니다. 그 다음에 점심을 먹었습니다.",
}


def test_a_text_is_kept_only_in_its_language(chat: Make) -> None:
    for language, text in PROSE.items():
        assert Language(languages=language).reason(chat("q", text)) is None, language
        others = tuple(set(PROSE) - {language})
        assert Language(languages=others).reason(chat("q", text)) == "language-answer", language


def test_prompts_answers_and_traces_are_judged_separately(chat: Make, texts: Callable[..., Texts]) -> None:
    rule = pickle.loads(pickle.dumps(Language(languages=("en", "it"))))

    assert rule.reason(chat(PROSE["de"], PROSE["en"])) == "language-prompt"
    assert rule.reason(chat(PROSE["it"], PROSE["en"], PROSE["de"])) == "language-reasoning"
    dropped = rule.drop(texts(PROSE["it"], PROSE["de"]))
    assert dropped is not None
    assert dropped.detail.startswith("de, not en/it: 'Das Wetter")


def test_languages_of_a_source_or_sample_override_the_list(chat: Make) -> None:
    rule = Language(languages=("en",), by_source={"germans": ("de",)})

    assert rule.reason(chat("q", PROSE["de"], source="germans")) is None
    assert rule.reason(chat("q", PROSE["en"], source="germans")) == "language-answer"
    assert rule.reason(chat("q", PROSE["fr"], language="fr", source="germans")) is None
    assert rule.reason(chat("q", PROSE["en"], language="fr")) == "language-answer"
    assert rule.reason(chat("q", PROSE["en"], language="en-GB")) is None
    assert rule.reason(chat("q", PROSE["en"], language="english")) == "language-code"
    assert Language(declared=False).reason(chat("q", PROSE["en"], language="fr")) is None


def test_code_formulas_and_short_texts_are_not_judged(chat: Make) -> None:
    rule = Language(languages=("zh",))
    code = "```python\n# the weather is nice and we are going to the park\nfor x in range(10):\n    print(x)\n```"

    assert rule.reason(chat("q", PROSE["zh"] + code * 5)) is None
    assert rule.reason(chat("q", "$\\text{the weather is nice and we are going to the park today with you}$")) is None
    assert rule.reason(chat("q", "The end is near.")) is None
    assert rule.reason(chat("q", "Purohit <purohit.e@x.com>, Vedarth Sharma, Guillaume Granger\n" * 5)) is None
    assert rule.reason(chat("q", "https://example.com/the/weather/is/nice/and/we/are/going/to/the/park/today")) is None


def test_the_majority_of_a_long_text_s_excerpts_decides(chat: Make) -> None:
    rule = Language(languages=("en",))
    english, german = PROSE["en"] * 30, PROSE["de"] * 30

    assert rule.reason(chat("q", german + english + english)) is None
    assert rule.reason(chat("q", english + german + german)) == "language-answer"


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"filters\.language\.by_source\.s: unknown language 'xq'; "):
        Language(by_source={"s": ("xq",)}).check()


@given(st.text(st.sampled_from("`$\\[]()<>{}/.@+-_=:ahtpsZA09 \n\t\x1c"), max_size=60))
def test_the_ascii_pattern_removes_the_same_text(text: str) -> None:
    assert _NOT_ASCII_PROSE.sub("~", text) == _NOT_PROSE.sub("~", text)


@given(st.text(st.sampled_from("`$\\[]()<>{}/.@+-_=:ahtpsZA09é \n"), max_size=60))
def test_the_quick_check_does_not_change_the_removed_text(text: str) -> None:
    guard = "(?!(?<=[a-z])[a-z])"
    assert guard in _NOT_PROSE.pattern
    plain = re.compile(_NOT_PROSE.pattern.replace(guard, ""), re.DOTALL)

    assert _NOT_PROSE.sub("~", text) == plain.sub("~", text)
