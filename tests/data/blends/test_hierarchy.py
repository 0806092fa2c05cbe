import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_ext.data.blends.hierarchy import Group, Leaf, read_tree


def tree(text: str, directory: str = "d") -> Group:
    return read_tree({"directory": directory, "blend": yaml.safe_load(text)})


def test_a_flat_list_is_a_group_that_divides_by_shares() -> None:
    root = read_tree(
        {
            "directory": "d",
            "streams": [
                {"name": "a", "weight": 3},
                {"name": "b", "weight": 0.1, "prefix": "e/b", "source": {"kind": "x"}},
            ],
        }
    )

    assert root.by == "shares"
    assert [(leaf.name, leaf.amount, leaf.prefix) for leaf in root.leaves()] == [
        ("a", 3, Path("d/a")),
        ("b", Fraction(1, 10), Path("e/b")),
    ]
    assert [leaf.source for leaf in root.leaves()] == [None, {"kind": "x"}]


def test_every_form_of_a_node_is_read() -> None:
    root = tree(
        """
        short: 2
        long: {share: 1, prefix: elsewhere/x, tokens: 3000000000, cap_epochs: 2.5}
        group: {share: 4, by: temperature, alpha: 0.3, names: "*_web", cap_epochs: 1, of: [deu, fra]}
        passes: {share: 5, by: epochs, of: {once: , twice: 2, thrice: {epochs: 3}, several: {epochs: 4, of: [p, q]}}}
        tiers: {share: 6, by: tiers, of: {A: {each: 0.2, of: [spa]}, B: {share: 0.3, of: {x: 1}}, C: [mlt]}}
        """
    )
    short, long, group, passes, tiers = root.children

    assert (short.amount, long.amount) == (2, 1)
    assert isinstance(long, Leaf) and (long.prefix, long.tokens, long.cap_epochs) == (
        Path("elsewhere/x"),
        3 * 10**9,
        2.5,
    )
    assert isinstance(group, Group) and isinstance(passes, Group) and isinstance(tiers, Group)
    assert [leaf.name for leaf in group.leaves()] == ["deu_web", "fra_web"]
    assert (group.by, group.setting, group.cap_epochs) == ("temperature", Fraction(3, 10), 1)
    assert [child.amount for child in passes.children] == [1, 2, 3, 4]
    assert tiers.setting == Fraction(1, 2)
    assert [child.amount for child in tiers.children] == [Fraction(1, 5), Fraction(3, 10), None]
    assert all(child.amount is None for child in group.children)


def test_names_apply_to_nested_groups_without_names() -> None:
    root = tree(
        "{a: {share: 1, names: x_*, of: {b: {share: 1, of: [c]}, d: {share: 1, names: y_*, of: [c]}, e: 1}}, f: 1}"
    )

    assert [leaf.name for leaf in root.leaves()] == ["x_c", "y_c", "x_e", "f"]


def test_the_root_may_have_a_rule() -> None:
    assert tree("{by: temperature, alpha: 0.5, of: [a, b]}").by == "temperature"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 0}", "data.blend.a must be a number above 0, not 0: to exclude it, remove it from the blend"),
        ("{a: 0, b: 0}", "data.blend.a must be a number above 0"),
        ("{a: -1}", "data.blend.a must be a number above 0, not -1"),
        ("{a: .nan}", "data.blend.a must be a number above 0, not nan"),
        ("{a: .inf}", "data.blend.a must be a number above 0, not inf"),
        ("{a: true}", "data.blend.a must be a number above 0, not True"),
        ("{a: much}", "data.blend.a must be a number above 0, not 'much'"),
        ("{a: }", "data.blend.a.share is missing: set it, since its group is divided by shares"),
        ("{a: {prefix: x}}", "data.blend.a.share is missing"),
        ("{a: [b]}", "data.blend.a.share is missing"),
        ("{a: {share: 1, tokens: -5}}", "data.blend.a.tokens must be a number above 0, not -5"),
        ("{a: {share: 1, cap_epochs: 0}}", "data.blend.a.cap_epochs must be a number above 0"),
        ("{a: {share: 1, prefx: x}}", "data.blend.a: unknown key 'prefx': did you mean 'prefix'"),
        ("{a: {share: 1, oof: [x]}}", "data.blend.a: unknown key 'oof': did you mean 'of'"),
        ("{a: {epochs: 1}}", "data.blend.a: unknown key 'epochs'"),
        ("{a: {share: 1, by: tier, of: [x]}}", "data.blend.a.by: unknown rule 'tier': did you mean 'tiers'"),
        ("{a: {share: 1, by: [x], of: [x]}}", "data.blend.a.by: unknown rule ['x']"),
        ("{a: {share: 1, by: epochs}}", "data.blend.a: the key 'of' is missing"),
        ("{by: epochs}", "data.blend.by makes data.blend a group, whose children must be under data.blend.of"),
        ("{a: {share: 1, by: epochs, of: {b: {share: 2}}}}", "data.blend.a.of.b: unknown key 'share'"),
        ("{a: {share: 1, by: temperature, of: [b]}}", "data.blend.a.alpha is missing"),
        ("{a: {share: 1, by: temperature, alpha: 2, of: [b]}}", "a.alpha must be a number from 0 to 1, not 2"),
        (
            "{a: {share: 1, by: temperature, alpha: 1, of: {b: 3}}}",
            "a.of.b: the group is divided by temperature, so its children must not have shares or epochs",
        ),
        ("{a: {share: 1, alpha: 1, of: [b]}}", "data.blend.a: unknown key 'alpha'"),
        ("{a: 1, b: {share: 1, of: [a]}}", "data.blend.b.of.a: the name 'a' is already used by data.blend.a"),
        ("{a: 1, b: {share: 1, prefix: d/a}}", "data.blend.b: the prefix d/a is already used by data.blend.a"),
        ("{a: {share: 1, of: [b, b]}}", "the name 'b' is already used by data.blend.a.of.b"),
        ("{a: {share: 1, of: [nb, no]}}", "data.blend.a.of[1] must be a name, not False"),
        ("{a: {share: 1, of: {no: 1}}}", "YAML reads an unquoted yes, no, on or off as False; put the name in quotes"),
        ("{a b: 1}", "data.blend.a b: the name must consist of letters, digits"),
        ("{a: {share: 1, names: x, of: [b]}}", "data.blend.a.names must contain exactly one *"),
        ("{a: {share: 1, of: []}}", "data.blend.a.of must be a mapping or a list of at least one child"),
        ("{}", "data.blend must be a mapping or a list of at least one child"),
        ("[a]", "data.blend must be a mapping from names to streams or groups"),
        ("{a: {share: 1, by: tiers, of: [b]}}", "data.blend.a.of: tiers must be a mapping"),
        (
            "{a: {share: 1, by: tiers, of: {A: 1}}}",
            "a.of.A: a tier must be a list of names, or a mapping with `of`, not 1",
        ),
        ("{a: {share: 1, by: tiers, decay: 0, of: {A: [b]}}}", "a.decay must be a number above 0 and at most 1"),
        (
            "{a: {share: 1, by: tiers, of: {A: {each: 0.6, of: [b, c]}}}}",
            "A.each=0.6 adds up to 1.2 for the tier, above 1: lower it to at most 0.5",
        ),
        (
            "{a: {share: 1, by: tiers, of: {A: {each: 0.5, share: 0.5, of: [b]}}}}",
            "`each` (of every child) and `share` (of the tier) are both set",
        ),
        (
            "{a: {share: 1, by: tiers, of: {A: {share: 1, of: [b]}, B: [c]}}}",
            "the shares of tiers sum to 1; lower them, to leave a share",
        ),
        ("{a: {share: 1, by: tiers, of: {A: {share: 0.5, of: [b]}}}}", "the shares of tiers sum to 0.5, not 1"),
    ],
)
def test_an_invalid_tree_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tree(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"directory": "d", "blend": {"a": 1}, "streams": []}, "data.blend and data.streams are both set: remove one"),
        ({"directory": None, "blend": {"a": 1}}, "data.directory must be a path, not None"),
        ({"directory": "d"}, "data.streams must be a list of at least one stream, not None"),
        ({"directory": "d", "streams": [{"name": "a"}]}, "data.streams[0]: the key 'weight' is missing"),
        (
            {"directory": "d", "streams": [{"name": "a", "weight": 0}]},
            "data.streams[0].weight must be a number above 0",
        ),
        (
            {"directory": "d", "streams": [{"name": "a", "weight": 1}] * 2},
            "data.streams[1]: the name 'a' is already used by",
        ),
        ({"directory": "d", "streams": ["a"]}, "data.streams[0] must be a mapping"),
    ],
)
def test_an_invalid_section_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_tree(data)
