"""Generated rows: each is solved from its text alone, by independent code."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from nemo_ext.evaluation.generators import GENERATORS, rows
from nemo_ext.evaluation.generators.choices import KINDS

LONG = ("needles", "variables", "common_words", "documents", "deliveries")


def made(name: str, count: int = 12, seed: int = 1, **settings: Any) -> list[dict[str, Any]]:
    return list(rows(name, count, seed=seed, **settings))


@pytest.mark.parametrize("name", GENERATORS)
def test_rows_depend_on_seed_and_number_alone(name: str) -> None:
    many = made(name)

    assert made(name, 5) == many[:5]
    assert len({row["id"] for row in many}) == len(many) == 12
    assert not {row["id"] for row in made(name, seed=2)} & {row["id"] for row in many}
    assert all(row["domain"] for row in many)
    assert json.loads(json.dumps(many)) == many


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("length", [128, 1024, 4000])
def test_a_context_has_the_requested_length(name: str, length: int) -> None:
    for row in made(name, 5, length=length):
        assert 0.8 * 4 * length < len(row["context"]) < 1.1 * 4 * length + 400


@pytest.mark.parametrize("name", LONG)
def test_lengths_alternate_independently(name: str) -> None:
    both = made(name, 6, length=[256, 512])

    assert [row["domain"] for row in both] == ["256", "512"] * 3
    assert both[::2] == made(name, 3, length=256)
    assert both[1::2] == made(name, 3, length=512)


@pytest.mark.parametrize("name", LONG)
def test_answers_and_wrong_choices_are_disjoint(name: str) -> None:
    for row in made(name):
        assert row["answers"] and len(set(row["answers"])) == len(row["answers"])
        assert not set(row["answers"]) & set(row["wrong"])


@pytest.mark.parametrize("settings", [{}, {"keys": 4}, {"values": 4}, {"keys": 4, "values": 2, "asked": 2}], ids=str)
def test_needles_are_in_the_text(settings: dict[str, Any]) -> None:
    for row in made("needles", **settings):
        said: dict[str, list[str]] = {}
        for thing, code in re.findall(r"The code of the ([\w ]+) is (\d{7})\.", row["context"]):
            said.setdefault(thing, []).append(code)
        asked = re.findall(r"\bthe ([a-z]+ [a-z]+)(?= and the |\?)", row["question"])
        assert len(asked) == settings.get("asked", 1)
        assert sorted(row["answers"]) == sorted(code for thing in asked for code in said[thing])
        assert {*row["answers"], *row["wrong"]} == {code for codes in said.values() for code in codes}


def test_needles_are_spread_over_the_context() -> None:
    found = [row["context"].index(row["answers"][0]) / len(row["context"]) for row in made("needles", 10)]

    assert found == sorted(found)
    assert found[0] < 0.05 and found[-1] > 0.95


def test_variables_follow_from_assignments_in_their_order() -> None:
    for row in made("variables", chains=3, hops=5):
        values: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w+) = (\w+)\.", row["context"]):
            values[name] = source if source.isdigit() else values[source]
        (sought,) = re.findall(r"the value (\d+)", row["question"])
        assert sorted(row["answers"]) == sorted(name for name, value in values.items() if value == sought)
        assert len(row["answers"]) == 6 and len(row["wrong"]) == 12


def test_common_words_are_the_most_frequent() -> None:
    for row in made("common_words", length=2000, common=4):
        counted = Counter(re.findall(r"\d+\. (\w+)", row["context"])).most_common()
        assert {word for word, _ in counted[:4]} == set(row["answers"])
        assert counted[3][1] >= 3 * counted[4][1]
        assert {word for word, _ in counted[4:]} == set(row["wrong"])


@pytest.mark.parametrize("hops", [1, 2, 3, 5])
def test_documents_have_the_answer_once(hops: int) -> None:
    for row in made("documents", hops=hops):
        born = dict(re.findall(r"Document \d+: (\w+ \w+) was born in (\w+) in", row["context"]))
        founded = dict(re.findall(r"The house of (\w+) was founded by (\w+ \w+)\.", row["context"]))
        taught = dict(re.findall(r"(\w+ \w+) learned everything from (\w+ \w+)\.", row["context"]))
        if hops >= 2:
            (house,) = re.findall(r"the founder of the house of (\w+) born", row["question"])
            person = founded[house]
            for _ in range(hops - 2):
                person = taught[person]
            assert row["question"].count("the teacher of") == hops - 2
        else:
            (person,) = re.findall(r"was (\w+ \w+) born", row["question"])
        assert row["answers"] == [born[person]]
        assert row["context"].count(f"{person} was born") == row["context"].count(f"founded by {person}.") == 1


@pytest.mark.parametrize("asked", ["order", "total"])
def test_deliveries_are_in_the_text(asked: str) -> None:
    for row in made("deliveries", asked=asked, towns=5):
        found = re.findall(r"On day (\d+) of the year (\w+) received (\d+) barrels\.", row["context"])
        assert len({town for _, town, _ in found}) == 5 and len({day for day, _, _ in found}) == len(found)
        if asked == "order":
            (place,) = re.findall(r"is number (\d)", row["question"])
            towns = [town for _, town, _ in sorted(found, key=lambda one: int(one[0]))]
            assert row["answers"] == [towns[int(place) - 1]] and sorted(row["wrong"] + row["answers"]) == sorted(towns)
        else:
            (sought,) = re.findall(r"did (\w+) receive", row["question"])
            amounts = [int(barrels) for _, town, barrels in found if town == sought]
            assert row["answers"] == [str(sum(amounts))] and len(amounts) >= 2


def solved(row: dict[str, Any]) -> str:
    """The correct choice, computed independently where possible."""
    question, texts = row["question"], row["choices"]
    if row["domain"] == "largest":
        return str((max if "largest" in question else min)(map(int, texts)))
    if row["domain"] == "alphabet":
        return str((max if "last" in question else min)(texts))
    if row["domain"] == "sequence":
        numbers = [int(each) for each in re.findall(r"\d+", question)]
        return str(2 * numbers[-1] - numbers[-2])
    if row["domain"] == "order":
        pairs = re.findall(r"(\w+) is older than (\w+)\.", question)
        people, younger = {name for pair in pairs for name in pair}, {name for _, name in pairs}
        (oldest,), (youngest,) = people - younger, people - {name for name, _ in pairs}
        return str(youngest if "youngest" in question else oldest)
    return str(texts[row["gold"]])


@pytest.mark.parametrize("kind", KINDS)
def test_choices_have_one_right_answer(kind: str) -> None:
    found = made("choices", 60, kinds=[kind])

    for row in found:
        assert solved(row) == row["choices"][row["gold"]] == row["continuations"][row["gold"]].removeprefix(" ")
        assert len(set(row["choices"])) == 4
        assert row["listed"].splitlines()["ABCD".index(row["letter"])] == f"{row['letter']}. {solved(row)}"
    assert {row["gold"] for row in found} == {0, 1, 2, 3}
    assert len({row["question"] + row["listed"] for row in found}) == 60


@pytest.mark.parametrize("part", ["sources", "docstrings"])
def test_sources_are_passages_of_different_modules(part: str) -> None:
    found = made("python_sources", 20, part=part, characters=800)

    assert len({row["module"] for row in found}) == 20
    for row in found:
        assert 400 <= len(row["text"]) <= 800
        assert row["text"].isascii() or len(row["text"].encode()) > len(row["text"])


def test_a_source_is_in_its_module() -> None:
    import sysconfig
    from pathlib import Path

    for row in made("python_sources", 5):
        path = Path(sysconfig.get_paths()["stdlib"]) / f"{row['module']}.py"
        assert row["text"] in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("needels", {}, "generator: unknown name 'needels': did you mean 'needles'"),
        ("needles", {"lenght": 3}, "generator needles: settings: unknown key 'lenght': did you mean 'length'"),
        ("needles", {"length": 127}, "length must be a whole number of at least 128"),
        ("needles", {"length": []}, "expected at least one length"),
        ("needles", {"length": "long"}, "length"),
        ("needles", {"asked": 2}, "asked=2: must be at most settings.keys=1"),
        ("needles", {"keys": 9}, "keys=9: expected a whole number from 1 to 8"),
        ("variables", {"hops": 0}, "hops must be a whole number of at least 1"),
        ("common_words", {"common": 11}, "common=11"),
        ("documents", {"hops": 6}, "hops=6: expected a whole number from 1 to 5"),
        ("deliveries", {"towns": 9}, "towns=9: expected a whole number from 3 to 8"),
        ("deliveries", {"asked": "sum"}, "asked: unknown"),
        ("choices", {"kinds": ["largst"]}, "'largst': did you mean 'largest'"),
        ("python_sources", {"part": "tests"}, "unknown part 'tests'"),
        ("python_sources", {"characters": 10_000_000}, "only 0 modules in .* have 10000000 characters"),
    ],
)
def test_invalid_settings_are_named(name: str, settings: dict[str, Any], message: str) -> None:

    with pytest.raises(ValueError, match=message):
        made(name, **settings)
