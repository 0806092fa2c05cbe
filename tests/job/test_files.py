from pathlib import Path

from nemo_ext.job.files import write_text


def test_who_reads_a_file_while_it_is_written_anew_reads_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_text(path, "before")

    with path.open() as reader:
        write_text(path, "after")
        assert reader.read() == "before"

    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]
