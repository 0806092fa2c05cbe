import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.sample import ToolCall
from nemo_ext.data.sft.sources import ConversationReport, ConversationSource, Located, load_conversations


def chat(text: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}], **more}


def write(path: Path, records: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(source: ConversationSource, **limits: int) -> tuple[list[Located], ConversationReport]:
    report = ConversationReport()
    found = []
    for part in source.parts(**({"max_documents": 1 << 60, "max_size": 1 << 60} | limits)):
        own = ConversationReport()
        found += list(source.read(part, own))
        report.add(own)
    return found, report


def test_metadata_are_read_from_keys_paths_and_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        [
            chat("1", uid=7, meta={"task": "math", "language": "IT"}, reasoning="off"),
            chat("2", uid="", meta=None),
        ],
    )
    by_content = "4fd347fe1c7dc43b"
    config = {"name": "mine", "path": str(path), "id_key": "uid", "task": "chat", "language": "en", "thinking": True}
    source = load_conversations(
        config | {"task_key": "meta.task", "language_key": "meta.language", "thinking_key": "reasoning"}
    )

    found, report = read(source)

    assert [(item.sample.id, item.sample.task, item.sample.language, item.sample.thinking) for item in found] == [
        ("7", "math", "it", False),
        (by_content, "chat", "en", True),
    ]
    assert [item.where for item in found] == [f"{path}:1", f"{path}:2"]
    assert {item.sample.source for item in found} == {"mine"}
    assert (report.records, report.skipped) == (2, {})


def test_invalid_records_are_skipped_and_counted_with_their_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("good", name="x")] * 12)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b'{"messages": [\n'
    lines[2] = b"[]\n"
    lines[3] = b'{"messages": [{"role": "user", "content": "\xff"}]}\n'
    lines[4] = json.dumps({"messages": [{"role": "boss", "content": "x"}]}).encode() + b"\n"
    lines[5] = json.dumps({"messages": [{"role": "user"}]}).encode() + b"\n"
    lines[6] = json.dumps(chat("x", id=[1])).encode() + b"\n"
    lines[7] = json.dumps(chat("x", task=3)).encode() + b"\n"
    lines[8] = b" \n"
    path.write_bytes(b"".join(lines))
    (tmp_path / "b.jsonl").write_text("")
    write(tmp_path / "c.jsonl", [chat("last")])
    source = load_conversations({"name": "s", "path": str(tmp_path / "*.jsonl")})

    source.check()
    found, report = read(source)

    assert [Path(item.where).name for item in found] == [*(f"a.jsonl:{n}" for n in (1, 10, 11, 12)), "c.jsonl:1"]
    assert len({item.sample.id for item in found}) == 2, "the same record has the same id"
    assert report.records == 12
    assert report.skipped == {"malformed": 3, "schema": 4, "empty file": 1}
    assert report.examples["empty file"] == [str(tmp_path / "b.jsonl")]
    assert report.examples["schema"][0].startswith(f"{path}:5: messages[0].role='boss' is not a role; known: ")
    assert [example.split(": ", 1)[1] for example in report.examples["schema"][1:]] == [
        "messages[0].content: expected a string, not nothing",
        "id: expected a string, not a list",
        "task: expected a string, not an int",
    ]


def test_compressed_files_are_read_like_plain_ones_and_damaged_ones_refused(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", [chat(os.urandom(200).hex()) for _ in range(300)])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    with pa.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as file:
        file.write(plain.read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes())[:-2000])

    def texts(name: str) -> list[str]:
        found, _ = read(load_conversations({"name": "s", "path": str(tmp_path / name)}))
        return [item.sample.messages[0].content for item in found]

    assert texts("a.jsonl") == texts("a.jsonl.gz") == texts("a.jsonl.zst")
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz cannot be read to its end"):
        texts("cut.jsonl.gz")


def test_parquet_rows_are_read_without_the_keys_that_only_other_rows_have(tmp_path: Path) -> None:
    def call(arguments: dict[str, int]) -> dict[str, object]:
        turn = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]}
        return {"messages": [{"role": "user", "content": "q"}, turn]}

    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([call({"x": 1}), call({"y": 2}), {"messages": None}]), path, row_group_size=2)
    source = load_conversations({"name": "s", "path": str(path)})

    source.check()
    found, report = read(source)

    calls = [item.sample.messages[1].tool_calls for item in found]
    assert calls == [(ToolCall(name="f", arguments={"x": 1}),), (ToolCall(name="f", arguments={"y": 2}),)]
    assert found[0].sample.messages[0].tool_calls == ()
    assert report.examples["schema"] == [
        f"{path}: row 3: expected a list in messages or conversations; the record's keys are ['messages']"
    ]


def test_an_unusable_source_is_refused_before_the_work(tmp_path: Path) -> None:
    alpaca = write(tmp_path / "alpaca.jsonl", [{"instruction": "x", "output": "y"}] * 3)
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")

    def check(**config: object) -> None:
        load_conversations({"name": "s", **config}).check()

    with pytest.raises(
        ValueError,
        match=r"source s: none of the first 3 records .*alpaca.jsonl:1: expected a list in messages or conversations",
    ):
        check(path=str(alpaca))
    with pytest.raises(ValueError, match=r"^source s: .*bad\.parquet is not a readable Parquet file"):
        check(path=str(tmp_path / "bad.parquet"))
    with pytest.raises(ValueError, match=r"^source s: .*file .*nowhere\.jsonl does not exist"):
        check(path=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match=r"mixes \.parquet with other files"):
        check(path=[str(alpaca), str(tmp_path / "bad.parquet")])
    with pytest.raises(ValueError, match=r"source s: unknown key 'pth': did you mean 'path'\?"):
        check(pth="x")
    with pytest.raises(ValueError, match=r"source s: the key 'path' is missing"):
        check()
    with pytest.raises(ValueError, match=r"source s: format='opnai': input should be 'auto'"):
        check(path="x", format="opnai")


def test_records_without_an_id_get_one_that_does_not_depend_on_other_data(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    write(tmp_path / "a.jsonl", [chat("1"), chat("2")])
    alone, _ = read(load_conversations({"name": "s", "path": str(tmp_path / "a.jsonl")}))
    pq.write_table(pa.Table.from_pylist([chat("1"), chat("2")]), tmp_path / "b.parquet")
    columns, _ = read(load_conversations({"name": "s", "path": str(tmp_path / "b.parquet")}))
    write(tmp_path / "a.jsonl", [chat("0"), chat("2"), chat("1")])
    write(tmp_path / "more" / "b.jsonl", [chat("3")])

    among, _ = read(load_conversations({"name": "s", "path": str(tmp_path / "**/*.jsonl")}))

    ids = {item.sample.messages[0].content: item.sample.id for item in among}
    assert [item.sample.id for item in alone] == [ids["1"], ids["2"]] == [item.sample.id for item in columns]
    assert len(set(ids.values())) == 4


def test_a_mode_line_of_a_system_message_sets_the_sample_s_mode(tmp_path: Path) -> None:
    def asked(system: str, **more: object) -> dict[str, object]:
        turns = [("system", system), ("user", "q"), ("assistant", "a")]
        return {"messages": [{"role": role, "content": text} for role, text in turns], **more}

    records = [
        asked("detailed thinking on"),
        asked("Thinking off\n\nBe brief."),
        asked("Be brief.\ndetailed thinking on\nBe kind."),
        asked("I was thinking on it."),
        asked("detailed thinking off", thinking="off"),
        asked("detailed thinking off", thinking=True),
        asked("thinking on\nthinking off"),
    ]
    source = load_conversations({"name": "s", "path": str(write(tmp_path / "a.jsonl", records))})

    found, report = read(source)
    kept = [item.sample for part in source.parts(max_documents=9, max_size=9999)
            for item in source.read(part, ConversationReport(), mode_lines=True)]  # fmt: skip

    texts = ["q", "Be brief.", "Be brief.\nBe kind.", "I was thinking on it.", "q"]
    assert [item.sample.messages[0].content for item in found] == texts
    assert [item.sample.thinking for item in found] == [True, False, True, None, False]
    assert report.changed == {"mode lines removed from system messages": 4}
    assert report.skipped == {"schema": 2} and "sets the other mode" in report.examples["schema"][0]
    assert [sample.messages[0].content for sample in kept] == [r["messages"][0]["content"] for r in records[:5]]  # type: ignore[index]
    assert [sample.thinking for sample in kept] == [True, False, True, None, False]


@given(
    rows=st.lists(st.sampled_from(["good", "bad", "blank", "broken"]), max_size=15),
    max_documents=st.integers(1, 5),
    max_size=st.integers(50, 500),
)
def test_samples_and_counts_do_not_depend_on_the_parts_of_files(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], max_documents: int, max_size: int
) -> None:
    lines = {"good": json.dumps(chat("x")), "bad": '{"messages": 3}', "blank": "", "broken": "{"}
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_text("".join(lines[row] + "\n" for row in rows))
    source = load_conversations({"name": "s", "path": str(path)})

    whole, cut = read(source), read(source, max_documents=max_documents, max_size=max_size)

    assert whole == cut
    found, report = cut
    good = [f"{path}:{n}" for n, row in enumerate(rows, 1) if row == "good"]
    assert [item.where for item in found] == good
    assert report.skipped.get("schema", 0) == rows.count("bad")
    assert report.skipped.get("malformed", 0) == rows.count("broken")
