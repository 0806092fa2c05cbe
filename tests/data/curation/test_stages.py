"""Single stages compared with independent computations of the same result."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)

from nemo_ext.data.curation.job import run
from nemo_ext.data.curation.settings import KINDS, read_plan
from nemo_ext.data.curation.stage import Features
from nemo_ext.data.curation.stages.buckets import Buckets
from nemo_ext.data.curation.stages.personal import Personal
from nemo_ext.data.curation.stages.rules import _Spaces
from nemo_ext.data.text.words import words_of
from nemo_ext.job.config import compose

Write = Callable[..., Path]
Curate = Callable[..., Path]
Lines = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Texts of standard library files, and prose made from their words."""
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:60]
    code = [text for path in files if (text := path.read_text(errors="ignore")).strip()]
    chance = random.Random(0)
    prose = ["\n".join(" ".join(chance.choices(text.split(), k=12)) + "." for _ in range(9)) for text in code]
    return [*(text[:4000] for text in code), *prose]


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("c4", C4QualityFilter),
        ("gopher_quality", GopherQualityFilter),
        ("gopher_repetition", GopherRepetitionFilter),
        ("fineweb", FineWebQualityFilter),
    ],
)
def test_rules_decide_as_datatrove_does(
    kind: str, block: type, texts: list[str], write: Write, curate: Curate, lines: Lines
) -> None:
    kept = []
    for number, text in enumerate(texts):
        document = Document(text=text, id=str(number))
        if block(language=_Spaces()).filter(document) is True:
            kept.append((document.id, document.text))
    source = write({"id": str(number), "text": text} for number, text in enumerate(texts))
    out = curate(source, {kind: f"{{kind: {kind}}}"})
    assert [(line["id"], line["text"]) for line in lines(out / "documents")] == kept
    assert 0 < len(kept) < len(texts)


def test_documents_are_judged_by_the_thresholds_of_their_language(write: Write, curate: Curate, lines: Lines) -> None:
    text = "many words that have been said of the pages " * 8
    records = [{"id": code, "text": text, "language": code} for code in ("en", "de", "it")]
    block = "{kind: gopher_quality, rules: {min_doc_words: 10}, by_language: {de: {min_doc_words: 100}}}"
    assert [line["id"] for line in lines(curate(write(records), {"quality": block}) / "documents")] == ["en", "it"]


def test_presets_run_optional_stages_once_their_models_are_set(write: Write, tmp_path: Path) -> None:
    words = [f"input={write([{'text': 'a'}])}", f"output={tmp_path / 'out'}"]
    dolma = read_plan(compose("curate", [*words, "preset=dolma"]))
    assert list(dolma.skipped) == ["toxic", "nsfw"] and list(dolma.stages)[-2:] == ["personal", "same_paragraphs"]
    model = "curate.blocks.toxic.model=/models/hate.bin"
    assert list(read_plan(compose("curate", [*words, "preset=dolma", model])).stages)[-3:-1] == ["toxic", "personal"]
    domyn = read_plan(compose("curate", [*words, "preset=domyn", "curate.blocks.listed.robots=[/robots.jsonl]"]))
    assert domyn.skipped == {"perplexity": "models"} and list(domyn.stages)[-2:] == ["personal", "listed"]


def test_rules_of_domyn_suit_languages_without_spaces(write: Write, tmp_path: Path, lines: Lines) -> None:
    line = "".join(map(chr, range(0x4E00, 0x4E64))) + "\u3002"
    english = "\n".join(f"Line {n} of this page has words. It ends here." for n in range(9))
    records = [
        {"id": "zh", "text": f"{line}\n{line}", "language": "zh"},
        {"id": "en", "text": f"{english}\nShort.\nPlease turn on JavaScript in this browser.", "language": "en"},
        {"id": "few", "text": "The same words. " * 60, "language": "en"},
        {"id": "braces", "text": f"{english}\nif (this) {{ return that; }}", "language": "it"},
    ]
    words = [
        "preset=domyn",
        "curate.stages=[c4,unique_words]",
        "curate.blocks.unique_words.least=12",
        "curate.divide=[]",
    ]
    run(compose("curate", [f"input={write(records)}", f"output={tmp_path / 'out'}", "workers=1", *words]))
    assert {each["id"]: each["text"] for each in lines(tmp_path / "out" / "documents")} == {
        "zh": records[0]["text"],
        "en": english,
    }


def test_repeated_texts_urls_and_paragraphs_are_removed(write: Write, curate: Curate, lines: Lines) -> None:
    chance = random.Random(1)
    paragraphs = [f"paragraph {number} of a page" for number in range(40)]
    records = [
        {"id": str(n), "url": f"https://a.b/{chance.randrange(60)}", "text": "\n".join(chance.choices(paragraphs, k=3))}
        for n in range(200)
    ]
    seen_urls, seen_texts, seen, expected = set[str](), set[str](), set[str](), []
    for record in records:
        if record["url"] in seen_urls:
            continue
        seen_urls.add(record["url"])
        if record["text"] in seen_texts:
            continue
        seen_texts.add(record["text"])
        left = [part for part in record["text"].split("\n") if not (part in seen or seen.add(part))]  # type: ignore[func-returns-value]
        if left:
            expected.append((record["id"], "\n".join(left)))
    stages = {name: f"{{kind: {name}}}" for name in ("same_url", "same_text", "same_paragraphs")}
    # Memory for only a few values at a time must not change the result.
    out = curate(write(records), stages, "curate.unit=3000", "curate.memory=400")
    assert [(line["id"], line["text"]) for line in lines(out / "documents")] == expected


def test_all_repeated_runs_of_words_are_removed(write: Write, curate: Curate, lines: Lines) -> None:
    chance = random.Random(2)
    pool = [" ".join(chance.choices("abcdefghij", k=chance.randint(3, 9))) for _ in range(12)]
    records = [{"id": str(n), "text": " ".join(chance.choices(pool, k=6))} for n in range(40)]
    run, seen, expected = 8, set[tuple[str, ...]](), []
    for record in records:
        words, out = record["text"].split(" "), set[int]()
        for start in range(len(words) - run + 1):
            gram = tuple(words[start : start + run])
            if gram in seen:
                out.update(range(start, start + run))
            seen.add(gram)
        if left := [word for number, word in enumerate(words) if number not in out]:
            expected.append((record["id"], left))
    out = curate(write(records), {"passages": f"{{kind: same_passages, words: {run}}}"}, "curate.memory=2000")
    assert [(line["id"], line["text"].split()) for line in lines(out / "documents")] == expected


def test_near_duplicates_have_high_jaccard_similarity(write: Write, curate: Curate, lines: Lines) -> None:
    chance = random.Random(3)
    texts = []
    for _ in range(60):
        base = chance.choices([f"w{n}" for n in range(3000)], k=300)
        texts.append(base)
        for share in (0.003, 0.01, 0.1):
            texts.append([f"x{chance.randrange(9999)}" if chance.random() < share else word for word in base])
    grams = [{tuple(words[n : n + 5]) for n in range(296)} for words in texts]
    records = [{"id": str(n), "text": " ".join(words)} for n, words in enumerate(texts)]
    wordless = {len(texts), len(texts) + 1}
    records += [{"id": str(n), "text": "?" * n} for n in wordless]
    block = "{kind: near_duplicates, bands: 26, rows: 11, threshold: 0.8}"
    kept = {
        int(line["id"]) for line in lines(curate(write(records), {"near": block}, "curate.memory=5000") / "documents")
    }
    assert wordless <= kept
    for first in range(0, len(texts), 4):
        assert first in kept
        for other in range(first + 1, first + 4):
            similarity = len(grams[first] & grams[other]) / len(grams[first] | grams[other])
            if similarity > 0.9 or similarity < 0.7:
                assert (other in kept) == (similarity < 0.7), similarity


@pytest.mark.parametrize("memory", [10**9, 60_000, 9_000])
def test_buckets_do_not_depend_on_memory(tmp_path: Path, memory: int) -> None:
    chance = np.random.default_rng(0)
    scores = chance.choice([-1e300, -2.5, -0.0, 0.0, 0.25, 0.5, 7.0], 3000).astype(np.float64)
    scores[::3] = chance.normal(size=1000)
    sizes, groups = (chance.integers(*ends, 3000).astype(np.uint64) for ends in ((1, 9000), (0, 3)))
    groups *= np.uint64(1 << 62)
    rows, units, first = np.stack([scores.view(np.uint64), sizes, groups], axis=1), [], 0
    for number, count in enumerate((0, 1000, 1, 1999)):
        rows[first : first + count].tofile(tmp_path / str(number))
        units.append(Features(tmp_path / str(number), 3 * count, count))
        first += count
    verdicts = [np.full(unit.documents, 255, np.uint8) for unit in units]

    Buckets(buckets=7).decide(units, lambda unit, places, values: verdicts[unit].__setitem__(places, values), memory)

    expected = np.empty(3000, np.uint8)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        order = members[np.argsort(scores[members], kind="stable")]
        middle = np.cumsum(sizes[order].astype(float)) - sizes[order] / 2
        expected[order] = np.minimum(7 * middle / sizes[order].sum(), 6).astype(np.uint8)
    assert (np.concatenate(verdicts) == expected).all()


def test_buckets_have_equal_bytes_and_rates_with_the_given_mean(write: Write, curate: Curate, lines: Lines) -> None:
    chance = random.Random(4)
    records = [{"id": str(n), "text": "x" * chance.randint(1, 99), "score": chance.random()} for n in range(500)]
    block = "{kind: buckets, key: score, buckets: 5, rate: 1.5, most: 4, throwaway: 0.2}"
    out = curate(write(records), {"buckets": block}, "curate.divide=[bucket]", "curate.unit=5000")
    rates = Buckets(key="score", buckets=5, rate=1.5, most=4, throwaway=0.2).rates
    assert rates[0] == 0 and all(one < other for one, other in pairwise(rates[1:]))
    assert np.mean(rates) == pytest.approx(1.5) and rates[-1] <= 4
    sizes = {n: sum(len(line["text"]) for line in lines(out / "documents" / "text" / str(n))) for n in range(1, 5)}
    assert max(sizes.values()) - min(sizes.values()) < 250
    kept = {n: [line["score"] for line in lines(out / "documents" / "text" / str(n))] for n in sizes}
    assert all(max(kept[n]) <= min(kept[n + 1]) for n in range(1, 4))
    streams = (out / "conf" / "data" / "curated.yaml").read_text()
    assert f"weight: {round(sizes[4] * rates[4])}" in streams
    with pytest.raises(ValueError, match="raise most"):
        Buckets(rate=3, most=4, throwaway=0.5).check()


def test_personal_data_is_replaced_and_too_much_of_it_drops_a_document() -> None:
    judge = Personal(regions=("US",), most=3).start()
    text = "Call +39 06 6982 1234 or write to a.b@c.it from 8.8.8.8; see 192.168.0.1, version 1.2.3 and 2024-01-02."
    document = Document(text=text, id="a")
    assert judge(document) is None
    assert document.text == (
        "Call |||PHONE_NUMBER||| or write to |||EMAIL_ADDRESS||| from |||IP_ADDRESS|||; see 192.168.0.1, version 1.2.3 "
        "and 2024-01-02."
    )
    dropped = judge(Document(text=f"{text} Also x@y.de, please.", id="b"))
    assert dropped is not None and dropped.reason == "much-of-it" and "2 email" in dropped.detail


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("on 06.07.2021, 06-07-2021 or 2024-11-26 10:30", None),
        ("for 600 000 000 or 600.000.000 euro, 0.30123456", None),
        ("ISBN 0-306-40615-2, P.IVA 01234567890, pages 31 32 33 34 35", None),
        ("3 5 7 9 11 13 15 17 19 and 4 8 12 16 20 24 28 32", None),
        ("+33 (0)1 42 68 53 00", "|||PHONE_NUMBER|||"),
        ("(212) 736-5000 (212) 736-5001", "|||PHONE_NUMBER||| |||PHONE_NUMBER|||"),
        ("+39\u00a006\u00a069821234", "|||PHONE_NUMBER|||"),
        ("BE68 5390 0754 7034 GEBABEBB", "|||BANK_ACCOUNT||| GEBABEBB"),
        ("06 69821234, 00187 Roma", "|||PHONE_NUMBER|||, 00187 Roma"),
        ("4111 1111 1111 1111 12/25", "|||CARD_NUMBER||| 12/25"),
        ("2221 0000 0000 0009", "|||CARD_NUMBER|||"),
        ("ES91 2100 0418 4502 0005 1332 BIC: CAIXESBB", "|||BANK_ACCOUNT||| BIC: CAIXESBB"),
        ("RSSMRA85T10A562S", "|||TAX_NUMBER|||"),
        ("a." * 100 + "b@" + "c." * 3 + "org", None),
    ],
)
def test_personal_data_is_distinguished_from_other_numbers(text: str, left: str | None) -> None:
    document = Document(text=f"see {text} there", id="a")
    assert Personal(regions=("IT", "FR", "DE", "ES", "US")).start()(document) is None
    assert document.text == f"see {text if left is None else left} there" or "b@" in text


def test_a_telephone_number_is_found_after_many_other_numbers() -> None:
    numbers = ", ".join(f"{number} 0000" for number in range(1000, 1500))
    document = Document(text=f"{numbers}; call +39 06 6982 1234 there", id="a")
    assert Personal().start()(document) is None
    assert document.text == f"{numbers}; call |||PHONE_NUMBER||| there"


def test_lists_include_subdomains_and_robots_txt(tmp_path: Path, write: Write, curate: Curate, lines: Lines) -> None:
    (tmp_path / "domains").write_text("# bad ones\nhttps://www.Bad.com\nmüller.de\n")
    robots = "\ufeffUser-agent: GPTBot\nAllow: /\nDisallow: /private/\nDisallow: /*.pdf$\n"
    broken = "User-agent: *\nDisallow: //[x"
    rows = [{"domain": "news.org", "robots": robots}, {"domain": "odd.org", "robots": broken}]
    (tmp_path / "robots.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "urls").write_text("https://www.site.net/page/\n")
    urls = {
        "kept": "https://notbad.com/",
        "below": "http://a.b.bad.com:80/x",
        "plain": "site.net/page",
        "robots": "https://www.news.org/private/1",
        "pdf": "news.org/a/b.pdf",
        "query": "http://bad.com?x=1",
        "unicode": "https://xn--mller-kva.de:443/",
        "odd": "https://odd.org/page",
        "allowed": "https://news.org/public",
        "other host": "https://open.news.org/private/1",
        "none": "",
    }
    records = [{"id": name, "text": "text", "metadata": {"url": url}} for name, url in urls.items()]
    files = {"domains": "domains", "urls": "urls", "robots": "robots.jsonl"}
    block = f"{{kind: listed, {', '.join(f'{key}: {tmp_path / name}' for key, name in files.items())}}}"
    out = curate(write(records), {"lists": block}, "curate.keep_dropped=all")
    assert [line["id"] for line in lines(out / "documents")] == ["kept", "odd", "allowed", "other host", "none"]
    reasons = {line["id"]: line["dropped"] for line in lines(out / "dropped")}
    assert reasons == {
        **{"below": "domain", "plain": "url", "robots": "robots"},
        **{"pdf": "robots", "query": "domain", "unicode": "domain"},
    }


def test_perplexity_equals_kenlms(tmp_path: Path, write: Write, curate: Curate, lines: Lines) -> None:
    kenlm = pytest.importorskip("kenlm", reason="pip install kenlm")
    grams = {1: ["-1.0\t<unk>", "0\t<s>\t0", "-0.5\t</s>", "-0.4\tgood\t-0.1", "-0.6\tword\t0"], 2: ["-0.2\tgood word"]}
    arpa = "\\data\\\n" + "".join(f"ngram {n}={len(entries)}\n" for n, entries in grams.items())
    arpa += "".join(f"\n\\{n}-grams:\n" + "\n".join(entries) + "\n" for n, entries in grams.items()) + "\n\\end\\\n"
    (tmp_path / "en.arpa").write_text(arpa)
    texts = ["good word", "good good good", "strange things here", "good\nword"]
    records = [{"id": str(n), "text": text, "language": "en"} for n, text in enumerate(texts)]
    out = curate(write(records), {"lm": f"{{kind: perplexity, models: {{en: {tmp_path / 'en.arpa'}}}, most: 5}}"})
    model = kenlm.Model(str(tmp_path / "en.arpa"))
    perplexities = {line["id"]: line["perplexity"] for line in lines(out / "documents")}
    assert set(perplexities) == {"0", "1", "3"}
    for number in ("0", "1"):
        assert perplexities[number] == pytest.approx(model.perplexity(texts[int(number)]), abs=0.01)
    shouted = write([{"id": "1", "text": "GÓOD word", "language": "en"}], "shouted.jsonl")
    block = f"{{kind: perplexity, models: {{en: {tmp_path / 'en.arpa'}}}, normalize: ccnet}}"
    (document,) = lines(curate(shouted, {"lm": block}, name="ccnet") / "documents")
    assert document["perplexity"] == pytest.approx(model.perplexity("good word"), abs=0.01)


def test_wrongly_decoded_text_is_repaired_before_it_is_judged(write: Write, curate: Curate, lines: Lines) -> None:
    text = "It’s a “quoted” café text – of the town. " * 20
    records = [{"id": "mended", "text": text.encode().decode("latin-1")}, {"id": "lost", "text": "a\ufffdb" * 30}]
    (document,) = lines(curate(write(records), {"encoding": "{kind: encoding}"}) / "documents")
    assert document["id"] == "mended" and "café" in document["text"]


def test_every_kind_is_named_in_the_help(command: Callable[..., Any], tmp_path: Path) -> None:
    text = command("curate", "--help", cwd=tmp_path).stdout
    assert all(kind in words_of(text) for kind in KINDS)
