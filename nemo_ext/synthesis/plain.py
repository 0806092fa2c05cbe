"""Steps without models: new columns, filters, expansion, groups, draws from other rows and deduplication."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nemo_ext.chat.formats import FormatError, to_sample
from nemo_ext.chat.sample import Message, Sample
from nemo_ext.data.sft.filters.base import Texts
from nemo_ext.data.sft.filters.near_duplicates import NearDuplicates, Sketches
from nemo_ext.data.sft.filters.screen import load_filters
from nemo_ext.job.made_of import digest
from nemo_ext.job.seeds import generator
from nemo_ext.synthesis.context import Context
from nemo_ext.synthesis.rows import ID, Row, source_of
from nemo_ext.synthesis.settings import Draw, Expand, Group, Keep, Nearest, Screen, Set, Spread, Step, Unique

_AT_ONCE = 500


def run_step(step: Step, context: Context) -> Iterator[Row]:
    """Run a step and yield its output rows.

    Raises:
        ValueError: an expression fails or has an invalid value; the message names the step, the key and the row.
    """
    runs: Mapping[type[Step], Callable[[Any, Context], Iterator[Row]]] = {
        Set: _set,
        Keep: _keep,
        Expand: _expand,
        Group: _group,
        Draw: _draw,
        Nearest: _nearest,
        Spread: _spread,
        Unique: _unique,
        Screen: _screen,
    }
    return runs[type(step)](step, context)


def _set(step: Set, context: Context) -> Iterator[Row]:
    def changed(row: Row) -> Iterator[Row]:
        new = context.columns("columns", step.columns, context.names(row))
        for name, source in step.templates.items():
            new[name] = context.text(f"templates.{name}", source, context.names(row | new))
        yield row | new

    return _mapped(step.when, context, changed)


def _keep(step: Keep, context: Context) -> Iterator[Row]:
    def kept(row: Row) -> Iterator[Row]:
        if context.satisfies(row, step.require, context.names(row)):
            yield row

    return _mapped(step.when, context, kept)


def _expand(step: Expand, context: Context) -> Iterator[Row]:
    def expanded(row: Row) -> Iterator[Row]:
        entries = context.value("rows", step.rows, context.names(row))
        if not isinstance(entries, list | tuple):
            raise ValueError(f"steps.{context.name}.rows: row {row[ID]}: expected a list, not {str(entries)[:60]!r}")
        if not entries:
            context.drop(row, "nothing to expand")
        for number, entry in enumerate(entries):
            columns = entry if isinstance(entry, Mapping) else {context.name: entry}
            named = f"{row[ID]}/{context.name}.{number}"
            yield {**row, **columns, "part": number, "parts": len(entries), ID: named}

    return _mapped(step.when, context, expanded)


def _mapped(when: str | None, context: Context, rows_of: Callable[[Row], Iterator[Row]]) -> Iterator[Row]:
    """Yield the rows that `rows_of` makes from each row; a row for which an expression fails is dropped.

    Raises:
        ValueError: the expressions fail for all rows that the step applies to.
    """
    problem: ValueError | None = None
    readable = False
    for row in context.read_rows():
        try:
            applies = context.applies(when, row)
            new_rows = list(rows_of(row)) if applies else [row]
        except ValueError as error:  # rows may be anything
            problem = problem or error
            context.drop(row, "unreadable row", str(error))
            continue
        readable = readable or applies
        yield from new_rows
    if problem is not None and not readable:
        raise problem


def _group(step: Group, context: Context) -> Iterator[Row]:
    numbers = {"groups": 0}
    for name, rows in itertools.groupby(context.read_rows(), key=lambda row: source_of(row[ID], step.by)):
        group = list(rows)
        numbers["groups"] += 1
        names = context.names(group[0] | {ID: name}, group=group)
        new = context.columns("columns", step.columns, names)
        if not context.satisfies(group[0], step.require, names | new):
            for row in group[1:]:
                context.drop(row, "its group was dropped")
            continue
        members, all_names = group, [context.names(row | new, group=group) for row in group]
        if step.where is not None:
            chosen = [bool(context.value("where", step.where, names)) for names in all_names]
            for row, keep in zip(group, chosen, strict=True):
                if not keep:
                    context.drop(row, "not where")
            members = [row for row, keep in zip(group, chosen, strict=True) if keep]
            all_names = [names for names, keep in zip(all_names, chosen, strict=True) if keep]
        if step.order is not None:
            keys = [context.value("order", step.order, names) for names in all_names]
            try:
                members = [members[place] for place in sorted(range(len(members)), key=keys.__getitem__)]
            except TypeError as error:
                raise ValueError(
                    f"steps.{context.name}.order: the values in the group of row {name} cannot be sorted ({error}); "
                    "use an expression whose values have one type"
                ) from None
        if step.into == "one":
            if members:
                yield {**members[0], **new, ID: name}
            continue
        for row in members[step.most :] if step.most is not None else ():
            context.drop(row, "more than most")
        for row in members[: step.most]:
            yield {**row, **new}
    context.counts.numbers |= numbers


def _draw(step: Draw, context: Context) -> Iterator[Row]:
    places = [place for place, row in enumerate(context.rows) if context.applies(step.among, row)]
    number = 0
    for place, row in enumerate(context.read_rows()):
        while number < len(places) and places[number] < place:
            number += 1
        if context.applies(step.when, row):
            at = number if number < len(places) and places[number] == place else None
            others = others_of(at, len(places), step.count, context.seed, context.name, row[ID])
            row[step.column] = [
                context.value("value", step.value, context.names(context.rows[places[other]])) for other in others
            ]
        yield row


def others_of(number: int | None, total: int, count: int, *names: Any) -> Iterator[int]:
    """Draw `count` distinct indices of rows at random, or all if there are fewer, without the row's own index.

    Args:
        number: index of the row; None if it is not one of the rows.
        total: number of rows.
        count: number of indices to draw.
        names: values that seed the draw.
    """
    others = total - (number is not None)
    if others > 0:
        drawn = generator(0, *map(str, names)).choice(others, size=min(count, others), replace=False)
        yield from (int(other) + (number is not None and int(other) >= number) for other in drawn)


def _nearest(step: Nearest, context: Context) -> Iterator[Row]:
    candidates = [row for row in context.rows if context.value("among", step.among, context.names(row))]
    if not candidates:
        raise ValueError(f"steps.{context.name}.among: no row is a candidate: add rows for which {step.among} holds")
    vectors = [_unit_vector(step, context, row) for row in candidates]
    values, sizes = (
        [context.value("value", step.value, context.names(row)) for row in candidates],
        set(map(len, vectors)),
    )
    matrix = np.stack(vectors) if len(sizes) == 1 else np.empty((0, 0))
    for row in context.read_rows():
        if context.applies(step.when, row):
            vector = _unit_vector(step, context, row)
            if sizes - {len(vector)}:
                raise ValueError(
                    f"steps.{context.name}.vector: row {row[ID]}: vectors differ in size: use one model for all"
                )
            similarities = matrix @ vector
            row[step.column] = [
                {"value": values[place], "similarity": float(similarities[place])}
                for place in np.argsort(-similarities, kind="stable")[: step.count]
            ]
        yield row


def _unit_vector(step: Nearest, context: Context, row: Row) -> Any:
    value = context.value("vector", step.vector, context.names(row))
    try:
        vector = np.array(value, dtype=np.float32)
        if vector.ndim != 1 or not np.isfinite(length := float(np.linalg.norm(vector))) or not length:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"steps.{context.name}.vector: row {row[ID]}: expected numbers that are not all 0, not {str(value)[:60]!r}"
        ) from None
    return vector / length


def _spread(step: Spread, context: Context) -> Iterator[Row]:
    topics = list[tuple[str, ...]]()
    for row in context.read_rows():
        entries = context.value("by", step.by, context.names(row))
        if not isinstance(entries, list | tuple):
            raise ValueError(f"steps.{context.name}.by: row {row[ID]}: expected a list, not {str(entries)[:60]!r}")
        topics.append(tuple(map(str, entries)))
    for place, number in enumerate(_in_turns(range(len(topics)), topics)):
        row = context.rows[number]
        if step.most is None or place < step.most:
            yield row
        else:
            context.drop(row, "more than most")


def _in_turns(members: Sequence[int], topics: Sequence[tuple[str, ...]], level: int = 0) -> Iterator[int]:
    """Yield the rows in `members` in round robin over their topics at this level, and recursively at deeper levels."""
    if all(len(topics[member]) <= level for member in members):
        yield from members
        return
    groups: dict[tuple[str, ...], list[int]] = {}
    for member in members:
        groups.setdefault(topics[member][level : level + 1], []).append(member)
    turns = [_in_turns(group, topics, level + 1) for group in groups.values()]
    while turns:
        taken = [(turn, next(turn, None)) for turn in turns]
        yield from (member for _, member in taken if member is not None)
        turns = [turn for turn, member in taken if member is not None]


def _unique(step: Unique, context: Context) -> Iterator[Row]:
    finder, sketched = NearDuplicates(threshold=step.near or 1.0), list[Sketches]()
    first: dict[str, int] = {}
    judged, same = list[bool](), list[bool]()
    for batch in itertools.batched(context.rows, _AT_ONCE):
        texts = list[str]()
        for row in batch:
            judged.append(context.applies(step.when, row))
            texts.append(str(context.value("text", step.text, context.names(row))) if judged[-1] else "")
            place = len(same)
            same.append(judged[-1] and first.setdefault(digest(texts[-1]), place) != place)
        if step.near is not None:
            sketched.append(finder.sketch([Texts(_sample(text)) for text in texts]))
    near = finder.duplicate_of(Sketches.joined(sketched)) if sketched else np.full(len(same), -1)
    for place, row in enumerate(context.read_rows()):
        if same[place]:
            context.drop(row, "duplicate")
        elif judged[place] and near[place] >= 0:
            context.drop(row, "near duplicate", f"of {context.rows[int(near[place])][ID]}")
        else:
            yield row


def _screen(step: Screen, context: Context) -> Iterator[Row]:
    screen = screen_of(step, f"steps.{context.name}")
    for row in context.read_rows():
        if not context.applies(step.when, row):
            yield row
            continue
        names = context.names(row)
        messages = context.value("messages", step.messages, names)
        code = context.value("language", step.language, names) if step.language else None
        tools = context.value("tools", step.tools, names) if step.tools else None
        if isinstance(messages, str):
            sample = _sample(messages, str(row[ID]), code or "")
        else:
            try:
                sample = to_sample(
                    {"messages": messages, "tools": tools}, id=str(row[ID]), format="openai", language=code or ""
                )
            except FormatError as error:
                context.drop(row, "no conversation", str(error))
                continue
        for judge in screen.filters:
            if (dropped := judge.drop(Texts(sample))) is not None:
                context.drop(row, f"{judge.name}/{dropped.reason}", dropped.detail)
                break
        else:
            yield row


def screen_of(step: Screen, where: str) -> Any:
    """Load and check a step's filters; `where` is the step's location for error messages.

    Raises:
        ValueError: a filter is unknown or unavailable.
    """
    try:
        screen = load_filters(step.filters)
        screen.check()
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None
    return screen


def _sample(text: str, name: str = "", language: str = "") -> Sample:
    return Sample(id=name, messages=(Message(role="user", content=text),), language=language)
