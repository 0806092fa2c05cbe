"""Numerical values of expressions, exact or to many digits, with numbers or matrices substituted for symbols."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from mpmath import MPContext

from nemo_ext.rl.verifiers.math_notation import Node

_MAX_BITS = 100_000
"""Maximum size of numbers in bits, which allows about 10 to the power of 30 000."""
Number = Any
"""A Fraction, or a real or complex mpmath number."""
_Matrix = tuple[Fraction, Fraction, Fraction, Fraction]
MATRIX_POWERS = (Node("neg", (Node("number", value=(Fraction(1), None)),)), Node("symbol", value="T"))


class NoValue(ArithmeticError):
    """Raised if an expression has no numerical value, or if its value is too large."""


class Values:
    """Calculator of the values of expressions in one comparison, with adjustable precision."""

    mp = MPContext()
    left_reals = False
    """Whether an intermediate result of the last value was complex although its operands were real."""

    def matrix(self, node: Node, point: dict[str, Fraction]) -> _Matrix:
        """Evaluate an expression in which capital letters are 2 x 2 matrices and numbers are multiples of the identity.

        The result has the entries (top left, top right, bottom left, bottom right).
        """
        kind, parts = node.kind, node.parts
        if kind == "words" and parts:
            return self.matrix(parts[0], point)
        if kind == "symbol" and is_capital(node):
            number = point[node.value]
            return number, number + 1, number * number, 3 - number
        if kind == "pow":
            a, b, c, d = self.matrix(parts[0], point)
            if parts[1] == Node("symbol", value="T"):
                return a, c, b, d
            power = self.value(parts[1], point)
            if not isinstance(power, Fraction) or power.denominator != 1 or abs(power) > 9:
                raise NoValue("the power of a matrix must be a whole number from -9 to 9")
            size = a * d - b * c
            base = (d / size, -b / size, -c / size, a / size) if power < 0 else (a, b, c, d)
            result: _Matrix = (Fraction(1), Fraction(0), Fraction(0), Fraction(1))
            for _ in range(abs(int(power))):
                result = _product(result, base)
            return result
        if kind in ("add", "mul", "div"):
            left, right = (self.matrix(part, point) for part in parts)
            if kind == "add":
                return left[0] + right[0], left[1] + right[1], left[2] + right[2], left[3] + right[3]
            if kind == "mul":
                return _product(left, right)
            return self.matrix(Node("mul", (parts[0], Node("pow", (parts[1], MATRIX_POWERS[0])))), point)
        if kind == "neg":
            a, b, c, d = self.matrix(parts[0], point)
            return -a, -b, -c, -d
        number = self.value(node, point)
        if not isinstance(number, Fraction):
            raise NoValue("a matrix can only be combined with rational numbers")
        return number, Fraction(0), Fraction(0), number

    def sampled(self, expected: Node, actual: Node, symbols: frozenset[str]) -> Iterator[tuple[Number, Number]]:
        """Yield the values of both expressions at the sample points where these are real.

        If there are fewer than two such points, the values at the other points are yielded too. Points at which an
        expression has no value are skipped.
        """
        others: list[tuple[Number, Number]] = []
        real = 0
        for point in points(symbols):
            self.left_reals = False
            try:
                first, second = self.value(expected, point), self.value(actual, point)
            except (NoValue, ZeroDivisionError):
                continue
            if self.left_reals:
                others.append((first, second))
            else:
                real += 1
                yield first, second
        if real < 2:
            yield from others

    def close(self, first: Number, second: Number) -> bool:
        """Return whether two numbers agree to 90 % of the current digits less 20, which allows for rounding errors."""
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first == second
        first, second = self.lift(first), self.lift(second)
        if self.mp.isinf(first) or self.mp.isinf(second):
            return bool(first == second)
        size = max(abs(first), abs(second))
        return bool(
            abs(first - second)
            <= size * self.mp.mpf(10) ** (20 - self.mp.dps * 9 // 10) + self.mp.mpf(10) ** -self.mp.dps * (size < 1e-20)
        )

    def lift(self, number: Number) -> Any:
        return self.mp.mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else number

    def value(self, node: Node, point: dict[str, Fraction]) -> Number:
        """Evaluate an expression at a point, a mapping from symbols to values.

        Raises:
            NoValue, ZeroDivisionError: the expression has no value there.
        """
        result = self._value(node, point)
        if isinstance(result, Fraction):
            if max(result.numerator.bit_length(), result.denominator.bit_length()) > _MAX_BITS:
                raise NoValue("the value is too large")
        elif self.mp.isnan(result) or (
            not self.mp.isinf(result) and result != 0 and abs(self.mp.mag(result)) > _MAX_BITS
        ):
            raise NoValue("the value is not a number, or too large or small")
        return result

    def finite(self, node: Node, point: dict[str, Fraction]) -> Number:
        made = self.value(node, point)
        if not isinstance(made, Fraction) and self.mp.isinf(made):
            raise NoValue("the value is infinite")
        return made

    def _value(self, node: Node, point: dict[str, Fraction]) -> Number:
        kind, parts = node.kind, node.parts
        if kind == "number":
            return node.value[0]
        if kind == "symbol":
            return point[node.value]
        if kind == "constant":
            return {"pi": +self.mp.pi, "e": +self.mp.e, "i": self.mp.mpc(0, 1), "oo": self.mp.inf}[node.value]
        if kind in ("words", "unit") and parts:
            return self.value(parts[0], point)
        if kind == "neg":
            return -self.value(parts[0], point)
        if kind not in _OPERATIONS and kind != "call":
            raise NoValue(f"an expression of kind {kind!r} has no value")
        if kind == "call" and node.value == "f":
            raise NoValue("an unknown function has no value")
        values = [self.finite(part, point) for part in parts]
        result = self.called(node.value, values) if kind == "call" else _OPERATIONS[kind](self, *values)
        if (
            isinstance(result, self.mp.mpc)
            and result.imag != 0
            and not any(isinstance(value, self.mp.mpc) for value in values)
        ):
            self.left_reals = True
        return result

    def sum(self, first: Number, second: Number) -> Number:
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first + second
        return self.lift(first) + self.lift(second)

    def product(self, first: Number, second: Number) -> Number:
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first * second
        return self.lift(first) * self.lift(second)

    def quotient(self, first: Number, second: Number) -> Number:
        if second == 0:
            raise ZeroDivisionError
        return self.product(first, 1 / second)

    def power(self, base: Number, exponent: Number) -> Number:
        if base == 0:
            if not isinstance(exponent, Fraction) or exponent <= 0:
                raise NoValue("0 can only be raised to a positive rational power")
            return Fraction(0)
        size = abs(self.mp.log(abs(self.lift(base)))) * abs(self.lift(exponent))
        if size > _MAX_BITS * 0.69:
            raise NoValue("the power is too large or small")
        exact = isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1
        if exact and max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) <= _MAX_BITS:
            return base ** int(exponent)
        return self.lift(base) ** self.lift(exponent)

    def called(self, name: str, values: list[Number]) -> Number:
        first = values[0]
        if name == "abs":
            return abs(first)
        if name == "root":
            return self.root(first, values[1])
        if name == "!":
            if not isinstance(first, Fraction) or first.denominator != 1 or not 0 <= first <= 5000:
                raise NoValue("a factorial requires a whole number from 0 to 5000")
            return Fraction(math.factorial(int(first)))
        if name in ("floor", "ceil"):
            return Fraction(int(getattr(self.mp, name)(self.lift(first).real)))
        if name == r"\binom":
            top, bottom = values
            if not all(isinstance(each, Fraction) and each.denominator == 1 and 0 <= each <= 5000 for each in values):
                raise NoValue("a binomial coefficient requires whole numbers from 0 to 5000")
            return Fraction(math.comb(int(top), int(bottom)))
        number = self.lift(first)
        if name in ("ln", "log", "lg"):
            if number == 0:
                raise NoValue("the logarithm of 0 is undefined")
            base = values[1] if len(values) == 2 else Fraction(10) if name == "lg" else None
            return self.mp.log(number) if base is None else self.mp.log(number) / self.mp.log(self.lift(base))
        if abs(number) > (_MAX_BITS * 0.69 if name in ("exp", "sinh", "cosh", "tanh") else 1e30):
            raise NoValue(f"the argument of {name} is too large")
        return getattr(self.mp, {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}.get(name, name))(number)

    def root(self, number: Number, degree: Number) -> Number:
        if degree == 0:
            raise NoValue("a root of degree 0 is undefined")
        if number == 0:
            return Fraction(0)
        odd = isinstance(degree, Fraction) and degree.denominator == 1 and degree % 2 == 1
        if odd and isinstance(number, Fraction) and number < 0:
            return -self.root(-number, degree)
        if degree == 2:
            return self.mp.sqrt(self.lift(number))
        return self.power(self.lift(number), 1 / degree)


_OPERATIONS: dict[str, Callable[..., Number]] = {
    "add": Values.sum,
    "mixed": Values.sum,
    "mul": Values.product,
    "div": Values.quotient,
    "ratio": Values.quotient,
    "pow": Values.power,
}


def is_capital(node: Node) -> bool:
    return node.kind == "symbol" and bool(node.value[:1].isupper())


def _product(left: _Matrix, right: _Matrix) -> _Matrix:
    (a, b, c, d), (e, f, g, h) = left, right
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


def points(symbols: frozenset[str]) -> Iterator[dict[str, Fraction]]:
    """Yield sample points: mappings from symbols to integers and fractions of both signs, fixed for given symbols.

    The last two points are far out on either side, beyond the kinks of expressions such as |x + 5|.
    """
    for turn in range(9 if symbols else 1):
        # With all remainders modulo 4, for (-1)^n and i^n.
        points = {
            name: Fraction(3 * place + (2, 5, 7, 12, 10)[turn // 2]) for place, name in enumerate(sorted(symbols))
        }
        if turn > 6:
            points = {name: (-1) ** turn * (18 + 4 * number) / 3 for name, number in points.items()}
        elif turn % 2:
            points = {name: (turn - 2) * number / (9 + 2 * turn) for name, number in points.items()}
        yield points
