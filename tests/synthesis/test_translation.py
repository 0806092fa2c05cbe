"""Lines to translate, and the parts of them that stay unchanged."""

import pytest

from nemo_ext.synthesis.expressions import code, majority, parses, without_sections
from nemo_ext.synthesis.translation import lines, unmasked


def shown(text: str) -> list[str]:
    return [each["masked"] for each in lines(text) if each["translate"]]


def test_code_and_formulas_are_not_translated() -> None:
    text = "One\n```python\nx = 1\n```\nTwo\n$$\nx\n$$\nThree\n"
    text += "\\begin{align}\ny &= z \\begin{cases}a\\end{cases}\n\\end{align}\nFour"

    assert shown(text) == ["One", "Two", "Three", "Four"]


@pytest.mark.parametrize(
    "text",
    [
        "$$x=1$$ is what we get.\nNext",
        "\\[ a \\] and then\nNext",
        "```pip install x``` installs it\nNext",
        "\\[\na\n\\].\nNext",
        "````\n```\na\n```\n````\nNext",
    ],
)
def test_a_block_ends_where_it_ends(text: str) -> None:
    assert shown(text)[-1] == "Next" and all(each["closed"] for each in lines(text))


def test_an_unclosed_block_is_reported() -> None:
    assert not any(each["closed"] for each in lines("One\n```\nTwo"))


def test_prices_are_not_formulas_and_mode_switches_are_not_text() -> None:
    assert shown("From $5 to US$10 it costs") == ["From $5 to US$10 it costs"]
    assert shown("detailed thinking off") == [] and shown("/no_think") == []


@pytest.mark.parametrize(
    ("line", "translated", "whole"),
    [
        ("  - The `code` is <b>here</b>.", "Der ⟦0⟧ ist ⟦1⟧hier⟦2⟧.", "  - Der `code` ist <b>hier</b>."),
        ("## A title ", "Ein Titel", "## Ein Titel "),
        ("| a word | b |", "| ein Wort | b |", "| ein Wort | b |"),
        ("| a word | b |", "ein Wort, b", None),
        ("See https://a.b/c?d=1.", "Siehe ⟦0⟧⟦0⟧.", None),
        ("See https://a.b/c?d=1.", "Siehe.", None),
    ],
)
def test_masked_fragments_are_restored(line: str, translated: str, whole: str | None) -> None:
    (given,) = lines(line)

    assert unmasked(translated, line, given["aside"]) == whole


def test_long_lines_are_fast() -> None:
    for text in ("a." * 20000, "\\( " * 20000, "```a\n" * 20000):
        lines(text)
        code(text)
    assert without_sections(f"a{' ' * 200_000}b", "Notes")


def test_blocks_by_language() -> None:
    text = "```python\nx = 1\n```\nprints\n```\n4 is shown\n```\n"

    assert code(text, "python") == "x = 1\n" and code(text) == "4 is shown\n"
    assert parses(code(text, "python")) and not parses("def f(:") and not parses("")


def test_a_majority_has_at_least_the_required_votes() -> None:
    assert majority(["4", " 4 ", "1", ""]) == "4"
    assert majority(["4", "4", "1", "2"], 4) is None
    assert majority(["4", "1"]) is None
