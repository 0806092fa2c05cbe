import copy

import pytest

from nemo_ext.evaluation import report


def mode(accuracy, interval, tokens, truncated, n):
    return {"accuracy": accuracy, "interval": interval, "tokens": tokens, "truncated": truncated, "n": n, "samples": n}


BENCHMARK = {"weight": 1.0, "verifier": "v", "failed": 0, "unscored": 0, "missing": 0, "reasons": {}, "metrics": {}}
BENCHMARK |= {"prompts": {}, "sensitivity": None, "domains": {}, "tokens": None, "reasoning_tokens": None}
SUMS = BENCHMARK | {
    "kind": "generate",
    "about": "sums",
    "metric": "avg@4",
    **mode(0.5, [0.4, 0.6], 1234.5, 0.031, 100),
    "samples": 398,
    "wanted": 400,
    "reasoning_tokens": 1000.0,
    "failed": 1,
    "unscored": 1,
    "reasons": {"HTTP 500": 1, "judge down | <b>": 1},
    "metrics": {"avg@4": 0.5, "pass@1": 0.5, "pass@4": 0.9},
    "higher_is_better": True,
    "modes": {"on": mode(0.5, [0.4, 0.6], 1234.5, 0.031, 100), "off": mode(0.25, None, 20.0, 0.0, 100)},
    "prompts": {"plain": mode(0.5, None, 1234.5, 0.0, 100), "polite": mode(0.4, None, 1234.5, 0.0, 100)},
    "sensitivity": {"std": 0.0512, "interval": [0.01, 0.1]},
    "domains": {"two_digits": {"accuracy": 0.75, "n": 50}},
}
TEXT = mode(0.91234, [0.9, 0.93], None, None, 20)
TEXT = BENCHMARK | TEXT | {"kind": "bits", "about": "text", "metric": "bits_per_byte", "modes": {"default": TEXT}}
TEXT |= {"wanted": 20, "higher_is_better": False}
RESULTS = {
    "model": "tiny",
    "endpoint": None,
    "digest": "abc",
    "suite": ["quick"],
    "seed": 1234,
    "nemo_ext": "0.1",
    "benchmarks": {"sums": SUMS, "local_text": TEXT},
    "mean": {"accuracy": 0.5, "interval": [0.4, 0.6], "benchmarks": 1},
    "missing": {"gsm8k": "data/benchmarks/gsm8k.jsonl: no such file; get it from openai/gsm8k"},
}


def test_report_has_every_figure(tmp_path):
    text = report.write(RESULTS, tmp_path).read_text()
    assert text.startswith("# tiny\n")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    first = ["sums", r"50.0% \[40.0, 60.0\]", "100", "1,234", "3.1%", "avg@4", "1,000", "398", "400", "1", "1"]
    assert first in rows
    assert [
        "local_text ↓",
        r"0.9123 \[0.9000, 0.9300\]",
        "20",
        *"––",
        "bits_per_byte",
        "–",
        "20",
        "20",
        "0",
        "0",
    ] in rows
    for row in (
        ["grand mean", r"50.0% \[40.0, 60.0\], weighted, over 1 benchmark"],
        ["sums", "off", "25.0%", "100", "20", "0.0%", "–"],
        ["sums", "polite", "40.0%", "100", "1,234", "0.0%", "–"],
        ["sums", r"5.1% \[1.0, 10.0\]", "2"],
        ["sums", "two_digits", "75.0%", "50"],
        ["sums", "pass@4", "90.0%"],
        ["sums", "HTTP 500", "1"],
        ["gsm8k", "data/benchmarks/gsm8k.jsonl: no such file; get it from openai/gsm8k"],
    ):
        assert row in rows
    assert r"judge down \| \<b\>" in text, "external text is escaped"
    assert report.INTERVALS in text and f"({report.PICTURE})" in text
    assert (tmp_path / report.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_report_of_nothing_says_what_is_missing(tmp_path):
    (tmp_path / report.PICTURE).write_bytes(b"of an earlier run")
    text = report.write(
        {"model": "tiny", "benchmarks": {}, "mean": None, "missing": {"a": "no data"}}, tmp_path
    ).read_text()
    assert "| a | no data |" in text and report.PICTURE not in text
    assert not (tmp_path / report.PICTURE).exists()


def test_benchmark_without_a_score_is_in_the_report(tmp_path):
    results = copy.deepcopy(RESULTS)
    results["benchmarks"]["sums"] |= {"accuracy": None, "interval": None, "n": 0, "tokens": None, "truncated": None}
    for mode in results["benchmarks"]["sums"]["modes"].values():
        mode |= {"accuracy": None, "interval": None}
    assert "| sums | – | 0 | – | – | avg@4 |" in report.write(results, tmp_path).read_text()


def test_summary_lines_up():
    lines = report.summary(RESULTS).splitlines()
    ends = [line.index(word) + len(word) for line, word in zip(lines, ("problems", "100", " 20"), strict=False)]
    assert len(set(ends)) == 1
    assert lines[3:] == [
        "grand mean: 50.0% [40.0, 60.0], weighted, over 1 benchmark",
        "not evaluated: gsm8k: data/benchmarks/gsm8k.jsonl: no such file; get it from openai/gsm8k",
    ]


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0, "0"), (7.25, "7.2"), (99.96, "100.0"), (100.4, "100"), (1234567, "1,234,567")]
)
def test_counts(value, shown):
    assert report.number(value).text == shown
