"""What `nemo-ext curate` finds of faults that are planted in a corpus: recall and precision of every stage.

    python benchmarks/curate_faults.py FOLDER [--each 200] [--line 200] [--workers 2]

Clean documents are sentences of the docstrings of packages that are there, in paragraphs. Each fault is planted in
`--each` documents of their own; one more is a single line of `--line` MB. Near copies are made by replacing words, and
sorted by the exact Jaccard similarity of their 5-grams with what they are copies of.
"""

import argparse
import io
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from nemo_ext.data.curation.job import run
from nemo_ext.data.text.corpora import DocstringsSource
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.data.text.words import words_of
from nemo_ext.job.config import compose

STAGES = (
    *("length", "encoding", "listed", "language", "same_url", "same_text", "gopher_quality", "gopher_repetition"),
    *("decontamination", "personal", "near_duplicates", "same_paragraphs", "same_passages"),
)
DROPS = {
    "a long line": "length",
    "broken characters": "encoding",
    "listed domain": "listed",
    "another language": "language",
    "same url": "same_url",
    "same text": "same_text",
    "spam template": "gopher_repetition",
    "a short page": "gopher_quality",
    "symbols": "gopher_quality",
    "benchmark leak": "decontamination",
}
"""Faults by the stage that has to drop them."""
SENTENCES = {
    "fr": (
        "Le conseil municipal se réunit chaque mardi pour discuter du budget. Nous avons vu le musée avec nos amis. "
        "Il pleuvait beaucoup, mais les enfants voulaient jouer dehors. La bibliothèque ferme plus tôt en hiver. "
        "Les voisins ont préparé un grand repas pour fêter la fin des travaux. Elle cherche la réponse à sa question."
    ),
    "de": (
        "Der Zug nach Hamburg hatte wieder einmal eine halbe Stunde Verspätung. Wir haben über den Plan gesprochen. "
        "Die Kinder spielen im Garten, obwohl es regnet. Im Winter schließt die Bibliothek früher als sonst. "
        "Niemand wusste, warum die Heizung nicht mehr funktionierte. Sie sucht noch immer nach einer Antwort."
    ),
    "it": (
        "Il treno per Milano è arrivato con mezz'ora di ritardo. Abbiamo parlato a lungo del progetto con gli amici. "
        "I bambini giocano in giardino anche se piove. In inverno la biblioteca chiude prima del solito. "
        "Nessuno sapeva perché il riscaldamento non funzionasse più. Lei cerca ancora una risposta alla sua domanda."
    ),
    "es": (
        "El tren a Madrid llegó con media hora de retraso. Hablamos mucho tiempo del proyecto con nuestros amigos. "
        "Los niños juegan en el jardín aunque está lloviendo. En invierno la biblioteca cierra más temprano. "
        "Nadie sabía por qué la calefacción ya no funcionaba. Ella todavía busca una respuesta a su pregunta."
    ),
    "ru": (
        "Поезд в Казань опоздал на полчаса. Мы долго говорили о проекте с друзьями. Дети играют в саду, хотя идёт "
        "дождь. Зимой библиотека закрывается раньше. Никто не знал, почему отопление больше не работает."
    ),
}
PERSONAL = (
    *("anna.rossi@mail-box.it", "j.doe+news@corp.example.co.uk", "8.8.4.4", "151.101.1.69", "+39 06 6982 1234"),
    *("+44 20 7946 0018", "(212) 736-5000", "DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432"),
    *("4111 1111 1111 1111", "RSSMRA85T10A562S", "536-90-4399"),
)
HARMLESS = (
    *(
        "version 3.12.4.1",
        "2024-11-26 10:30",
        "192.168.1.10",
        "order 4111111111111112",
        "pages 212-736",
        "the @decorator",
    ),
    *("06.07.2021", "600.000.000 euro", "ISBN 0-306-40615-2", "3 5 7 9 11 13 15 17 19", "0.30123456"),
    *("ISBN 978-3-16-148410-0", "DE89 3704 0044 0532 0130 01", "1.000.000,50 EUR", "sha 0123456789ab"),
)
BOILERPLATE = "We use cookies to make this page better; by reading on you agree to our terms of use and privacy policy."


@dataclass
class Planted:
    """Faults by the id of their document, and what is to be found in the text that stays."""

    faults: dict[str, str] = field(default_factory=dict)
    copies: dict[str, tuple[str, float]] = field(default_factory=dict)
    personal: dict[str, list[str]] = field(default_factory=dict)
    harmless: dict[str, str] = field(default_factory=dict)
    passages: dict[str, str] = field(default_factory=dict)


PACKAGES = ("numpy", "scipy", "matplotlib", "rich", "pydantic", "hydra")


def sentences(packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """Different sentences of six words and more, of the docstrings of packages that are there."""
    source = DocstringsSource(packages=packages)
    found: dict[str, None] = {}
    report = ReadReport()
    for part in source.parts(max_documents=1 << 30, max_size=1 << 30):
        for document in source.read(part, report):
            for paragraph in re.split(r"\n\s*\n", document.text):
                for sentence in re.split(r"(?<=\.)\s+", " ".join(paragraph.split())):
                    words = re.findall(r"\b[a-z]+\b", sentence)
                    if 6 <= len(words) < 40 and sentence[0].isupper() and sentence.endswith("."):
                        found[sentence] = None
    return list(found)


def jaccard(one: str, other: str) -> float:
    """Exact Jaccard similarity of the 5-grams of two texts."""
    sets = []
    for text in (one, other):
        words = words_of(text)
        sets.append({tuple(words[n : n + 5]) for n in range(len(words) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def make(folder: Path, *, each: int, line: float, seed: int = 0, packages: tuple[str, ...] = PACKAGES) -> Planted:
    """Write the corpus and the lists that stages need.

    Args:
        folder: folder to write.
        each: documents of a fault, and a tenth of the clean ones.
        line: MB of the long line.
        seed: seed of everything.
        packages: packages whose docstrings the sentences are of.
    """
    chance, known, planted = random.Random(seed), sentences(packages), Planted()
    made: list[dict[str, str]] = []

    def clean() -> str:
        return "\n".join(" ".join(chance.choice(known) for _ in range(4)) for _ in range(chance.randint(3, 6)))

    def add(name: str, text: str, *, fault: str | None = None, **more: str) -> str:
        made.append({"id": name, "url": f"https://site{chance.randrange(10**9)}.org/{name}", "text": text, **more})
        if fault is not None:
            planted.faults[name] = fault
        return name

    for number in range(10 * each):
        add(f"clean-{number}", clean())
    first = list(made)
    for number in range(each):
        base = chance.choice(first)
        add(f"same-{number}", base["text"], fault="same text")
        add(f"url-{number}", clean(), fault="same url", url=chance.choice(first)["url"])
        add(f"listed-{number}", clean(), fault="listed domain", url=f"http://a.b.casino{number % 7}.biz/{number}")
        language = chance.choice(list(SENTENCES))
        parts = re.split(r"(?<=\.) ", SENTENCES[language])
        text = "\n".join(" ".join(chance.sample(parts, 4)) for _ in range(5))
        add(f"language-{number}", text, fault="another language")
        spam = f"Buy {chance.choice(known).split()[0]} pills {chance.randrange(1000)} now and save the most of it."
        add(f"spam-{number}", "\n".join([spam] * chance.randint(8, 30)), fault="spam template")
        add(f"short-{number}", max(chance.sample(known, 9), key=len), fault="a short page")
        hashes = " ".join(f"{word} #" if n % 4 == 0 else word for n, word in enumerate(clean().split()))
        add(f"symbols-{number}", hashes, fault="symbols")
        broken = "".join(c if chance.random() > 0.02 else "\ufffd" for c in clean())
        add(f"broken-{number}", broken, fault="broken characters")
        for copy in range(3):
            words, share, copied = clean().split(" "), chance.uniform(0.001, 0.06), chance.choice(first)
            words = [chance.choice(words) if chance.random() < share else word for word in copied["text"].split(" ")]
            words[chance.randrange(len(words))] = "another"
            name = add(f"near-{number}-{copy}", " ".join(words))
            planted.copies[name] = (copied["id"], jaccard(copied["text"], made[-1]["text"]))
        there = chance.sample(PERSONAL, 3)
        parts = clean().split("\n")
        planted.personal[
            add(f"personal-{number}", "\n".join([*parts, f"Ask {there[0]}, {there[1]} or {there[2]} today."]))
        ] = there
        lookalike = chance.choice(HARMLESS)
        planted.harmless[add(f"harmless-{number}", f"{clean()}\nIt says {lookalike} in file {number}.")] = lookalike
        add(f"boilerplate-{number}", f"{clean()}\n{BOILERPLATE}")
        item = " ".join(
            f"{word}{number}" if n % 3 else word for n, word in enumerate(chance.choice(known).split()[:20])
        )
        question = f"Which of the {number} answers is right if {item} and nothing else is known to anybody here?"
        add(f"leak-{number}", f"{clean()}\n{question}", fault="benchmark leak")
        with open(folder / "items.jsonl", "a", encoding="utf-8") as items:
            items.write(json.dumps({"question": question}) + "\n")
        passage = " ".join(chance.choice(known) for _ in range(20))
        add(f"passage-a-{number}", f"{clean()}\n{chance.choice(known)} {passage}")
        planted.passages[add(f"passage-b-{number}", f"{clean()}\n{chance.choice(known)} {passage} So it goes on.")] = (
            passage
        )
    order = list(range(len(first), len(made)))
    chance.shuffle(order)
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as out:
        for record in [
            *first,
            *(made[number] for number in sorted(order, key=lambda n: (made[n]["id"][:9] == "passage-b", n))),
        ]:
            out.write(json.dumps(record) + "\n")
        if line:
            planted.faults["long"] = "a long line"
            out.write('{"id": "long", "text": "' + "word " * int(line * 200_000) + '"}\n')
    (folder / "domains.txt").write_text("".join(f"casino{number}.biz\n" for number in range(7)))
    return planted


def words(folder: Path, name: str, workers: int) -> list[str]:
    """Words of the command that curates the corpus."""
    blocks = {
        "length": "{kind: length, least: 20, most: 1000000}",
        "encoding": "{kind: encoding}",
        "listed": f"{{kind: listed, domains: [{folder / 'domains.txt'}]}}",
        "language": "{kind: language, languages: [en], least: 0.5}",
        "same_url": "{kind: same_url}",
        "same_text": "{kind: same_text}",
        "gopher_repetition": "{kind: gopher_repetition}",
        "gopher_quality": "{kind: gopher_quality}",
        "decontamination": f"{{kind: decontamination, test_sets: [{{name: items, path: [{folder / 'items.jsonl'}]}}]}}",
        "personal": "{kind: personal, regions: [US, GB, IT, DE, FR, ES]}",
        "near_duplicates": "{kind: near_duplicates, bands: 26, rows: 11, threshold: 0.8}",
        "same_paragraphs": "{kind: same_paragraphs}",
        "same_passages": "{kind: same_passages}",
    }
    return [
        *(f"input={folder / 'corpus.jsonl'}", f"output={folder / name}", f"workers={workers}"),
        *(f"+curate.blocks.{stage}={block}" for stage, block in blocks.items()),
        *(f"curate.stages=[{','.join(STAGES)}]", "curate.keep_dropped=all", "curate.unit=1e6"),
    ]


def lines(place: Path) -> Iterator[dict[str, str]]:
    """Records of the compressed files below a folder."""
    for path in sorted(place.rglob("*.jsonl.zst")):
        with open(path, "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            yield from map(json.loads, io.BufferedReader(stream))


@dataclass
class Found:
    """Planted and found faults of one kind, and what was found wrongly."""

    planted: int
    found: int
    wrong: int

    @property
    def recall(self) -> float:
        """Share of the planted that was found."""
        return self.found / max(1, self.planted)

    @property
    def precision(self) -> float:
        """Share of what was found that was planted."""
        return self.found / max(1, self.found + self.wrong)


def judged(output: Path, planted: Planted) -> dict[str, Found]:
    """What was found of each fault."""
    dropped = {stage: {line["id"] for line in lines(output / "dropped" / stage)} for stage in STAGES}
    kept = {line["id"]: line["text"] for line in lines(output / "documents")}
    found = {}
    numbers = Counter(planted.faults.values())
    for fault, stage in DROPS.items():
        if numbers[fault]:
            mine = {name for name in dropped[stage] if planted.faults.get(name) == fault}
            others = {name for name in dropped[stage] if DROPS.get(planted.faults.get(name, "")) != stage}
            found[f"{stage}: {fault}"] = Found(numbers[fault], len(mine), len(others))
    replaced = wrong = there = 0
    for name, texts in planted.personal.items():
        if name in kept:
            there += len(texts)
            replaced += sum(text not in kept[name] for text in texts)
    for name, text in planted.harmless.items():
        wrong += name in kept and text not in kept[name]
    found["personal: addresses and numbers"] = Found(there, replaced, wrong)
    near, wrong = dropped["near_duplicates"], 0
    bands: dict[str, list[bool]] = defaultdict(list)
    for name, (_, similarity) in planted.copies.items():
        if not any(name in names for stage, names in dropped.items() if stage != "near_duplicates"):
            for low in (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6):
                if similarity >= low:
                    bands[f"{low:g} and more"].append(name in near)
                    break
    wrong = len([name for name in near if name not in planted.copies])
    for name in sorted(bands, reverse=True):
        found[f"near_duplicates: similarity {name}"] = Found(len(bands[name]), sum(bands[name]), wrong)
    pages = {name: text for name, text in kept.items() if name.startswith("boilerplate")}
    left = sum(BOILERPLATE in text for text in pages.values())
    found["same_paragraphs: boilerplate"] = Found(len(pages) - 1, len(pages) - left, 0)
    passages = {name: text for name, text in planted.passages.items() if name in kept}
    there = len(passages)
    found["same_passages: passages"] = Found(there, sum(text not in kept[name] for name, text in passages.items()), 0)
    return found


def table(found: Mapping[str, Found]) -> str:
    """The table."""
    rows = ["| stage: fault | planted | found | recall | found wrongly | precision |", "|---|---|---|---|---|---|"]
    rows += [
        f"| {name} | {each.planted} | {each.found} | {each.recall:.3f} | {each.wrong} | {each.precision:.3f} |"
        for name, each in found.items()
    ]
    return "\n".join(rows)


def main() -> None:
    """Make the corpus, curate it, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=200)
    parser.add_argument("--line", type=float, default=200)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    planted = make(given.folder.absolute(), each=given.each, line=given.line)
    run(compose("curate", words(given.folder.absolute(), "curated", given.workers)))
    print(table(judged(given.folder / "curated", planted)))


if __name__ == "__main__":
    main()
