from fractions import Fraction
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.blends.division import divide, fill
from nemo_ext.data.blends.hierarchy import Group, Node, read_tree
from nemo_ext.data.blends.sizes import Size


def sized(**tokens: int) -> dict[str, Size]:
    return {name: Size(tokens=count, known="files") for name, count in tokens.items()}


def shares(text: str, *, tokens: int | None = None, **sizes: int) -> dict[str, float]:
    root = read_tree({"directory": "d", "blend": yaml.safe_load(text)})
    return {name: float(share) for name, share in divide(root, sized(**sizes), tokens=tokens).items()}


def test_shares_are_divided_by_their_sum_and_multiplied_down_the_tree() -> None:
    assert shares("{a: 3, b: {share: 1, of: {c: 0.1, d: 0.3}}}") == {"a": 0.75, "c": 0.0625, "d": 0.1875}


def test_shares_are_exact() -> None:
    root = read_tree({"directory": "d", "blend": {"a": {"share": 0.12, "of": {"b": 0.1, "c": 0.9}}, "d": 0.88}})

    assert divide(root, {}) == {"b": Fraction(12, 1000), "c": Fraction(108, 1000), "d": Fraction(88, 100)}


def test_epochs_weigh_sizes() -> None:
    assert shares("{by: epochs, of: {a: 1, b: 3}}", a=600, b=100) == pytest.approx({"a": 2 / 3, "b": 1 / 3})


def test_epochs_of_a_group_are_over_all_its_streams() -> None:
    text = "{by: epochs, of: {a: 1, g: {epochs: 2, of: {b: 1, c: 1}}}}"
    assert shares(text, a=200, b=10, c=90) == pytest.approx({"a": 0.5, "b": 0.25, "c": 0.25})


@pytest.mark.parametrize(("alpha", "expected"), [(0, 0.5), (0.5, 1 / 3), (1, 0.2)])
def test_temperature_interpolates_between_equal_and_proportional(alpha: float, expected: float) -> None:
    text = f"{{by: temperature, alpha: {alpha}, of: [small, large]}}"
    assert shares(text, small=100, large=400)["small"] == pytest.approx(expected)


def test_tiers_as_in_domyns_multilingual_stream() -> None:
    # Paper, section 3.2: tier A at 10 % each, the remaining 60 % over the lower tiers, decaying.
    text = (
        "{by: tiers, decay: 0.5, of: {A: {each: 0.1, of: [a1, a2, a3, a4]}, B: [b1, b2], C: [c1, c2, c3], O: [o1, o2]}}"
    )
    got = shares(text)

    assert [got[f"a{n}"] for n in (1, 2, 3, 4)] == pytest.approx([0.1] * 4)
    assert sum(share for name, share in got.items() if name[0] != "a") == pytest.approx(0.6)
    assert got["b1"] == pytest.approx(2 * got["c1"])
    assert got["c1"] == pytest.approx(2 * got["o2"])


def test_the_excess_of_a_cap_goes_to_siblings_in_proportion() -> None:
    text = "{a: {share: 50, cap_epochs: 2}, b: 30, c: 20}"
    assert shares(text, tokens=1000, a=100) == pytest.approx({"a": 0.2, "b": 0.48, "c": 0.32})


def test_an_excess_can_reach_the_next_cap() -> None:
    text = "{a: {share: 50, cap_epochs: 1}, b: {share: 30, cap_epochs: 1}, c: 20}"
    assert shares(text, tokens=1000, a=100, b=400) == pytest.approx({"a": 0.1, "b": 0.4, "c": 0.5})


def test_a_group_whose_children_are_all_capped_gives_the_excess_to_its_siblings() -> None:
    text = "{g: {share: 60, of: {a: {share: 1, cap_epochs: 2}, b: {share: 1, cap_epochs: 2}}}, c: 40}"
    assert shares(text, tokens=1000, a=50, b=150) == pytest.approx({"a": 0.1, "b": 0.3, "c": 0.6})


def test_a_cap_on_a_group_is_over_all_its_streams() -> None:
    text = "{g: {share: 60, cap_epochs: 1, of: {a: 1, b: 1}}, c: 40}"
    assert shares(text, tokens=1000, a=50, b=150) == pytest.approx({"a": 0.1, "b": 0.1, "c": 0.8})


def test_a_cap_that_is_not_reached_changes_nothing() -> None:
    assert shares("{a: {share: 1, cap_epochs: 4}, b: 1}", tokens=1000, a=125) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    ("text", "sizes", "tokens", "message"),
    [
        (
            "{by: epochs, of: [a, b]}",
            {"a": 1},
            10,
            r"data\.blend\.b: the size of b is required because .*epochs.*d/b_train",
        ),
        ("{by: temperature, alpha: 1, of: [a]}", {}, 10, "its group divides by temperature"),
        ("{a: {share: 1, cap_epochs: 1}, b: 1}", {}, 10, "the size of a is required because it is under cap_epochs"),
        (
            "{a: {share: 1, cap_epochs: 1}, b: 1}",
            {"a": 5},
            None,
            r"data\.blend\.a\.cap_epochs requires the number of tokens",
        ),
        (
            "{a: {share: 1, cap_epochs: 2}, b: {share: 1, cap_epochs: 1}}",
            {"a": 100, "b": 300},
            1000,
            "the blend's caps allow 500 tokens, but the run reads 1,000",
        ),
    ],
)
def test_missing_sizes_and_tokens_are_errors(
    text: str, sizes: dict[str, int], tokens: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shares(text, tokens=tokens, **sizes)


# Properties

AMOUNT = st.integers(1, 1000) | st.floats(0.001, 1000, allow_nan=False)


@st.composite
def trees(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Size]]:
    """A tree of random rules and caps, with sizes for all its streams."""
    names = iter(f"s{number}" for number in range(1000))
    sizes: dict[str, Size] = {}

    def capped() -> dict[str, float]:
        return {"cap_epochs": draw(st.floats(0.1, 8))} if draw(st.booleans()) else {}

    def group(depth: int) -> dict[str, Any]:
        by = draw(st.sampled_from(["shares", "epochs", "temperature", "tiers"]))
        of: dict[str, Any] = {}
        for _ in range(draw(st.integers(1, 4))):
            name = next(names)
            if by == "tiers" or (depth and draw(st.booleans())):
                child = group(depth - 1 if depth else 0) if by != "tiers" else {"of": leaves()}
            else:
                sizes[name] = Size(tokens=draw(st.integers(1, 10**13)), known="files")
                child = capped()
            key = {"shares": "share", "epochs": "epochs"}.get(by)
            of[name] = child | ({key: draw(AMOUNT)} if key else {})
        if by == "tiers" and len(of) > 1 and draw(st.booleans()):
            of[next(iter(of))]["share"] = 0.25
        extra = {"alpha": draw(st.floats(0, 1))} if by == "temperature" else {}
        return {"by": by, "of": of, **extra, **capped()}

    def leaves() -> list[str]:
        found = [next(names) for _ in range(draw(st.integers(1, 3)))]
        sizes.update({name: Size(tokens=draw(st.integers(1, 10**13)), known="files") for name in found})
        return found

    return group(2), sizes


def spent(node: Node, got: dict[str, Fraction]) -> Fraction:
    return sum((got[leaf.name] for leaf in node.leaves()), Fraction(0)) if isinstance(node, Group) else got[node.name]


@given(trees(), st.integers(1, 10**14))
def test_all_tokens_are_allotted_and_no_cap_is_exceeded(
    tree: tuple[dict[str, Any], dict[str, Size]], tokens: int
) -> None:
    blend, sizes = tree
    root = read_tree({"directory": "d", "blend": blend})
    try:
        got = divide(root, sizes, tokens=tokens)
    except ValueError as error:
        if "caps allow" not in str(error):
            raise
        return

    assert sum(got.values()) == 1
    assert got.keys() == sizes.keys()
    assert all(share > 0 for share in got.values())
    nodes: list[Node] = [root]
    for node in nodes:
        leaves = [node.name] if not isinstance(node, Group) else [leaf.name for leaf in node.leaves()]
        if node.cap_epochs is not None:
            assert spent(node, got) * tokens <= node.cap_epochs * sum(sizes[name].tokens for name in leaves)
        nodes += node.children if isinstance(node, Group) else ()


@given(
    st.lists(st.tuples(st.integers(1, 99), st.none() | st.integers(1, 99)), min_size=1, max_size=6), st.integers(1, 99)
)
def test_parts_below_their_limits_keep_their_proportions(children: list[tuple[int, int | None]], budget: int) -> None:
    parts, limits = [Fraction(part) for part, _ in children], [None if m is None else Fraction(m) for _, m in children]
    if None not in limits and sum(limit for limit in limits if limit is not None) < budget:
        return
    got = fill(Fraction(budget), parts, limits)

    assert sum(got) == budget
    rates = [g / p for g, p in zip(got, parts, strict=True)]
    below = {rate for rate, g, limit in zip(rates, got, limits, strict=True) if g != limit}
    assert len(below) <= 1
    # Without its limit, a part at the limit would get more at the common rate.
    assert all(rate <= common for rate in rates for common in below)
