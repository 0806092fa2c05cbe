"""What a tokenizer makes of text that it was not trained on, beside others: tables and a picture."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
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


Counts = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Sizes of texts by the name of these, then by tokenizer.

`bytes` of UTF-8, `words` between white space, `tokens`, and `changed` texts, which did not come back the same."""


def measured(tokenizers: Mapping[str, "Tokenizer"], samples: Sequence[Sample]) -> dict[str, Counts]:
    """Counts of held-out text by `stream` and by `language`.

    Args:
        tokenizers: tokenizers by name.
        samples: streams with what is held out of them.
    """
    from nemo_ext.data.sft.filters.language import identifier

    found: dict[str, Any] = {kind: defaultdict(lambda: defaultdict(Counter)) for kind in ("stream", "language")}
    for sample in samples:
        for text in sample.held_out:
            language = str(identifier().classify(text[:_LANGUAGE_TEXT])[0])
            for name, tokenizer in tokenizers.items():
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                changed = int(tokenizer.decode(ids, skip_special_tokens=False) != text)
                sizes = {"bytes": len(text.encode()), "words": len(text.split()), "tokens": len(ids)}
                for counts in (found["stream"][sample.stream.name][name], found["language"][language][name]):
                    counts.update({**sizes, "changed": changed})
    few = [name for name, each in found["language"].items() if next(iter(each.values()))["bytes"] < _LEAST_BYTES]
    for name in few if len(few) > 1 else ():
        for tokenizer, counts in found["language"].pop(name).items():
            found["language"]["others"][tokenizer].update(counts)
    return found


def markdown(
    about: Sequence[tuple[str, str]],
    counts: Mapping[str, Counts],
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
    names = _tokenizers(counts["stream"])
    lines = ["# Tokenizer", "", markdown_table(("", ""), about), ""]
    lines += [f"![bytes a token]({PICTURE})" if names else "There is too little text to hold any out.", ""]
    for kind, by_name in counts.items() if names else ():
        heading = [kind, "bytes", *(f"{name}: {what}" for name in names for what in ("bytes a token", "tokens a word"))]
        rows = []
        for label, by in by_name.items():
            ratios = [(_ratio(by[name], "bytes", "tokens"), _ratio(by[name], "tokens", "words")) for name in names]
            rows.append([label, f"{by[names[0]]['bytes']:,}", *(f"{each:.2f}" for pair in ratios for each in pair)])
        about_these = "Bytes a token (more is shorter), and tokens a word, of text that was held out."
        lines += [f"## By {kind}", "", about_these, "", markdown_table(heading, rows), ""]
    changed = {name: sum(by[name]["changed"] for by in counts["stream"].values()) for name in names}
    if any(changed.values()):
        told = ", ".join(f"{name} {number}" for name, number in changed.items())
        lines += [f"Held-out texts that decoding does not give back as they were: {told}.", ""]
    sizes = [
        (
            each.stream.name,
            f"{each.stream.share:.1%}",
            f"{each.train_bytes:,}",
            f"{each.held_out_bytes:,}",
            each.report.summary(examples=1),
        )
        for each in samples
    ]
    lines += ["## Sample", "", markdown_table(("stream", "wanted share", "bytes", "held out", "skipped"), sizes), ""]
    lines += ["## Tokens", "", f"Longest: {_shown(longest)}", ""]
    lines += [f"In the sample {len(unused):,} tokens do not occur: {_shown(unused[:40])}", ""]
    return "\n".join(lines)


def _tokenizers(counts: Counts) -> list[str]:
    return list(next(iter(counts.values()), ()))


def _ratio(counts: Mapping[str, int], one: str, other: str) -> float:
    return counts[one] / max(1, counts[other])


def _shown(tokens: Sequence[str]) -> str:
    return ", ".join(f"`{token!r}`" for token in tokens) or "none"


def picture(counts: Counts, path: Path) -> None:
    """Bars of bytes a token, by stream and tokenizer.

    Args:
        counts: counts by stream.
        path: picture to write.
    """
    names = _tokenizers(counts)
    figure = new_figure(figsize=(8, 0.8 + 0.3 * len(names) * len(counts) + 0.3 * len(counts)))
    axes = figure.subplots()
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        values = [_ratio(each[name], "bytes", "tokens") for each in counts.values()]
        places = [place + number * height for place in range(len(counts))]
        axes.barh(places, values, height=height * 0.9, label=name)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(counts))], list(counts))
    axes.invert_yaxis()
    axes.set_xlabel("bytes a token")
    if len(names) > 1:
        figure.legend(loc="outside upper center", ncols=min(4, len(names)))
    tidy(axes, grid="x")
    save_figure(figure, path)
