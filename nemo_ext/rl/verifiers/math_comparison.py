"""Comparison of two answers: numbers exactly or to 2680 digits, expressions at sample points, sets by their members.

An answer must be evaluated as far as the reference is. A leading "x = " is ignored, unless both have one and the names
differ. All members of a chain of equations must be equal. Lists and {} are unordered, while () and [] are ordered.
Intervals, inequalities and unions are equal if they have the same members. 50 % equals both 50 and 0.5. A unit may be
omitted, but two units must measure the same quantity. A decimal with at least six significant digits equals the number
that it is rounded from.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from nemo_ext.rl.verifiers.math_notation import MORE, UNITS, Node, whole
from nemo_ext.rl.verifiers.math_values import MATRIX_POWERS, NoValue, Number, Values, is_capital, points

_DIGITS = {80: 9, 3000: 1}
"""Mapping from precision in digits to number of sample points; many digits tell nearly equal numbers apart."""
_ZERO = Node("number", value=(Fraction(0), None))
_ONE = Node("number", value=(Fraction(1), None))
_HUNDRED = Node("number", value=(Fraction(100), None))
_DENIALS = ("not", "never", "unless", "except", "maybe", "perhaps", "about")
_FUNCTION_NAMES = frozenset(("\\phi", "\\varphi", "\\sigma", *"fghpFGHP"))
_OPERATION = re.compile(
    r"(?<!_)(?<!_\{)\\(?:sum|prod|i{0,2}int|oint|lim|[dt]?binom|choose|gcd|lcm|det|min|max)(?![A-Za-z])|\\[dt]?frac\{d\}"
    r"|\\begin\{vmatrix\}|(?<!\\)!(?!=)"
)
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def operations(text: str) -> set[str]:
    """Return the unevaluated operations in an answer, which it may contain only if its reference does."""
    return set(_OPERATION.findall(text))


def worked_out(node: Node) -> bool:
    """Return whether a node is fully evaluated: a number, or a tuple, list, set, interval or inequality of numbers.

    An initial "x =" is allowed.
    """
    return _literal(node) and any(part.kind in ("number", "time") for part in node.walk())


def difference(reference: Node, answer: Node) -> str:
    """Return why an answer is wrong; "" if it is correct."""
    candidates = [_measured(reference, _renamed(reference, candidate)) for candidate in _candidates(answer)]
    if worked_out(reference):
        if not _symbols(reference):
            candidates = list(map(_without_quantity, candidates))
        lasts = list(map(_last, candidates))
        if not any(map(_literal, lasts)) or (_has_whole_numbers(reference) and all(map(_has_fraction, lasts))):
            return "not worked out"
    same = _Comparison().same
    return "" if any(same(reference, candidate) for candidate in candidates) else "different answer"


def _candidates(answer: Node) -> list[Node]:
    """Return the values that may be compared with the reference: both numbers of "2/3 ~ 0.667", else the answer.

    If the second number is not the first one rounded, return only a node that equals no reference.
    """
    if answer.kind != "relation" or "~" not in answer.value:
        return [answer]
    begin = answer.value.index("~") + 1
    signs = tuple(sign.replace("~", "=") for sign in answer.value)
    if begin == 1 and _name(answer.parts[0]):
        return [Node("relation", answer.parts, signs)]
    exact = Node("relation", answer.parts[:begin], signs[: begin - 1]) if begin > 1 else answer.parts[0]
    if all(_Comparison().roughly(_last(exact), part) for part in answer.parts[begin:]):
        return [exact, answer.parts[-1]]
    return [Node("words", value="contradiction")]


def _measured(reference: Node, answer: Node) -> Node:
    """Read letters in the answer as units if the reference has the same units (220 V); otherwise leave it unchanged."""
    expected = _last(reference)
    if expected.kind == "unit" and (read := _with_units(answer)) and sorted(read[2].items()) == [*expected.value[1]]:
        return Node("unit", (read[0],), (read[1], expected.value[1]))
    return answer


_WHOLE_NUMBERS = frozenset("jklmn")
_CONSTANTS = frozenset(("C", "c", "K", "k", "A", "C_1", "c_1", "C_0"))


def _renamed(reference: Node, answer: Node) -> Node:
    """Rename the answer's parameter to the reference's, as in 2k pi to 2n pi or x^2 + C to x^2 + c.

    Other answers are returned unchanged.
    """
    expected, actual = _last(reference), _last(answer)
    names = [sorted(one - other) for one, other in itertools.permutations((_symbols(expected), _symbols(actual)))]
    if any(len(differing) != 1 for differing in names):
        return answer
    (ours,), (theirs,) = names
    whole_numbers = {ours, theirs} <= _WHOLE_NUMBERS and all(
        any(part.kind == "constant" and part.value == "pi" for part in node.walk()) for node in (expected, actual)
    )
    constants = {ours, theirs} <= _CONSTANTS and not {"a", "b", "A", "B"} & (_symbols(expected) & _symbols(actual))
    if whole_numbers or (constants and _is_constant(expected, ours) and _is_constant(actual, theirs)):
        return _with_name(answer, theirs, ours)
    return answer


def _is_constant(node: Node, name: str) -> bool:
    """Return whether `name` is a constant of integration in `node`: a single summand, or a factor of a power of e."""
    if sum(part.value == name for part in node.walk() if part.kind == "symbol") != 1:
        return False
    if node.kind == "add":
        return any(part.value == name if part.kind == "symbol" else _is_constant(part, name) for part in node.parts)
    factors = [part for part in node.walk() if part.kind != "mul"] if node.kind == "mul" else []
    return any(part.kind == "pow" and part.parts[0].value == "e" for part in factors) and any(
        part.kind == "symbol" and part.value == name for part in factors
    )


def _with_name(node: Node, name: str, new: str) -> Node:
    if node.kind == "symbol":
        return Node("symbol", value=new) if node.value == name else node
    return Node(node.kind, tuple(_with_name(part, name, new) for part in node.parts), node.value)


def _without_quantity(answer: Node) -> Node:
    """Return the right side of an answer such as m + n = 17, whose left side only names a quantity.

    Other answers are returned unchanged.
    """
    if _is_equation(answer) and answer.parts[0].kind in ("add", "mul", "div"):
        leaves = [part for part in answer.parts[0].walk() if part.kind not in ("add", "mul", "div", "neg")]
        if all(leaf.kind == "symbol" for leaf in leaves) and len(set(leaves)) == len(leaves):
            rest = answer.parts[1:]
            return rest[0] if len(rest) == 1 else Node("relation", rest, answer.value[1:])
    return answer


def _has_fraction(node: Node) -> bool:
    return any(part.kind in ("div", "mixed", "ratio") for part in node.walk())


def _has_whole_numbers(node: Node) -> bool:
    """Return whether all numbers are whole and there are no fractions, percentages or powers."""
    return not _has_fraction(node) and all(
        part.kind not in ("percent", "pow") and (part.kind != "number" or whole(part)) for part in node.walk()
    )


def _literal(node: Node) -> bool:
    kind, parts = node.kind, node.parts
    if kind in ("number", "constant", "symbol", "words", "named", "time", "mixed"):
        return True
    if kind in ("group", "relation", "union", "intersection", "minus", "matrix"):
        return all(map(_literal, parts))
    if kind in ("neg", "pm", "mp", "percent", "unit", "based"):
        inner = parts[0]
        return _literal(inner) and not (kind in ("neg", "pm") and inner.kind in ("neg", "pm"))
    if kind == "ratio" and len(terms := _terms(node)) > 2:
        return all(map(_literal, terms))
    if kind in ("div", "ratio"):
        return all(map(_signed, parts))
    return _power_of_ten(node) or (kind == "mul" and parts[0].kind == "number" and _power_of_ten(parts[1]))


def _terms(node: Node) -> list[Node]:
    """Return the terms of a ratio; for anything else, a list with only the node."""
    return [*_terms(node.parts[0]), node.parts[1]] if node.kind == "ratio" else [node]


def _signed(node: Node) -> bool:
    return node.kind == "number" or (node.kind == "neg" and node.parts[0].kind == "number")


def _power_of_ten(node: Node) -> bool:
    return node.kind == "pow" and whole(node.parts[0]) and node.parts[0].value[0] == 10 and _signed(node.parts[1])


def _name(node: Node) -> Node | None:
    """Return the node if it can be the name in a definition: x, a_n, f(x), AB, (x, y), |AB|, words; else None."""
    if node.kind in ("symbol", "words"):
        return None if node.kind == "words" and node.value.startswith(_DENIALS) else node
    if node.kind == "group" and node.value == "()":
        return node if all(map(_name, node.parts)) else None
    if node.kind == "call":
        return node if node.value == "f" or (node.value == "abs" and _name(node.parts[0])) else None
    if node.kind == "mul" and node.parts[0].kind == "symbol" and node.parts[0].value.rstrip("'") in _FUNCTION_NAMES:
        at_a_number = any(leaf.kind == "number" for part in node.parts[1:] for leaf in _leaves(part))
        return Node("call", node.parts if at_a_number else node.parts[:1], "f")
    if node.kind == "ratio" or (node.kind == "div" and all(map(is_capital, _leaves(node)))):
        return node if all(map(_name, node.parts)) else None  # a : b : c, AB / BC
    return node if node.kind == "mul" and all(map(_name, node.parts)) else None


def _leaves(node: Node) -> list[Node]:
    return [part for part in node.walk() if not part.parts]


def _is_equation(node: Node) -> bool:
    return node.kind == "relation" and set(node.value) == {"="}


def _is_definition(node: Node) -> bool:
    return _is_equation(node) or (node.kind == "relation" and node.value == (r"\in",))


def _primes(name: Node) -> int:
    return sum(part.value.count("'") for part in name.walk() if part.kind == "symbol")


def _symbols(node: Node) -> frozenset[str]:
    return frozenset(part.value for part in node.walk() if part.kind == "symbol")


def _chain(node: Node) -> tuple[Node | None, list[Node]]:
    """Return the name (or None) and the other members of a chain of equations; (None, [node]) for anything else."""
    if _is_equation(node):
        names = [name for part in node.parts if (name := _name(part)) is not None]
        others = [part for part in node.parts if _name(part) is None]
        if len(names) == 1 and not _symbols(others[-1]) & _symbols(names[0]):
            return names[0], others
        if len(names) == 2 and not others and any(part.kind != "symbol" for part in node.parts):
            return names[0], [node.parts[1]]  # but x = y is an equation
        if not names and not _symbols(node):
            return None, others
    return None, [node]


def _last(node: Node) -> Node:
    """Return an answer's final result, without "x =" and intermediate results."""
    if _is_equation(node):
        members = _chain(node)[1]
        return members[-1] if members else node
    if node.kind == "group":
        return Node("group", tuple(map(_last, node.parts)), node.value)
    return node


class _Comparison(Values):
    """Comparison of a reference with an answer, including the values computed for it."""

    def same(self, reference: Node, answer: Node) -> bool:
        """Return whether an answer equals the reference."""
        expected_name, expected = self.defined(reference)
        actual_name, actual = self.defined(answer)
        if expected is None or actual is None:
            return False
        if actual_name and expected_name is None and expected.kind == "relation" and _is_set(expected):
            expected_name = Node("symbol", value=min(_symbols(expected), default=actual_name.value))
        kinds = [name.kind for name in (expected_name, actual_name) if name]
        if expected_name != actual_name and kinds in ([kind] * 2 for kind in ("symbol", "ratio", "div", "call")):
            return False
        if _is_equation(reference) and _is_equation(answer) and (expected_name is None) != (actual_name is None):
            return self.same_relation(reference, answer)  # y = 2x + 1 and 2x - y = -1
        if expected_name and actual_name and _primes(expected_name) != _primes(actual_name):
            return False  # f'(x) is not f(x)
        if (
            actual_name
            and not expected_name
            and _symbols(actual_name) & _symbols(expected)
            and expected.kind != "relation"
        ):
            return False  # x = x^2 for x^2
        return self.same_value(expected, actual)

    def defined(self, node: Node) -> tuple[Node | None, Node | None]:
        """Return the name and value of a definition such as x = 2.

        The name is None if there is none, as in 4/2 = 2; the value is None if the members of the equation differ.
        """
        if node.kind == "relation" and node.value == (r"\in",) and _name(node.parts[0]):
            return node.parts[0], node.parts[1]
        if node.kind == "group" and node.value in ("", "or", "and") and all(map(_is_definition, node.parts)):
            pairs = [self.defined(part) for part in node.parts]
            values = tuple(value for _, value in pairs if value is not None)
            if len({name for name, _ in pairs}) == 1 and pairs[0][0] is not None:  # x = 1 or x = 2
                return pairs[0][0], Node("group", values, "{}") if len(values) == len(pairs) else None
        if node.kind == "group" and node.value in ("", "or", "and") and _is_equation(node.parts[0]):
            name, value = self.defined(node.parts[0])
            if name is not None and value is not None and not any(part.kind == "relation" for part in node.parts[1:]):
                return name, Node("group", (value, *node.parts[1:]), "{}")  # x = 1, 2
        name, members = _chain(node)
        if any(not self.same_value(members[-1], member) for member in members[:-1]):
            return name, None
        if name is not None and name.kind == members[-1].kind == "group" and len(name.parts) == len(members[-1].parts):
            return None, _system(name.parts, members[-1].parts)
        return name, members[-1]

    def same_value(self, expected: Node, actual: Node) -> bool:
        expected, actual = self.plain(expected), self.plain(actual)
        if expected == actual:
            return True
        if expected.kind == "system" or actual.kind == "system":
            return self.same_system(expected, actual)
        terms = _terms(expected), _terms(actual)
        if max(map(len, terms)) > 2:
            return len(terms[0]) == len(terms[1]) and all(
                self.same_scalar(Node("mul", (first, terms[1][0])), Node("mul", (second, terms[0][0])))
                and self.same_scalar(first, _ZERO) == self.same_scalar(second, _ZERO)
                for first, second in zip(*terms, strict=True)
            )
        if expected.kind == actual.kind == "words":
            return bool(expected.value == actual.value)
        if expected.kind == "words" and expected.parts:
            expected = expected.parts[0]
        for kind in ("time", "based", "matrix", "words", "builder"):
            if kind in (expected.kind, actual.kind):
                return self.same_parts(expected, actual)
        if (_is_set(expected) or _is_set(actual)) and (answer := self.same_members(expected, actual)) is not None:
            return answer
        if expected.kind == "relation" and actual.kind == "relation":
            return self.same_relation(expected, actual)
        if expected.kind == "group" or actual.kind == "group":
            return self.same_group(expected, actual)
        return self.same_scalar(expected, actual)

    def plain(self, node: Node) -> Node:
        """Simplify a node: expand +- into a list with both signs, and turn "x = 1, y = 2" into a system."""
        if node.kind == "words" or node.kind == "system":
            return node
        if node.kind != "group" or node.value in ("()", "[]"):
            both = _both(node)
            node = Node("group", tuple(both), "{}") if len(both) == 2 else node
        elif node.value in ("", "or", "and", "{}"):
            node = Node("group", tuple(each for part in node.parts for each in _both(part)), node.value)
        if node.kind == "group" and len(node.parts) == 1 and not _is_set(node.parts[0]):
            return node if _is_braced(node.parts[0]) else node.parts[0]
        if node.kind == "group" and node.value in ("", "and", "or"):
            pairs = [self.defined(part) for part in node.parts]
            names = [name for name, _ in pairs if name is not None]
            values = tuple(value if value is not None else Node("words", value="?") for _, value in pairs)
            if names and all(part.kind != "relation" or _is_equation(part) for part in node.parts):
                if len(set(names)) == 1 and pairs[0][0] is not None:
                    return Node("group", values, "{}")  # x = 1, 2
                if len(set(names)) == len(pairs):
                    return _system(names, values)
        return node

    def same_system(self, expected: Node, actual: Node) -> bool:
        """Return whether two answers give the same values to several unknowns.

        The values are matched by the unknowns' names, or by their order if only one answer names them.
        """
        if expected.kind == actual.kind:
            values = dict(zip(actual.value, actual.parts, strict=True))
            return set(expected.value) == set(actual.value) and all(
                self.same_value(part, values[name]) for name, part in zip(expected.value, expected.parts, strict=True)
            )
        other = actual if expected.kind == "system" else expected
        if _is_braced(other):
            names = (expected if expected.kind == "system" else actual).value
            same_letter = len({str(name.value).partition("_")[0] for name in names}) == 1  # x_1 = 1, x_2 = 2
            return same_letter and self.same_unordered(expected, actual)
        return other.kind == "group" and other.value in ("()", "", "[]") and self.all_same(expected, actual)

    def all_same(self, expected: Node, actual: Node) -> bool:
        return len(expected.parts) == len(actual.parts) and all(map(self.same_value, expected.parts, actual.parts))

    def same_parts(self, expected: Node, actual: Node) -> bool:
        if expected.kind == "based" and actual.kind == "number":
            return self.same_value(expected.parts[0], actual)  # the base may be omitted
        for column, vector in ((expected, actual), (actual, expected)):
            if column.kind == "matrix" and vector.kind == "group" and all(len(row.parts) == 1 for row in column.parts):
                entries = Node("group", tuple(row.parts[0] for row in column.parts), "()")
                return vector.value in ("()", "[]") and self.all_same(entries, vector)
        if expected.kind != actual.kind:
            return False
        return (expected.kind == "matrix" or expected.value == actual.value) and self.all_same(expected, actual)

    def same_group(self, expected: Node, actual: Node) -> bool:
        if expected.kind != actual.kind:
            return False
        if {expected.value, actual.value} == {"and", "or"} and not any(
            part.kind in ("number", "constant") for part in expected.walk()
        ):
            return False  # the parts are statements, not solutions
        first, second = ({"or": "{}", "and": ""}.get(node.value, node.value) for node in (expected, actual))
        if expected.value == "" and _is_order(expected):
            return self.all_same(expected, actual)
        if {first, second} <= {"", "{}"}:
            return self.same_unordered(expected, actual)
        vectors = {first, second} <= {"()", "[]"} and len(expected.parts) > 2
        return (first == second or vectors or {first, second} == {"", "()"}) and self.all_same(expected, actual)

    def same_unordered(self, expected: Node, actual: Node) -> bool:
        remaining = list(actual.parts)
        for part in expected.parts:
            # Among several members, sets match sets only: {1}, {2} is not {1, 2}.
            match = next(
                (
                    place
                    for place, other in enumerate(remaining)
                    if (len(expected.parts) == 1 or _is_braced(part) == _is_braced(other)) and self.same(part, other)
                ),
                None,
            )
            if match is None:
                return False
            remaining.pop(match)
        return not remaining

    def same_relation(self, expected: Node, actual: Node) -> bool:
        """Return whether two equations or inequalities are the same up to a factor, once all terms are on the left."""
        if len(expected.value) != 1 or len(actual.value) != 1 or _symbols(expected) != _symbols(actual):
            turned = Node("relation", actual.parts[::-1], tuple(_TURNED.get(sign, sign) for sign in actual.value[::-1]))
            return any(expected.value == each.value and self.all_same(expected, each) for each in (actual, turned))
        left, right = (Node("add", (node.parts[0], Node("neg", (node.parts[1],)))) for node in (expected, actual))
        ratios: list[Number] = []
        for point in points(_symbols(expected)):
            try:
                first, second = self.value(left, point), self.value(right, point)
            except (NoValue, ZeroDivisionError):
                continue
            if first == 0 or second == 0:
                if first != second:
                    return False
                continue
            ratios.append(self.quotient(second, first))
            if not self.close(ratios[0], ratios[-1]):
                return False
        sign = expected.value[0]
        if len(ratios) < (2 if _symbols(expected) else 1):
            return False
        return bool(actual.value[0] == (sign if self.lift(ratios[0]).real > 0 else _TURNED.get(sign, sign)))

    def same_scalar(self, expected: Node, actual: Node) -> bool:
        if {expected.kind, actual.kind} == {"percent", "unit"}:
            return False
        if "percent" in (expected.kind, actual.kind):
            inner = [node.parts[0] if node.kind == "percent" else node for node in (expected, actual)]
            parts = [_hundredth(node.parts[0]) if node.kind == "percent" else node for node in (expected, actual)]
            return self.same_scalar(*inner) or (expected.kind != actual.kind and self.same_scalar(*parts))
        factors = Fraction(1), Fraction(1)
        if expected.kind == actual.kind == "unit" and expected.value[1] and actual.value[1]:
            ways, units = zip(*(_ways_and_units(node.value[1]) for node in (expected, actual)), strict=True)
            if (
                (all(ways) and ways[0] != ways[1])
                or "fewer" in ways[0] ^ ways[1]
                or (all(units) and units[0] != units[1])
            ):
                return False
            factors = expected.value[0], actual.value[0]
        expected, actual = (node.parts[0] if node.kind == "unit" else node for node in (expected, actual))
        if expected == actual and factors[0] == factors[1]:
            return True
        if expected.kind in ("named", "relation", "group") or actual.kind in ("named", "relation", "group"):
            return False
        if _are_matrices(expected, actual):
            return self.same_matrices(expected, actual)
        decimal = _decimals(expected) is not None or _decimals(actual) is not None
        symbols = _symbols(expected) | _symbols(actual)
        for digits, most in _DIGITS.items():
            self.mp.dps, seen = digits, 0
            for first, second in self.sampled(expected, actual, symbols):
                if seen == most:
                    break
                seen += 1
                if factors[0] != factors[1]:
                    first, second = self.product(first, factors[0]), self.product(second, factors[1])
                if not self.close(first, second) and (
                    not decimal or symbols or not self.rounded(expected, actual, first, second)
                ):
                    return False
            if seen < (min(2, most) if symbols else 1):
                return False
        return True

    def same_matrices(self, expected: Node, actual: Node) -> bool:
        """Return whether two expressions are equal if capital letters are matrices, so the order of factors matters."""
        symbols = _symbols(expected) | _symbols(actual)
        for point in itertools.islice(points(symbols), 0, 5, 2):
            try:
                first, second = (self.matrix(node, point) for node in (expected, actual))
                if first != second:
                    return False
            except (NoValue, ZeroDivisionError):
                return False
        return True

    def rounded(self, expected: Node, actual: Node, first: Number, second: Number) -> bool:
        """Return whether the less precise number is the more precise one rounded to at least six significant digits.

        `first` and `second` are the values of `expected` and `actual`, at least one of which is a decimal.
        """
        pairs = ((_decimals(expected), first), (_decimals(actual), second))
        decimals, short = min(
            ((places, value) for places, value in pairs if places is not None), key=lambda pair: pair[0]
        )
        unit = self.mp.mpf(10) ** -decimals
        return bool(abs(self.lift(short)) >= 100_000 * unit and abs(self.lift(first) - self.lift(second)) <= unit / 2)

    def roughly(self, exact: Node, rounded: Node) -> bool:
        """Return whether `rounded`, an integer or a decimal, is `exact` rounded."""
        if rounded.kind == "unit":
            rounded = rounded.parts[0]
        try:
            first, second = self.value(exact, {}), self.value(rounded, {})
        except (KeyError, NoValue, ZeroDivisionError):
            return False
        decimals = _decimals(rounded) or 0
        return bool(abs(self.lift(first) - self.lift(second)) <= self.mp.mpf(10) ** -decimals / 2)

    # Sets of real numbers.

    def same_members(self, expected: Node, actual: Node) -> bool | None:
        """Return whether two sets have the same members; None if their end points cannot decide this."""
        names = [
            frozenset[str]().union(*(_symbols(part) for part in node.walk() if part.kind == "relation"))
            for node in (expected, actual)
        ]
        if all(names) and names[0] != names[1]:
            return False
        self.mp.dps = min(_DIGITS)
        ends: list[Any] = []
        try:
            for node in (expected, actual):
                for end in _ends(node):
                    number = self.lift(self.value(end, {}))
                    if isinstance(number, self.mp.mpc) and number.imag != 0:
                        return None
                    ends.append((number.real, end))
        except (KeyError, NoValue, ZeroDivisionError, _NoSet):
            return None
        places: dict[Node, int] = {}
        place, before = 0, None
        for number, end in sorted(ends, key=lambda pair: pair[0]):
            if before is None or not self.close(before, number):
                place += 2
            places[end], before = place, number
        lowest = 3 if any(number == -self.mp.inf for number, _ in ends) else 1
        highest = place - 1 if any(number == self.mp.inf for number, _ in ends) else place + 1
        try:
            return all(
                _member(expected, at, places) == _member(actual, at, places) for at in range(lowest, highest + 1)
            )
        except (KeyError, _NoSet):
            return None


class _NoSet(Exception):
    """Raised if a node is not a set of real numbers described by its end points (an interval, inequality or union)."""


def _is_set(node: Node) -> bool:
    return (
        node.kind in ("union", "intersection", "minus")
        or (node.kind == "named" and node.value in ("R", "empty"))
        or (node.kind == "relation" and not set(node.value) <= {"=", r"\in"})
        or (node.kind == "group" and node.value in ("(]", "[)"))
        or (node.kind == "group" and node.value in ("or", "and") and all(map(_is_set, node.parts)))
    )


def _ends(node: Node) -> Iterator[Node]:
    """Yield a set's end points, at which membership may change."""
    if node.kind == "named":
        return
    if node.kind == "group" or node.kind == "relation":
        for part in node.parts:
            if _is_set(part) or (node.value in ("or", "and") and part.kind == "relation"):
                yield from _ends(part)
            elif node.kind == "group" or part.kind != "symbol":
                yield part
    elif node.kind in ("union", "intersection", "minus"):
        for part in node.parts:
            yield from _ends(part)
    else:
        raise _NoSet


def _member(node: Node, at: int, places: dict[Node, int]) -> bool:
    """Return whether a position on the number line is in a set.

    `at` is even at an end point and odd between two; `places` maps the end points to their positions.
    """
    parts = node.parts
    if node.kind == "named":
        if node.value not in ("R", "empty"):
            raise _NoSet
        return bool(node.value == "R")
    if node.kind == "minus":
        return _member(parts[0], at, places) and not _member(parts[1], at, places)
    if node.kind == "union" or node.value == "or":
        return any(_member(part, at, places) for part in parts)
    if node.kind == "intersection" or node.value == "and":
        return all(_member(part, at, places) for part in parts)
    if node.kind == "relation":
        sides = [at if part.kind == "symbol" else places[part] for part in parts]
        if len({part for part in parts if part.kind == "symbol"}) != 1:
            raise _NoSet
        pairs = zip(node.value, itertools.pairwise(sides), strict=True)
        return all(_HOLDS[sign](*pair) for sign, pair in pairs)
    if node.value == "{}":
        return at in {places[part] for part in parts}
    if node.kind != "group" or len(parts) != 2 or node.value not in ("()", "(]", "[)", "[]"):
        raise _NoSet
    low, high = places[parts[0]], places[parts[1]]
    return (low <= at if node.value[0] == "[" else low < at) and (at <= high if node.value[1] == "]" else at < high)


_HOLDS: dict[str, Callable[[int, int], bool]] = {
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "=": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
}


def _system(names: Sequence[Node], values: Sequence[Node]) -> Node:
    """Return a node for several unknowns and their values; x, y and z are sorted, others stay in the given order."""
    pairs = list(zip(names, values, strict=True))
    if all(name.kind == "symbol" and name.value in "xyz" for name in names):
        pairs.sort(key=lambda pair: str(pair[0].value))
    return Node("system", tuple(value for _, value in pairs), tuple(name for name, _ in pairs))


def _is_order(node: Node) -> bool:
    """Return whether a list of letters states an order: three or more letters, or letters not sorted alphabetically."""
    letters = [str(part.value) for part in node.parts if part.kind == "symbol" or part.kind == "words"]
    if len(letters) < len(node.parts) or any(len(letter) > 1 for letter in letters):
        return False
    return len(letters) > 2 or letters != sorted(letters)


def _is_braced(node: Node) -> bool:
    return node.kind == "group" and node.value == "{}"


def _signs(node: Node, upper: bool) -> Node:
    """Return the node with only the upper or only the lower signs of +- and -+."""
    parts = tuple(_signs(part, upper) for part in node.parts)
    if node.kind in ("pm", "mp"):
        return parts[0] if upper == (node.kind == "pm") else Node("neg", parts)
    return Node(node.kind, parts, node.value)


def _both(node: Node) -> list[Node]:
    if any(part.kind in ("pm", "mp") for part in node.walk()):
        return [_signs(node, True), _signs(node, False)]
    return [node]


def _with_units(node: Node) -> tuple[Node, Fraction, Counter[str]] | None:
    """Split a quantity such as 5 m/s into a number, its unit's size in base units, and the powers of its dimensions.

    Returns None if it contains symbols other than units.
    """
    if node.kind == "symbol" and node.value in UNITS:
        dimension, size = UNITS[node.value]
        return _ONE, size, Counter({dimension: 1})
    if node.kind in ("mul", "div") and (left := _with_units(node.parts[0])) and (right := _with_units(node.parts[1])):
        sign = 1 if node.kind == "mul" else -1
        dimensions = Counter({name: left[2][name] + sign * right[2][name] for name in {*left[2], *right[2]}})
        number = Node(node.kind, (left[0], right[0])) if right[0] != _ONE else left[0]
        return number, left[1] * right[1] ** sign, dimensions
    if node.kind == "pow" and node.parts[0].kind == "symbol" and node.parts[1].value in ((2, None), (3, None)):
        read, power = _with_units(node.parts[0]), int(node.parts[1].value[0])
        return read and (_ONE, read[1] ** power, Counter(dict.fromkeys(read[2], power)))
    return None if _symbols(node) else (node, Fraction(1), Counter())


def _are_matrices(*nodes: Node) -> bool:
    """Return whether the nodes contain several capital letters, at least one of them inverted or transposed."""
    parts = [part for node in nodes for part in node.walk()]
    capitals = {part.value for part in parts if is_capital(part)} - {"T"}
    return len(capitals) > 1 and any(
        part.kind == "pow" and is_capital(part.parts[0]) and part.parts[1] in MATRIX_POWERS for part in parts
    )


def _ways_and_units(dimensions: Sequence[tuple[str, int]]) -> tuple[frozenset[str], list[tuple[str, int]]]:
    """Split dimensions with powers into words of comparison (more, fewer; usually none) and real dimensions."""
    ways = frozenset("fewer" if name == "less" else name for name, _ in dimensions if name in MORE)
    return ways, [(name, power) for name, power in dimensions if name not in MORE]


def _decimals(node: Node) -> int | None:
    """Return a decimal number's number of decimals, also in scientific notation; None for anything else."""
    if node.kind == "neg":
        return _decimals(node.parts[0])
    if node.kind == "mul" and node.parts[0].kind == "number" and _power_of_ten(node.parts[1]):
        decimals, exponent = node.parts[0].value[1], node.parts[1].parts[1]
        power = -exponent.parts[0].value[0] if exponent.kind == "neg" else exponent.value[0]
        return None if decimals is None else int(decimals - power)
    return node.value[1] if node.kind == "number" else None


def _hundredth(node: Node) -> Node:
    """Divide a value by 100; a decimal number gets two more decimal places."""
    if node.kind == "neg":
        return Node("neg", (_hundredth(node.parts[0]),))
    if node.kind == "number" and node.value[1] is not None:
        return Node("number", value=(node.value[0] / 100, node.value[1] + 2))
    return Node("div", (node, _HUNDRED))
