"""What a tokenizer makes of text that it was not trained on, beside others: tables and a picture."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_ext.data.vocabulary.sample import Sample
from nemo_ext.job.report import Report, outer_legend, tidy

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


def page(about: Mapping[str, object], counts: Mapping[str, Counts], samples: Sequence[Sample]) -> Report:
    """The report on the tokenizer's own figures, its counts (see `measured`) and the streams."""
    names = list(next(iter(counts["stream"].values()), ()))
    report = Report("Tokenizer").facts(about)
    if names:
        _picture(report, counts["stream"], names)
    else:
        report.add("There is too little text to hold any out.")
    for kind, by_name in counts.items() if names else ():
        heading = [kind, "bytes", *(f"{name}: {what}" for name in names for what in ("bytes a token", "tokens a word"))]
        rows = []
        for label, by in by_name.items():
            ratios = [(_ratio(by[name], "bytes", "tokens"), _ratio(by[name], "tokens", "words")) for name in names]
            rows.append([label, by[names[0]]["bytes"], *(f"{ratio:.2f}" for pair in ratios for ratio in pair)])
        report.section(f"By {kind}", "Bytes a token (more is shorter), and tokens a word, of text that was held out.")
        report.table("", heading, rows)
    changed = {name: sum(by[name]["changed"] for by in counts["stream"].values()) for name in names}
    if any(changed.values()):
        told = ", ".join(f"{name} {number}" for name, number in changed.items())
        report.add(f"Held-out texts that decoding does not give back as they were: {told}.")
    sizes = [
        (of.stream.name, f"{of.stream.share:.1%}", of.train_bytes, of.held_out_bytes, of.report.summary(examples=1))
        for of in samples
    ]
    return report.table("Sample", ("stream", "wanted share", "bytes", "held out", "skipped"), sizes)


def _ratio(counts: Mapping[str, int], one: str, other: str) -> float:
    return counts[one] / max(1, counts[other])


def shown(tokens: Sequence[str]) -> str:
    """Tokens as Markdown."""
    return ", ".join(f"`{token!r}`" for token in tokens) or "none"


def _picture(report: Report, counts: Counts, names: Sequence[str]) -> None:
    """Draws bars of bytes a token, by stream and tokenizer."""
    height = 0.8 / len(names)
    (axes,) = report.picture("bytes a token", PICTURE, 8, 0.8 + 0.3 * (len(names) + 1) * len(counts))
    for number, name in enumerate(names):
        values = [_ratio(by[name], "bytes", "tokens") for by in counts.values()]
        axes.barh(np.arange(len(counts)) + number * height, values, height=height * 0.9, label=name)
    axes.set_yticks(np.arange(len(counts)) + 0.4 - height / 2, list(counts))
    axes.invert_yaxis()
    tidy(axes, grid="x", xlabel="bytes a token")
    outer_legend([axes])
