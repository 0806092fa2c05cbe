"""Canaries: rows with planted faults, which show whether a judge detects faults."""

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
    """Raised if a judge accepted too many planted faults."""


def canaries_of(step: Ask | Verify, work: WorkSettings) -> Canaries | None:
    """Return a step's canary settings, with the share set by the user, if any; None if the step has no canaries."""
    if step.canaries is None or work.canaries == 0:
        return None
    return step.canaries if work.canaries is None else replace(step.canaries, share=work.canaries)


def with_canaries(context: Context, canaries: Canaries | None, when: str | None) -> Iterator[tuple[Row, bool, bool]]:
    """Yield each row, followed by its canary if it has one.

    Args:
        context: context of the step, with its rows.
        canaries: settings of the canaries; None to plant none.
        when: the step's condition; rows that do not satisfy it have no canary.

    Yields:
        (row, whether the step applies to it, whether it is a canary).
    """
    total, planted = len(context.rows), 0.0
    if canaries is not None and total > 1:
        planted = max(math.ceil(canaries.share * total), min(total, canaries.LEAST)) / total
    for number, row in enumerate(context.rows):
        applies = context.applies(when, row)
        yield row, applies, False
        if applies and canaries is not None and uniform(context.seed, context.name, "canary", str(row[ID])) < planted:
            others = others_of(number, total, _OTHERS, context.seed, context.name, "canary", row[ID])
            rows = [context.rows[other] for other in others]
            other = next((candidate for candidate in rows if _origin(candidate) != _origin(row)), None)
            if other is None:
                continue
            names = context.names(row, other=other)
            if canaries.when is not None and not context.value("canaries.when", canaries.when, names):
                continue
            planted_columns = context.columns("canaries.columns", canaries.columns, names)
            yield {**row, **planted_columns, ID: f"{row[ID]}/canary"}, True, True


def _origin(row: Row) -> str:
    """Return the id of the input row that a row was made from, by one or several steps."""
    return _MADE.sub("", str(row[ID]))


def count_canaries(canaries: Canaries | None, planted: int, fooled: int, context: Context) -> dict[str, Any]:
    """Return the numbers of planted and accepted canaries for the report; empty if none were planted.

    Args:
        canaries: settings of the canaries; None if there are none.
        planted: number of the judge's verdicts on canaries.
        fooled: number of these verdicts that accept the fault.
        context: context of the step.

    Raises:
        Fooled: the judge accepted too many of them.
    """
    if canaries is None or not planted:
        return {}
    if fooled > canaries.most * planted:
        raise Fooled(
            f"steps.{context.name}: the judge accepted {fooled} of {planted} planted faults, more than "
            f"canaries.most={canaries.most:g}, and cannot be trusted: use another judge, or improve its prompt"
        )
    return {"canaries": planted, "canaries_fooled": fooled}
