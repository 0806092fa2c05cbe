import gzip
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.text.documents import Document, Part, ReadReport, Source
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.text.user_files import record_source
from tests.json_lines import write_jsonl

Read = Callable[[Source], tuple[list[Document], ReadReport]]


def read(source: Source, part: Part) -> list[Document]:
    return list(source.read(part, ReadReport()))


@pytest.mark.parametrize("kind", ["jsonl", "text", "parquet"])
def test_a_missing_file_is_an_error(tmp_path: Path, kind: str) -> None:
    source = load_source({"kind": kind, "path": str(tmp_path / "nowhere.x")})

    with pytest.raises(ValueError, match=r"nowhere\.x"):
        source.check()


def test_a_directory_or_a_glob_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a directory; name its files"):
        load_source({"kind": "text", "path": str(tmp_path)}).check()
    with pytest.raises(ValueError, match=r"file .*\*\.txt does not exist"):
        load_source({"kind": "text", "path": str(tmp_path / "*.txt")}).check()
    with pytest.raises(ValueError, match="is not a directory"):
        load_source({"kind": "tree", "path": str(tmp_path / "nowhere")}).check()


# ------------------------------------------------------------------------------------------ jsonl


def test_jsonl_ids_are_file_and_line_and_blank_lines_are_ignored(tmp_path: Path, read_all: Read) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two"}\r\n{"body": "no newline at the end"}')
    (tmp_path / "b" / "a.jsonl").write_text('{"body": "four", "other": 1}\n')
    source = load_source({"kind": "jsonl", "path": str(tmp_path / "**" / "*.jsonl"), "text_key": "body"})

    documents, report = read_all(source)

    assert documents == [
        Document("a.jsonl:1", "one"),
        Document("a.jsonl:3", "two"),
        Document("a.jsonl:4", "no newline at the end"),
        Document("b/a.jsonl:1", "four"),
    ]
    assert report.records == 4
    assert report.skipped == {}


def test_compressed_jsonl_reads_as_the_plain_file(tmp_path: Path, read_all: Read) -> None:
    plain = write_jsonl(tmp_path / "a.json", [{"text": f"text {number} é"} for number in range(1000)])
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    with pa.output_stream(str(tmp_path / "a.json.zst"), compression="zstd") as file:
        file.write(plain.read_bytes())

    def texts(name: str) -> list[str]:
        return [document.text for document in read_all(load_source({"kind": "jsonl", "path": name}))[0]]

    assert texts(str(plain)) == texts(f"{plain}.gz") == texts(f"{plain}.zst")
    assert len(texts(str(plain))) == 1000


def test_a_damaged_compressed_file_is_an_error(tmp_path: Path, read_all: Read) -> None:
    line = json.dumps({"text": os.urandom(50_000).hex()}).encode() + b"\n"
    whole = gzip.compress(line)
    (tmp_path / "cut.json.gz").write_bytes(whole[:-1000])
    (tmp_path / "changed.json.gz").write_bytes(whole[:20_000] + bytes(2_000) + whole[22_000:])
    (tmp_path / "not.json.gz").write_bytes(line)
    with pa.output_stream(str(tmp_path / "cut.json.zst"), compression="zstd") as file:
        file.write(line)
    os.truncate(tmp_path / "cut.json.zst", 10_000)
    (tmp_path / "not.json.zst").write_bytes(line)

    for name in ("cut.json.gz", "changed.json.gz", "not.json.gz", "cut.json.zst", "not.json.zst"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read to its end"):
            read_all(load_source({"kind": "jsonl", "path": str(tmp_path / name)}))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_another_unicode_encoding_is_an_error(tmp_path: Path, encoding: str, suffix: str) -> None:
    content = '{"text": "one"}\n{"text": "zwei \u00e9"}\n'.encode(encoding)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    (tmp_path / "a.txt").write_bytes(content)

    with pytest.raises(
        ValueError,
        match=rf"a\.jsonl{suffix} is not UTF-8 \(it seems to be {encoding[:6].upper()}\).* -f {encoding[:6].upper()} ",
    ):
        load_source({"kind": "jsonl", "path": str(path)}).check()
    text = load_source({"kind": "text", "path": str(tmp_path / "a.txt")})
    with pytest.raises(ValueError, match=rf"it seems to be {encoding[:6].upper()}"):
        read(text, next(text.parts(max_documents=1, max_size=1)))


def test_lines_in_another_encoding_are_malformed(tmp_path: Path, read_all: Read) -> None:
    other = '{"text": "two"}\n'
    content = b'{"text": "one"}\n' * 99 + other.encode("utf-16-le") + other.encode("latin-1")
    (tmp_path / "a.jsonl").write_bytes(content)

    documents, report = read_all(
        load_source({"kind": "jsonl", "path": str(tmp_path / "a.jsonl"), "max_bad_share": 0.5})
    )

    assert [document.text for document in documents] == ["one"] * 99
    assert report.skipped == {"malformed": 2}


@pytest.mark.parametrize("frames", [1, 3])
def test_a_zst_of_any_window_and_number_of_frames_is_read(tmp_path: Path, read_all: Read, frames: int) -> None:
    line = json.dumps({"text": "a" * 100_000}).encode() + b"\n"
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=31)
    path = tmp_path / "a.jsonl.zst"
    with open(path, "wb") as file:
        for _ in range(frames):
            with zstandard.ZstdCompressor(compression_params=wide).stream_writer(file, closefd=False) as frame:
                frame.write(line * 20)

    assert len(read_all(load_source({"kind": "jsonl", "path": str(path)}))[0]) == 20 * frames


@given(
    texts=st.lists(st.one_of(st.none(), st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)), max_size=20),
    max_documents=st.integers(1, 8),
    max_size=st.integers(1, 200),
)
def test_jsonl_documents_do_not_depend_on_where_it_is_cut(
    texts: list[str | None], max_documents: int, max_size: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.jsonl")
        lines = ["\n" if text is None else json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        path.write_bytes("".join(lines).encode())
        source = load_source({"kind": "jsonl", "path": str(path)})

        whole = [
            document for part in source.parts(max_documents=10**9, max_size=10**9) for document in read(source, part)
        ]
        parts = list(source.parts(max_documents=max_documents, max_size=max_size))
        cut = [document for part in parts for document in read(source, part)]

    expected = [Document(f"a.jsonl:{line}", text) for line, text in enumerate(texts, 1) if text is not None]
    assert whole == cut == expected
    assert sum(part.size for part in parts) == len("".join(lines).encode())
    assert all(part.documents <= max_documents for part in parts)


def test_malformed_lines_are_counted_with_their_place(tmp_path: Path, read_all: Read) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"good {number}"} for number in range(1000)])
    lines = path.read_bytes().splitlines(keepends=True)
    lines[6] = b'{"text": "cut off\n'
    lines[7] = b"[1]\n"
    lines[8] = b'{"txt": "x"}\n'
    lines[9] = b'{"text": 3}\n'
    lines[10] = b'{"text": "\\ud800"}\n'
    lines[11] = b'{"text": "\xff"}\n'
    lines[12] = b'{"text": " \\n"}\n'
    path.write_bytes(b"".join(lines))

    documents, report = read_all(load_source({"kind": "jsonl", "path": str(path)}))

    assert len(documents) == 993
    assert report.records == 1000
    assert report.skipped == {"malformed": 6, "empty": 1}
    assert [example.split(":")[1] for example in report.examples["malformed"]] == ["7", "8", "9", "10", "11"]
    assert "there is no key 'text'; set text_key to one of txt" in report.examples["malformed"][2]
    assert report.examples["empty"] == ["a.jsonl:13"]


def test_too_many_malformed_lines_are_an_error(tmp_path: Path, read_all: Read) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "good"}] * 98 + [{"text": None}] * 2)
    config = {"kind": "jsonl", "path": str(path)}

    with pytest.raises(ValueError, match=r"2 of 100 records .* max_bad_share=0.01 .*a\.jsonl:99: 'text': .*, not null"):
        read_all(load_source(config))
    assert len(read_all(load_source(config | {"max_bad_share": 0.02, "deduplicate": False}))[0]) == 98


def test_check_reports_a_wrong_text_key(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"content": "x", "id": 1}] * 5)

    with pytest.raises(ValueError, match=r"none of the first lines contains text .*set text_key to one of content, id"):
        load_source({"kind": "jsonl", "path": str(path)}).check()


# ---------------------------------------------------------------------------------------- parquet


def test_parquet_is_read_by_row_group(tmp_path: Path, read_all: Read) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"row {number}" for number in range(250)]
    pq.write_table(pa.table({"body": texts, "id": list(range(250))}), path, row_group_size=100)
    source = load_source({"kind": "parquet", "path": str(path), "text_key": "body"})

    source.check()
    parts = list(source.parts(max_documents=10, max_size=10))
    documents, report = read_all(source)

    assert [part.documents for part in parts] == [100, 100, 50]
    assert documents == [Document(f"a.parquet:{row}", text) for row, text in enumerate(texts, 1)]
    assert report.records == 250


def test_only_nulls_inside_structs_of_a_table_are_dropped(tmp_path: Path) -> None:
    """In a struct column each row has the keys of all rows; in JSON a null is a value."""
    schemas = [{"a": {"const": None, "type": ["string", "null"]}, "enum": [None, 1]}, {"b": {"type": "integer"}}]
    write_jsonl(tmp_path / "a.jsonl", [{"tools": schema, "note": None} for schema in schemas])
    rows = [{"tools": {"const": "x", "type": None}, "note": None}, {"tools": {"type": "integer"}, "note": "n"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")

    def records(name: str) -> list[dict[str, Any]]:
        source = record_source((str(tmp_path / name),), None, "test")
        parts = source.parts(max_documents=100, max_size=1 << 20)
        return [record for part in parts for _, record in source.records(part, ReadReport())]

    assert [record["tools"] for record in records("a.jsonl")] == schemas
    assert records("a.parquet") == [
        {"tools": {"const": "x"}, "note": None},
        {"tools": {"type": "integer"}, "note": "n"},
    ]


def test_parquet_nulls_are_counted_and_dictionaries_are_text(tmp_path: Path, read_all: Read) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(["a", None, "b"]).dictionary_encode()}), path)
    source = load_source({"kind": "parquet", "path": str(path), "max_bad_share": 0.5})

    source.check()
    documents, report = read_all(source)

    assert [document.text for document in documents] == ["a", "b"]
    assert report.skipped == {"malformed": 1}
    assert report.examples["malformed"] == [f"{path}: row 2: 'text': expected a string, not null"]


def test_parquet_text_that_is_not_utf8_is_counted_with_its_row(tmp_path: Path, read_all: Read) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.array([b"one", b"t\xffwo", b"three"], pa.binary())
    bad = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])  # unchecked
    pq.write_table(pa.table({"text": bad}), path)
    source = load_source({"kind": "parquet", "path": str(path), "max_bad_share": 0.5})

    documents, report = read_all(source)

    assert documents == [Document("a.parquet:1", "one"), Document("a.parquet:3", "three")]
    assert report.records == 3 and report.skipped == {"malformed": 1}
    assert report.examples["malformed"][0].startswith(f"{path}: row 2: not UTF-8")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".parquet"])
def test_rows_of_all_files_come_with_their_places(tmp_path: Path, suffix: str) -> None:
    rows = [{"a": 1, "text": "x\u2028y"}, {"a": 2, "text": "z"}]
    path = tmp_path / f"rows.jsonl{suffix}" if suffix != ".parquet" else tmp_path / "rows.parquet"
    lines = "".join(json.dumps(row) + "\n\n" for row in rows).encode()
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1)
    else:
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(suffix, bytes)
        path.write_bytes(pack(lines))

    placed = list(record_source((str(path),), None, "rows").rows())

    places = [f"{path}: row 1", f"{path}: row 2"] if suffix == ".parquet" else [f"{path}:1", f"{path}:3"]
    assert placed == list(zip(places, rows, strict=True))


@pytest.mark.parametrize(("line", "strict"), [("[1]", False), ('{"a": 1', False), ('{"a": NaN}', True)])
def test_a_malformed_row_is_an_error(tmp_path: Path, line: str, strict: bool) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + line)

    with pytest.raises(ValueError, match=r"a\.jsonl:2: not .*; correct or remove this record"):
        list(record_source((str(tmp_path / "a.jsonl"),), None, "rows").rows(strict=strict))


def test_an_invalid_parquet_column_or_file_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"texts": ["a"], "id": [1]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")

    with pytest.raises(
        ValueError, match=r"no string column 'text': set text_key; did you mean 'texts'\? known: texts$"
    ):
        load_source({"kind": "parquet", "path": str(tmp_path / "a.parquet")}).check()
    with pytest.raises(ValueError, match=r"b\.parquet is not a readable Parquet file"):
        load_source({"kind": "parquet", "path": str(tmp_path / "b.parquet")}).check()


# --------------------------------------------------------------------------------- text and trees


def test_text_files_are_one_document_each(tmp_path: Path, read_all: Read) -> None:
    for name, text in (("b.txt", "second\r\nline"), ("a.txt", "\ufefffirst"), ("c.md", "not named")):
        (tmp_path / name).write_bytes(text.encode())
    source = load_source({"kind": "text", "path": [str(tmp_path / "*.txt"), str(tmp_path / "a.txt")]})

    assert read_all(source)[0] == [Document("a.txt", "first"), Document("b.txt", "second\r\nline")]


def test_a_text_file_that_is_not_utf8_is_an_error(tmp_path: Path, read_all: Read) -> None:
    (tmp_path / "a.txt").write_bytes("caf\u00e9".encode("latin-1"))

    with pytest.raises(ValueError, match=r"undecodable \(.*a\.txt: byte 3\)\); convert it to UTF-8"):
        read_all(load_source({"kind": "text", "path": str(tmp_path / "a.txt")}))


def test_a_tree_reads_the_files_its_globs_select_and_counts_unreadable_ones(tmp_path: Path, read_all: Read) -> None:
    files = {
        "main.py": b"print(1)\n",
        "pkg/module.py": b"x = 1\n",
        "pkg/empty.py": b"",
        "pkg/binary.py": b"\x00\x01",
        "pkg/latin.py": "caf\u00e9".encode("latin-1"),
        "pkg/generated/out.py": b"y = 2\n",
        "node_modules/left.py": b"z = 3\n",
        "notes.txt": b"not chosen",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere")
    source = load_source(
        {"kind": "tree", "path": str(tmp_path), "include": "*.py", "exclude": ["node_modules", "pkg/generated/*"]}
    )

    documents, report = read_all(source)

    assert documents == [Document("main.py", "print(1)\n"), Document("pkg/module.py", "x = 1\n")]
    assert report.skipped == {"binary": 1, "undecodable": 1, "empty": 1}
    assert report.examples["binary"] == [str(tmp_path / "pkg/binary.py")]


def test_a_tree_without_a_matching_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")

    with pytest.raises(ValueError, match=r"include=\['\*\.py'\] and exclude=.* select no file below"):
        load_source({"kind": "tree", "path": str(tmp_path), "include": ["*.py"]}).check()


def test_the_fingerprint_detects_a_changed_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    source = load_source({"kind": "jsonl", "path": str(path)})
    before = source.fingerprint(source.inputs())

    assert source.fingerprint(source.inputs()) == before
    write_jsonl(path, [{"text": "b"}])
    os.utime(path, ns=(0, 0))  # the same size at another time
    assert source.fingerprint(source.inputs()) != before
