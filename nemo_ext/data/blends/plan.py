"""Plan of a blend: each stream's share of a run's tokens and, given its size, its epochs, with warnings and notes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from nemo_ext.data.blends.division import divide, proportions
from nemo_ext.data.blends.hierarchy import Group, Leaf, Node, positive, read_tree
from nemo_ext.data.blends.sizes import Size, size_of

MAX_EPOCHS = 4.0
"""Passes up to which repeated text is about as good as new text (Muennighoff et al. 2023, arXiv 2305.16264)."""

LIMITS = ("max_epochs", "refuse_epochs")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A node of a blend, with its part of the run's tokens.

    Attributes:
        node: The group or stream.
        depth: Depth in the tree; 0 for the root.
        share: Exact share of the run's tokens.
        size: Number of available tokens; None if the size of a stream is unknown.
        assumed: True if `size` includes assumed sizes.
        tokens: Number of the run's tokens that come from this node; None if the run's length is unknown.
        capped: True if the share is limited by the cap.
    """

    node: Node
    depth: int
    share: Fraction
    size: int | None
    assumed: bool
    tokens: float | None
    capped: bool

    @property
    def epochs(self) -> float | None:
        """Number of epochs over this part's data in the run; None if the data's size or the run's length is unknown."""
        return None if self.size is None or self.tokens is None else self.tokens / self.size


@dataclass(frozen=True, kw_only=True)
class BlendPlan:
    """Plan of a blend for a run.

    Attributes:
        root: Tree of the blend's groups and streams.
        sizes: Known sizes of streams, keyed by name.
        shares: Shares of all streams, keyed by name and summing to exactly 1.
        tokens: Number of tokens in the run; None if unknown.
        max_epochs: Number of passes over a stream above which `warning` names it.
    """

    root: Group
    sizes: dict[str, Size]
    shares: dict[str, Fraction]
    tokens: int | None
    max_epochs: float

    @cached_property
    def parts(self) -> list[Part]:
        """All nodes of the tree, each as a `Part`, and each group before its children."""
        return list(self._described(self.root, 0))

    def part(self, *path: str) -> Part:
        """Return the `Part` of the node at a path of keys from the root, such as `part("multilingual", "A")`.

        Raises:
            KeyError: There is no such node.
        """
        node: Node = self.root
        for key in path:
            node = {child.key: child for child in node.children}[key]
        return next(part for part in self.parts if part.node is node)

    def megatron_words(self, split: str) -> list[str]:
        """Return the blend of a split as Megatron's list: weight, prefix, weight, prefix, ..."""
        weights = {name: repr(float(share)) for name, share in self.shares.items()}
        return [word for leaf in self.root.leaves() for word in (weights[leaf.name], f"{leaf.prefix}_{split}")]

    def too_often(self, part: Part) -> bool:
        """Return whether a part is a stream that is read more than `max_epochs` times."""
        return isinstance(part.node, Leaf) and (part.epochs or 0) > self.max_epochs

    def warning(self) -> str | None:
        """Return a warning about streams read more than `max_epochs` times, the worst first; None if there are none."""
        often = sorted((part for part in self.parts if self.too_often(part)), key=lambda part: -(part.epochs or 0))
        if not often:
            return None
        names = some_of([f"{leaf.name} {part.epochs:.3g} times" for part in often for leaf in part.node.leaves()])
        return (
            f"some streams are read more than max_epochs={self.max_epochs:g} times: {names}; add text, lower shares or "
            "set caps"
        )

    def notes(self) -> list[str]:
        """Return notes for the user: normalised shares, tiers out of order, changed epochs, uncertain sizes."""
        notes = []
        for part in self.parts:
            node = part.node
            if isinstance(node, Group):
                notes += [*self._normalised(node), *self._rising(node), *self._other_epochs(node)]
        assumed = [name for name, size in self.sizes.items() if size.known == "assumed"]
        unknown = [leaf.name for leaf in self.root.leaves() if leaf.name not in self.sizes]
        if assumed:
            notes.append(f"sizes are assumed, not counted: {some_of(assumed)}")
        if unknown:
            notes.append(f"sizes and epochs are unknown without files or `tokens`: {some_of(unknown)}")
        return notes

    def _described(self, node: Node, depth: int) -> Iterator[Part]:
        leaves = list(node.leaves())
        sizes = [self.sizes[leaf.name] for leaf in leaves if leaf.name in self.sizes]
        share = sum((self.shares[leaf.name] for leaf in leaves), start=Fraction(0))
        size = sum(size.tokens for size in sizes) if len(sizes) == len(leaves) else None
        most = None if node.cap_epochs is None or size is None else node.cap_epochs * size
        yield Part(
            node=node,
            depth=depth,
            share=share,
            size=size,
            assumed=any(size.known == "assumed" for size in sizes),
            tokens=None if self.tokens is None else float(share * self.tokens),
            capped=self.tokens is not None and share * self.tokens == most,
        )
        for child in node.children:
            yield from self._described(child, depth + 1)

    def _normalised(self, group: Group) -> list[str]:
        total = sum(child.amount for child in group.children if child.amount is not None)
        alike = len({child.amount for child in group.children}) == 1
        if group.by != "shares" or alike or total in (1, 100):
            return []
        return [f"{group.where}: the shares sum to {float(total):g}; each is divided by this sum"]

    def _rising(self, group: Group) -> list[str]:
        """Return notes on tiers whose children get more than the children of the tier above."""
        if group.by != "tiers":
            return []
        parts = zip(proportions(group, self.sizes), group.children, strict=True)
        per_child = [part / max(1, len(child.children)) for part, child in parts]
        neighbours = zip(group.children, group.children[1:], per_child, per_child[1:], strict=False)
        return [
            f"{group.where}: a child of tier {below.key} gets more than a child of tier {above.key}: {float(low):.3g} "
            f"of the group, against {float(high):.3g}"
            for above, below, high, low in neighbours
            if low > high
        ]

    def _other_epochs(self, group: Group) -> list[str]:
        """Return a note, in a list, on children whose epochs in the run differ by more than 5 % from the config.

        The list is empty if there are no such children, or if the run's length is unknown.
        """
        if group.by != "epochs" or self.tokens is None:
            return []
        parts = [part for part in self.parts if part.node in group.children]
        off = [p for p in parts if p.epochs and p.node.amount and abs(p.epochs / float(p.node.amount) - 1) > 0.05]
        if not off:
            return []
        changes = [f"{part.node.key} {float(part.node.amount or 0):g} -> {part.epochs:.3g}" for part in off]
        return [f"{group.where}: configured epochs are only relative; in this run: {some_of(changes)}"]


def plan_blend(data: Mapping[str, Any], tokens: int | None = None, *, before_tokenising: bool = False) -> BlendPlan:
    """Plan the shares of a blend from the sizes of the tokenised files.

    Args:
        data: A `data` section; see `read_tree`. Streams that are read more than `max_epochs` times (default 4) cause a
            warning; more than `refuse_epochs` times (default: no limit), an error.
        tokens: Number of tokens in the run; None if unknown.
        before_tokenising: True to ignore damaged files of streams with a source, which will be tokenised anyway.

    Raises:
        ValueError: The blend is invalid, a stream is empty, or a stream is read more than `refuse_epochs` times.
    """
    root = read_tree(data)
    if tokens is not None and tokens <= 0:
        raise ValueError(f"tokens={tokens}: the number of tokens of the run must be positive")
    limits = {key: float(positive(f"data.{key}", data[key])) for key in LIMITS if data.get(key) is not None}
    sizes = {}
    for leaf in root.leaves():
        try:
            size = size_of(leaf.prefix, assumed=leaf.tokens)
        except ValueError as error:
            if leaf.source is not None and before_tokenising:
                continue
            raise ValueError(f"{leaf.where}: {error}") from error
        if size is not None:
            sizes[leaf.name] = size
    shares = divide(root, sizes, tokens=tokens)
    most, refused = limits.get("max_epochs", MAX_EPOCHS), limits.get("refuse_epochs")
    plan = BlendPlan(root=root, sizes=sizes, shares=shares, tokens=tokens, max_epochs=most)
    for part in plan.parts:
        if refused is not None and isinstance(part.node, Leaf) and (part.epochs or 0) > refused:
            raise ValueError(
                f"{part.node.where}: {part.node.name} would be read {part.epochs:.3g} times ({_count(part.tokens)} "
                f"tokens of {_count(part.size)}), more than data.refuse_epochs={refused:g}; lower its share, add text "
                "or raise refuse_epochs"
            )
    return plan


def _count(tokens: float | None) -> str:
    return "an unknown number" if tokens is None else f"{tokens:,.0f}"


def some_of(names: list[str], most: int = 8) -> str:
    """Join names for a message: the first `most`, followed by the number of further ones."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
