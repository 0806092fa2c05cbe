from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.text.documents import (
    EXAMPLES_PER_REASON,
    Admission,
    ReadReport,
    document_digest,
    split_position,
)
from nemo_ext.data.text.sources import load_source

SPLIT_POSITION = 15606018129191011366


@given(
    texts=st.lists(st.text("abc é", min_size=1, max_size=4), min_size=1, max_size=30),
    max_bytes=st.one_of(st.none(), st.integers(1, 40)),
    deduplicate=st.booleans(),
)
def test_the_longest_prefix_of_the_distinct_documents_within_max_bytes_is_admitted(
    texts: list[str], max_bytes: int | None, deduplicate: bool
) -> None:
    source = load_source({"kind": "jsonl", "path": "x", "max_bytes": max_bytes, "deduplicate": deduplicate})
    admission, report = Admission(source), ReadReport()

    kept = [text for text in texts if admission.admit(document_digest(text.encode()), len(text.encode()), report)]

    distinct = list(dict.fromkeys(texts)) if deduplicate else texts
    assert kept == distinct[: len(kept)]
    assert admission.size == len("".join(kept).encode())
    assert admission.full == (len(kept) < len(distinct))
    if admission.full:
        assert max_bytes is not None
        assert admission.size <= max_bytes < len("".join(distinct[: len(kept) + 1]).encode())
    else:
        assert report.skipped.get("duplicate", 0) == len(texts) - len(kept)


def test_a_report_counts_all_records_and_lists_the_first_few() -> None:
    report, later = ReadReport(records=3), ReadReport(records=9)
    report.skip("malformed", "a:1")
    report.skip("duplicate", count=1200)
    for line in range(1, 9):
        later.skip("malformed", f"b:{line}")

    report.add(later)

    assert report.records == 12
    assert report.examples == {"malformed": ["a:1", "b:1", "b:2", "b:3", "b:4"]}
    assert EXAMPLES_PER_REASON == 5
    assert report.summary() == "1,200 duplicate, 9 malformed (a:1; b:1; b:2; b:3; b:4; ...)"
    assert report.summary(examples=1) == "1,200 duplicate, 9 malformed (a:1; ...)"
    assert ReadReport().summary() == "nothing"


def test_the_split_of_a_document_never_changes_between_versions() -> None:
    # Any other value would move documents from training to validation in existing data.
    assert split_position(1234, "a.jsonl:1") == SPLIT_POSITION
    assert split_position(1234, "bad name \udcff:1") < 2**64
