"""Building of one part of a source: groups its records, pairs and filters their answers, and writes lines with counts.

Each part is written to a separate file, so an interrupted run resumes with the missing parts.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from nemo_ext.chat.formats import FormatError
from nemo_ext.chat.sample import Sample, has_reasoning, openai_messages
from nemo_ext.chat.template import Template
from nemo_ext.data.preference.filters import Lengths
from nemo_ext.data.preference.genrm import GenrmSample, from_pair, genrm_record, swapped, to_genrm
from nemo_ext.data.preference.group import Group, Pair, json_digest, pair_digest, prompt_digest
from nemo_ext.data.preference.hallucination import tool_hallucination
from nemo_ext.data.preference.measure import Texts, lengths_of, rendered_pair
from nemo_ext.data.preference.pairs import delta, judged, ready, safety
from nemo_ext.data.preference.records import merged, to_group
from nemo_ext.data.preference.settings import SourceSettings
from nemo_ext.data.preference.spread import Placed, gathered
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.data.text.tokenizers import Tokenizer, load_tokenizer
from nemo_ext.job.files import complete_file, write_text
from nemo_ext.job.seeds import digest
from nemo_ext.job.settings import checked

_MAKERS: Mapping[str, Callable[..., list[Pair]]] = {
    "delta": delta,
    "judged": judged,
    "safety": safety,
    "pairs": ready,
    "tool_hallucination": tool_hallucination,
}


class Row(NamedTuple):
    """One line in the file of a part of a source.

    Attributes:
        order: random number by which the lines of all sources are sorted.
        unit: random number, equal for a pair and the samples made from it; a limit keeps the smallest ones.
        content: digest of the content, which identifies duplicates between sources.
        prompt: digest of the prompt, which determines whether a line is for training or validation.
        genrm: True for a sample that trains a reward model.
        position: byte offset of the line in its file.
    """

    order: int
    unit: int
    content: int
    prompt: int
    genrm: bool
    position: int = 0


@dataclass
class Counts:
    """Counts of one part of a source.

    Attributes:
        records: records read, and records skipped by reason.
        groups: prompts, and prompts without a pair and skipped answers, by reason.
        pairs: pairs made, and pairs dropped by reason.
        before: mapping from chosen minus rejected length to number of pairs, before the filters.
        after: the same for pairs that pass the filters.
    """

    records: ReadReport = field(default_factory=ReadReport)
    groups: ReadReport = field(default_factory=ReadReport)
    pairs: ReadReport = field(default_factory=ReadReport)
    before: Counter[int] = field(default_factory=Counter)
    after: Counter[int] = field(default_factory=Counter)

    def add(self, other: "Counts") -> None:
        """Add the counts of another part."""
        for name in ("records", "groups", "pairs"):
            getattr(self, name).add(getattr(other, name))
        self.before.update(other.before)
        self.after.update(other.after)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Settings that workers need to build the parts of one source."""

    source: SourceSettings
    tokenizer: str
    template: str | None
    swap: bool
    seed: int


def build(work: Work, part: tuple[Path, Path]) -> None:
    """Build one part of a source, given as (path of its records, path of its output), unless the output exists."""
    records, output = part
    if output.exists():
        return
    counts = Counts()
    rows: list[Row] = []
    position = 0
    with complete_file(output) as file:
        for staged, row in _staged(work, records, counts):
            line = json.dumps(staged).encode() + b"\n"
            file.write(line)
            rows.append(row._replace(position=position))
            position += len(line)
        write_text(counts_path(output), json.dumps({**vars(counts), "rows": rows}, default=vars))


def read_counts(output: Path) -> tuple[Counts, list[Row]]:
    """Read the counts and rows of a finished part of a source."""
    stored = json.loads(counts_path(output).read_text())
    rows = [Row(*row) for row in stored.pop("rows")]
    return checked(Counts, stored), rows


def counts_path(output: Path) -> Path:
    """Return the path of the file that holds a part's counts."""
    return output.with_name(f"{output.name}.json")


def _staged(work: Work, records: Path, counts: Counts) -> Iterator[tuple[dict[str, Any], Row]]:
    """Yield (content, row) for each line of a part, built from the file `records`; update `counts`."""
    source = work.source
    for same in gathered(records):
        if source.kind == "genrm":
            for sample in _genrm_samples(same, source, counts):
                yield from _genrm_lines(work, sample)
            continue
        for group in _groups(same, source, counts):
            for pair in _pairs(group, work, counts):
                lengths, texts = _measured(pair, work, counts)
                if lengths is None:
                    continue
                difference = lengths.chosen - lengths.rejected
                counts.before[difference] += 1
                if reason := source.filters.reason(pair, lengths):
                    counts.pairs.skip(reason, f"{source.name}: {pair.id}")
                    continue
                counts.after[difference] += 1
                yield _line(pair, lengths, texts, source), _row(work, pair.id, pair_digest(pair), pair.group)
                if labels := source.as_genrm:
                    sample = from_pair(pair, chosen=labels.chosen, rejected=labels.rejected, ranking=labels.ranking)
                    if not work.swap and digest(work.seed, "side", source.name, pair.id) & 1:
                        sample = swapped(sample)
                    yield from _genrm_lines(work, sample)


def _groups(same: list[Placed], source: SourceSettings, counts: Counts) -> Iterator[Group]:
    """Group the records with one id, `same`: one group for each set of declared tools, or for each existing pair."""
    groups: list[Group] = []
    for placed in same:
        try:
            pairs = source.kind == "pairs"
            groups.append(to_group(placed.record, source.keys, side=placed.side, pairs=pairs, report=counts.groups))
        except FormatError as error:
            counts.records.skip("schema", f"{placed.where}: {error}")
    if source.kind == "pairs":
        yield from (_labelled(group, source) for group in _separate(groups, counts, same))
        return
    # A record without a prompt (such as a weak model's) does not show whether tools were declared.
    without_prompt = [group for group in groups if not group.prompt]
    prompted = sorted((group for group in groups if group.prompt), key=_declares)
    variants = [list(variant) for _, variant in groupby(prompted, key=_declares)] or [[]]
    for variant in variants:
        together = variant + (without_prompt if len(variants) == 1 else [])
        if not together:
            continue
        counts.groups.records += 1
        if (whole := merged(together, counts.groups, same[0].where)) is not None:
            if len(variants) > 1 and whole.tools:  # ids must differ, since they identify pairs, draws and limits
                whole = dataclasses.replace(whole, id=f"{whole.id}@{json_digest(list(whole.tools))}")
            yield _labelled(whole, source)
    if len(variants) > 1 and without_prompt:
        counts.records.skip("answer without a prompt, whose id has prompts with different tools", same[0].where)


def _separate(groups: list[Group], counts: Counts, same: list[Placed]) -> Iterator[Group]:
    """Yield groups that hold one existing pair each and share an id; all but the first get a number after the id.

    Identical pairs are yielded once and counted in `counts`; `same` are the records of the groups.
    """
    distinct = {json.dumps([group.generations[0].key, group.generations[1].key]): group for group in groups}
    if len(groups) > len(distinct):
        counts.groups.skip("identical pairs", same[0].where, count=len(groups) - len(distinct))
    for number, (_, group) in enumerate(sorted(distinct.items())):
        counts.groups.records += 1
        yield group if number == 0 else dataclasses.replace(group, id=f"{group.id}#{number + 1}")


def _labelled(group: Group, source: SourceSettings) -> Group:
    return dataclasses.replace(
        group, source=source.name, task=group.task or source.task, language=group.language or source.language
    )


def _declares(group: Group) -> str:
    return json.dumps(list(group.tools), sort_keys=True) if group.tools else ""


def _pairs(group: Group, work: Work, counts: Counts) -> list[Pair]:
    source = work.source
    if source.turns != "any" and group.multi_turn != (source.turns == "multi"):
        counts.groups.skip("several turns" if group.multi_turn else "one turn", group.id)
        return []
    pairs = _MAKERS[source.kind](group, source, work.seed, counts.groups)
    counts.pairs.records += len(pairs)
    return pairs


def _measured(pair: Pair, work: Work, counts: Counts) -> tuple[Lengths | None, Texts | None]:
    tokenizer, template = loaded(work.tokenizer, work.template)
    texts = None
    if template is not None:
        try:
            question = Sample(id=pair.id, messages=pair.group.prompt, tools=pair.group.tools)
            texts = rendered_pair(question, pair.chosen.messages, pair.rejected.messages, template)
        except ValueError as error:
            counts.pairs.skip("chat template", f"{work.source.name}: {error}")
            return None, None
    return lengths_of(pair, tokenizer, texts), texts


def _line(pair: Pair, lengths: Lengths, texts: Texts | None, source: SourceSettings) -> dict[str, Any]:
    group = pair.group
    line: dict[str, Any] = {
        "id": pair.id,
        "source": source.name,
        "kind": pair.kind,
        "task": group.task,
        "language": group.language,
        "prompt": openai_messages(group.prompt),
        "chosen": openai_messages(pair.chosen.messages),
        "rejected": openai_messages(pair.rejected.messages),
        "tools": [dict(tool) for tool in group.tools],
        "thinking": has_reasoning(pair.chosen.messages) or has_reasoning(pair.rejected.messages),
        "chosen_model": pair.chosen.model,
        "rejected_model": pair.rejected.model,
        "chosen_score": pair.chosen.score,
        "rejected_score": pair.rejected.score,
        "lengths": list(lengths),
        "multi_turn": group.multi_turn,
    }
    return line if texts is None else line | {"texts": list(texts)}


def _genrm_samples(same: list[Placed], source: SourceSettings, counts: Counts) -> Iterator[GenrmSample]:
    distinct: dict[str, GenrmSample] = {}
    for placed in same:
        try:
            sample = to_genrm(placed.record, source.keys)
        except FormatError as error:
            counts.records.skip("schema", f"{placed.where}: {error}")
            continue
        counts.groups.records += 1
        if sample is None:
            counts.groups.skip("tie", placed.where)
            continue
        key = json.dumps(genrm_record(sample), sort_keys=True)
        if key in distinct:
            counts.groups.skip("identical samples", placed.where)
        distinct[key] = sample
    for number, (_, sample) in enumerate(sorted(distinct.items())):
        identifier = sample.id if number == 0 else f"{sample.id}#{number + 1}"
        group = _labelled(sample.group, source)
        counts.pairs.records += 1
        yield dataclasses.replace(sample, id=identifier, group=group)


def _genrm_lines(work: Work, sample: GenrmSample) -> Iterator[tuple[dict[str, Any], Row]]:
    for version in (sample, swapped(sample)) if work.swap else (sample,):
        record = genrm_record(version)
        labels = {name: getattr(version.group, name) for name in ("task", "language")}
        line = {"id": record["id"], "source": work.source.name, "kind": "genrm", **labels, "genrm": record}
        content = json.dumps({key: value for key, value in record.items() if key not in ("id", "swapped")})
        yield line, _row(work, record["id"], digest(0, content), version.group, genrm=True, unit=sample.id)


def _row(work: Work, identifier: str, content: int, group: Group, *, genrm: bool = False, unit: str = "") -> Row:
    name = work.source.name
    return Row(
        order=digest(work.seed, "order", name, identifier, genrm),
        unit=digest(work.seed, "limit", name, unit or identifier),
        content=content,
        prompt=prompt_digest(group.prompt),
        genrm=genrm,
    )


@lru_cache(maxsize=1)
def loaded(tokenizer: str, template: str | None) -> tuple[Tokenizer | None, Template | None]:
    """Load the tokenizer and template of a `Work`, cached per process; None for each that is not set."""
    config = json.loads(tokenizer)
    if config is not None and template is not None and config["kind"] == "huggingface":
        config = {"parse_special_tokens": True, **config}  # the template's markup consists of special tokens
    return (None if config is None else load_tokenizer(config, "tokenizer")), (
        None if template is None else Template.load(template)
    )
