"""What a tokenizer makes of text that it was not trained on, beside others: tables and a picture."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.data.vocabulary.sample import Sample
from nemo_ext.job.report import markdown_table, new_figure, save_figure, tidy

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OURS = "this one"
PICTURE = "bytes_a_token.png"
_LANGUAGE_TEXT = 2000
"""Characters of a document that its language is told from."""
_LEAST_BYTES = 10_000
"""Bytes of a language below which it is among the others."""


@dataclass
class Counts:
    """Sizes of some texts: UTF-8 bytes, words between white space, tokens, texts that did not come back the same."""

    bytes: int = 0
    words: int = 0
    tokens: int = 0
    changed: int = 0

    def add(self, other: "Counts") -> None:
        """Adds the sizes of other texts."""
        for name in ("bytes", "words", "tokens", "changed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def measured(
    tokenizers: Mapping[str, "Tokenizer"], samples: Sequence[Sample]
) -> dict[str, dict[str, dict[str, Counts]]]:
    """Counts of held-out text by `stream` and by `language`, by name of these, by name of the tokenizer.

    Args:
        tokenizers: tokenizers by name.
        samples: streams with what is held out of them.
    """
    found: dict[str, Any] = {kind: defaultdict(lambda: defaultdict(Counts)) for kind in ("stream", "language")}
    for sample in samples:
        for text in sample.held_out:
            language = _language(text[:_LANGUAGE_TEXT])
            for name, tokenizer in tokenizers.items():
                counts = _count(tokenizer, text)
                found["stream"][sample.stream.name][name].add(counts)
                found["language"][language][name].add(counts)
    few = [name for name, each in found["language"].items() if next(iter(each.values())).bytes < _LEAST_BYTES]
    if len(few) > 1:
        for name in few:
            for tokenizer, counts in found["language"].pop(name).items():
                found["language"]["others"][tokenizer].add(counts)
    return {kind: {name: dict(each) for name, each in by_name.items()} for kind, by_name in found.items()}


def _count(tokenizer: "Tokenizer", text: str) -> Counts:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    back = tokenizer.decode(ids, skip_special_tokens=False)
    return Counts(len(text.encode()), len(text.split()), len(ids), int(back != text))


def _language(text: str) -> str:
    from nemo_ext.data.sft.filters.language import identifier

    return str(identifier().classify(text)[0])


def markdown(
    about: Sequence[tuple[str, str]],
    counts: Mapping[str, Mapping[str, Mapping[str, Counts]]],
    samples: Sequence[Sample],
    *,
    longest: Sequence[str],
    unused: Sequence[str],
) -> str:
    """The report.

    Args:
        about: the tokenizer's own figures, as rows of a table.
        counts: see `measured`.
        samples: the streams.
        longest: the longest tokens.
        unused: tokens that the sample does not have.
    """
    names = list(dict.fromkeys(name for by_name in counts.values() for each in by_name.values() for name in each))
    lines = ["# Tokenizer", "", markdown_table(("", ""), about), ""]
    lines += [f"![bytes a token]({PICTURE})" if names else "There is too little text to hold any out.", ""]
    for kind, by_name in counts.items() if names else ():
        lines += [
            f"## By {kind}",
            "",
            "Bytes a token (more is shorter), and tokens a word, of text that was held out.",
            "",
        ]
        heading = [kind, "bytes", *(f"{name}: {what}" for name in names for what in ("bytes a token", "tokens a word"))]
        lines += [markdown_table(heading, [_row(label, each, names) for label, each in by_name.items()]), ""]
    changed = {name: sum(each[name].changed for each in counts["stream"].values()) for name in names}
    if any(changed.values()):
        told = ", ".join(f"{name} {number}" for name, number in changed.items())
        lines += [f"Held-out texts that decoding does not give back as they were: {told}.", ""]
    rows = [
        (
            each.stream.name,
            f"{each.stream.share:.1%}",
            f"{each.train_bytes:,}",
            f"{each.held_out_bytes:,}",
            each.report.summary(examples=1),
        )
        for each in samples
    ]
    lines += ["## Sample", "", markdown_table(("stream", "wanted share", "bytes", "held out", "skipped"), rows), ""]
    lines += [
        "## Tokens",
        "",
        f"Longest: {_shown(longest)}",
        "",
        f"In the sample {len(unused):,} tokens do not occur: {_shown(unused[:40])}",
        "",
    ]
    return "\n".join(lines)


def _row(label: str, each: Mapping[str, Counts], names: Sequence[str]) -> list[str]:
    row = [label, f"{next(iter(each.values())).bytes:,}"]
    for name in names:
        row += [
            f"{each[name].bytes / max(1, each[name].tokens):.2f}",
            f"{each[name].tokens / max(1, each[name].words):.2f}",
        ]
    return row


def _shown(tokens: Sequence[str]) -> str:
    return ", ".join(f"`{token!r}`" for token in tokens) or "none"


def picture(counts: Mapping[str, Mapping[str, Counts]], path: Path) -> None:
    """Bars of bytes a token, by stream and tokenizer.

    Args:
        counts: counts by stream, by tokenizer.
        path: picture to write.
    """
    names = list(dict.fromkeys(name for each in counts.values() for name in each))
    figure = new_figure(figsize=(8, 0.8 + 0.3 * len(names) * len(counts) + 0.3 * len(counts)))
    axes = figure.subplots()
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        values = [each[name].bytes / max(1, each[name].tokens) for each in counts.values()]
        places = [place + number * height for place in range(len(counts))]
        axes.barh(places, values, height=height * 0.9, label=name)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(counts))], list(counts))
    axes.invert_yaxis()
    axes.set_xlabel("bytes a token")
    if len(names) > 1:
        figure.legend(loc="outside upper center", ncols=min(4, len(names)))
    tidy(axes, grid="x")
    save_figure(figure, path)
