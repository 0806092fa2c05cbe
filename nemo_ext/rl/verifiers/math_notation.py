r"""Tokenizer and parser for final answers in LaTeX or plain mathematics, with this grammar:

    answer    clause { ("," | ";" | "or" | "and") clause }
    clause    [ "=" | "~" ] region { ("=" | "<" | ">" | "<=" | ">=" | "!=" | "in" | "~") region }
    region    value { ("union" | "intersection" | "minus") value }
    value     sum [ "%" | scale | unit ] | words | hours [ ":" minutes ] ("AM" | "PM")
    sum       [ sign ] product { ("+" | "-" | "+-" | "-+") product }
    product   power { [ "*" | "/" | ":" ] power }
    power     atom { "!" | "^" power | "_" subscript | degrees }
    atom      number | mixed number | symbol | constant | function power | fraction | root | matrix | brackets

`read` returns the tree. Spaces, fonts and sizes are skipped; anything else outside the grammar raises
`UnknownNotation`.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unicodedata import normalize


class UnknownNotation(ValueError):
    """Raised if a string does not follow the grammar; the message says where."""


class Ambiguous(UnknownNotation):
    """Raised for adjacent numbers, which may be one number, two, or a product."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node in an answer's tree.

    Attributes:
        kind: `number` (value: Fraction, and its decimals or None), `symbol`, `constant`, `words` (value: name), `add`,
            `mul`, `div`, `ratio`, `pow`, `neg`, `pm`, `mp`, `mixed`, `call` (value: function), `percent`, `unit`
            (value: factor and dimensions), `based` (value: base), `time` (value: hour, minute, half of the day),
            `group` (value: its brackets, "" for a bare list, "or", "and"), `relation` (value: its signs), `union`,
            `intersection`, `minus`, `named` (value: a set), `builder` (parts: members, their condition), `matrix`
            (parts: rows).
        parts: operands.
    """

    kind: str
    parts: tuple["Node", ...] = ()
    value: Any = None

    def walk(self) -> Iterator["Node"]:
        yield self
        for part in self.parts:
            yield from part.walk()


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    spaced: bool


_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp"
FUNCTIONS = frozenset(_FUNCTIONS.split())
CONSTANTS = {r"\pi": "pi", "pi": "pi", r"\infty": "oo", "infinity": "oo", "e": "e", "i": "i"}
_GREEK = r"""\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \kappa \lambda \mu \nu \xi \rho
\sigma \tau \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Pi \Sigma \Phi \Psi \Omega \ell"""
GREEK = frozenset(_GREEK.split())
_SAME = {
    r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">=", r"\lt": "<",
    r"\gt": ">", r"\ne": "!=", r"\neq": "!=", r"\approx": "~", r"\simeq": "~", r"\cdot": "*",
    r"\times": "*", r"\ast": "*", r"\div": "/", r"\cup": "union", r"\cap": "intersection", r"\setminus": "minus",
    r"\backslash": "minus", r"\pm": "pm", r"\mp": "mp", r"\lor": "or", r"\vee": "or", r"\land": "and",
    r"\wedge": "and", r"\{": r"\{", r"\lbrace": r"\{", r"\}": r"\}", r"\rbrace": r"\}", r"\%": "%", r"\lvert": "|",
    r"\rvert": "|", r"\vert": "|", r"\mid": "such that", r"\langle": "<<", r"\rangle": ">>",
    r"\varnothing": r"\emptyset",
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
    r"\degree": "degree", r"\R": "R", r"\lbrack": "[", r"\rbrack": "]", r"\$": "$", r"\colon": ":",
}  # fmt: skip
_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "∗": "*", "÷": r"\div ", "√": r"\sqrt ", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ",
    "°": r"\degree ", "ℝ": r"\mathbb{R}", "²": "^{2}", "³": "^{3}",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "′": "'",
    "Ω": r"\Omega ", "\u2126": r"\Omega ", "µ": r"\mu ", "μ": r"\mu ", "Å": r"\AA ",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "⟨": r"\langle ", "⟩": r"\rangle ",
}  # fmt: skip
_UNICODE |= {each: rf"\frac{{{normalize('NFKC', each).replace('\u2044', '}{')}}}" for each in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_TO_LATEX = str.maketrans(_UNICODE)

# Units written as symbols, directly after a number and at the end of a value.
_SYMBOLIC = re.compile(
    r"(?<=[\d}])(?:\s|~|\\[,;: ])*(?:(?:\\(?:text|mathrm)\s*\{\s*(?P<text>[kMm])\s*\}|(?P<bare>[kMm]))?\s*"
    r"(?:\\Omega(?![A-Za-z])|\\(?:text|mathrm)\s*\{\s*(?P<inner>[kMm]?)\s*\\Omega\s*\})"
    r"|\\mu(?![A-Za-z])\s*(?:\\(?:text|mathrm)\s*\{\s*(?P<of>[A-Za-z]+)\s*\}|(?P<letter>[mFsCHAVWgLlJ]))"
    r"|(?:\\text\s*\{\s*)?(?P<length>\\AA)(?![A-Za-z])\s*\}?)\s*(?=\Z|[,;)])"
)
_MICRO = {"m": "meter", "s": "second", "g": "gram", "F": "farad", "C": "coulomb", "H": "henry", "L": "liter"}

# Dimension, size and names of units.
_UNITS = """length 1 m meter metre; length 1/100 cm centimeter centimetre; length 1/1000 mm millimeter millimetre
length 1/10 dm decimeter; length 1000 km kilometer kilometre; length 127/5000 in inch inches
length 381/1250 ft foot feet; length 1143/1250 yd yard; length 201168/125 mi mile; mass 1 g gram; mass 1000 kg kilogram
mass 1/1000 mg milligram; mass 45359237/100000 lb lbs pound; mass 45359237/1600000 oz ounce; mass 1000000 tonne
time 1 s sec second; time 60 min mins minute; time 3600 h hr hrs hour; time 86400 day; time 604800 week
time 1/1000 ms millisecond; year 1 yr year; volume 1 l L liter litre; volume 1/1000 ml mL milliliter millilitre
angle 1 degree deg; radian 1 rad radian; dollar 1 dollar usd USD; dollar 1/100 cent; euro 1 euro eur EUR; joule 1 J
ohm 1 ohm; ohm 1000 kohm kiloohm kilohm; ohm 1000000 Mohm megaohm megohm; ohm 1/1000 mohm milliohm
length 1/1000000 micrometer micrometre micron; time 1/1000000 microsecond; mass 1/1000000 microgram
watt 1 W watt; ampere 1 A amp ampere; newton 1 N newton; volt 1 V volt; kelvin 1 K"""
UNITS = {
    name: (dimension, Fraction(factor))
    for dimension, factor, *names in (line.split() for line in re.split("[;\n]", _UNITS))
    for name in names
}
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SQUARE = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
# Words that change the meaning of the value before them, and so are not units.
_NO_UNITS = """
not no nor but if unless except without maybe perhaps possibly probably about around roughly approximately approx
almost nearly than least most greater over under above below between to from until versus vs is are was
were be equals equal plus minus times divided by half halves third thirds quarter quarters dozen pair wrong false
incorrect unknown undefined something none either neither both otherwise other others another each instead rather
hundredths tenths thousandths power base factorial root any all every some also then so when where which that this it
since because for as at with only never cannot can may might should could would modulo mod remainder squared cubed
hopefully guess uncertain unsure likely assuming sometimes usually estimated estimate ish circa max maximum minimum
upwards onwards negative inverse reciprocal imaginary alternatively undetermined rounded sorry nope error twice double
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety tens dozens hundreds thousands millions
billions trillions zillion lakh crore bn mn mio mrd
"""
_FRACTIONS = """fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth
seventeenth eighteenth nineteenth twentieth hundredth thousandth"""
MORE = frozenset(("more", "fewer", "less"))
"""Words that state the direction of a difference, as in "3 more apples"."""
NO_UNITS = frozenset(_NO_UNITS.split()) | {word + end for word in _FRACTIONS.split() for end in ("", "s")}

_SIGNS = {"percent": "%", "percentage": "%", "pct": "%", "degrees": "degree"}
_SKIPPED = (
    r"left\s*\.|right\s*\.|left|right|[bB]igg?[lr]?|displaystyle|textstyle|scriptstyle|limits|q?quad|bf|rm|it|tt|sf"
    r"|bfseries|mathstrut|hfill|allowbreak|nobreak|thinspace|enspace|hspace\*?\s*\{[^{}]*\}"
)
_FONTS = "text|textbf|textit|textrm|mbox|hbox|mathrm|mathbf|mathit|mathsf|underline|operatorname|boldsymbol|bm|rm|bf"
_GROUPED = r"(?<![\d.^_])\d{1,3}(?P<separator>SEPARATORS)\d{3}(?:(?P=separator)\d{3})*(?!\d)(?:\.\d+)?"
_NUMBER = r"\d+\.\d*|\.\d+|\d+"


def _tokens_of(separators: str) -> re.Pattern[str]:
    return re.compile(
        rf"\\(?P<font>{_FONTS})\s*\*?\{{(?P<inner>[^{{}}]*)\}}"
        rf"|(?P<space>(?:\s|~|\\[,:;!/ ]|\\(?:{_SKIPPED})(?![A-Za-z])|(?<!\\)\$)+)"
        r"|(?P<repeating>(?P<fixed>\d*\.\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(?P<period>\d+)\s*\}|(?P<digit>\d)))"
        rf"|(?P<scientific>(?:{_NUMBER})[eE][+-]?\d{{1,6}}(?![A-Za-z0-9.]))"
        rf"|(?P<grouped>{_GROUPED.replace('SEPARATORS', separators)})"
        rf"|(?P<number>{_NUMBER})"
        r"|(?P<half>(?<![A-Za-z])[aApP](?:\.\s?[mM]\.?|[mM])(?![A-Za-z]))"
        r"|(?P<command>\\(?:[A-Za-z]+|\\|.))"
        r"|(?P<letters>[A-Za-z]+)"
        r"|(?P<sign><=|>=|!=|[-+*/^_=<>()\[\]{}|!,;:%'&$€£¥])",
        re.DOTALL,
    )


_EMPTY = re.compile(r"\{\s*\}\s*(?=[\^_])")
_SPACES = r"\{,\}|,\\! ?|\\[,! ]|~| "
_TOKENS = {True: _tokens_of(rf"{_SPACES}|,"), False: _tokens_of(_SPACES)}


def _tokens(text: str, *, grouped: bool, words: bool = False) -> list[_Token]:
    """Split a string into tokens; with `words`, for the contents of \\text{}, letters form words.

    `grouped` is as in `read`.
    """
    tokens: list[_Token] = []
    position, spaced = 0, False
    while position < len(text):
        match = _TOKENS[grouped].match(text, position)
        if match is None and words and text[position] == ".":
            position += 1
            continue
        if match is None:
            raise UnknownNotation(f"unexpected characters {text[position : position + 20]!r}")
        position, kind, this = match.end(), match.lastgroup or "", match[0]
        if match["space"]:
            spaced = True
            continue
        if match["font"]:
            inner = match["inner"]
            plain = match["font"].startswith(("text", "mbox", "hbox")) or (
                match["font"] in ("mathrm", "operatorname", "rm")
                and (len(inner.strip()) > 1 or inner.strip() in UNITS)
                and inner.strip() not in FUNCTIONS
            )
            more = _tokens(inner, grouped=grouped, words=plain)
            if more:
                more[0].spaced |= spaced or plain
            tokens += more
            spaced = bool(more) and plain
            continue
        if match["letters"]:
            after_number = bool(tokens) and tokens[-1].kind == "number"
            tokens += _letters(this, words=words, spaced=spaced, after_number=after_number)
            position += words and text[position : position + 1] == "."  # an abbreviation
        elif match["command"]:
            name = _SAME.get(this, this)
            tokens.append(_Token("command" if name.startswith("\\") else "sign", name, spaced))
        elif kind in ("half", "sign"):
            tokens.append(_Token(kind, this, spaced))
        else:
            tokens.append(_Token("number", this, spaced))
        spaced = False
    return tokens


def _letters(run: str, *, words: bool, spaced: bool, after_number: bool) -> list[_Token]:
    """Return the tokens of a run of letters: a word, a function or constant, or one symbol per letter."""
    if run.lower() in ("or", "and"):
        return [_Token("sign", run.lower(), spaced)]
    if run.lower() in _SIGNS:
        return [_Token("sign", _SIGNS[run.lower()], spaced)]
    if run in FUNCTIONS or run in ("sqrt", "pi", "infinity"):
        return [_Token("command", rf"\{run}" if run != "infinity" else r"\infty", spaced)]
    vowels = set(run.lower()) & set("aeiou") and not set(run) & set("xyz")
    word = len(run) > 1 and (run in UNITS or len(run) > 3 or (after_number and spaced and vowels))
    if words or word:
        return [_Token("word", run, spaced)]
    return [_Token("symbol", letter, spaced and not place) for place, letter in enumerate(run)]


def read(text: str, *, grouped: bool = True) -> Node:
    """Parse an answer into a tree.

    Args:
        grouped: whether "1,234" is one number rather than two.

    Raises:
        UnknownNotation: the text does not follow the grammar.
    """
    text = _EMPTY.sub("", text.replace("{:}", ":").translate(_TO_LATEX))
    text = _SYMBOLIC.sub(_unit_in_words, text)
    try:
        parser = _Parser(_tokens(text, grouped=grouped))
        tree = parser.answer()
        if parser.peek() is not None:
            raise UnknownNotation(f"unexpected {parser.peek()!r} after the expression")
    except RecursionError:
        raise UnknownNotation("the expression is nested too deeply") from None
    return tree


def _unit_in_words(match: re.Match[str]) -> str:
    if match["length"]:
        return r"\text{ angstrom}"
    if of := match["of"] or match["letter"]:
        return rf"\text{{ micro{_MICRO.get(of, of)}}}"
    return rf"\text{{ {match['text'] or match['bare'] or match['inner'] or ''}ohm}}"


def number(text: str) -> Node:
    """Return the node of an exact number from its digits, with optional decimal point and exponent."""
    mantissa, _, exponent = text.lower().partition("e")
    power = int(exponent or 0)
    if abs(power) > 10_000:
        raise UnknownNotation(f"the exponent of {text} is too large")
    decimals = len(mantissa.partition(".")[2]) - power if "." in mantissa else None
    return Node("number", value=(Fraction(mantissa) * Fraction(10) ** power, decimals))


def _repeating(text: str) -> Node:
    whole, _, rest = text.partition(".")
    fixed, _, period = rest.partition("\\")
    period = "".join(filter(str.isdigit, period))
    value = Fraction(int((whole + fixed) or 0)) + Fraction(int(period), 10 ** len(period) - 1)
    return Node("number", value=(value / 10 ** len(fixed), None))


_RELATIONS = frozenset(("=", "~", "<", ">", "<=", ">=", "!=", r"\in"))
_OPENING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}", "<<": ">>"}
_BEGIN = frozenset((r"\frac", r"\sqrt", r"\binom", r"\lfloor", r"\lceil", r"\vec", r"\begin"))
_NAMING = frozenset((r"\overline", r"\overrightarrow", r"\vec", r"\hat", r"\widehat", r"\bar", r"\angle", r"\triangle"))
_ENDS = frozenset((",", ";", "or", "and", ")", "]", r"\}", "}", ">>", "=", "&", "\\\\", r"\end"))
_CLOSES = frozenset((")", "]", r"\}", "}", ">>"))
_MATRICES = frozenset(("pmatrix", "bmatrix", "matrix", "array", "Bmatrix"))


class _Parser:
    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.bars = 0
        self.builds_set = False

    def peek(self, ahead: int = 0) -> str | None:
        place = self.at + ahead
        return self.tokens[place].text if place < len(self.tokens) else None

    def kind(self, ahead: int = 0) -> str:
        place = self.at + ahead
        return self.tokens[place].kind if place < len(self.tokens) else ""

    def next(self) -> _Token:
        if self.at >= len(self.tokens):
            raise UnknownNotation("the expression ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def take(self, *texts: str) -> str | None:
        """Consume the next token and return its text if it is one of `texts`; otherwise return None."""
        if self.kind() in ("sign", "command") and self.peek() in texts:
            return self.next().text
        return None

    def expect(self, text: str) -> None:
        if self.take(text) is None:
            raise UnknownNotation(f"expected {text!r}, not {self.peek() or 'the end'!r}")

    def answer(self) -> Node:
        items, between = self.items()
        return items[0] if len(items) == 1 else Node("group", tuple(items), between)

    def items(self) -> tuple[list[Node], str]:
        """Parse clauses; return them, and "or" or "and" if only that word separates them, else ""."""
        items, between = [self.clause()], set()
        while sign := self.take(",", ";", "or", "and"):
            word = self.take("or", "and") if sign in ",;" else None  # "1, 2, and 3"
            between.add(word or sign)
            items.append(self.clause())
        return items, between.pop() if between in ({"or"}, {"and"}) else ""

    def clause(self) -> Node:
        self.take("=", "~")
        parts, signs = [self.region()], []
        while sign := self.take(*_RELATIONS):
            signs.append(sign)
            parts.append(self.region())
        return Node("relation", tuple(parts), tuple(signs)) if signs else parts[0]

    def region(self) -> Node:
        node = self.value()
        while kind := self.take("union", "intersection", "minus"):
            node = Node(kind, (node, self.value()))
        return node

    def value(self) -> Node:
        if words := self.words():
            return words
        if self.kind() == "number" and (time := self.time()):
            return time
        currency = self.take("$", "€", "£", "¥")
        node = self.sum()
        if self.take("%"):
            node = Node("percent", (node,))
        elif (scale := SCALES.get((self.peek() or "").lower())) and self.kind() == "word":
            self.next()
            node = Node("mul", (node, Node("pow", (number("10"), number(str(scale))))))
        if currency:
            return Node("unit", (node,), (Fraction(1), ((currency.replace("$", "dollar"), 1),)))
        return self.unit(node) if self.kind() == "word" or self.peek() == "degree" else node

    def words(self) -> Node | None:
        """Parse two or more bare letters as words; the node's part is the product of symbols they may also mean.

        Return None if the next tokens are something else.
        """
        begins, end = self.at, self.at
        while end < len(self.tokens) and self.tokens[end].kind in ("word", "symbol"):
            end += 1
        run = self.tokens[begins:end]
        following = self.tokens[end].text if end < len(self.tokens) else ";"
        if sum(len(token.text) for token in run) < 2 or following not in _ENDS:
            return None
        self.at = end
        product: tuple[Node, ...] = ()
        if all(token.kind == "symbol" for token in run):
            letters = (Node("constant" if token.text in CONSTANTS else "symbol", value=token.text) for token in run)
            product = (functools.reduce(lambda left, right: Node("mul", (left, right)), letters),)
        name = "".join(token.text for token in run).casefold()
        return Node("named", value="R") if name == "allrealnumbers" else Node("words", product, name)

    def time(self) -> Node | None:
        minutes = self.peek(1) == ":" and self.kind(2) == "number"
        half = 3 if minutes else 1
        if self.kind(half) != "half":
            return None
        tokens = [self.next().text for _ in range(half + 1)]
        clock = [int(text) if text.isdigit() and len(text) < 3 else 99 for text in tokens[:half:2]] + [0]
        if not 1 <= clock[0] <= 12 or clock[1] > 59:
            raise UnknownNotation(f"{' '.join(tokens)!r} is not a time of day")
        return Node("time", value=(clock[0] % 12, clock[1], tokens[-1][0].lower()))

    def unit(self, value: Node) -> Node:
        """Parse the unit that follows a value: words, at most two of them unknown, with powers and quotients."""
        size, dimensions, sign, power, unknown = Fraction(1), Counter[str](), 1, 1, 0
        while self.kind() == "word" or self.peek() in ("/", "*", "degree") or (dimensions and self.kind() == "symbol"):
            word = self.next().text
            lower = word.lower()
            if word in ("/", "*", "per"):
                sign = 1 if word == "*" else -1
            elif lower in _SQUARE:
                power = _SQUARE[lower]
            elif lower in NO_UNITS or lower in SCALES or unknown > 1 or (lower in MORE and MORE & set(dimensions)):
                raise UnknownNotation(f"unexpected {word!r} after a value")
            elif lower in MORE:
                dimensions[lower] = 1
            elif word != "a" and lower not in ("an", "the", "of") and (lower != "in" or self.kind() != "word"):
                # amperes, and inches: not "3 in a row"
                names = (word, lower, lower.removesuffix("s"), lower.removesuffix("es"))
                name = next((name for name in names if name in UNITS), "")
                unknown += not name
                dimension, factor = UNITS.get(name, (names[2], Fraction(1)))
                if word == "degree" and self.peek() in ("C", "F"):
                    dimension = f"degree {self.next().text}"
                if self.take("^"):
                    exponent = self.exponent()
                    sign = -1 if exponent.kind == "neg" else sign
                    number = exponent.parts[0] if exponent.kind == "neg" else exponent
                    if number.kind != "number" or number.value[0] not in (1, 2, 3):
                        raise UnknownNotation("the exponent of a unit must be 1, 2 or 3, or its negative")
                    power = int(number.value[0])
                dimensions[dimension] += sign * power
                size, sign, power = size * factor ** (sign * power), 1, 1
        return Node("unit", (value,), (size, tuple(sorted(dimensions.items()))))

    def sum(self) -> Node:
        signs = {"+": "", "-": "neg", "pm": "pm", "mp": "mp"}
        sign = self.take(*signs)
        node = self.product()
        if sign and signs[sign]:
            node = Node(signs[sign], (node,))
        while sign := self.take(*signs):
            part = self.product()
            if node.kind == "named" and sign == "-":
                node = Node("minus", (node, part))
            else:
                node = Node("add", (node, Node(signs[sign], (part,)) if signs[sign] else part))
        return node

    def product(self, *, stop_at_functions: bool = False) -> Node:
        node = self.power()
        while True:
            if sign := self.take("*", "/") or (None if self.builds_set else self.take(":")):
                negative = self.take("-")
                right = self.power()
                right = Node("neg", (right,)) if negative else right
                node = Node({"*": "mul", "/": "div", ":": "ratio"}[sign], (node, right))
            elif self._begins_factor() and not (stop_at_functions and (self.peek() or "")[1:] in FUNCTIONS):
                before = self.tokens[self.at - 1]
                bare_number = self.kind() == "number" and before.kind == "number" and self.peek(-2) not in ("^", "_")
                begins = self.at
                right = self.power()
                if bare_number:  # "1 1/2"
                    if not (node.kind == "number" and self.tokens[begins].spaced and self.take("/")):
                        raise Ambiguous("numbers side by side without an operator")
                    node = self._whole_and_part(node, Node("div", (right, self.power())))
                elif whole(node) and self.tokens[begins].text == r"\frac" and all(map(whole, right.parts)):
                    node = self._whole_and_part(node, right)
                elif self.tokens[begins].kind == "number" and node.kind in ("div", "mixed"):
                    raise Ambiguous("numbers side by side without an operator")  # \frac{1}{2} 3
                else:
                    node = Node("mul", (node, right))
            else:
                return node

    @staticmethod
    def _whole_and_part(count: Node, part: Node) -> Node:
        above, below = part.parts
        if not (whole(count) and whole(above) and whole(below) and above.value[0] < below.value[0]):
            raise Ambiguous("numbers side by side without an operator")
        return Node("mixed", (count, part))

    def _begins_factor(self) -> bool:
        kind, text = self.kind(), self.peek() or ""
        if kind in ("number", "symbol"):
            return True
        if kind == "sign":
            return text in ("(", "{", "[", "R") or (text == "|" and not self.bars)
        return kind == "command" and (text in CONSTANTS or text in GREEK or text in _BEGIN or text[1:] in FUNCTIONS)

    def power(self) -> Node:
        node = self.atom()
        while True:
            if self.take("^"):
                if self.peek() == r"\circ" or (self.peek() == "{" and self.peek(1) == r"\circ" and self.peek(2) == "}"):
                    for _ in range(1 if self.peek() == r"\circ" else 3):
                        self.next()
                    self.tokens.insert(self.at, _Token("sign", "degree", False))
                    return node
                if self.peek() == "degree":
                    return node
                node = Node("pow", (node, self.exponent()))
            elif self.take("_"):
                node = self.subscripted(node)
            elif self.take("!"):
                node = Node("call", (node,), "!")
            elif node.kind == "symbol" and self.take("'"):
                node = Node("symbol", value=node.value + "'")
            else:
                return node

    def subscripted(self, node: Node) -> Node:
        if node.kind == "number" and node.value[1] is None and self.tokens[self.at - 2].text != ")":
            base = self.argument()
            if not whole(base) or not 2 <= base.value[0] <= 36:
                raise UnknownNotation("the base of a number must be a whole number from 2 to 36")
            return Node("based", (node,), int(base.value[0]))
        if node.kind not in ("symbol", "constant"):
            raise UnknownNotation("only numbers, symbols and constants can have a subscript")
        begins = self.at
        if self.peek() == "{" and self.peek(1) in (r"\max", r"\min") and self.peek(2) == "}":
            self.at += 3
        else:
            self.argument()
        name = "".join(token.text for token in self.tokens[begins : self.at] if token.text not in "{}")
        return Node("symbol", value=f"{node.value}_{name}")

    def exponent(self) -> Node:
        if self.take("-"):
            return Node("neg", (self.exponent(),))
        if self.take("+"):
            return self.exponent()
        base = self.argument()
        return Node("pow", (base, self.exponent())) if self.take("^") else base

    def argument(self, *, digit: bool = False) -> Node:
        """Parse a command's argument: a group in braces or one token; with `digit`, only one digit of a number."""
        if self.take("{"):
            return self.answer_in_braces()
        if digit and self.kind() == "number" and self.peek() and len(self.peek() or "") > 1:
            token = self.tokens[self.at]
            self.tokens[self.at : self.at + 1] = [
                _Token("number", token.text[0], token.spaced),
                _Token("number", token.text[1:], False),
            ]
        return self.atom()

    def answer_in_braces(self) -> Node:
        if self.take("}"):
            raise UnknownNotation("the braces {} are empty")
        items, _ = self.items()
        if self.take(r"\over"):
            if len(items) > 1:
                raise UnknownNotation(r"\over must follow a single expression")
            items = [Node("div", (items[0], self.sum()))]
        self.expect("}")
        return items[0] if len(items) == 1 else Node("group", tuple(items), "{}")

    def atom(self) -> Node:
        token = self.next()
        text = token.text
        if token.kind == "number":
            if "\\" in text and any(name in text for name in ("overline", "bar", "dot")):
                return _repeating(text)
            return number(re.sub(r"\{,\}|\\[,! ]|[,~ ]|\\!", "", text))
        if token.kind == "symbol" or (token.kind == "word" and len(text) == 1):
            if text in CONSTANTS:
                return Node("constant", value=CONSTANTS[text])
            return self.called(Node("symbol", value=text))
        if text in CONSTANTS:
            return Node("constant", value=CONSTANTS[text])
        if text in GREEK:
            return Node("symbol", value=text)
        if text in _OPENING:
            return self.brackets(text)
        if text == "|":
            self.bars += 1
            inner = self.sum()
            self.expect("|")
            self.bars -= 1
            return Node("call", (inner,), "abs")
        if text in (r"\lfloor", r"\lceil"):
            inner = self.sum()
            self.expect(text.replace(r"\l", r"\r"))
            return Node("call", (inner,), text[2:])
        return self.command(text)

    def called(self, name: Node) -> Node:
        """Parse the arguments after `name` if there are several, as in f(1, 2); f(x) is read as a product.

        Return the call, or `name` itself if it is not followed by several arguments.
        """
        if self.peek() != "(" or not self._several():
            return name
        self.next()
        inner = self.brackets("(")
        return Node("call", (name, *inner.parts), "f")

    def _several(self) -> bool:
        """Return whether the brackets that begin here contain a comma outside inner brackets."""
        depth = 0
        for token in self.tokens[self.at :]:
            depth += (token.text in _OPENING) - (token.text in _CLOSES)
            if depth == 0 or (depth == 1 and token.text == ","):
                return depth == 1
        return False

    def brackets(self, opening: str) -> Node:
        outer = self.bars, self.builds_set
        self.bars, self.builds_set = int(opening == r"\{"), opening == r"\{"
        node = self.inside(opening)
        self.bars, self.builds_set = outer
        return node

    def inside(self, opening: str) -> Node:
        if opening == r"\{" and self.take(r"\}"):
            return Node("named", value="empty")
        if opening == "{":
            return self.answer_in_braces()
        items, between = self.items()
        if opening == r"\{" and len(items) == 1 and self.take("|", ":", "such that"):
            self.bars, self.builds_set = 0, False
            conditions, between = self.items()
            self.expect(r"\}")
            whole = items[0].parts[1:] if items[0].kind == "relation" and items[0].value == (r"\in",) else ()
            condition = conditions[0] if len(conditions) == 1 else Node("group", tuple(conditions), between or "and")
            if (items[0].parts[0] if whole else items[0]).kind != "symbol":
                return Node("builder", (items[0], condition))
            return Node("intersection", (*whole, condition)) if whole else condition
        closing = self.take(*_CLOSES)
        if closing is None or (closing != _OPENING[opening] and {opening, closing} not in ({"(", "]"}, {"[", ")"})):
            raise UnknownNotation(f"the bracket {opening!r} has no matching closing bracket")
        shape = {"<<": "(", r"\{": "{"}.get(opening, opening) + {">>": ")", r"\}": "}"}.get(closing, closing)
        if len(items) == 1 and shape in ("()", "[]"):
            return items[0]
        if len(items) == 1 and shape != "{}":
            raise UnknownNotation(f"the brackets {shape!r} require at least two values")
        return Node("group", tuple(items), shape)

    def command(self, text: str) -> Node:
        if text == r"\frac":
            if self.peek() == "{" and self.peek(1) in ("d", r"\partial") and self.peek(2) in ("}", "^"):
                raise UnknownNotation(r"the derivative \frac{d} is not supported")
            return Node("div", (self.argument(digit=True), self.argument(digit=True)))
        if text == r"\binom":
            return Node("call", (self.argument(digit=True), self.argument(digit=True)), r"\binom")
        if text == r"\sqrt":
            degree = None
            if self.take("["):
                degree = self.sum()
                self.expect("]")
            inner = self.argument()
            return Node("call", (inner, degree or number("2")), "root")
        if text[1:] in FUNCTIONS:
            return self.function(text[1:])
        if text in (r"\mathbb", r"\Bbb"):
            braced = self.take("{")
            name = self.next().text
            if braced:
                self.expect("}")
            return Node("named", value=name)
        if text == "R":
            return Node("named", value="R")
        if text == r"\emptyset":
            return Node("named", value="empty")
        if text in _NAMING:
            begins, braced = self.at, self.take("{")
            while self.kind() in ("symbol", "word"):
                self.next()
            if braced:
                self.expect("}")
            return Node("symbol", value=" ".join(token.text for token in self.tokens[begins - 1 : self.at]))
        if text == r"\begin":
            return self.matrix()
        raise UnknownNotation(f"unknown command or sign {text!r}")

    def function(self, name: str) -> Node:
        base = None
        if name == "log" and self.take("_"):
            multiple = self.kind() == "number" and self.kind(1) not in ("number", "symbol", "sign", "command")
            base = self.argument(digit=multiple)
        power = self.exponent() if self.take("^") else None
        if self.kind() == "sign" and self.peek() in ("(", "[", "{", "|"):
            inner = self.atom()
        else:
            sign = self.take("-")
            inner = self.product(stop_at_functions=True) if self._begins_factor() else self.atom()
            inner = Node("neg", (inner,)) if sign else inner
        if self.take("degree") or (inner.kind == "unit" and inner.value[1] == (("angle", 1),)):
            inner = Node("mul", (inner, Node("div", (Node("constant", value="pi"), number("180")))))
        if name in ("sin", "cos", "tan") and power == Node("neg", (number("1"),)):
            name, power = f"arc{name}", None
        call = Node("call", (inner,) if base is None else (inner, base), name)
        return call if power is None else Node("pow", (call, power))

    def matrix(self) -> Node:
        self.expect("{")
        letters = []
        while self.kind() in ("symbol", "word"):
            letters.append(self.next().text)
        self.expect("}")
        name = "".join(letters)
        if name not in _MATRICES:
            raise UnknownNotation(f"unknown environment {name!r} after \\begin")
        if name == "array" and self.take("{"):
            while self.take("}") is None:
                self.next()
        rows, row = [], [self.clause()]
        while True:
            if self.take("&"):
                row.append(self.clause())
            else:
                rows.append(row)
                if not self.take("\\\\") or self.peek() == r"\end":
                    break
                row = [self.clause()]
        self.expect(r"\end")
        self.expect("{")
        while self.take("}") is None:
            self.next()
        if len({len(row) for row in rows}) != 1:
            raise UnknownNotation("the rows of a matrix have different lengths")
        return Node("matrix", tuple(Node("group", tuple(row), "()") for row in rows))


def whole(node: Node) -> bool:
    """Return whether a node is a whole number without a sign."""
    return node.kind == "number" and node.value[1] is None and bool(node.value[0].denominator == 1)
