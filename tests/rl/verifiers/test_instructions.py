"""Rules that a program can check."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.environments import make
from nemo_ext.rl.verifiers.instruction_rules import RULES, language_of, sentences, words
from nemo_ext.rl.verifiers.instructions import MAX_CHARACTERS, MOST, check, verify
from tests.json_lines import read_jsonl
from tests.rl.gym_data import gym_data
from tests.rl.verdicts import verdict_on

# For each rule: parameters, an answer that follows it, and answers that do not.
CASES: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("keywords:existence", {"keywords": ["sea", "C++"]}, "The Sea is c++.", ["The sea is C."]),
    (
        "keywords:frequency",
        {"keyword": "tea", "frequency": 2, "relation": "at least"},
        "Tea and more tea.",
        ["One tea."],
    ),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "less than"}, "One tea.", ["Tea tea."]),
    ("keywords:forbidden_words", {"forbidden_words": ["art"]}, "A party.", ["This is art."]),
    (
        "keywords:letter_frequency",
        {"letter": "z", "let_frequency": 2, "let_relation": "at least"},
        "Zigzag",
        ["Zen"],
    ),
    (
        "language:response_language",
        {"language": "it"},
        "La vita è bella e il sole splende sul mare.",
        ["Life is beautiful and the sun shines on the sea.", "12 + 3"],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", ["Dr. No is."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", ["a", "a\n***\n***\nb"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", ["and three words"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\nThen, second.",
        ["First.\n\nAnd then.", "Then.", "a\n\nthen\n\nb"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", ["[a]", "[a\n] [b]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Text\nP.S. more", ["Text", "P.S.", "map.s. x"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Text\nP.P.S more", ["Text P.S. more"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", ["* a", "* a\n* b\n* c", "**a**\n* b"]),
    (
        "detectable_format:constrained_response",
        {},
        "My answer is no.",
        ["No.", "My answer is yes. My answer is no. My answer is maybe."],
    ),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", ["*a*", "** ** * *"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        ["Section 1", "Section Section"],
    ),
    (
        "detectable_format:json_format",
        {},
        '```json\n{"a": 1}\n```',
        ["{a: 1}", "7", '{"a": NaN}', "[" * 50_000 + "1", "1" * 5000],
    ),
    ("detectable_format:title", {}, "<<A title>>\ntext", ["<A title>", "<< >> a", "<<a\nb>>"]),
    ("combination:two_responses", {}, "one\n******\ntwo", ["one", "one ****** one", "a ****** b ****** c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why?"}, "Why? Because.", ["Why?", "Because. Why?"]),
    ("startend:end_checker", {"end_phrase": "The end."}, "So it was. the end.", ["The end. Or not"]),
    ("startend:quotation", {}, '"all of it"', ['"all" of it', '"']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NASA and ESA",
        ["NASA and Esa"],
    ),
    (
        "change_case:english_capital",
        {},
        "THE SUN SHINES ON THE SEA TODAY",
        ["The sun", "DIE SONNE SCHEINT HEUTE IMMER"],
    ),
    (
        "change_case:english_lowercase",
        {},
        "the sun shines on the sea today",
        ["The sun", "die sonne scheint heute oft"],
    ),
    ("punctuation:no_comma", {}, "no comma", ["a, b"]),
    (
        "copy:repeat_phrase",
        {"phrase": "Time flies when having fun", "small_n": 2},
        "Time runs when having fun. Time flies while having fun.",
        ["Time runs when having fun.", "Time flies when having fun. Time flies when having fun."],
    ),
    ("copy:copy", {"prompt_to_repeat": "Say it."}, "say it.", ["Say it. It."]),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "bcd", ["abcd", "b"]),
    ("detectable_format:sentence_hyphens", {}, "One is.-Two is.", ["One is. Two is.", "One.- Two.", "One"]),
    ("keywords:no_adjacent_consecutive", {}, "a cat ran", ["a bat"]),
    ("detectable_format:square_brackets", {}, "[every] [word]", ["[every] word", "[] []", "[a b]"]),
    ("keywords:word_once", {"keyword": "sun"}, "The sun.", ["The sun and the sun.", "The moon."]),
    (
        "keywords:word_count_different_numbers",
        {"keyword": "tea", "frequency": 2, "relation": "at least"},
        "tea tea",
        ["tea"],
    ),
    ("keywords:exclude_word_harder", {"keyword": "sun", "instruction": "x"}, "Sunday", ["The sun."]),
    ("paragraphs:paragraphs", {}, "a *** b", ["a", "a *** b *** c"]),
    ("paragraphs:paragraphs2", {}, "a\n\nb", ["a\nb"]),
    ("first_word:first_word_sent", {"first_word": "we"}, "We go. We stay.", ["We go. They stay."]),
    ("first_word:first_word_answer", {"first_word": "we"}, '"We go."', ["They go. We stay."]),
    ("last_word:last_word_sent", {"last_word": "now"}, "Go now. Stay now!", ["Go now. Stay."]),
    ("last_word:last_word_answer", {"last_word": "now"}, "Stay. Go now.", ["Now go."]),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>", ["I am", "<<I am>> at home", "home"]),
    ("copy:copying_simple", {"prompt_to_repeat": "Say it."}, "Say it.", ["It."]),
    ("copy:copying_multiple", {"prompt_to_repeat": "Say it.", "N": 2}, "Say it.\n******\nSay it.", ["Say it."]),
    ("punctuation:punctuation_dot", {}, "no dot", ["dot."]),
    ("punctuation:punctuation_exclamation", {}, "no mark.", ["mark!"]),
    ("count:lowercase_counting", {"N": 1}, "ONE is TWO", ["this is it"]),
    ("letters:letter_counting", {"N": 3, "relation": "less than"}, "ab 1234", ["abc"]),
    ("letters:letter_counting2", {"letter": "a", "let_frequency": 2, "let_relation": "less than"}, "a", ["aa"]),
    (
        "count:counting_composition",
        {"n_sent": 1, "n_words": 2},
        "One two.\n* * *\nThree four.\n***\nFive six.",
        ["One two.", "One two.\n***\nThree.\n***\nFive six."],
    ),
    ("count:count_unique", {}, "each word differs", ["The word the"]),
    (
        "count:count_increment_word",
        {"keyword1": "sun", "keyword2": "sea"},
        "sun sea sea",
        ["sun sea", "sun sun sea sea"],
    ),
    ("keywords:palindrome", {}, "A level road", ["a I road"]),
    ("keywords:keyword_specific_position", {"keyword": "sea", "n": 2, "m": 1}, "Go. Sea ahead.", ["Sea ahead."]),
    ("keywords:start_end", {}, "Stop and then stop", ["Stop and then stop.", "Stop"]),
]


def outcome(answer: str, *instructions: tuple[str, dict[str, Any]]) -> str:
    reference = check({"instructions": [{"id": name, "kwargs": kwargs} for name, kwargs in instructions]})
    return verify(parse_response(answer), reference).outcome


@pytest.mark.parametrize(("name", "kwargs", "kept", "broken"), CASES)
def test_each_rule(name: str, kwargs: dict[str, Any], kept: str, broken: list[str]) -> None:
    assert outcome(kept, (name, kwargs)) == "correct"
    for answer in broken:
        assert outcome(answer, (name, kwargs)) == "wrong", answer


def test_every_rule_has_cases_and_a_request() -> None:
    assert {name for name, *_ in CASES} == set(RULES)
    for name, kwargs, *_ in CASES:
        (instruction,) = check({"instructions": [{"id": name, "kwargs": kwargs}]}).instructions
        assert "{" not in instruction.says() or "{" in str(kwargs)


def test_all_or_a_share() -> None:
    given = [{"id": "punctuation:no_comma"}, {"id": "punctuation:punctuation_dot", "kwargs": None}]

    assert verify(parse_response("Yes."), check({"instructions": given})).score == 0
    assert verify(parse_response("Yes."), check({"instructions": given, "mode": "share"})).score == 0.5
    assert verify(parse_response("Yes"), check({"instructions": given, "mode": "share"})).score == 1


def test_the_reasoning_does_not_count() -> None:
    instruction = ("punctuation:no_comma", {})

    assert outcome("<think>well, so</think>Yes", instruction) == "correct"
    assert outcome("<think>well so</think>Yes, so", instruction) == "wrong"
    assert outcome("<think>well so", instruction) == "wrong"


def test_tables_leave_cells_empty_and_make_floats() -> None:
    kwargs = {"num_words": 3.0, "relation": "less than", "keyword": None}

    assert outcome("two words", ("length_constraints:number_words", kwargs)) == "correct"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"instructions": []}, "at least 1 item"),
        ({"instructions": [{"id": "punctuation:no_comma"}] * (MOST + 1)}, rf"at most {MOST} items"),
        ({"instructions": ["no_comma"]}, r"instructions\.0"),
        ({"instructions": [{"id": "punctuation:no_coma"}]}, "did you mean 'punctuation:no_comma'"),
        ({"instructions": [{"id": "keywords:word_once"}]}, r"kwargs of .*: the key 'keyword' is missing"),
        ({"instructions": [{"id": "keywords:word_once", "kwargs": {"keywords": "a"}}]}, "did you mean 'keyword'"),
        (
            {"instructions": [{"id": "keywords:word_once", "kwargs": {"keyword": ""}}]},
            r"kwargs of .*word_once': keyword=''",
        ),
        (
            {"instructions": [{"id": "keywords:existence", "kwargs": {"keywords": "a"}}]},
            "kwargs of .*: keywords=.*list",
        ),
        ({"instructions": [{"id": "count:lowercase_counting", "kwargs": {"N": 1.5}}]}, "kwargs of .*: N="),
        ({"instructions": [{"id": "count:lowercase_counting", "kwargs": {"N": "3"}}]}, "kwargs of .*: N='3'"),
        ({"instructions": [{"id": "copy:copying_multiple", "kwargs": {"N": True, "prompt_to_repeat": "a"}}]}, "N=True"),
        ({"instructions": [{"id": "count:lowercase_counting", "kwargs": {"N": -1.0}}]}, "kwargs of .*: N=-1"),
        ({"instructions": [{"id": "language:response_language", "kwargs": {"language": "xx"}}]}, "language='xx'.*'ar'"),
        ({"instructions": [{"id": "punctuation:no_comma"}], "mode": "half"}, "reference.mode='half'"),
    ],
)
def test_bad_references(reference: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(reference)


ADVERSARIAL = [
    *("", " \n", "...", "\x00", "a\x00b", "\ud800", "a\ud83d", "a" * (MAX_CHARACTERS + 1), "😀😀", "</think>"),
    bytes(range(256)).decode("latin-1"),
]


@pytest.mark.parametrize("answer", ADVERSARIAL)
def test_malformed_text_follows_no_rule(answer: str) -> None:
    for name, kwargs, *_ in CASES:
        assert outcome(answer, (name, kwargs)) == "wrong"


LONG = MAX_CHARACTERS // 2
RUNS = [
    "." * LONG,
    "mr. " * (LONG // 4),
    "[" * LONG,
    "*" * LONG,
    "<" * LONG,
    " " * LONG,
    '."' * (LONG // 2),
    "{" * LONG,
]
RUNS += ["p.s." * (LONG // 4), "-" * LONG, "a." * (LONG // 2), "\n   " * (LONG // 4), "***" * (LONG // 3), "İ" * LONG]
RUNS += ["Time fun " * (LONG // 9), "a’" * (LONG // 2), "Section1" * (LONG // 8), '"' * LONG, "\\" * LONG]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: repr(run[:8]))
def test_long_runs_end(run: str) -> None:
    """A check with quadratic time would take minutes here."""
    for number, (name, kwargs, *_) in enumerate(CASES):
        assert outcome(f"a{run}b" if number % 2 else run, (name, kwargs)) in ("correct", "wrong")


@given(
    answer=st.text(max_size=80) | st.lists(st.sampled_from([kept for *_, kept, _ in CASES]), max_size=4).map("".join)
)
def test_any_answer_has_a_verdict(answer: str) -> None:
    for name, kwargs, *_ in CASES:
        assert outcome(answer, (name, kwargs)) in ("correct", "wrong")


def test_sentences_and_words() -> None:
    assert sentences('He said "Go!" Dr. Ray left. Is 3.5 more? Yes') == [
        'He said "Go!"',
        "Dr. Ray left.",
        "Is 3.5 more?",
        "Yes",
    ]
    assert sentences("a title\n\nOne line\nin two. ...") == ["a title", "One line\nin two."]
    assert words("It's a well-known fact: 3 cats") == ["It's", "a", "well-known", "fact", "3", "cats"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1. Buy milk.\n2. Buy eggs.", 2),
        ("Do this:\n  1. Buy milk.\n  2) Buy eggs.\n- 3. Go.", 3),
        ("a. Buy milk.\nb. Buy eggs.", 2),
        ("1. Buy milk.\r\n\r\n2. Buy eggs.", 2),
        ("How many? 42. Good.", 3),
        ("It is 42.\nGood.", 2),
        ("J. R. R. Tolkien wrote it. So did C.S. Lewis.", 2),
        ("The U.S. Army came. George W. Bush too.", 2),
        ("We met at 5 p.m. in town. It was 6 p.m. Then we left.", 3),
        ("Pens, books, etc. are there. Pens, etc. We have all.", 3),
        ("Use tools, e.g. Python, i.e. code. Yes.", 2),
        ("See Fig. 3 and No. 5. Did he? No. He left.", 4),
        ("Ask Gen. Grant vs. Col. Lee. Prof. Xu (Ph.D. of law) knows.", 2),
        ("It was I. You know.", 2),
        ("One.\n \t\nTwo", 2),
    ],
)
def test_numbers_and_abbreviations_do_not_end_sentences(text: str, number: int) -> None:
    assert len(sentences(text)) == number, sentences(text)


@pytest.mark.parametrize("divider", ["\n\n", "\r\n\r\n", "\n  \n", "\n\t\n\n"])
def test_blank_lines_divide_paragraphs(divider: str) -> None:
    second = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}

    assert outcome(f"First.{divider}Then.", ("paragraphs:paragraphs2", {})) == "correct"
    assert outcome(f"First.{divider}Then.", ("length_constraints:nth_paragraph_first_word", second)) == "correct"
    assert outcome("First.\nThen.", ("paragraphs:paragraphs2", {})) == "wrong"


@pytest.mark.parametrize("accented", ["\u00e9", "e\u0301"])
@pytest.mark.parametrize("asked", ["\u00e9", "e\u0301"])
def test_letters_with_accents_are_letters(accented: str, asked: str) -> None:
    word = f"caf{accented}s"
    if len(asked) == 1:
        letter = {"letter": asked, "let_frequency": 1, "let_relation": "at least"}
        assert outcome(word, ("keywords:letter_frequency", letter)) == "correct"
    assert outcome(word, ("letters:letter_counting", {"N": 5, "relation": "at least"})) == "correct"
    assert outcome(word, ("letters:letter_counting", {"N": 6, "relation": "at least"})) == "wrong"
    assert outcome(word, ("count:lowercase_counting", {"N": 0})) == "wrong"
    assert outcome(word, ("length_constraints:number_words", {"num_words": 2, "relation": "less than"})) == "correct"
    assert outcome(word, ("keywords:existence", {"keywords": [f"caf{asked}s"]})) == "correct"


def test_keywords_inside_words_count_as_in_the_benchmark_or_not_at_all() -> None:
    rules = [
        ("keywords:existence", {"keywords": ["art"]}),
        ("keywords:frequency", {"keyword": "art", "frequency": 1, "relation": "at least"}),
        ("keywords:word_once", {"keyword": "art"}),
        ("count:count_increment_word", {"keyword1": "art", "keyword2": "sea"}),
    ]
    for name, kwargs in rules:
        for text, answers in (("Seas, a sea, a party", "correct wrong"), ("Sea, sea, art!", "correct correct")):
            reference = {"instructions": [{"id": name, "kwargs": kwargs}]}
            found = [
                verify(parse_response(text), check(reference | {"whole_words": whole})).outcome
                for whole in (False, True)
            ]
            assert found == answers.split(), name


def test_languages() -> None:
    said = {
        "de": "Der Hund schläft im Garten, weil es heute sehr warm ist.",
        "es": "El perro duerme en el jardín porque hoy hace mucho calor.",
        "hi": "आज बहुत गर्मी है इसलिए कुत्ता बगीचे में सो रहा है।",
        "ru": "Собака спит в саду, потому что сегодня очень жарко.",
        "en": "THE DOG SLEEPS IN THE GARDEN BECAUSE IT IS VERY WARM",
    }
    assert {code: language_of(text) for code, text in said.items()} == {code: code for code in said}
    assert language_of("123 ...") == ""


def test_settings() -> None:
    environment = make("instructions", {"max_characters": 5})
    reference = {"instructions": [{"id": "punctuation:no_comma"}]}

    assert verdict_on(environment, "12345", reference).outcome == "correct"
    assert verdict_on(environment, "123456", reference).outcome == "wrong"
    with pytest.raises(ValueError, match="max_characters"):
        make("instructions", {"max_characters": 0})


@pytest.mark.gym
def test_agrees_with_gym() -> None:
    differing, compared = [], 0
    for record in read_jsonl(gym_data("instruction_following") / "example_rollouts.jsonl"):
        answer = record["response"]["output"][-1]["content"][0]["text"]
        rows = zip(record["instruction_id_list"], record["kwargs"], record["follow_instruction_list"], strict=True)
        for name, kwargs, theirs in rows:
            ours = outcome(answer, (name, kwargs or {})) == "correct"
            compared += 1
            if ours != theirs:
                differing.append(name)

    # The paragraph begins "Crash—emotion", which the published check counts as one word.
    assert compared >= 10 and differing == ["length_constraints:nth_paragraph_first_word"]
