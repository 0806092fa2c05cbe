import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.data.streams import blend_to_tokenize, read_blend
from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer
from nemo_ext.data.text.user_files import JsonlSource, ParquetSource, TextSource, TreeSource
from nemo_ext.data.tokenize import tokenize_blend

Write = Callable[..., Source]


@pytest.fixture
def blend(tmp_path: Path, jsonl: Write) -> dict[str, Any]:
    """Valid blend of two streams, for tests to make invalid."""
    for name in ("web", "code"):
        jsonl(tmp_path / f"{name}.jsonl", [f"{name} {number}" for number in range(30)])
    return {
        "directory": str(tmp_path / "data"),
        "tokenizer": {"kind": "byte"},
        "validation_share": 0.2,
        "seed": 3,
        "workers": 1,
        "streams": [
            {"name": name, "weight": weight, "source": {"kind": "jsonl", "path": str(tmp_path / f"{name}.jsonl")}}
            for name, weight in (("web", 0.6), ("code", 0.4))
        ],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(stream=[]), "data: unknown key 'stream': did you mean 'streams'"),
        (lambda c: c.pop("directory"), "data: the key 'directory' is missing"),
        (lambda c: c.update(streams=[]), "streams must be a list of at least one stream"),
        (lambda c: c.update(tokenizer="byte"), "tokenizer must be a mapping such as {kind: byte}, not 'byte'"),
        (
            lambda c: c.update(tokenizer={"kind": "huggingface", "path": "nowhere"}),
            "data.tokenizer: nowhere cannot be read",
        ),
        (lambda c: c.update(validation_share="5%"), "data.validation_share=.5%.: input should be a valid number"),
        (
            lambda c: c["streams"][1].update(name="web"),
            r"streams\[1\]: the name 'web' is already used by data\.streams\[0\]",
        ),
        (
            lambda c: c["streams"][1].update(prefix=c["directory"] + "/web"),
            r"streams\[1\]: the prefix .*/web is already used by data\.streams\[0\]",
        ),
        (lambda c: c["streams"][1].update(name="../x"), r"streams\[1\]: the name must consist of letters"),
        (lambda c: c["streams"][1].update(weight=0), r"streams\[1\]\.weight must be a number above 0, not 0"),
        (lambda c: c["streams"][1].pop("weight"), r"streams\[1\]: the key 'weight' is missing"),
        (lambda c: c["streams"][1].update(weigth=1), r"streams\[1\]: unknown key 'weigth': did you mean 'weight'"),
        (lambda c: c["streams"][1]["source"].update(kind="jsonnl"), "stream 'code': unknown source kind 'jsonnl'"),
        (
            lambda c: c["streams"][1]["source"].update(path="nowhere.jsonl"),
            r"stream 'code': jsonl source: file nowhere\.jsonl does not exist",
        ),
        (
            lambda c: c["streams"][1]["source"].update(text_key="x"),
            r"stream 'code': .*code\.jsonl: none of the first lines contains text",
        ),
    ],
)
def test_an_invalid_blend_is_an_error_before_any_work(
    tmp_path: Path, blend: dict[str, Any], change: Callable[[dict[str, Any]], object], message: str
) -> None:
    change(blend)

    with pytest.raises(ValueError, match=message):
        tokenize_blend(blend, progress=False)
    assert not (tmp_path / "data").exists()


# -------------------------------------------------------------------------- the user's files


NOTHING: dict[str, object] = dict.fromkeys(
    ("input", "output", "kind", "text_key", "tokenizer", "validation_share", "workers", "data")
)


def composed(**values: object) -> dict[str, object]:
    """Composed config of `nemo-ext tokenize` with these values."""
    return NOTHING | values


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", JsonlSource),
        ("a.json.gz", JsonlSource),
        ("a.parquet", ParquetSource),
        ("a.txt", TextSource),
        ("project", TreeSource),
    ],
)
def test_the_kind_is_inferred_from_the_name(tmp_path: Path, name: str, kind: type[Source]) -> None:
    pa = pytest.importorskip("pyarrow")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "main.py").write_text("print(1)")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")

    blend = read_blend(blend_to_tokenize(composed(input=str(tmp_path / name), output=str(tmp_path / "out/mine"))))

    (stream,) = blend.streams
    assert isinstance(stream.source, kind)
    assert (stream.name, stream.prefix) == ("mine", tmp_path / "out/mine")
    assert blend.tokenizer.identity == "byte-257"


def test_options_for_files_reach_the_blend(tmp_path: Path, bpe_file: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(json.dumps({"body": name}) + "\n")
    config = composed(
        input=[str(tmp_path / "a"), str(tmp_path / "b")],
        output="mine",
        kind="jsonl",
        text_key="body",
        tokenizer=str(bpe_file),
        validation_share=0.3,
        workers=2,
        data={"directory": None, "streams": None, "tokenizer": None, "validation_share": 0.05, "seed": 7},
    )

    blend = read_blend(blend_to_tokenize(config))

    assert blend.streams[0].source == JsonlSource(path=(str(tmp_path / "a"), str(tmp_path / "b")), text_key="body")
    assert blend.streams[0].prefix == Path("mine")
    assert isinstance(blend.tokenizer, HuggingFaceTokenizer)
    assert (blend.validation_share, blend.seed, blend.workers) == (0.3, 7, 2)


def test_tokenizer_share_and_workers_override_the_blends(blend: dict[str, Any], bpe_file: Path) -> None:
    unchanged = read_blend(blend_to_tokenize(composed(data=blend)))
    tokenizer = {"kind": "huggingface", "path": str(bpe_file), "parse_special_tokens": True}

    changed = read_blend(blend_to_tokenize(composed(data=blend, tokenizer=tokenizer, validation_share=0, workers=5)))

    assert (unchanged.validation_share, unchanged.workers, unchanged.tokenizer.identity) == (0.2, 1, "byte-257")
    assert (changed.validation_share, changed.workers, changed.tokenizer.describe()["path"]) == (0, 5, str(bpe_file))
    assert [stream.name for stream in changed.streams] == ["web", "code"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no text is given: set input=FILE and output=PREFIX, or choose a blend"),
        ({"input": "DIR/a.jsonl"}, "output is not set: set output=PREFIX, which writes"),
        ({"input": "DIR/a.jsonl", "output": "DIR"}, "is a directory: give a prefix for the files, e.g. .*/mine"),
        ({"input": "DIR/a.jsonl", "output": "new/"}, "output=new/ is a directory"),
        ({"input": 3, "output": "x"}, "input=3: input should be"),
        ({"input": "", "output": "x"}, "input='' contains an empty name"),
        ({"input": ["a.jsonl", ""], "output": "x"}, "contains an empty name"),
        ({"input": "a.jsonl", "output": "x", "workers": "2"}, "workers='2': input should be a valid integer"),
        ({"input": "a.bin", "output": "x"}, "the kind of input=a.bin cannot be inferred from its name: set kind"),
        ({"input": "a.txt.gz", "output": "x"}, "the kind of input=a.txt.gz cannot be inferred"),
        ({"input": ["a.jsonl", "b.txt"], "output": "x"}, r"files of different kinds \(jsonl, text\)"),
        (
            {"input": "DIR", "output": "x"},
            r"holds a\.jsonl: set input='.*/\*\.jsonl' to read such files, or kind=tree",
        ),
        ({"input": "DIR", "output": "DIR/x", "kind": "tree"}, "is inside input=.*, which must not change"),
        ({"input": "a.jsonl", "output": "x", "data": {"streams": [{}]}}, "cannot be combined with a blend"),
        ({"kind": "jsonl", "data": {"streams": [{}]}}, "kind=jsonl requires input="),
        ({"data": {"streams": [{"name": "a", "weight": 1}]}}, "no stream of this blend has a source"),
    ],
)
def test_input_that_cannot_be_tokenised_is_an_error(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    values = {k: v.replace("DIR", str(tmp_path)) if isinstance(v, str) else v for k, v in values.items()}

    with pytest.raises(ValueError, match=message):
        blend_to_tokenize(composed(**values))


def test_a_text_key_is_refused_for_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")

    with pytest.raises(ValueError, match="stream 'x': text source: unknown key 'text_key'"):
        read_blend(blend_to_tokenize(composed(input=str(tmp_path / "a.txt"), output="x", text_key="body")))
