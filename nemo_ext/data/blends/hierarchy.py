"""A blend as a tree, in which groups divide their share among their children by a rule, and leaves are streams.

    blend:                                     # the root is a group, too; by default it divides by shares
      code: 20                                 # a leaf is a stream; shares are divided by their sum
      web: {share: 60, cap_epochs: 2}          # a leaf with more settings
      books: {share: 10, by: temperature, alpha: 0.5, of: [fiction, science]}
      multilingual:
        share: 10
        by: tiers
        names: multilingual_*                  # leaf `spa` is the stream multilingual_spa
        of: {A: {each: 0.1, of: [spa, ita, fra, deu]}, B: [por, nld], others: [mlt, gle]}

Reading a tree performs all checks that do not depend on sizes; `nemo_ext.data.blends.division` computes the shares.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from nemo_ext.job.settings import check_keys, nearest

DECAY = Fraction(1, 2)  # (choice)

# Keys that a rule reads from the group, and from each child.
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
        amount: Share or number of epochs, depending on the group's rule; None if the rule reads neither.
        prefix: Prefix of the stream's files.
        source: Source to tokenise; None if the files are made elsewhere.
        tokens: Assumed size in tokens, for planning before the files exist.
        cap_epochs: Maximum number of passes; the excess goes to the stream's siblings.
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
        """Always empty, since a stream is a leaf of the tree."""
        return ()

    def leaves(self) -> Iterator["Leaf"]:
        """Yield only this stream; `Group.leaves` yields all streams of a group."""
        yield self


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group in a blend: its children, and the rule that divides the group's share among them.

    Attributes:
        key, where, cap_epochs: See `Leaf`; the cap applies to passes over all of the group's streams together.
        amount: Share or epochs, depending on the parent's rule; for a tier, its share, or None to share the remainder.
        by: Rule: `shares`, `epochs`, `temperature` or `tiers`.
        setting: Alpha of `temperature` or decay of `tiers`.
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
        """Yield all streams of the group, in order."""
        for child in self.children:
            yield from child.leaves()


Node = Leaf | Group


def read_tree(data: Mapping[str, object]) -> Group:
    """Read the tree that a `data` section describes, as `blend` or as a flat list of `streams`.

    Args:
        data: `directory`, and either `blend`, a group or the children of a group that divides by shares, or `streams`,
            a list of mappings with `name`, `weight` and optionally `prefix` and `source`.

    Raises:
        ValueError: The blend is invalid; the message names the place in the config.
    """
    blend, streams = data.get("blend"), data.get("streams")
    if blend is not None and streams is not None:
        raise ValueError(
            "data.blend and data.streams are both set: remove one, with data.blend=null or data.streams=null"
        )
    directory = data.get("directory")
    if not isinstance(directory, str | Path) or not str(directory):
        raise ValueError(f"data.directory must be a path, not {directory!r}")
    reader = _Reader(Path(directory))
    root = reader.flat(streams) if blend is None else reader.root(blend)
    seen: dict[str, str] = {}
    files: dict[Path, str] = {}
    for leaf in root.leaves():
        if leaf.name in seen:
            raise ValueError(
                f"{leaf.where}: the name {leaf.name!r} is already used by {seen[leaf.name]}; rename the stream, or set "
                "`names` in its group"
            )
        if leaf.prefix in files:
            raise ValueError(
                f"{leaf.where}: the prefix {leaf.prefix} is already used by {files[leaf.prefix]}; set another prefix"
            )
        seen[leaf.name] = files[leaf.prefix] = leaf.where
    return root


@dataclass(frozen=True)
class _Reader:
    """Reader of a blend's tree; holds the directory and the name pattern that apply at the current node."""

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
            leaf = self._leaf(stream["name"], where, positive(f"{where}.weight", stream["weight"], excludes=True), rest)
            leaves.append(leaf)
        return Group(key="", where="data.streams", amount=None, by="shares", setting=None, children=tuple(leaves))

    def root(self, section: object) -> Group:
        where = "data.blend"
        if not isinstance(section, Mapping):
            raise ValueError(f"{where} must be a mapping from names to streams or groups, not {section!r}")
        if "of" not in section:
            for key in _GROUP:
                if key in section:
                    raise ValueError(
                        f"{where}.{key} makes data.blend a group, whose children must be under {where}.of: move them "
                        "there"
                    )
            section = {"of": section}
        return self._group("", where, section, parent=None)

    def _node(self, key: object, where: str, section: object, *, parent: str) -> Node:
        if isinstance(key, bool):
            raise ValueError(f"{where}: YAML reads an unquoted yes, no, on or off as {key}; put the name in quotes")
        if isinstance(section, Mapping):
            # Only groups have these keys, so with one of them a misspelt `of` is reported as a key of a group.
            if any(word in section for word in ("of", "by", "names", "alpha", "decay")) or parent == "tiers":
                return self._group(str(key), where, section, parent=parent)
            allowed = _AMOUNTS[parent]
            check_keys(section, (*allowed, "of", *_LEAF), required=(), where=where)
            rest = {name: value for name, value in section.items() if name not in allowed}
            return self._leaf(str(key), where, self._amount(where, section, parent), rest)
        if isinstance(section, Sequence) and not isinstance(section, str):
            return self._group(str(key), where, {"of": section}, parent=parent)
        if parent == "tiers":
            raise ValueError(f"{where}: a tier must be a list of names, or a mapping with `of`, not {section!r}")
        amounts = _AMOUNTS[parent]
        if section is not None and not amounts:
            raise ValueError(
                f"{where}: the group is divided by {parent}, so its children must not have shares or "
                f"epochs; remove {section!r}"
            )
        values = {} if section is None else {amounts[0]: section}
        return self._leaf(str(key), where, self._amount(where, values, parent, short=True), {})

    def _group(self, key: str, where: str, section: Mapping[str, object], *, parent: str | None) -> Group:
        by = section.get("by", "shares")
        if not isinstance(by, str) or by not in _SETTINGS:
            raise ValueError(f"{where}.by: unknown rule {by!r}: {nearest(str(by), _SETTINGS)}")
        amounts = () if parent is None else _AMOUNTS[parent]
        check_keys(section, (*_GROUP, *_SETTINGS[by], *amounts), required=("of",), where=where)
        reader = self
        if "names" in section:
            names = section["names"]
            if not isinstance(names, str) or names.count("*") != 1:
                raise ValueError(
                    f"{where}.names must contain exactly one *, which stands for a child's name, not {names!r}"
                )
            reader = replace(self, names=names)
        children = reader._children(f"{where}.of" if key or parent else where, section["of"], by)
        group = Group(
            key=key,
            where=where,
            amount=None if parent is None else self._amount(where, section, parent, children=len(children)),
            by=by,
            setting=_setting(where, section, by),
            children=children,
            cap_epochs=_cap(where, section),
        )
        if by == "tiers":
            _check_tiers(group)
        return group

    def _children(self, where: str, section: object, by: str) -> tuple[Node, ...]:
        if isinstance(section, Mapping) and section:
            return tuple(self._node(key, f"{where}.{key}", value, parent=by) for key, value in section.items())
        if isinstance(section, Sequence) and not isinstance(section, str) and section:
            if by == "tiers":
                raise ValueError(
                    f"{where}: tiers must be a mapping, such as {{A: [spa, ita], others: [mlt]}}, not {section!r}"
                )
            for number, key in enumerate(section):
                if not isinstance(key, str):
                    raise ValueError(
                        f"{where}[{number}] must be a name, not {key!r}; to give children settings, use a mapping"
                    )
            # Children in a list all get the same amount.
            alike = None if by == "temperature" else 1
            return tuple(self._node(key, f"{where}.{key}", alike, parent=by) for key in section)
        raise ValueError(f"{where} must be a mapping or a list of at least one child, not {section!r}")

    def _amount(
        self, where: str, section: Mapping[str, object], parent: str, *, short: bool = False, children: int = 1
    ) -> Fraction | None:
        if parent == "temperature":
            return None
        if parent == "tiers":
            if "each" in section and "share" in section:
                raise ValueError(f"{where}: `each` (of every child) and `share` (of the tier) are both set: remove one")
            for key, times in (("each", children), ("share", 1)):
                if key in section:
                    amount = positive(f"{where}.{key}", section[key], excludes=True)
                    if amount * times > 1:
                        raise ValueError(
                            f"{where}.{key}={section[key]} adds up to {float(amount * times):g} for the tier, above "
                            f"1: lower it to at most {math.floor(1e6 / times) / 1e6:g}"
                        )
                    return amount * times
            return None
        (key,) = _AMOUNTS[parent]
        if key not in section:
            if parent == "epochs":
                return Fraction(1)
            raise ValueError(f"{where}.{key} is missing: set it, since its group is divided by {parent}")
        return positive(where if short else f"{where}.{key}", section[key], excludes=True)

    def _leaf(self, key: object, where: str, amount: Fraction | None, section: Mapping[str, object]) -> Leaf:
        name = self.names.replace("*", key) if isinstance(key, str) else key
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{where}: the name must consist of letters, digits, '.', '_' and '-' (it names files), not {name!r}"
            )
        tokens, prefix = section.get("tokens"), section.get("prefix")
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
            source=section.get("source"),
            tokens=tokens,
            cap_epochs=_cap(where, section),
        )


def _setting(where: str, section: Mapping[str, object], by: str) -> Fraction | None:
    if by == "temperature":
        if "alpha" not in section:
            raise ValueError(
                f"{where}.alpha is missing: set it to a number from 0 (equal shares) to 1 (shares in proportion to "
                "tokens)"
            )
        return positive(f"{where}.alpha", section["alpha"], zero=True, most=1)
    if by == "tiers":
        return positive(f"{where}.decay", section["decay"], most=1) if "decay" in section else DECAY
    return None


def _cap(where: str, section: Mapping[str, object]) -> Fraction | None:
    cap = section.get("cap_epochs")
    return None if cap is None else positive(f"{where}.cap_epochs", cap, excludes=True)


def _check_tiers(group: Group) -> None:
    amounts = [child.amount for child in group.children if child.amount is not None]
    total = sum(amounts)
    if len(amounts) < len(group.children):
        if total >= 1:
            raise ValueError(
                f"{group.where}: the shares of tiers sum to {float(total):g}; lower them, to leave a share for the "
                "other tiers"
            )
    elif total != 1:
        raise ValueError(
            f"{group.where}: the shares of tiers sum to {float(total):g}, not 1; remove one, so that its tier gets the "
            "remainder"
        )


def positive(
    where: str, value: object, *, zero: bool = False, most: int | None = None, excludes: bool = False
) -> Fraction:
    """Check a setting's number and return it as an exact fraction of its decimal digits, so that 0.1 is 1/10.

    Args:
        where: key of the setting, for the message.
        zero: True to allow 0.
        most: maximum; None for no limit.
        excludes: True if 0 would exclude a part of the blend, so that the message says how to do that.

    Raises:
        ValueError: The value is not a number within the limits.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if number:
        exact = Fraction(str(value))
        if (exact > 0 or (zero and exact == 0)) and (most is None or exact <= most):
            return exact
    limits = f"from 0 to {most}" if zero else "above 0" + ("" if most is None else f" and at most {most}")
    hint = ": to exclude it, remove it from the blend" if excludes and value == 0 else ""
    raise ValueError(f"{where} must be a number {limits}, not {value!r}{hint}")
