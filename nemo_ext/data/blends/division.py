"""Division of a run's tokens among the streams of a blend's tree, by the groups' rules and within caps.

Shares are exact fractions, so a blend's shares sum to 1 however deep it is.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from nemo_ext.data.blends.hierarchy import Group, Leaf, Node
from nemo_ext.data.blends.sizes import Size


def divide(root: Group, sizes: Mapping[str, Size], *, tokens: int | None = None) -> dict[str, Fraction]:
    """Return the share of the run's tokens for each stream, keyed by name and summing to 1.

    A group's tokens are divided by its rule: `shares` in proportion to the children's shares; `epochs` in proportion to
    epochs x size; `temperature` to size^alpha (Conneau et al. 2020, section 3.1, on sentences; here on tokens); `tiers`
    gives tiers with a share their share, and the remainder to the other tiers in proportion to n x decay^k, for the
    k-th of these tiers (from 0) with n children, so that a child gets `decay` times as much as one in the tier above.

    A child that would exceed its cap gets the cap, and the excess goes to its siblings in proportion to their parts,
    until no child exceeds its cap. A group is limited to the sum of its children's limits: if all children are capped,
    the excess goes to the group's siblings.

    Args:
        sizes: Sizes of streams, keyed by name; required for streams under rules and caps that depend on sizes.
        tokens: Number of the run's tokens; required only for caps.

    Raises:
        ValueError: A size or `tokens` is required but missing, or the caps together are below `tokens`.
    """
    capped = _first_cap(root)
    if capped and tokens is None:
        raise ValueError(
            f"{capped}.cap_epochs requires the number of tokens of the run: set tokens=... (for training, train.tokens)"
        )
    budget = Fraction(tokens) if tokens is not None and capped else Fraction(1)
    most = _capacity(root, sizes)
    if most is not None and most < budget:
        raise ValueError(
            f"the blend's caps allow {int(most):,} tokens, but the run reads {tokens:,}: raise cap_epochs, add streams "
            "or train on fewer tokens"
        )
    shares: dict[str, Fraction] = {}
    _allot(root, budget, sizes, shares)
    return {name: part / budget for name, part in shares.items()}


def proportions(group: Group, sizes: Mapping[str, Size]) -> list[Fraction]:
    """Return the fraction of a group's tokens that its rule gives to each child before caps; the fractions sum to 1.

    Raises:
        ValueError: The rule requires a size that is unknown.
    """
    if group.by == "tiers":
        return _tiers(group)
    if group.by == "shares":
        parts = [_amount(child) for child in group.children]
    else:
        why = f"its group divides by {group.by}"
        measured = [Fraction(tokens_in(child, sizes, why=why)) for child in group.children]
        if group.by == "epochs":
            parts = [_amount(child) * size for child, size in zip(group.children, measured, strict=True)]
        else:
            assert group.setting is not None
            most, alpha = max(measured), float(group.setting)
            parts = [Fraction(float(size / most) ** alpha) for size in measured]
    return _scaled(parts)


def tokens_in(node: Node, sizes: Mapping[str, Size], *, why: str) -> int:
    """Return the size of a node in tokens, which is the total of its streams.

    Raises:
        ValueError: A size is unknown; the message includes `why` it is needed.
    """
    for leaf in node.leaves():
        if leaf.name not in sizes:
            raise ValueError(
                f"{leaf.where}: the size of {leaf.name} is required because {why}, but {leaf.prefix}_train.idx does "
                "not exist; tokenise the stream first (`nemo-ext tokenize`), or set its `tokens` to an assumed size"
            )
    return sum(sizes[leaf.name].tokens for leaf in node.leaves())


def _tiers(group: Group) -> list[Fraction]:
    assert group.setting is not None
    rest = 1 - sum(child.amount for child in group.children if child.amount is not None)
    decaying = [child for child in group.children if child.amount is None]
    weights = _scaled([max(1, len(child.children)) * group.setting**number for number, child in enumerate(decaying)])
    parts = iter(weights)
    return [rest * next(parts) if child.amount is None else child.amount for child in group.children]


def _amount(node: Node) -> Fraction:
    assert node.amount is not None, node.where
    return node.amount


def _scaled(parts: Sequence[Fraction]) -> list[Fraction]:
    total = sum(parts, start=Fraction(0))
    return [part / total for part in parts]


def _first_cap(node: Node) -> str | None:
    if node.cap_epochs is not None:
        return node.where
    return next((where for child in node.children if (where := _first_cap(child)) is not None), None)


def _capacity(node: Node, sizes: Mapping[str, Size]) -> Fraction | None:
    """Return the maximum number of tokens that a node's caps allow; None if there is no limit."""
    most = None
    if isinstance(node, Group):
        parts = [_capacity(child, sizes) for child in node.children]
        bounded = [part for part in parts if part is not None]
        if len(bounded) == len(parts):
            most = sum(bounded, start=Fraction(0))
    if node.cap_epochs is not None:
        cap = node.cap_epochs * tokens_in(node, sizes, why="it is under cap_epochs")
        most = cap if most is None else min(cap, most)
    return most


def _allot(node: Node, budget: Fraction, sizes: Mapping[str, Size], shares: dict[str, Fraction]) -> None:
    if isinstance(node, Leaf):
        shares[node.name] = budget
        return
    limits = [_capacity(child, sizes) for child in node.children]
    for child, part in zip(node.children, fill(budget, proportions(node, sizes), limits), strict=True):
        _allot(child, part, sizes, shares)


def fill(budget: Fraction, parts: Sequence[Fraction], limits: Sequence[Fraction | None]) -> list[Fraction]:
    """Divide `budget` in proportion to `parts` without exceeding their limits; return the amounts in the same order.

    Args:
        budget: Amount to divide; at most the sum of the limits, if every part has one.
        parts: Positive weights.
        limits: Limit of each part; None for no limit.
    """
    full: dict[int, Fraction] = {}
    rate = Fraction(0)
    while open_ := [number for number in range(len(parts)) if number not in full]:
        rate = (budget - sum(full.values())) / sum(parts[number] for number in open_)
        more = {n: limit for n in open_ if (limit := limits[n]) is not None and parts[n] * rate > limit}
        if not more:
            break
        full |= more
    return [full.get(number, part * rate) for number, part in enumerate(parts)]
