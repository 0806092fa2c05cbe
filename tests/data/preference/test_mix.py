from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.preference.build import Row
from nemo_ext.data.preference.mix import Line, is_validation, mixed
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.seeds import digest


def lines_of(source: int, contents: list[int]) -> list[Line]:
    rows = [
        Row(order=digest(1, source, n), unit=digest(2, source, n), content=content, prompt=content, genrm=False)
        for n, content in enumerate(contents)
    ]
    return [Line(source, 0, row._replace(position=number)) for number, row in enumerate(rows)]


CONTENTS = st.lists(st.integers(0, 30), max_size=20)
LIMIT = st.none() | st.integers(1, 25)


@given(st.lists(CONTENTS, min_size=1, max_size=3), LIMIT, LIMIT, st.randoms())
def test_every_pair_is_kept_once_or_counted(
    contents: list[list[int]], first: int | None, limit: int | None, random: object
) -> None:
    sources = [lines_of(number, given) for number, given in enumerate(contents)]
    limits = [first, *[None] * (len(sources) - 1)]
    reports, again = ([ReadReport() for _ in sources] for _ in range(2))
    shuffled = [list(lines) for lines in sources]
    for lines in shuffled:
        random.shuffle(lines)  # type: ignore[attr-defined]

    kept = mixed(sources, limits=limits, limit=limit, reports=reports)

    assert kept == mixed(shuffled, limits=limits, limit=limit, reports=again), "whatever the order was"
    found = [line.row.content for line in kept]
    assert len(found) == len(set(found))
    dropped = sum(sum(report.skipped.values()) for report in reports)
    assert len(kept) + dropped == sum(map(len, sources))
    if limit is None and first is None:
        assert set(found) == {content for given in contents for content in given}
    assert limit is None or len(kept) <= limit
    assert first is None or sum(line.source == 0 for line in kept) <= first


def test_both_orders_of_a_sample_are_kept_or_dropped_together() -> None:
    rows = [
        Row(order=2 * unit + side, unit=unit, content=2 * unit + side, prompt=unit, genrm=True, position=0)
        for unit in range(50)
        for side in (0, 1)
    ]
    kept = mixed([[Line(0, 0, row) for row in rows]], limits=[10], limit=None, reports=[ReadReport()])

    assert len(kept) == 20
    assert sorted(line.row.unit for line in kept) == sorted(2 * list({line.row.unit for line in kept}))


def test_the_split_follows_the_prompt() -> None:
    rows = [Row(order=n, unit=n, content=n, prompt=n % 500, genrm=False) for n in range(1000)]
    sides = {(row.prompt, is_validation(row, 0.1, 7)) for row in rows}

    assert len(sides) == 500
    assert 20 < sum(side for _, side in sides) < 80


def test_a_limited_source_has_no_advantage_under_the_overall_limit() -> None:
    sources = [lines_of(0, list(range(2000))), lines_of(1, list(range(2000, 2400)))]

    kept = mixed(sources, limits=[400, None], limit=400, reports=[ReadReport(), ReadReport()])

    assert 150 < sum(line.source == 0 for line in kept) < 250
