"""A blend as a tree: groups divide their share among their children by a rule, leaves are streams.

    blend:                                     # the root is a group too; without `by` it divides by shares
      code: 20                                 # a leaf is a stream; shares are divided by their sum
      web: {share: 60, cap_epochs: 2}          # or with more to say of it
      books: {share: 10, by: temperature, alpha: 0.5, of: [fiction, science]}
      multilingual:
        share: 10
        by: tiers
        names: multilingual_*                  # leaf `spa` is the stream multilingual_spa
        of: {A: {each: 0.1, of: [spa, ita, fra, deu]}, B: [por, nld], others: [mlt, gle]}

Reading checks what can be checked without sizes; `nemo_ext.data.blends.division` divides.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from nemo_ext.job.settings import check_keys, nearest

DECAY = Fraction(1, 2)  # (choice)

# Settings that a rule takes from the group, and from each child.
_SETTINGS = {"shares": (), "epochs": (), "temperature": ("alpha",), "tiers": ("decay",)}
_AMOUNTS = {"shares": ("share",), "epochs": ("epochs",), "temperature": (), "tiers": ("each", "share")}
_LEAF = ("prefix", "source", "tokens", "cap_epochs")
_GROUP = ("of", "by", "names", "cap_epochs")


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A stream in a blend.

    Attributes:
        key: Name of the stream in its group.
        where: Place of the stream in the config.
        name: Name of the stream in the blend, and of its files.
        amount: Share or epochs in the group's terms; None where the rule takes neither.
        prefix: Prefix of the stream's files.
        source: Source to tokenise; None if the files are made elsewhere.
        tokens: Assumed size in tokens, for a plan before there are files.
        cap_epochs: Largest number of passes; the excess goes to the stream's siblings.
    """

    key: str
    where: str
    name: str
    amount: Fraction | None
    prefix: Path
    source: object = None
    tokens: int | None = None
    cap_epochs: Fraction | None = None

    @property
    def children(self) -> tuple["Node", ...]:
        """None: a stream is where the tree ends."""
        return ()

    def leaves(self) -> Iterator["Leaf"]:
        """Iterate over the stream itself, as over those of a group."""
        yield self


@dataclass(frozen=True, kw_only=True)
class Group:
    """Children of a blend and the rule that divides the group's share among them.

    Attributes:
        key, where, cap_epochs: See `Leaf`; the cap is on passes over all streams of the group together.
        amount: Share or epochs in the parent's terms; a tier's part of 1, None for tiers that decay over the rest.
        by: Rule: `shares`, `epochs`, `temperature` or `tiers`.
        setting: Alpha of temperature, decay of tiers.
        children: Children in the config's order.
    """

    key: str
    where: str
    amount: Fraction | None
    by: str
    setting: Fraction | None
    children: tuple["Node", ...]
    cap_epochs: Fraction | None = None

    def leaves(self) -> Iterator[Leaf]:
        """Iterate over all streams of the group, in order."""
        for child in self.children:
            yield from child.leaves()


Node = Leaf | Group


def read_tree(data: Mapping[str, object]) -> Group:
    """Read the tree that a `data` section describes: `blend`, or a flat list of `streams`.

    Args:
        data: `directory` and either `blend`, a group or a mapping of the nodes of a group that divides by shares, or
            `streams`, a list of mappings with `name`, `weight` and, if wanted, `prefix` and `source`.

    Raises:
        ValueError: The blend is wrong; the message names the place in the config.
    """
    blend, streams = data.get("blend"), data.get("streams")
    if blend is not None and streams is not None:
        raise ValueError("data has a blend and streams: choose one (data=null, or data.blend=null, takes one away)")
    directory = data.get("directory")
    if not isinstance(directory, str | Path) or not str(directory):
        raise ValueError(f"data.directory must be a path, not {directory!r}")
    reader = _Reader(Path(directory))
    root = reader.flat(streams) if blend is None else reader.root(blend)
    seen: dict[str, str] = {}
    files: dict[Path, str] = {}
    for leaf in root.leaves():
        if leaf.name in seen:
            raise ValueError(f"{leaf.where}: the name {leaf.name!r} is taken by {seen[leaf.name]}: see `names`")
        if leaf.prefix in files:
            raise ValueError(f"{leaf.where}: the prefix {leaf.prefix} is taken by {files[leaf.prefix]}")
        seen[leaf.name] = files[leaf.prefix] = leaf.where
    return root


@dataclass(frozen=True)
class _Reader:
    """Reader of a tree, with what its nodes have in common."""

    directory: Path
    names: str = "*"

    def flat(self, streams: object) -> Group:
        if not isinstance(streams, Sequence) or isinstance(streams, str) or not streams:
            raise ValueError(f"data.streams must be a list of at least one stream, not {streams!r}")
        leaves = []
        for number, stream in enumerate(streams):
            where = f"data.streams[{number}]"
            if not isinstance(stream, Mapping):
                raise ValueError(f"{where} must be a mapping with name, weight and source, not {stream!r}")
            check_keys(stream, ("name", "weight", "prefix", "source"), required=("name", "weight"), where=where)
            rest = {key: value for key, value in stream.items() if key not in ("name", "weight")}
            leaf = self._leaf(stream["name"], where, positive(f"{where}.weight", stream["weight"]), rest)
            leaves.append(leaf)
        return Group(key="", where="data.streams", amount=None, by="shares", setting=None, children=tuple(leaves))

    def root(self, given: object) -> Group:
        where = "data.blend"
        if not isinstance(given, Mapping):
            raise ValueError(f"{where} must be a mapping of nodes, not {given!r}")
        if "of" not in given:
            for key in _GROUP:
                if key in given:
                    raise ValueError(f"{where}: {key} belongs to a group, whose children stand under `of`")
            given = {"of": given}
        return self._group("", where, given, parent=None)

    def _node(self, key: object, where: str, given: object, *, parent: str) -> Node:
        if isinstance(key, bool):
            raise ValueError(f"{where}: YAML reads an unquoted yes, no, on or off as {key}: put the name in quotes")
        if isinstance(given, Mapping):
            # Only groups have these keys, so a misspelt `of` is reported as a group's.
            if any(word in given for word in ("of", "by", "names", "alpha", "decay")) or parent == "tiers":
                return self._group(str(key), where, given, parent=parent)
            allowed = _AMOUNTS[parent]
            check_keys(given, (*allowed, "of", *_LEAF), required=(), where=where)
            rest = {name: value for name, value in given.items() if name not in allowed}
            return self._leaf(str(key), where, self._amount(where, given, parent), rest)
        if isinstance(given, Sequence) and not isinstance(given, str):
            return self._group(str(key), where, {"of": given}, parent=parent)
        if parent == "tiers":
            raise ValueError(f"{where}: a tier is a list of names, or a mapping with `of`, not {given!r}")
        amounts = _AMOUNTS[parent]
        if given is not None and not amounts:
            raise ValueError(f"{where}: a group divided by {parent} takes no number of its children, not {given!r}")
        values = {} if given is None else {amounts[0]: given}
        return self._leaf(str(key), where, self._amount(where, values, parent, short=True), {})

    def _group(self, key: str, where: str, given: Mapping[str, object], *, parent: str | None) -> Group:
        by = given.get("by", "shares")
        if not isinstance(by, str) or by not in _SETTINGS:
            raise ValueError(f"{where}.by: unknown rule {by!r}: {nearest(str(by), _SETTINGS)}")
        amounts = () if parent is None else _AMOUNTS[parent]
        check_keys(given, (*_GROUP, *_SETTINGS[by], *amounts), required=("of",), where=where)
        reader = self
        if "names" in given:
            names = given["names"]
            if not isinstance(names, str) or names.count("*") != 1:
                raise ValueError(f"{where}.names must hold one *, where a child's name goes, not {names!r}")
            reader = replace(self, names=names)
        children = reader._children(f"{where}.of" if key or parent else where, given["of"], by)
        group = Group(
            key=key,
            where=where,
            amount=None if parent is None else self._amount(where, given, parent, children=len(children)),
            by=by,
            setting=_setting(where, given, by),
            children=children,
            cap_epochs=_cap(where, given),
        )
        if by == "tiers":
            _check_tiers(group)
        return group

    def _children(self, where: str, given: object, by: str) -> tuple[Node, ...]:
        if isinstance(given, Mapping) and given:
            return tuple(self._node(key, f"{where}.{key}", value, parent=by) for key, value in given.items())
        if isinstance(given, Sequence) and not isinstance(given, str) and given:
            if by == "tiers":
                raise ValueError(f"{where}: tiers are a mapping, such as {{A: [spa, ita], others: [mlt]}}")
            for number, key in enumerate(given):
                if not isinstance(key, str):
                    raise ValueError(
                        f"{where}[{number}] must be a name, not {key!r}; a child with settings stands in a mapping"
                    )
            # Children in a list all get the same amount.
            alike = None if by == "temperature" else 1
            return tuple(self._node(key, f"{where}.{key}", alike, parent=by) for key in given)
        raise ValueError(f"{where} must be a mapping or a list of at least one child, not {given!r}")

    def _amount(
        self, where: str, given: Mapping[str, object], parent: str, *, short: bool = False, children: int = 1
    ) -> Fraction | None:
        if parent == "temperature":
            return None
        if parent == "tiers":
            if "each" in given and "share" in given:
                raise ValueError(f"{where}: give `each` (of every child) or `share` (of the tier), not both")
            for key, times in (("each", children), ("share", 1)):
                if key in given:
                    amount = positive(f"{where}.{key}", given[key])
                    if amount * times > 1:
                        raise ValueError(
                            f"{where}.{key}={given[key]}: tiers are parts of 1, and this takes more than 1"
                        )
                    return amount * times
            return None
        (key,) = _AMOUNTS[parent]
        if key not in given:
            if parent == "epochs":
                return Fraction(1)
            raise ValueError(f"{where}: its {key} is missing: its group divides by {parent}")
        return positive(where if short else f"{where}.{key}", given[key])

    def _leaf(self, key: object, where: str, amount: Fraction | None, given: Mapping[str, object]) -> Leaf:
        name = self.names.replace("*", key) if isinstance(key, str) else key
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(f"{where}: name must be letters, digits, '.', '_' and '-' (it names files), not {name!r}")
        tokens, prefix = given.get("tokens"), given.get("prefix")
        if tokens is not None:
            tokens = math.ceil(positive(f"{where}.tokens", tokens))
        if prefix is not None and (not isinstance(prefix, str | Path) or not str(prefix)):
            raise ValueError(f"{where}.prefix must be a path, not {prefix!r}")
        return Leaf(
            key=str(key),
            where=where,
            name=name,
            amount=amount,
            prefix=self.directory / name if prefix is None else Path(prefix),
            source=given.get("source"),
            tokens=tokens,
            cap_epochs=_cap(where, given),
        )


def _setting(where: str, given: Mapping[str, object], by: str) -> Fraction | None:
    if by == "temperature":
        if "alpha" not in given:
            raise ValueError(f"{where}: alpha is missing: 1 is in proportion to tokens, 0 is all alike")
        return positive(f"{where}.alpha", given["alpha"], zero=True, most=1)
    if by == "tiers":
        return positive(f"{where}.decay", given["decay"], most=1) if "decay" in given else DECAY
    return None


def _cap(where: str, given: Mapping[str, object]) -> Fraction | None:
    cap = given.get("cap_epochs")
    return None if cap is None else positive(f"{where}.cap_epochs", cap)


def _check_tiers(group: Group) -> None:
    given = [child.amount for child in group.children if child.amount is not None]
    taken = sum(given)
    if len(given) < len(group.children):
        if taken >= 1:
            raise ValueError(
                f"{group.where}: the given tiers take {float(taken):g} of 1: nothing is left for the others"
            )
    elif taken != 1:
        raise ValueError(f"{group.where}: the tiers take {float(taken):g}, not 1: give one no share, for the rest")


def positive(where: str, value: object, *, zero: bool = False, most: int | None = None) -> Fraction:
    """Return a setting's number exactly as written: 0.1 is a tenth.

    Raises:
        ValueError: It is not a number within the limits.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if number:
        exact = Fraction(str(value))
        if (exact > 0 or (zero and exact == 0)) and (most is None or exact <= most):
            return exact
    limits = f"from 0 to {most}" if zero else "above 0" + ("" if most is None else f" and at most {most}")
    hint = ": to leave a part out, take it away" if value == 0 else ""
    raise ValueError(f"{where} must be a number {limits}, not {value!r}{hint}")
