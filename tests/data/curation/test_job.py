"""`nemo-ext curate` and `nemo-ext curate_classifier` end to end: malformed input, invalid settings, second runs."""

import gzip
import json
import os
import resource
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import zstandard

from nemo_ext.data.curation.classifier import load_scorer
from nemo_ext.data.curation.job import run
from nemo_ext.data.curation.training import run as train_classifier
from nemo_ext.data.streams import blend_to_tokenize
from nemo_ext.data.text.user_files import JsonlSource
from nemo_ext.data.tokenize import tokenize_blend
from nemo_ext.job.config import compose

Write = Callable[..., Path]
Curate = Callable[..., Path]
Lines = Callable[[Path], list[dict[str, Any]]]
LENGTH = {"length": "{kind: length, least: 3}"}


def test_records_keep_their_keys_and_invalid_records_are_counted(tmp_path: Path, curate: Curate, lines: Lines) -> None:
    source = tmp_path / "raw.jsonl"
    good = {"id": 7, "text": "a text", "url": "u", "nested": {"key": [1, None]}, "big": 1 << 70, "source": "crawl"}
    source.write_bytes(
        b"\n".join([json.dumps(good).encode(), b'{"text": "half', b'{"text": 5}', b'{"other": "x"}', b'{"text": " "}'])
        + b'\n{"text": "\\ud800 half a character"}\n'
        + b"".join(b'{"text": "document %d"}\n' % number for number in range(500))
    )
    out = curate(source, LENGTH)
    first, second, *_ = lines(out / "documents")
    assert first == {**good, "id": "7", "source": "text", "source_": "crawl"}
    assert second["id"] == "text/raw.jsonl:7"
    read = json.loads((out / "funnel.json").read_text())["text"]["read"]
    assert read["records"] == 506 and read["skipped"] == {"malformed": 4, "empty": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"text": "abcdef"}\n' * 9999)[:-20], "cannot be read to its end"),
        (gzip.compress(b'{"content": "abc"}\n' * 99), "no key 'text'"),
        (b"", "input or data.streams has no documents"),
    ],
    ids=["cut", "other keys", "empty"],  # the bytes of a gzip file contain the time
)
def test_unusable_files_are_reported(tmp_path: Path, curate: Curate, content: bytes, message: str) -> None:
    source = tmp_path / ("raw.jsonl.gz" if content else "raw.jsonl")
    source.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        curate(source, LENGTH)


@pytest.mark.parametrize(
    ("stages", "words", "message"),
    [
        ({}, (), "curate.stages is empty: choose a preset"),
        (LENGTH, ("curate.stages=[lengths]",), "curate.stages: 'lengths' is not in .*did you mean 'length'"),
        ({}, ("curate.stages=[length]",), "curate.stages: 'length' is not in .*add it with 'curate.blocks.length={}'"),
        ({"length": "{kind: lenght}"}, (), "curate.blocks.length: unknown kind 'lenght': did you mean 'length'"),
        ({"length": "{least: 3, mots: 4}"}, (), "curate.blocks.length: unknown key 'mots': did you mean 'most'"),
        ({"c4": "{rules: {min_sentences: 3}}"}, (), "curate.blocks.c4: rules: unknown key 'min_sentences'"),
        (
            {"language": "{languages: [english]}"},
            (),
            "curate.blocks.language: languages: unknown language code 'english'",
        ),
        ({"personal": "{kinds: [mail]}"}, (), "did you mean 'email'"),
        (
            {"perplexity": "{models: {}}"},
            ("curate.optional=[perplexity]",),
            "none of perplexity can run without a model, list or test sets: set one in curate.bl",
        ),
        (
            {"perplexity": "{model: en.arpa}"},
            ("curate.optional=[perplexity]",),
            "unknown key 'model': did you mean 'mo",
        ),
        (LENGTH, ("curate.optional=[length]",), "curate.optional: 'length' is not a block with a model or list"),
        ({"classifier": "{model: /nowhere}"}, (), "fastText model /nowhere does not exist"),
        ({"listed": "{domains: /nowhere}"}, (), "file /nowhere does not exist"),
        ({"buckets": "{key: quality}"}, (), "has quality=None, but a number is required: before this"),
        (LENGTH, ("shard=2/2",), "shard: 2/2: expected I/N with I below N"),
        (LENGTH, ("+curate.blocks.langage.least=0.9",), "did you mean 'language'"),
        (LENGTH, ("curate.tokenizer=/nowhere",), "/nowhere"),
        ({"c4": "{rules: {min_words_per_line: few}}"}, (), "curate.blocks.c4: rules.*wrong type"),
        ({"gopher_quality": "{rules: {min_doc_words: many}}"}, (), "wrong type"),
        ({"read": "{kind: length}"}, (), "'read' is not a valid stage name"),
        ({"a": "{kind: buckets}", "b": "{kind: buckets}"}, (), "a and b both assign buckets"),
        ({"buckets": "{rate: 1}"}, (), "requires one stream per bucket"),
        (LENGTH, ("curate.divide=[long]",), "document text/raw.jsonl:1 has long='x+'..., which is too long"),
        (
            LENGTH,
            ("streams=[{name: web, weight: 1, source: {kind: jsonl, path: /nowhere.jsonl}}]",),
            "input cannot be combined with a blend",
        ),
    ],
)
def test_invalid_settings_are_reported(
    write: Write, curate: Curate, stages: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        curate(write([{"text": "a text", "long": "x" * 200}]), stages, *words)


def test_only_the_folders_of_kept_documents_are_limited(
    write: Write, curate: Curate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_ext.data.curation.passes.MOST_FOLDERS", 2)
    words = ("curate.divide=[lang]", "curate.keep_dropped=all")

    def records(*languages: str) -> list[dict[str, str]]:
        return [{"text": "short", "lang": "de"}, *({"text": "a long text", "lang": lang} for lang in languages)]

    curate(write(records("de", "it")), {"length": "{least: 8}"}, *words)
    with pytest.raises(ValueError, match=r"curate\.divide requires more than 2 folders"):
        curate(write(records("de", "it", "fr")), {"length": "{least: 8}"}, *words, name="more")


def test_a_second_run_does_nothing_and_other_settings_are_refused(
    tmp_path: Path, write: Write, curate: Curate, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write([{"text": f"text {number}"} for number in range(9)])
    out = curate(source, LENGTH)
    before = (out / "report.md").stat().st_mtime_ns
    capsys.readouterr()
    curate(source, LENGTH)
    assert (out / "report.md").stat().st_mtime_ns == before and "is already complete" in capsys.readouterr().err
    with pytest.raises(ValueError, match="least: 3 -> 4"):
        curate(source, {"length": "{kind: length, least: 4}"})
    os.utime(source, (1, 1))
    with pytest.raises(ValueError, match="choose another folder"):
        curate(source, LENGTH)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("notes")
    with pytest.raises(ValueError, match="has files that `nemo-ext curate` did not write"):
        curate(source, LENGTH, name="mine")


@pytest.mark.parametrize("file", ["000000.jsonl.zst", "000000.values", "000000.verdicts", "000000.ends.npy"])
@pytest.mark.parametrize("short", [True, False])
def test_a_truncated_or_missing_file_stops_the_job(
    tmp_path: Path, write: Write, curate: Curate, lines: Lines, file: str, short: bool
) -> None:
    source = write([{"text": f"text {number % 70}"} for number in range(100)])
    stages, words = {"same": "{kind: same_text}"}, ("curate.unit=1000",)
    curate(source, stages, *words, "shard=0/2")
    if file != "000000.values":  # read by the decision; the next pass reads the rest
        curate(source, stages, *words, "shard=1/2")
    middle = tmp_path / "out" / ".job" / "0" / file
    if not short:
        middle.unlink()
    elif file.endswith(".zst"):
        whole = list(lines(middle.parent))[:20]
        middle.write_bytes(zstandard.compress(b"".join(json.dumps(line).encode() + b"\n" for line in whole)))
    else:
        middle.write_bytes(middle.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"damaged|20 documents, but \d+|are missing|cannot be read"):
        curate(source, stages, *words)


def test_input_that_changes_during_the_run_is_an_error(tmp_path: Path, write: Write, curate: Curate) -> None:
    source = write([{"text": f"text {number}"} for number in range(1000)])
    curate(source, LENGTH, "curate.unit=5000", "shard=0/2")
    own = tmp_path / "out" / ".job"
    before = source.stat()
    with open(source, "r+b") as file:
        file.truncate(before.st_size // 2)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    record = json.loads((own / "settings.json").read_text())
    (digest,) = (stream["files"] for stream in record["streams"].values())
    now = JsonlSource(path=(str(source),)).fingerprint([("raw.jsonl", source)])
    (own / "settings.json").write_text(json.dumps(record).replace(digest, now))
    with pytest.raises(ValueError, match="became shorter during the run"):
        curate(source, LENGTH, "curate.unit=5000", "shard=1/2")


def test_odd_records_are_counted_and_do_not_stop_the_job(tmp_path: Path, write: Write, curate: Curate) -> None:
    (tmp_path / "domains").write_text("bad.com\n")
    odd = [
        {"id": "\ud83dx", "text": "ab"},
        {"text": "no address", "url": "http://[bad"},
        {"text": "no address", "url": "http://[::1/x?y"},
        {"text": "no words", "url": "x" * 100_000},
        {"text": "kept", "url": "https://good.com", "dropped": "mine", "text_": "too"},
    ]
    out = curate(write(odd), {"lists": f"{{kind: listed, domains: {tmp_path / 'domains'}}}", **LENGTH})
    (counts,) = json.loads((out / "funnel.json").read_text()).values()
    assert counts["stages"]["length"]["dropped"]["too-short"]["amount"]["documents"] == 1
    assert counts["stages"]["length"]["kept"]["documents"] == 4


def test_many_units_do_not_need_many_open_files(write: Write, curate: Curate, lines: Lines) -> None:
    source = write([{"text": f"text {number % 80}"} for number in range(160)])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, before[1]))
    try:
        stages = {"same": "{kind: same_text}", "near": "{kind: near_duplicates, threshold: 0.8}"}
        out = curate(source, stages, "curate.unit=60")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(list((out / ".job" / "0").glob("*.json"))) > 40 and len(lines(out / "documents")) == 80


def test_languages_and_streams_become_folders_that_tokenize_reads(tmp_path: Path, write: Write, curate: Curate) -> None:
    for name in ("web", "wiki"):
        records = [{"text": f"text {name} {number}", "lang": "a/.." if number % 2 else "en"} for number in range(20)]
        write(records, f"{name}.jsonl")
    sources = {name: f"{{kind: jsonl, path: {tmp_path / name}.jsonl}}" for name in ("web", "wiki")}
    streams = ", ".join(f"{{name: {name}, weight: 1, source: {source}}}" for name, source in sources.items())
    out = curate(Path("null"), LENGTH, "input=null", f"streams=[{streams}]", "curate.divide=[lang]")
    assert sorted(str(path.relative_to(out / "documents")) for path in (out / "documents").glob("*/*")) == [
        *("web/a___", "web/en", "wiki/a___", "wiki/en")
    ]
    config = compose("tokenize", [f"--config-dir={out / 'conf'}", "data=curated", "workers=1", "tokenizer=byte"])
    tokenize_blend(blend_to_tokenize(config))
    assert (out / "tokens" / "web.en_train.idx").exists()


@pytest.mark.parametrize(
    "preset", ["dolma", "domyn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dolma3", "fineweb"))]
)
def test_presets_start_and_keep_prose(tmp_path: Path, write: Write, lines: Lines, preset: str) -> None:
    sentences = [
        *(
            "The harbour was quiet when the first boats came back with their nets.",
            "Nobody had seen the old man since.",
        ),
        *("They talked about the weather and of the price that the fish would have.", "A dog slept in the shade."),
        *("By noon the market was full, and the children ran between the tables.", "It smelled of salt and bread."),
        *("Later that day a storm was said to be on its way from the north.", "So they pulled the boats up the beach."),
    ]
    prose = [
        " ".join(sentences[(number + step) % 8] for step in range(8)) + f" It was day {number}." for number in range(3)
    ]
    source = write({"id": str(n), "text": text} for n, text in enumerate([*prose, prose[0], "spam " * 500]))
    run(compose("curate", [f"input={source}", f"output={tmp_path / 'out'}", f"preset={preset}", "workers=1"]))
    kept = [line["id"] for line in lines(tmp_path / "out" / "documents")]
    assert kept and set(kept) <= {"0", "1", "2"}


def test_web_archives_give_pages_with_their_url(tmp_path: Path, curate: Curate, lines: Lines) -> None:
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    sentences = " ".join(f"This is sentence number {n} of an article about the sea and its fish." for n in range(12))
    page = f"<html><body><nav>Home | Login</nav><article><p>{sentences}</p></article></body></html>".encode()
    path = tmp_path / "crawl.warc.gz"
    with open(path, "wb") as file:
        writer = WARCWriter(file, gzip=True)
        for status, kind, body in (
            *(("200 OK", "text/html", page), ("404 Not Found", "text/html", page)),
            *(("200 OK", "image/png", b"png"), ("200 OK", "text/html", b"<html></html>")),
            *(
                ("200 OK", "text/html; gzip", gzip.compress(page)),
                ("200 OK", "text/html; gzip", gzip.compress(page)[:-40]),
            ),
        ):
            encoding = [("Content-Encoding", "gzip")] if "gzip" in kind else []
            headers = StatusAndHeaders(status, [("Content-Type", kind), *encoding], protocol="HTTP/1.0")
            url = f"http://example.com/{len(body)}"
            writer.write_record(writer.create_warc_record(url, "response", payload=BytesIO(body), http_headers=headers))
    out = curate(path, LENGTH)
    document, packed = lines(out / "documents")
    assert document["text"] == sentences and document["url"] == f"http://example.com/{len(page)}"
    assert packed["text"] == sentences
    skipped = json.loads((out / "funnel.json").read_text())["text"]["read"]["skipped"]
    assert skipped == {"status 404": 1, "not text": 1, "no text": 1, "damaged page": 1}
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="cannot be read to its end"):
        curate(path, LENGTH, name="cut")


@pytest.mark.parametrize("engine", ["hashed", pytest.param("fasttext", marks=pytest.mark.slow)])
def test_a_classifier_separates_its_two_sets(
    tmp_path: Path, write: Write, curate: Curate, engine: str, lines: Lines
) -> None:
    proofs = ({"text": f"the theorem follows from lemma {n} and the proof is short"} for n in range(300))
    offers = ({"text": f"click here for {n} cheap offers and subscribe to the newsletter"} for n in range(300))
    good, web = write(proofs, "good.jsonl"), write(offers, "web.jsonl")
    words = [f"positives={good}", f"negatives={web}", f"output={tmp_path / 'quality'}", f"engine={engine}", "bits=14"]
    train_classifier(compose("curate_classifier", words))
    report = (tmp_path / "quality" / "report.md").read_text()
    assert "| area under the ROC curve | 1.0000 |" in report
    scorer = load_scorer(str(tmp_path / "quality"))
    assert scorer.score("a proof of the lemma") > 0.6 > 0.4 > scorer.score("cheap offers in the newsletter")
    mixed = write(
        [{"id": "g", "text": "the proof of the theorem"}, {"id": "w", "text": "subscribe to cheap offers"}],
        "mixed.jsonl",
    )
    block = f"{{kind: classifier, model: {tmp_path / 'quality'}, least: 0.5}}"
    assert [line["id"] for line in lines(curate(mixed, {"quality": block}) / "documents")] == ["g"]
    page = write(
        [{"text": "The lemma follows. Click for cheap offers! A proof: 1.5 is\nshort. Cheap offers"}], "page.jsonl"
    )
    block = f"{{kind: sentences, model: {tmp_path / 'quality'}, threshold: 0.5}}"
    (document,) = lines(curate(page, {"sentences": block}, name="page") / "documents")
    assert document["text"] == " Click for cheap offers!  Cheap offers"
    (tmp_path / "quality" / "classifier.json").write_text('{"bits": 60, "threshold": 0.5, "engine": "hashed"}')
    with pytest.raises(ValueError, match="not a classifier"):
        load_scorer(str(tmp_path / "quality"))
