"""Report on a tokenizer's results on held-out text, compared with other tokenizers: tables and a picture."""

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
"""Number of characters of a document from which its language is identified."""
_LEAST_BYTES = 10_000
"""Minimum size in bytes of the text in a language that is reported separately rather than among `others`."""


Counts = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Counts keyed by group of texts (a stream or language), then by tokenizer.

These are `bytes` of UTF-8, `words` separated by white space, `tokens`, and `changed`, the number of texts that decoding
did not restore.
"""


def measure(tokenizers: Mapping[str, "Tokenizer"], samples: Sequence[Sample]) -> dict[str, Counts]:
    """Encode the held-out texts with each tokenizer, and count them by stream and by language.

    Bytes, words, tokens, and texts that decoding does not restore are counted (see `Counts`), under the keys `stream`
    and `language`. Languages with little text are counted together as `others`.
    """
    from nemo_ext.data.sft.filters.language import identifier

    groups: dict[str, Any] = {kind: defaultdict(lambda: defaultdict(Counter)) for kind in ("stream", "language")}
    for sample in samples:
        for text in sample.held_out:
            language = str(identifier().classify(text[:_LANGUAGE_TEXT])[0])
            for name, tokenizer in tokenizers.items():
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                changed = int(tokenizer.decode(ids, skip_special_tokens=False) != text)
                sizes = {"bytes": len(text.encode()), "words": len(text.split()), "tokens": len(ids)}
                for counts in (groups["stream"][sample.stream.name][name], groups["language"][language][name]):
                    counts.update({**sizes, "changed": changed})
    languages = groups["language"]
    small = [name for name, counts in languages.items() if next(iter(counts.values()))["bytes"] < _LEAST_BYTES]
    for name in small if len(small) > 1 else ():
        for tokenizer, counts in languages.pop(name).items():
            languages["others"][tokenizer].update(counts)
    return groups


def page(about: Mapping[str, object], counts: Mapping[str, Counts], samples: Sequence[Sample]) -> Report:
    """Build the report: facts about the tokenizer, its counts (see `measure`) and the sampled streams."""
    names = list(next(iter(counts["stream"].values()), ()))
    report = Report("Tokenizer").facts(about)
    if names:
        _picture(report, counts["stream"], names)
    else:
        report.add("There is too little text to hold any out.")
    ratio_names = ("bytes per token", "tokens per word")
    for kind, groups in counts.items() if names else ():
        heading = [kind, "bytes", *(f"{name}: {ratio}" for name in names for ratio in ratio_names)]
        rows = []
        for label, by in groups.items():
            ratios = [(_ratio(by[name], "bytes", "tokens"), _ratio(by[name], "tokens", "words")) for name in names]
            rows.append([label, by[names[0]]["bytes"], *(f"{ratio:.2f}" for pair in ratios for ratio in pair)])
        report.section(f"By {kind}", "Bytes per token (higher is better) and tokens per word on held-out text.")
        report.table("", heading, rows)
    changed = {name: sum(by[name]["changed"] for by in counts["stream"].values()) for name in names}
    if any(changed.values()):
        numbers = ", ".join(f"{name} {number}" for name, number in changed.items())
        report.add(f"Held-out texts that decoding does not restore: {numbers}.")
    rows = [
        [
            *(sample.stream.name, f"{sample.stream.share:.1%}", sample.train_bytes, sample.held_out_bytes),
            sample.report.summary(examples=1),
        ]
        for sample in samples
    ]
    return report.table("Sample", ("stream", "requested share", "bytes", "held out", "skipped"), rows)


def _ratio(counts: Mapping[str, int], numerator: str, denominator: str) -> float:
    return counts[numerator] / max(1, counts[denominator])


def shown(tokens: Sequence[str]) -> str:
    """Format tokens as a Markdown list on one line; "none" if there are none."""
    return ", ".join(f"`{token!r}`" for token in tokens) or "none"


def _picture(report: Report, counts: Counts, names: Sequence[str]) -> None:
    """Draw bars of bytes per token, grouped by stream, one per tokenizer."""
    height = 0.8 / len(names)
    (axes,) = report.picture("bytes per token", PICTURE, 8, 0.8 + 0.3 * (len(names) + 1) * len(counts))
    for number, name in enumerate(names):
        values = [_ratio(by[name], "bytes", "tokens") for by in counts.values()]
        axes.barh(np.arange(len(counts)) + number * height, values, height=height * 0.9, label=name)
    axes.set_yticks(np.arange(len(counts)) + 0.4 - height / 2, list(counts))
    axes.invert_yaxis()
    tidy(axes, grid="x", xlabel="bytes per token")
    outer_legend([axes])
