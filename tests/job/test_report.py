"""Reports: parts in order, empty ones omitted, pictures next to the report and inside its page."""

from pathlib import Path

import numpy as np

from nemo_ext.job.report import Report, outer_legend, tidy


def test_parts_in_order() -> None:
    report = Report("A run", "Said first.").facts({"steps": 12345, "loss": "0.5", "seed": None})
    report.section("Results", "Of all.").table("", ("name", "count:"), [("a|b", np.int64(1234))], "Below it.")
    report.section("next", level=3).code("nemo-ext train\n", "bash")

    assert report.markdown() == (
        "# A run\n\nSaid first.\n\n|  |  |\n| --- | --- |\n| steps | 12,345 |\n| loss | 0.5 |\n| seed |  |\n\n"
        "## Results\n\nOf all.\n\n| name | count |\n| --- | --: |\n| a\\|b | 1,234 |\n\nBelow it.\n\n"
        "### next\n\n```bash\nnemo-ext train\n```\n"
    )


def test_empty_parts_are_omitted() -> None:
    report = Report("A run", "", None).section("Nothing", "", None).table("No rows", ("a",), [], "no note either")

    assert report.facts({}).markdown() == "# A run\n"


def test_a_picture_is_written_next_to_the_report_and_into_its_page(tmp_path: Path) -> None:
    report = Report("Runs & rates")
    left, right = report.picture("rates", "rates.png", 4, 2, columns=2)
    left.plot([1, 2], label="one")
    right.plot([2, 1], label="two")
    tidy(left, right, title="rates", xlabel="step", ylim=(0, 3), legend=True)
    outer_legend([left, right])

    page = report.write(tmp_path / "report.md", page=True)

    assert (left.get_xlabel(), right.get_ylim(), left.get_title(loc="left")) == ("step", (0, 3), "rates")
    assert [text.get_text() for text in left.figure.legends[0].get_texts()] == ["one", "two"]
    assert (tmp_path / "report.md").read_text() == "# Runs & rates\n\n![rates](rates.png)\n"
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert page == tmp_path / "report.html"
    assert "<title>Runs &amp; rates</title>" in page.read_text() and "data:image/png;base64," in page.read_text()


def test_sections_follow_an_earlier_report(tmp_path: Path) -> None:
    path = Report("A run").write(tmp_path / "report.md")

    Report("").section("Starts", "Two.").write(path, after=path.read_text())

    assert path.read_text() == "# A run\n\n## Starts\n\nTwo.\n"
