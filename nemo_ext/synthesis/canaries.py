"""Rows with planted faults, which tell whether a judge judges."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nemo_ext.job.seeds import uniform
from nemo_ext.synthesis.context import Context
from nemo_ext.synthesis.plain import others_of
from nemo_ext.synthesis.rows import ID, Row
from nemo_ext.synthesis.settings import Ask, Canaries, Verify, WorkSettings

_OTHERS = 8
_MADE = re.compile(r"(?:/\w+\.\d+)+$")


class Fooled(Exception):
    """A judge took too many planted faults for right."""


def canaries_of(step: Ask | Verify, work: WorkSettings) -> Canaries | None:
    """Canaries of a step, by the recipe or as the user wants them."""
    if step.canaries is None or work.canaries == 0:
        return None
    if work.canaries is None:
        return step.canaries
    given = step.canaries
    return replace(given, share=work.canaries)


def with_canaries(context: Context, canaries: Canaries | None, when: str | None) -> Iterator[tuple[Row, bool, bool]]:
    """The rows, each with whether the step is for it, and False; canaries with two times True follow their rows."""
    total, planted = len(context.rows), 0.0
    if canaries is not None and total > 1:
        planted = max(math.ceil(canaries.share * total), min(total, canaries.LEAST)) / total
    for number, row in enumerate(context.rows):
        applies = context.applies(when, row)
        yield row, applies, False
        if applies and canaries is not None and uniform(context.seed, context.name, "canary", str(row[ID])) < planted:
            others = others_of(number, total, _OTHERS, context.seed, context.name, "canary", row[ID])
            rows = [context.rows[other] for other in others]
            other = next((each for each in rows if _origin(each) != _origin(row)), None)
            if other is None:
                continue
            names = context.names(row, other=other)
            if canaries.when is not None and not context.value("canaries.when", canaries.when, names):
                continue
            planted_columns = context.columns("canaries.columns", canaries.columns, names)
            yield {**row, **planted_columns, ID: f"{row[ID]}/canary"}, True, True


def _origin(row: Row) -> str:
    """Id of the row of the input that steps have made a row out of."""
    return _MADE.sub("", str(row[ID]))


def told(canaries: Canaries | None, planted: int, fooled: int, context: Context) -> dict[str, Any]:
    """What is said of canaries.

    Raises:
        Fooled: too many were taken for right.
    """
    if canaries is None or not planted:
        return {}
    if fooled > canaries.most * planted:
        raise Fooled(
            f"steps.{context.name}: {fooled} of {planted} planted faults were taken for right, more than "
            f"canaries.most={canaries.most:g}: this judge cannot be trusted. Take another, or mend its prompt"
        )
    return {"canaries": planted, "canaries_fooled": fooled}
